"""Tells how a run is doing, from its logs and from Slurm, without torch."""
