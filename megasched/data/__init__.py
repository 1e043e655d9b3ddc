"""Makes the data of a run."""
