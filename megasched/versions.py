"""Lists the supported versions of other packages; ``pyproject.toml`` says the same to pip."""

MEGATRON = ">=0.19,<0.20"
TRANSFORMERS = ">=5.17,<5.25"
TORCH = ">=2.11,<2.14"
