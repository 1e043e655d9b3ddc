"""The schedule of tests that choose a level."""

# Everything by default, but for the level of what ``where`` names.
SCHEDULE = """
from megasched.model_adapters.default_schedule import schedule as default


def schedule(sch, layout):
    default(sch, layout)
    sch["{where}"].level("{level}")
"""
