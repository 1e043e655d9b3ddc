"""How a run is doing: its logs read back, Slurm asked. Nothing here needs torch."""
