"""Jobs of Slurm: the batch script, what Slurm says to it, and its submission."""
