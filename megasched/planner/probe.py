"""What one micro-batch costs in memory, measured on the scheduled modules themselves.

A rank's stage is built as a training run builds it, of tensors without memory (``FakeTensorMode``) in process
groups that send nothing (torch's fake backend), and runs forward and backward. ``LiveBytes`` counts what autograd
keeps and what is alive for a moment. Nothing here knows what a transformer is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from megasched.errors import ConfigError
from megasched.lowering import experts
from megasched.patches.attributes import set_attribute
from megasched.planner import kernels
from megasched.planner.live_bytes import LiveBytes
from megasched.planner.work import CountWork, Work
from megasched.trial.meta_call import DefaultScalars, tensors_in

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megasched.layout import Layout
    from megasched.megatron.scheduled_model import ScheduledModel
    from megasched.megatron.session import Session
    from megasched.megatron.stage import Stage
    from megasched.placement import Placement


@dataclass(frozen=True)
class Measured:
    """Bytes of one micro-batch in a stage of one layer.

    Attributes:
        before: kept from forward to backward of what is made before the layer, the received hidden state included.
        layer: kept of the rest; the hidden state that goes out is in it.
        output: of that hidden state; Megatron lets go of it once it is sent. 0 where a stage sends nothing.
        forward: the most that is alive during the forward.
        backward: the most that comes on top of what was kept, until the gradient leaves the layer.
        ending: the most that is alive after that, in the backward of what stands before the layers.
        held: alive from step to step beside the parameters: buffers, tables, communication buffers.
        before_work: what is computed and sent before the layer, in the forward.
        forward_work: in the rest of it.
        backward_work: in the backward, what is recomputed included.
    """

    before: int
    layer: int
    output: int
    forward: int
    backward: int
    ending: int
    held: int
    before_work: Work
    forward_work: Work
    backward_work: Work


@dataclass(frozen=True)
class Setting:
    """What of a run decides what a micro-batch costs, beside its layout.

    Attributes:
        sequence_length: of whole sequences.
        dtype: of parameters and activations.
        recompute_granularity: Megatron's: None, "selective" (attention's core) or "full" (whole layers).
        gradient_dtype: of the gradients that Megatron sums and sends.
        on_gpu: with the kernels of a GPU, Transformer Engine's among them, in place of a CPU's.
    """

    micro_batch_size: int
    sequence_length: int
    dtype: torch.dtype = torch.bfloat16
    recompute_granularity: str | None = None
    gradient_dtype: torch.dtype = torch.float32
    on_gpu: bool = False


# What asks for values, or whether there are any -> what takes its place. HF would make masks for fake tensors that
# training on whole sequences does without.
_WITHOUT_VALUES: dict[str, Callable[..., Any]] = {
    "transformers.utils.import_utils:is_fake_tensor": lambda tensor: False,
    "transformers.masking_utils:find_packed_sequence_indices": lambda positions: None,
    "megasched.lowering.experts:routed": experts.routed_evenly,
}


def _functions(session: Session, setting: Setting) -> dict[str, Callable[..., Any]]:
    """What takes the place of what while a stage runs."""
    fp8 = session.plan.layout.fp8
    return _WITHOUT_VALUES | (kernels.stand_ins(fp8 and fp8.fp8_recipe) if setting.on_gpu else {})


@contextmanager
def fake_groups(layout: Layout) -> Iterator[None]:
    """Megatron's groups of a process that stands for rank 0 of a layout without pipeline or data parallelism.

    Ends the process groups that it made; there may be none before. Megatron's RNG states are brought back.
    """
    import torch.testing._internal.distributed.fake_pg
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    tracker = get_cuda_rng_tracker()
    states = dict(vars(tracker))
    with emulated_cuda():
        torch.distributed.init_process_group("fake", rank=0, world_size=layout.tp * layout.cp * layout.ep)
        try:
            parallel_state.initialize_model_parallel(
                layout.tp,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(1234)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_global_memory_buffer()
            torch.distributed.destroy_process_group()
            vars(tracker).update(states)


@contextmanager
def emulated_cuda() -> Iterator[None]:
    """Megatron's layers ask for CUDA; a real one is not touched. Who measures often enters it once around all."""
    from megasched import patches

    if "host_cuda" in patches.active():
        yield
        return
    patches.apply("host_cuda", force=True, quiet=True)
    try:
        yield
    finally:
        patches.undo("host_cuda")


