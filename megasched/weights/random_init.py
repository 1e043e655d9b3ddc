"""Initialises weights as the HF class would, one parameter at a time, with the same values at every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megasched.definition.code_state.random_states import seeded
from megasched.definition.module_copy import copy_module
from megasched.errors import CheckpointError, ConfigError
from megasched.plan.placement import Placement
from megasched.transformers_names import INIT_WEIGHTS
from megasched.weights.source import canonical_names, compare_names

# transformers.initialization passes over tensors that carry this flag.
INITIALIZED = "_is_hf_initialized"
type Initialiser = Callable[[nn.Module], object]


def parameter_seed(seed: int, name: str) -> int:
    """Returns the RNG seed of a parameter, the same in every process and layout; 32 bits, the CPU RNG's limit."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big")


class RandomInit:
    """Provides weights by running the HF class's own ``_init_weights``, or a function of each module.

    A value depends on the seed, the parameter's canonical name and the config, and on nothing else: not on
    the layout, nor on which other parameters are requested. (Hosts whose CPUs lack AVX2 differ from those
    that have it in the last bits.) Memory: one full float32 parameter at a time. One whose entries are requested
    one by one (an expert of a stack) stays until another is requested.

    Args:
        definition: from ``megasched.definition.build.build_definition``, parameters on meta, not scheduled yet.
            It is copied (that costs no parameter memory), so that the caller may go on to change it.
        seed: Megatron's ``--seed``.
        init_weights: is called on each module, children first, as by ``nn.Module.apply``. By default an HF class's
            ``_init_weights``. Modules of other classes call their ``reset_parameters`` before, as torch's do.

    Raises:
        ConfigError: a parameter of the definition is not on meta.
    """

    def __init__(self, definition: nn.Module, seed: int, init_weights: Initialiser | None = None) -> None:
        for name, param in definition.named_parameters():
            if not param.is_meta:
                raise ConfigError(
                    f"RandomInit: {name} is on {param.device}, not on meta; give it the definition as "
                    "build_definition returns it, before it is filled"
                )
        self._skeleton = copy_module(definition)
        self._seed, self._initialise = seed, init_weights
        for original, param in zip(definition.parameters(), self._skeleton.parameters(), strict=True):
            # deepcopy drops attributes of parameters, and some _init_weights read theirs.
            param.__dict__.update(original.__dict__)
            setattr(param, INITIALIZED, True)
        self._sources = self._find_sources()
        self._kept: tuple[str, torch.Tensor] | None = None

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        """Returns this rank's part of an initialised parameter in float32; see ``WeightSource.local``.

        Raises:
            CheckpointError: the definition has no parameter of that name, or it has another shape.
            ConfigError: the HF class leaves the parameter uninitialised.
        """
        if placement.name not in self._sources:
            raise CheckpointError(f"{placement.name}: {type(self._skeleton).__name__} has no such parameter")
        shape = tuple(self._skeleton.get_parameter(placement.name).shape)
        if shape != placement.shape:
            raise CheckpointError(
                f"{placement.name}: {type(self._skeleton).__name__} has it in shape {list(shape)}, "
                f"expected {list(placement.shape)}"
            )
        full = self._full(placement.name, keep=placement.axis == 0 and size == placement.shape[0])
        piece = placement.shard(full, rank, size)
        if piece.numel() == full.numel():
            return piece.contiguous()
        # A view would keep the memory of the full parameter.
        return piece.clone(memory_format=torch.contiguous_format)

    def buffer(self, name: str) -> None:
        """Returns None: buffers are real in the definition, as the class made them."""
        return None

    def check(self, names: Collection[str]) -> None:
        """See ``WeightSource.check``."""
        wanted, found = set(names), set(self._sources)
        compare_names(f"the parameters of {type(self._skeleton).__name__}", wanted - found, found - wanted)

    def _find_sources(self) -> dict[str, str]:
        """Returns the name under which HF initialises each parameter, by its canonical name.

        HF initialises first and ties afterwards, so a tied parameter has the value of its source (an
        embedding zeroes its padding row, a head doesn't), whichever of them is named first.
        """
        canonical = canonical_names(self._skeleton)
        tied_to = getattr(self._skeleton, "all_tied_weights_keys", {})
        sources = {first: first for first in canonical.values()}
        for target, source in tied_to.items():
            if canonical.get(target) is not None and canonical[target] == canonical.get(source):
                sources[canonical[target]] = source
        return sources

    def _full(self, name: str, keep: bool) -> torch.Tensor:
        """Returns the full parameter of that canonical name, computed once while it is kept."""
        if self._kept is not None and self._kept[0] == name:
            return self._kept[1]
        self._kept = None  # before the next is made: never two at a time
        full = self._initialised(name)
        if keep:
            self._kept = name, full
        return full

    def _initialised(self, name: str) -> torch.Tensor:
        """Computes the full parameter of that canonical name; float32, CPU."""
        source = self._sources[name]
        with self._made_real(source) as real, seeded(parameter_seed(self._seed, name)), torch.no_grad():
            for initialise, module in self._initialisers(source):
                try:
                    initialise(module)
                except RuntimeError as error:
                    function = getattr(initialise, "__qualname__", initialise)
                    raise ConfigError(
                        f"{name}: {function} can't initialise it while the other "
                        f"parameters are on meta ({error}), so there is no random start for it; load weights"
                    ) from error
        if real.isnan().any():
            whose = (
                f"{type(self._skeleton).__name__}._init_weights" if self._initialise is None else "init_weights"
            )
            raise ConfigError(
                f"{name}: {whose} leaves it uninitialised, so there is no random start for it; load weights, or "
                "initialise it there"
            )
        return real.detach()

    @contextmanager
    def _made_real(self, name: str) -> Iterator[torch.nn.Parameter]:
        """Yields the parameter in its place in the skeleton, real and full of NaN; puts meta back afterwards."""
        path, _, leaf = name.rpartition(".")
        slots = self._skeleton.get_submodule(path)._parameters
        empty = slots[leaf]
        assert empty is not None
        nan = torch.full(empty.shape, float("nan"), dtype=torch.float32, device="cpu")
        real = torch.nn.Parameter(nan, requires_grad=empty.requires_grad)
        real.__dict__.update({key: value for key, value in empty.__dict__.items() if key != INITIALIZED})
        slots[leaf] = real
        try:
            yield real
        finally:
            slots[leaf] = empty

    def _initialisers(self, name: str) -> list[tuple[Any, nn.Module]]:
        """Returns functions with the modules that they are called on, from the parameter's owner to the root.

        Of HF the order and the choice of model are those of ``smart_apply`` in transformers/modeling_utils.py:
        children first, and below a nested PreTrainedModel its function is called.
        """
        from transformers import PreTrainedModel

        model, module = self._skeleton, self._skeleton
        chain: list[tuple[nn.Module, nn.Module]] = [(model, module)]
        for attribute in name.split(".")[:-1]:
            module = getattr(module, attribute)
            model = module if isinstance(module, PreTrainedModel) else model
            chain.append((model, module))
        owner, given, own = chain[-1][1], self._initialise, isinstance(self._skeleton, PreTrainedModel)
        if own and given is None:
            return [(getattr(model, INIT_WEIGHTS), module) for model, module in chain[::-1]]
        reset = None if own else getattr(type(owner), "reset_parameters", None)
        first = [] if reset is None else [(reset, owner)]
        return [*first, *((given, module) for _, module in chain[::-1] if given is not None)]
