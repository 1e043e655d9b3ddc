"""Jobs without Slurm: torchrun on each host, over ssh or here, and its restarts."""
