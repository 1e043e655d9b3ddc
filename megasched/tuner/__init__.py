"""``megasched tune``: a space of flags and schedule options, searched by short runs of the trainer."""
