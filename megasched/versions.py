"""Versions of other packages that megasched is known to work with; ``pyproject.toml`` says the same to pip."""

MEGATRON = ">=0.19,<0.20"
TRANSFORMERS = ">=5.17,<5.25"
