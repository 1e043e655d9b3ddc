"""Megatron's flags that Transformer Engine carries out: 8-bit training, overlap of communication."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from megasched.layout import Fp8

_MISSING = "Transformer Engine does that, and it is not installed here: pip install 'transformer-engine[pytorch]'"


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


def te_misfits(args: argparse.Namespace) -> list[str]:
    """What speaks against these flags whatever the model is: no Transformer Engine, a number of tokens that its
    8-bit matrix products don't take.

    Args:
        args: as Megatron parsed them, validated or not.
    """
    asked = {f"--fp8-format {args.fp8}": args.fp8, "--tp-comm-overlap": args.tp_comm_overlap}
    lines = []
    if find_spec("transformer_engine") is None:
        lines += [f"{flag}: {_MISSING}" for flag, given in asked.items() if given]
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
