"""Holds the built-in primitives, which importing it registers. Those on graphs are in ``graph``."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
