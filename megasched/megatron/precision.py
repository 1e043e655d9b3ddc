"""8-bit training as Megatron's flags ask for it, and what a run here can't do of it."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from megasched.layout import Fp8


def fp8_from_args(args: argparse.Namespace) -> Fp8 | None:
    """What ``--fp8-format`` and the flags around it say; None without it."""
    if not args.fp8:
        return None
    apart = args.first_last_layers_bf16
    return Fp8(
        fp8_recipe=str(getattr(args.fp8_recipe, "value", args.fp8_recipe)),
        num_layers_at_start_in_bf16=args.num_layers_at_start_in_bf16 if apart else 0,
        num_layers_at_end_in_bf16=args.num_layers_at_end_in_bf16 if apart else 0,
    )


def fp8_misfits(args: argparse.Namespace) -> list[str]:
    """What speaks against 8-bit training whatever the model is: no Transformer Engine, or a number of tokens that
    its matrix products don't take.

    Args:
        args: as Megatron parsed them, validated or not.
    """
    fp8 = fp8_from_args(args)
    if fp8 is None:
        return []
    lines = []
    if find_spec("transformer_engine") is None:
        lines.append(
            f"--fp8-format {args.fp8}: Transformer Engine computes in 8 bits, and it is not installed here: "
            "pip install 'transformer-engine[pytorch]'"
        )
    if args.seq_length and args.micro_batch_size:
        split = args.tensor_model_parallel_size if args.sequence_parallel else 1
        sizes = f"--seq-length {args.seq_length} x --micro-batch-size {args.micro_batch_size}"
        sizes += f" / TP {split} under --sequence-parallel" if split > 1 else ""
        if args.seq_length * args.micro_batch_size % (split * fp8.multiple):
            lines.append(
                f"{sizes}: 8-bit matrix products ({fp8.fp8_recipe}) take a multiple of {fp8.multiple} tokens"
            )
    return lines
