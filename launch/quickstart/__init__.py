"""Runs ``megasched quickstart``: a corpus, a model and a layout that fit the machine, and the trainer."""
