"""What torch does beside, in a process on ghost CUDA; torch calls ``prepare`` when it is imported.

That is told by ``entry_points.txt``. With ``GHOST_INTEGERS=1``, whole numbers are computed on the host
(``ghost_integers.py``).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def prepare() -> None:
    """Has torch's allocator tell the ghost what it takes back, from where CUDA is first used."""
    import torch

    beside = Path(os.environ["LD_PRELOAD"]).with_name("libghost_torch.so")
    torch.cuda._lazy_call(lambda: ctypes.CDLL(str(beside)).ghost_attach())
    if os.environ.get("GHOST_INTEGERS") == "1":
        from ghost_integers import Integers

        Integers().__enter__()  # until the process ends