def measure(session: Session, stage: Stage, setting: Setting) -> Measured:
    """Builds a stage of one layer inside ``fake_groups`` of the session's layout, and runs it.

    The second of two micro-batches is measured: what the first one left behind is there for good.

    Raises:
        ConfigError: the model computes by values, which fake tensors lack.
    """
    try:
        return _measure(session, stage, setting)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        layer = session.plan.structure.layer_path(stage.start)
        raise ConfigError(f"{layer} can't be measured without values: it asks for {error}") from error


def _measure(session: Session, stage: Stage, setting: Setting) -> Measured:
    definition = _copy_with_layers(session, range(stage.start, stage.stop))
    from megatron.core import parallel_state

    parallel_state.destroy_global_memory_buffer()  # what another measurement left in it
    parallel_state._set_global_memory_buffer()
    with ExitStack() as stack:
        for target, function in _functions(session, setting).items():
            stack.callback(set_attribute(target, function))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        live, count = LiveBytes(), CountWork()
        stack.enter_context(_Meter(live, count))
        model = _build(session, definition, stage, setting)
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        run = _Run(model, stage, session, setting, live, count)
        run.once()
        return run.once(held=live.now - parameters)


_device_of = torch.ops.prim.device.default


class _Meter(DefaultScalars):
    """Both counts and the answers about values, in one mode: each would be asked about every operation."""

    def __init__(self, live: LiveBytes, count: CountWork) -> None:
        super().__init__(remember=False)
        self.live, self.count = live, count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _device_of:  # two of three calls, which fake tensors answer slowly
            return args[0].device
        output = super().__torch_dispatch__(func, types, args, kwargs)
        self.live.see(output)
        self.count.see(func, args, output)
        return output


def _copy_with_layers(session: Session, kept: range) -> Any:
    """A copy of the definition in which other layers are empty, which a stage has no use for."""
    structure = session.plan.structure
    assert structure is not None
    memo: dict[int, Any] = {}
    for index in range(structure.count):
        if index not in kept:
            layer = session.replaced.get_submodule(structure.layer_path(index))
            empty = copy.copy(layer)
            empty._parameters, empty._buffers, empty._modules = {}, {}, {}
            memo[id(layer)] = empty
    return copy.deepcopy(session.replaced, memo)


def _drop_gradient(parameter: torch.Tensor) -> None:
    """Megatron's DDP adds a gradient to its buffer and lets go of it (``distributed_data_parallel.py``)."""
    parameter.grad = None


