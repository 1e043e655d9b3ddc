"""A plain HF model as a model chunk for Megatron's trainer: eager, compiled, or with Liger's kernels.

The definition runs as transformers ships it (attention ``sdpa``). Around it is what Megatron's trainer expects
and nothing that computes, but for the loss: cross entropy per token in float32, as for the other contenders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from unittest import mock

import torch
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from megasched.trainer.builder import ScheduledModelBuilder


class HFChunk(MegatronModule):
    """The whole definition on one rank; called with tokens and labels [b, s] it gives losses [b, s], float32."""

    def __init__(self, config: Any, definition: Any, call: Callable[..., Any], pg_collection: Any) -> None:
        super().__init__(config)
        self.definition, self.pg_collection, self.vp_stage = definition, pg_collection, None
        self.pre_process = self.post_process = True
        self.share_embeddings_and_output_weights = False
        self._call = call

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Nothing comes over a wire: there is one stage."""

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: Any = None,
        mask: Any = None,
        *,
        labels: Any,
        loss_mask: Any = None,
    ) -> torch.Tensor:
        logits = self._call(input_ids=tokens, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> HFChunk:
        """Megatron's Float16Module casts the chunk; HF keeps its rotary tables in float32, and so do we."""
        tables = {buffer: (buffer.dtype, buffer) for buffer in self.buffers() if buffer.is_floating_point()}
        held = [(m, name, tables[b]) for m in self.modules() for name, b in m._buffers.items() if b in tables]
        super()._apply(fn, recurse)
        for module, name, (dtype, before) in held:
            module._buffers[name] = before.to(device=module._buffers[name].device, dtype=dtype)
        return self


class HFModelBuilder(ScheduledModelBuilder):
    """Eager."""

    attention: ClassVar[str] = "sdpa"

    def build_model(self, pg_collection: Any, *args: Any, **kwargs: Any) -> Any:
        from megasched.definition.build import build_definition
        from megasched.trainer.current_session import get_session
        from megasched.weights.random_init import RandomInit
        from megasched.weights.source import materialize

        config = get_session().definition.config
        config._attn_implementation = self.attention
        definition = build_definition(config)
        materialize(definition, RandomInit(definition, 1234))
        transformer = self._model_config.transformer
        definition.to("cpu" if transformer.use_cpu_initialization else "cuda").train()
        return HFChunk(transformer, definition, self.prepare(definition), pg_collection)

    def prepare(self, definition: Any) -> Callable[..., Any]:
        """What is called for the logits."""
        return definition


class CompiledHFModelBuilder(HFModelBuilder):
    """Under ``torch.compile``, one static shape."""

    def prepare(self, definition: Any) -> Callable[..., Any]:
        emulated = bool(_get_current_function_mode_stack())
        with _compiler_on() if emulated else nullcontext():
            compiled = torch.compile(definition, dynamic=False)

        def call(**inputs: Any) -> Any:
            with _compiler_on() if emulated else nullcontext():
                return compiled(**inputs)

        return call


@contextmanager
def _compiler_on() -> Iterator[None]:
    """In a rehearsal: the compiler, which is off for Megatron's functions, and the CPU with no emulated GPU."""
    import torch._dynamo
    import torch._functorch.config

    with (
        mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "0"}),
        torch._dynamo.config.patch(disable=False),
        # Otherwise it is compiled in the backward pass, which runs outside of this.
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        mock.patch("torch.cuda.is_available", return_value=False),
        mock.patch("torch.cuda.device_count", return_value=0),
        _pop_mode_temporarily(),
    ):
        yield


class LigerHFModelBuilder(HFModelBuilder):
    """With Liger's kernels for rotary embedding, norms and MLP.

    Its fused head and loss is left out: it gives one mean loss, and every contender's loss is per token.
    """

    def prepare(self, definition: Any) -> Callable[..., Any]:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=definition, fused_linear_cross_entropy=False, cross_entropy=False)
        return definition
