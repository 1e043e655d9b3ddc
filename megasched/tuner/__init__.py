"""Searches a space by runs of the trainer, for ``megasched tune``, or by a function, for ``megasched.tune``."""
