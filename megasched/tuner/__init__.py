"""Searches a space of flags and schedule options by short runs of the trainer, for ``megasched tune``."""
