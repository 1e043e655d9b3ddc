"""The reference of ``megasched verify``: plain transformers and torch, in files that import none of megasched."""

from pathlib import Path

SCRIPT = Path(__file__).with_name("reference.py")
