"""Holds the reference of ``megasched verify``: plain transformers and torch, in a script without megasched."""

from pathlib import Path

SCRIPT = Path(__file__).with_name("reference.py")
