"""Starts jobs without Slurm, by torchrun on each host, over ssh or on this machine, with restarts."""
