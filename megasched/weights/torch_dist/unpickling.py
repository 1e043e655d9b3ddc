"""Reads the pickles of a checkpoint without running anything that they name.

A pickle calls whatever function it names. This module accepts listed names only; Megatron's own classes become
inert stand-ins, so that neither Megatron nor the code of the run that wrote the checkpoint is needed.
"""

from __future__ import annotations

import dataclasses
import enum
from argparse import Namespace
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import IO, Any

import torch

from megasched.errors import CheckpointError
from megasched.reading import pickled

# Classes of these modules describe a checkpoint (``.metadata``): data classes and enumerations alone are taken.
_METADATA_MODULES = ("metadata", "filesystem", "planner")
_TENSORS = {"_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_parameter"}


class StandIn:
    """Stands in for an object of a class that is not read, and keeps the class's name and the arguments."""

    name = ""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.made_of))})"


class Unpickler(pickled.Unpickler):
    """Builds plain values, tensors and descriptions of checkpoints.

    Raises:
        CheckpointError: the pickle names anything else.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = _known(module, name)
        if found is None:
            raise CheckpointError(
                f"the checkpoint's pickle names {module}.{name}, which is no part of a torch_dist checkpoint; "
                "nothing of it was run"
            )
        return found


class InertUnpickler(Unpickler):
    """Builds the same as ``Unpickler``, with a ``StandIn`` for an object of any other class."""

    def find_class(self, module: str, name: str) -> Any:
        return _known(module, name) or type(name, (StandIn,), {"name": name})


class InertPickle:
    """Provides what ``torch.load`` needs of its argument ``pickle_module``."""

    Unpickler = InertUnpickler

    @staticmethod
    def load(file: IO[bytes], **options: Any) -> Any:
        """Loads like ``pickle.load``."""
        return InertUnpickler(file, **options).load()


def _known(module: str, name: str) -> Any:
    match module:
        case "torch":
            value = getattr(torch, name, None)
            storage = isinstance(value, type) and name.endswith("Storage")
            return value if storage or isinstance(value, torch.dtype) or name == "Size" else None
        case "torch.serialization":
            return torch.serialization._get_layout if name == "_get_layout" else None
        case "torch._utils":
            return getattr(torch._utils, name) if name in _TENSORS else None
        case "argparse":
            return Namespace if name == "Namespace" else None
        case "collections":
            return OrderedDict if name == "OrderedDict" else None
        case "pathlib" | "pathlib._local":  # where the checkpoint was written
            return PurePosixPath if name in ("PosixPath", "PurePosixPath") else None
    parent, _, last = module.rpartition(".")
    if parent == "torch.distributed.checkpoint" and last in _METADATA_MODULES:
        return _description(module, name)
    return None


def _description(module: str, name: str) -> Any:
    import importlib

    value = getattr(importlib.import_module(module), name, None)
    described = isinstance(value, type) and (dataclasses.is_dataclass(value) or issubclass(value, enum.Enum))
    return value if described else None