def _build(session: Session, definition: Any, stage: Stage, setting: Setting) -> ScheduledModel:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megasched.megatron.scheduled_model import ScheduledModel

    config = _config(session, setting)
    model = ScheduledModel(
        config,
        definition,
        session.schedule,
        session.plan,
        stage,
        _NoValues(),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    for path in session.plan.blocks:
        if stage.holds(session.plan.structure, path) and session.plan.in_8_bits(path):
            kernels.mark_8_bits(model.definition.get_submodule(path))
    return model.train()


def _config(session: Session, setting: Setting) -> TransformerConfig:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megasched.definition import text_config

    layout, text = session.plan.layout, text_config(session.definition.config)
    full = setting.recompute_granularity == "full"
    try:
        return TransformerConfig(
            num_layers=session.plan.structure.count,  # type: ignore[union-attr]
            hidden_size=text.hidden_size,
            num_attention_heads=text.num_attention_heads,
            tensor_model_parallel_size=layout.tp,
            sequence_parallel=layout.sp,
            context_parallel_size=layout.cp,
            use_cpu_initialization=True,
            params_dtype=setting.dtype,
            pipeline_dtype=setting.dtype,
            bf16=setting.dtype == torch.bfloat16,
            recompute_granularity=setting.recompute_granularity,
            recompute_method="uniform" if full else None,
            recompute_num_layers=1 if full else None,
            **(_on_gpu(layout) if setting.on_gpu else {}),
        )
    except ValueError as error:  # what the trainer would end with, too
        raise ConfigError(f"Megatron: {error}") from error


def _on_gpu(layout: Layout) -> dict[str, Any]:
    """What Megatron's arguments say by default where there is a GPU, and what a layout asks for."""
    found: dict[str, Any] = {"bias_activation_fusion": True, "apply_rope_fusion": True}
    if layout.fp8 is not None:
        found |= {"fp8": "hybrid", "fp8_recipe": layout.fp8.fp8_recipe}
    return found


class _NoValues:
    """A weight source for parameters that have none; see ``megasched.weights.source.WeightSource``."""

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        return torch.zeros(()).expand(placement.local_shape(size))

    def buffer(self, name: str) -> None:
        return None

    def check(self, names: Any) -> None:
        return None


class _Run:
    """Forward and backward of one micro-batch."""

    def __init__(
        self,
        model: ScheduledModel,
        stage: Stage,
        session: Session,
        setting: Setting,
        live: LiveBytes,
        count: CountWork,
    ) -> None:
        self.model, self.stage, self.live, self.count = model, stage, live, count
        layout, structure = session.plan.layout, session.plan.structure
        assert structure is not None
        self.batch, self.length = setting.micro_batch_size, setting.sequence_length // layout.cp
        self.wire = (self.length // (layout.tp if layout.sp else 1), self.batch, model.config.hidden_size)
        self.dtype = setting.dtype
        self.peak = 0  # in the backward, until the gradient left the layer
        self.left = False
        layer = model.definition.get_submodule(structure.layer_path(stage.start))
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)

    def once(self, held: int = 0) -> Measured:
        live = self.live
        live.tag = "before"
        live.reset_peak()
        start = live.now
        self.count.work = before_work = Work()
        output = self._forward()
        end, forward = live.now, live.peak
        before = live.made_under("before")
        live.tag = ""
        sent = 0 if self.stage.last else output.numel() * output.element_size()
        live.reset_peak()
        forward_work, self.count.work = self.count.work, Work()
        self.left = False
        if output.requires_grad:  # not where all on a first stage is frozen
            output.backward(None if self.stage.last else torch.zeros_like(output))
        if not self.left:  # nothing before the layers is trained: the backward pass ended in them
            self._leave()
        del output
        return Measured(
            before,
            end - start - before,
            sent,
            forward - start,
            self.peak - end,
            live.peak - start,
            held,
            before_work,
            forward_work,
            self.count.work,
        )

    def _forward(self) -> torch.Tensor:
        model = self.model
        tokens = torch.zeros(self.batch, self.length, dtype=torch.long)
        if not self.stage.first:
            received = torch.zeros(self.wire, dtype=self.dtype, requires_grad=True)
            received.register_hook(self._leave)
            model.set_input_tensor(received)
        output = model(tokens, None, None, labels=tokens)
        model.set_input_tensor(None)
        return output.float().mean() if self.stage.last else output

    def _enter(self, layer: Any, args: Any, kwargs: Any) -> None:
        if self.live.tag:  # and not the layer's forward once more, in the backward pass
            self.live.tag = ""
            self.count.work = Work()
            if self.stage.first:
                carried = (tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad)
                hidden = next(carried, None)
                if hidden is not None:
                    hidden.register_hook(self._leave)

    def _leave(self, gradient: torch.Tensor | None = None) -> None:
        self.left = True
        self.peak = self.live.peak
        self.live.reset_peak()
