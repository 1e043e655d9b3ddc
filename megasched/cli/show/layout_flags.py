"""Defines the flags of a run's layout, which ``megasched show`` takes as its own and once more in ``--diff``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from megasched.cli.options import Cp, Dp, Ep, Pp, Sp, Tp, Vp, layout_of
from megasched.errors import ConfigError
from megasched.language.parallel_dims import Fp8, ParallelDims

MicroBatchSize = Annotated[int, typer.Option(help="Sequences in one forward.")]
Fp8Recipe = Annotated[
    str | None, typer.Option(metavar="RECIPE", help="8-bit training: delayed, tensorwise, blockwise, mxfp8.")
]
DistributedOptimizer = Annotated[
    bool, typer.Option("--use-distributed-optimizer", help="Shard the optimizer's state over DP and CP.")
]
GradReduceInBf16 = Annotated[
    bool, typer.Option("--grad-reduce-in-bf16", help="Gradients are summed and sent in bf16.")
]
TpCommOverlap = Annotated[
    bool, typer.Option("--tp-comm-overlap", help="What Megatron's layers send over TP overlaps with products.")
]
RecomputeGranularity = Annotated[
    Literal["full", "selective"] | None, typer.Option(help="What a run computes again.")
]
RecomputeMethod = Annotated[
    Literal["uniform", "block"] | None, typer.Option(help="All layers, or the first ones of each stage.")
]
RecomputeNumLayers = Annotated[int | None, typer.Option(min=1, help="With block: how many.", show_default=False)]

# Fields that the name of a layout does not tell.
_BESIDE = (
    *("micro_batch_size", "tp_comm_overlap", "use_distributed_optimizer", "grad_reduce_in_bf16"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
)


@dataclass(frozen=True)
class LayoutFlags:
    """Holds what the flags say of how a job is spread, and of what its step costs; it has their names."""

    tp: Tp = 1
    sp: Sp = False
    pp: Pp = 1
    vp: Vp = 1
    cp: Cp = 1
    ep: Ep = 1
    dp: Dp = 1
    micro_batch_size: MicroBatchSize = 1
    fp8_recipe: Fp8Recipe = None
    use_distributed_optimizer: DistributedOptimizer = False
    grad_reduce_in_bf16: GradReduceInBf16 = False
    tp_comm_overlap: TpCommOverlap = False
    recompute_granularity: RecomputeGranularity = None
    recompute_method: RecomputeMethod = None
    recompute_num_layers: RecomputeNumLayers = None

    @property
    def layout(self) -> ParallelDims:
        """Returns the layout that the flags describe.

        Raises:
            ConfigError: there is no such layout.
        """
        ranks = self.tp * self.cp * self.dp
        if ranks > 0 and self.ep > 0 and ranks % self.ep:
            what = f"--ep {self.ep} does not divide the {ranks} ranks of a pipeline stage, which share out experts"
            raise ConfigError(f"{what}: name all replicas with --dp (TP x CP x DP are these ranks)")
        return layout_of(
            *(self.tp, self.sp, self.pp, self.cp, self.ep),
            vp=self.vp,
            dp=self.dp,
            micro_batch_size=self.micro_batch_size,
            fp8=Fp8(fp8_recipe=self.fp8_recipe) if self.fp8_recipe is not None else None,
            tp_comm_overlap=self.tp_comm_overlap,
        )

    def title(self, other: LayoutFlags) -> str:
        """Returns the layout's name, and the other flags by which it differs from another."""
        words = [str(self.layout)]
        for name in _BESIDE:
            value = getattr(self, name)
            if value != getattr(other, name) and value:
                words.append(f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}")
        return " ".join(words)


def names_layout(diff: str) -> bool:
    """Returns whether ``--diff`` was given flags; no schedule's name begins with a hyphen."""
    return diff.startswith("-")


def parse_layout(diff: str) -> LayoutFlags:
    """Reads the flags given to ``--diff`` as those of the command are read, with the same defaults.

    Raises:
        BadParameter: the text has a quotation without an end.
        UsageError: it has another flag, or a value that does not fit.
    """
    try:
        words = shlex.split(diff)
    except ValueError as error:
        raise typer.BadParameter(f"--diff {diff}: {error}") from error
    flags = typer.Typer(add_completion=False, rich_markup_mode=None)
    flags.command(add_help_option=False)(LayoutFlags)
    found: LayoutFlags = typer.main.get_command(flags).main(words, prog_name="--diff", standalone_mode=False)
    return found
