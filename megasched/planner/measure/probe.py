"""Measures the memory and the work of one micro-batch, on the scheduled modules themselves.

A rank's stage is built as a training run builds it, of tensors without memory (``FakeTensorMode``) in process
groups that send nothing (torch's fake backend), and runs forward and backward. ``LiveBytes`` counts what autograd
keeps and what is alive for a moment. Nothing in this module knows what a transformer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from megasched.analysis.recording.meta_call import ScalarAnswers, tensors_in
from megasched.attributes import set_attribute
from megasched.errors import ConfigError, MegaschedError, ScheduleError
from megasched.imports import quiet_imports
from megasched.language.parallel_dims import ParallelDims
from megasched.layers import experts
from megasched.patches import active, apply, undo
from megasched.planner.measure.build_stage import Setting, build_stage, copy_with_layers
from megasched.planner.measure.fake_results import FakeResults
from megasched.planner.measure.live_bytes import LiveBytes
from megasched.planner.measure.work import CountWork, Work
from megasched.planner.stand_ins import even_routing, expert_kernels, kernels
from megasched.trainer.scheduled_model import ScheduledModel
from megasched.trainer.session import Session
from megasched.trainer.stages.stage import Stage
from megasched.trainer.stages.stage_transfer import BoundaryCodec
from megasched.transformers_names import PACKED


@dataclass(frozen=True)
class Measured:
    """Holds the bytes and the work of one micro-batch in a stage of one layer.

    Attributes:
        before: what is made before the layer and kept for the backward, the received hidden state included.
        layer: what is made later and kept for the backward, the hidden state that goes out included.
        output: that outgoing hidden state, which Megatron frees once it is sent; 0 where a stage sends nothing.
        forward: the most that is alive during the forward.
        backward: the most that comes on top of what was kept, until the gradient leaves the layer.
        ending: the most that is alive after that, in the backward of what stands before the layers.
        held: what stays alive from step to step besides the parameters: buffers, tables, communication buffers.
        before_work: work of the forward before the layer.
        forward_work: work of the rest of the forward.
        backward_work: work of the backward, what is recomputed included.
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


# What asks for values, or whether there are any -> what takes its place. HF would make masks for fake tensors that
# training on whole sequences does without.
_WITHOUT_VALUES: dict[str, Callable[..., Any]] = {
    "transformers.utils.import_utils:is_fake_tensor": lambda tensor: False,
    PACKED: lambda positions: None,
    "megasched.layers.experts:routed": experts.routed_evenly,
    "megasched.layers.experts:tokens_of_ranks": experts.as_many_tokens,
}


def _functions(session: Session, setting: Setting) -> dict[str, Callable[..., Any]]:
    """Maps each target to the function that takes its place while a stage runs."""
    found, fp8 = dict(_WITHOUT_VALUES), session.plan.layout.fp8
    recipe = fp8 and fp8.fp8_recipe
    if setting.on_gpu:
        found |= kernels.stand_ins(recipe)
    if session.plan.by_megatron:
        found |= even_routing.STAND_INS | (expert_kernels.stand_ins(recipe) if setting.on_gpu else {})
    return found


