"""Starts jobs of Slurm: renders the batch script, asks Slurm what it says to it, and submits it."""
