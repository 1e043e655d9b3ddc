"""Handles flags of Megatron's that Transformer Engine carries out, and defaults that need it.

The flags are those of 8-bit training, overlap of communication, and the kernels of attention.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from importlib.util import find_spec

from megasched.language.parallel_dims import Fp8

_MISSING = "Transformer Engine does that, and it is not installed here: pip install 'transformer-engine[pytorch]'"

_UNCOUNTED = (
    "without Transformer Engine or NVIDIA apex a run with it can't be resumed: Megatron asks the optimizer that "
    "is to load a checkpoint for the one number of steps that it has made (`assert len(steps) == 1`)"
)

# Value of --attention-backend -> the variable by which Transformer Engine's attention leaves that kernel out.
_BACKENDS = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
_FLASH_VERSIONS = (2, 3, 4)

# Attributes of `args` by which Megatron's defaults ask for kernels of Transformer Engine or apex: the value that
# does not, and the flag that gives it.
_WITHOUT_KERNELS = {
    "transformer_impl": ("local", "--transformer-impl local"),
    "apply_rope_fusion": (False, "--no-rope-fusion"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm"),
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion"),
}


def fp8_from_args(args: argparse.Namespace) -> Fp8 | None:
    """Returns the settings of ``--fp8-format`` and the flags around it; None without it."""
    if not args.fp8:
        return None
    apart = args.first_last_layers_bf16
    return Fp8(
        fp8_recipe=str(getattr(args.fp8_recipe, "value", args.fp8_recipe)),
        num_layers_at_start_in_bf16=args.num_layers_at_start_in_bf16 if apart else 0,
        num_layers_at_end_in_bf16=args.num_layers_at_end_in_bf16 if apart else 0,
    )


def attention_variables(args: argparse.Namespace) -> dict[str, str]:
    """Returns the environment variables by which Transformer Engine's attention chooses among its kernels.

    A choice that is left to it has none. Megatron's own models set the same (``_set_attention_backend``,
    core/models/common/language_module/language_module.py:108).

    Args:
        args: as Megatron parsed them.
    """
    chosen, version = args.attention_backend.name, args.flash_attention_version
    found = {}
    if chosen in _BACKENDS:
        found = {variable: str(int(name == chosen)) for name, variable in _BACKENDS.items()}
    if version is not None:
        found |= {f"NVTE_FLASH_ATTN_V{other}": "0" for other in _FLASH_VERSIONS if other != version}
    return found


def configure_attention_backend(args: argparse.Namespace) -> None:
    """Makes ``--attention-backend`` and ``--flash-attention-version`` hold in this process."""
    os.environ.update(attention_variables(args))


def default_args_without_te(args: argparse.Namespace) -> None:
    """Switches off what Megatron's defaults ask of Transformer Engine, where that is not installed, and says so.

    Args:
        args: as Megatron parsed them, before it validates them; changed.
    """
    if find_spec("transformer_engine") is not None:
        return
    flags = [flag for name, (value, flag) in _WITHOUT_KERNELS.items() if getattr(args, name) != value]
    for name, (value, _) in _WITHOUT_KERNELS.items():
        setattr(args, name, value)
    if flags and args.rank == 0:
        print(f"megasched: Transformer Engine is not installed, so the run has {' '.join(flags)}")


def _backend_conflicts(args: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    given = f"--attention-backend {args.attention_backend.name}"
    if args.flash_attention_version is not None:
        given += f" --flash-attention-version {args.flash_attention_version}"
    wanted = attention_variables(args)
    held = {name: environ[name] for name, value in wanted.items() if environ.get(name, value) != value}
    return [f"{given}: {name}={value} is in the environment, which says otherwise" for name, value in held.items()]


def te_conflicts(args: argparse.Namespace) -> list[str]:
    """Returns a line for each flag that Transformer Engine can't carry out here, whatever the model is.

    It is not installed, a variable of the environment contradicts the flag, or its 8-bit matrix products don't
    take the number of tokens.

    Args:
        args: as Megatron parsed them, validated or not.
    """
    backend, version = args.attention_backend.name, args.flash_attention_version
    asked = {
        f"--fp8-format {args.fp8}": args.fp8,
        "--tp-comm-overlap": args.tp_comm_overlap,
        f"--attention-backend {backend}": backend in _BACKENDS,
        f"--flash-attention-version {version}": version is not None,
    }
    lines = _backend_conflicts(args, os.environ)
    if find_spec("transformer_engine") is None:
        lines += [f"{flag}: {_MISSING}" for flag, given in asked.items() if given]
        if args.optimizer_cpu_offload and (args.save or args.load) and find_spec("apex") is None:
            lines.append(f"--optimizer-cpu-offload: {_UNCOUNTED}")
    fp8 = fp8_from_args(args)
    if fp8 is not None and args.seq_length and args.micro_batch_size:
        split = args.tensor_model_parallel_size if args.sequence_parallel else 1
        sizes = f"--seq-length {args.seq_length} x --micro-batch-size {args.micro_batch_size}"
        sizes += f" / TP {split} under --sequence-parallel" if split > 1 else ""
        if args.seq_length * args.micro_batch_size % (split * fp8.multiple):
            lines.append(
                f"{sizes}: 8-bit matrix products ({fp8.fp8_recipe}) take a multiple of {fp8.multiple} tokens"
            )
    return lines