@contextmanager
def fake_groups(layout: ParallelDims) -> Iterator[None]:
    """Runs its body in Megatron's groups, as rank 0 of a layout without pipeline or data parallelism, quietly.

    Ends the process groups that it made; there may be none before. Megatron's RNG states are brought back.
    """
    import torch.testing._internal.distributed.fake_pg
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    tracker = get_cuda_rng_tracker()
    states = dict(vars(tracker))
    with quiet_imports(), emulated_cuda():
        torch.distributed.init_process_group("fake", rank=0, world_size=layout.tp * layout.cp * layout.ep)
        try:
            parallel_state.initialize_model_parallel(
                layout.tp,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=1,
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
    """Runs its body with CUDA emulated, for which Megatron's layers ask; a real one is not touched.

    A caller that measures often enters it once around all measurements.
    """
    if "host_cuda" in active():
        yield
        return
    apply("host_cuda", force=True, quiet=True)
    try:
        yield
    finally:
        undo("host_cuda")


def measure(session: Session, stage: Stage, setting: Setting) -> Measured:
    """Measures a stage of one layer, built inside ``fake_groups`` of the session's layout.

    The second of two micro-batches is measured: what the first one left behind is there for good.

    Raises:
        ConfigError: the model does not run, e.g. because it computes by values, which fake tensors lack.
    """
    layer = session.plan.structure.layer_path(stage.start)  # type: ignore[union-attr]
    try:
        return _of_any_copy(session, stage, setting)
    except MegaschedError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise ConfigError(f"{layer} can't be measured without values: it asks for {error}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"{layer} can't be measured, it fails on fake tensors: {what}") from error


def _of_any_copy(session: Session, stage: Stage, setting: Setting) -> Measured:
    """Measures a copy without the layers of other stages, or a whole copy where that fails.

    The other layers are many, but the code of some definitions reaches into them (BigBird's does).
    """
    try:
        return _measure(session, stage, setting, copy_with_layers(session, range(stage.start, stage.stop)))
    except AttributeError:
        return _measure(session, stage, setting, session.copy_of_definition())


def _measure(session: Session, stage: Stage, setting: Setting, definition: Any) -> Measured:
    from megatron.core import parallel_state

    parallel_state.destroy_global_memory_buffer()  # what another measurement left in it
    parallel_state._set_global_memory_buffer()
    packing = _packing(session, stage, setting)
    with ExitStack() as stack:
        for target, function in _functions(session, setting).items():
            stack.callback(set_attribute(target, function))
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        live, count = LiveBytes(), CountWork()
        stack.enter_context(_Meter(fake, live, count))
        model = build_stage(session, definition, stage, setting, packing)
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        run = _Run(model, stage, session, setting, live, count)
        run.warm_up()
        return run.once(held=live.now - parameters)


def _packing(session: Session, stage: Stage, setting: Setting) -> BoundaryCodec | None:
    """Returns how tensors that enter and leave the stage are sent; None where they are not packed.

    A run's packing is as wide as its widest cut takes; this one is as wide as the cuts next to the layer.

    Raises:
        ScheduleError: the layers can't be cut there; a run without pipeline stages may do.
    """
    cuts = ([] if stage.first else [stage.start]) + ([] if stage.last else [stage.stop])
    try:
        return session.packing(cuts, setting.dtype, (setting.micro_batch_size, setting.sequence_length))
    except ScheduleError as error:
        problem = error.problems[0]
        what = f"not measured, as its layers would be measured like stages: {problem.what}"
        raise ScheduleError(replace(problem, what=what)) from error


_device_of = torch.ops.prim.device.default


class _Meter(ScalarAnswers):
    """Combines both counts and the answers about values in one mode, as each mode costs at every operation."""

    def __init__(self, fake: FakeTensorMode, live: LiveBytes, count: CountWork) -> None:
        super().__init__(FakeResults(fake))
        self.live, self.count = live, count

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _device_of:  # two of three calls, which fake tensors answer slowly
            return args[0].device
        output = super().execute(func, args, kwargs)
        self.live.see(output)
        self.count.see(func, args, output)
        return output


def _drop_gradient(parameter: torch.Tensor) -> None:
    """Drops a gradient, as Megatron's DDP does once it is in its buffer (``distributed_data_parallel.py``)."""
    parameter.grad = None


class _Run:
    """Runs forward and backward of one micro-batch."""

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
        layout, structure = session.plan.layout, session.plan.stack
        self.batch, self.length = setting.micro_batch_size, setting.sequence_length // layout.cp
        self.wire = (self.length // (layout.tp if layout.sp else 1), self.batch, model.config.hidden_size)
        self.dtype = setting.dtype
        self.peak = 0  # in the backward, until the gradient left the layer
        self.left = False
        layer = model.definition.get_submodule(structure.layer_path(stage.start))
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)

    def warm_up(self) -> None:
        """Runs a forward, in which a micro-batch makes what it leaves behind: tables and communication buffers.

        It has no graph: what modules remember of a micro-batch would hold on to it, and does not after a backward.
        """
        with torch.no_grad():
            self._forward()

    def once(self, held: int) -> Measured:
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
        output = model(tokens, None, None, labels=tokens, loss_mask=torch.ones(self.batch, self.length))
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
