"""Written by `make stubs`, from the registry: primitives as called on schedules and lists of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from megasched.graph.naming import GraphNode
from megasched.graph.patterns import Pattern
from megasched.language.subgraph import Subgraph

class PrimitiveCalls:
    def adapt(
        self, rank: int, alpha: float | None = None, dropout: float = 0.0, use_rslora: bool = False
    ) -> Self: ...
    def annotate(self, param: str, key: str, value: Any) -> Self: ...
    def checkpoint(
        self,
        subgraph: Subgraph | Sequence[Subgraph] | Mapping[str, Any] | None = None,
        *,
        order_args_fn: Callable[..., Sequence[Any]] | None = None,
    ) -> Self: ...
    def cut_pipeline_stage(self) -> Self: ...
    def pipeline_split(self) -> Self: ...
    def decompose(self) -> Self: ...
    def find(
        self,
        what: str | Callable[..., torch.Tensor | bool] | nn.Module | Pattern,
        missing_ok: bool = False,
        examples: Mapping[str, Any] | None = None,
    ) -> list[Subgraph]: ...
    def find_subgraph(
        self,
        what: str | Callable[..., torch.Tensor | bool] | nn.Module | Pattern,
        missing_ok: bool = False,
        examples: Mapping[str, Any] | None = None,
    ) -> list[Subgraph]: ...
    def find_node(self, what: str | Callable[[GraphNode], bool], missing_ok: bool = False) -> list[Subgraph]: ...
    def fork_rng(self) -> Self: ...
    def fuse(
        self,
        subgraph: Subgraph | Sequence[Subgraph] | Mapping[str, Any],
        compiler: str = "inductor",
        name: str = "",
    ) -> Self: ...
    def hook(self, mode: str, fn: Callable[..., Any]) -> Self: ...
    def level(self, name: str, *, required: bool = True, because: str = "") -> Self: ...
    def probe(self, label: str = "", every: int = 1) -> Self: ...
    def print(self, label: str = "", every: int = 1) -> Self: ...
    def replace(
        self,
        factory: nn.Module | Callable[[nn.Module], nn.Module],
        weights: Mapping[str, str | Callable[[dict[str, Any]], Any]] | Subgraph | Sequence[Subgraph] | None = None,
        drop: tuple[str, ...] = (),
        subgraph: Subgraph | Sequence[Subgraph] | Mapping[str, Any] | None = None,
    ) -> Self: ...
    def replace_all(
        self,
        what: type[nn.Module] | str,
        factory: Callable[[nn.Module], nn.Module] | Callable[[str, nn.Module], nn.Module],
        weights: Mapping[str, str | Callable[[dict[str, Any]], Any]] | None = None,
        drop: tuple[str, ...] = (),
    ) -> Self: ...
    def shard(self, param: str | Sequence[str], axis: int, components: Sequence[int] | None = None) -> Self: ...
    def sync(
        self,
        mode: str,
        op: str | Callable[..., Any] | None = None,
        axis: int | None = None,
        *,
        sync_op_or_fn: str | Callable[..., Any] | None = None,
        tensor_parallel_output_grad: bool = False,
    ) -> Self: ...
    def sync_batch_norm(self) -> Self: ...
    def trace(
        self,
        leaves: Sequence[str | type[nn.Module]] = (),
        flatten: bool | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        *,
        recursive: bool | None = None,
        leaf_modules: Sequence[str | type[nn.Module]] = (),
    ) -> Self: ...
    def trace_until(
        self,
        where: str | Callable[[str, nn.Module], bool] | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        leaves: tuple[str, ...] = (),
    ) -> Self: ...
    def unfreeze(self) -> Self: ...
