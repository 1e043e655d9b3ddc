"""Verifies the schedule of any module as ``build`` makes it: every number of one step, and which call is wrong."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from megasched.errors import ConfigError, MegaschedError
from megasched.language.parallel_dims import ParallelDims, current_layout
from megasched.language.schedule import Schedule, replay
from megasched.lowering.build import create_schedule
from megasched.lowering.groups import refuse_unscheduled
from megasched.verify.library.module_comparison import HALVES, ModuleComparison
from megasched.verify.library.module_step import Example, own_loss
from megasched.verify.locate.bisect import Call, bisect_records
from megasched.verify.parity import failure, refusal_of
from megasched.verify.ranks.pool import RankError, RankPool, init_megatron
from megasched.verify.report.verification import Verification

REMEDY = (
    "verify sends the module to ranks that it starts, which import its code: put classes and functions into a "
    "file beside the program and import them, or run the program by torchrun and call verify in its ranks"
)


def verify(
    schedule: Schedule,
    *,
    inputs: Any,
    loss: Callable[[Any], torch.Tensor] = own_loss,
    tp: int | None = None,
    dp: int | None = None,
    ranks: RankPool | None = None,
    timeout: float = 600,
) -> Verification:
    """Compares one training step of a scheduled module with that of the unscheduled one, number by number.

    Compared are the loss, each output, every gradient, every weight after a step of AdamW, the buffers, and
    whether ranks that hold copies hold the same. Where something is wrong, the module is named at which it goes
    wrong first, and the calls of the schedule without which all is right. It works on copies: the module and the
    schedule stay as they are. Dropouts are off on both sides.

    In a process with Megatron's groups it runs in them; all ranks call it, with the same whole batch, and get the
    same report. In one without, a schedule for several ranks is verified in processes that are started on this
    machine's CPUs.

    Args:
        schedule: schedule of the whole module, not yet built.
        inputs: arguments of the module's forward with the values to run on: by name, as a tuple, or one tensor.
            Over data-parallel ranks tensors as long as the first one are split along their first dimension.
        loss: makes a scalar of the module's output. By default it is the output's own ``loss``, as HF's models
            return it for labels, or else a fixed projection of the output's tensors.
        tp: start so many tensor-parallel ranks; by default what the schedule was created for.
        dp: as ``tp``, of data-parallel ranks.
        ranks: processes to run it on; own ones by default.
        timeout: seconds for the started ranks.

    Raises:
        ConfigError: the schedule is built, weights are deferred, the loss is not finite without the schedule, the
            batch does not divide by the data-parallel ranks, or what is to go to started ranks can't be imported
            there.
    """
    refuse_unscheduled(schedule)
    started = time.monotonic()
    sizes = {"tensor_model_parallel_size": tp, "data_parallel_size": dp}
    layout = replace(schedule.layout, **{name: size for name, size in sizes.items() if size is not None})
    example = Example(_by_name(schedule.root.mod, inputs), loss)
    _refuse(schedule, example, layout)
    if current_layout().world_size == 1 < layout.world_size:
        packed = _pack(schedule, example, layout)
        with nullcontext(ranks) if ranks is not None else RankPool(layout.world_size) as pool:
            found = _in_ranks(pool, packed, _empty(schedule, layout), timeout)
    else:
        found = verify_here(schedule, example)
    found.seconds = round(time.monotonic() - started, 1)
    return found


def verify_here(schedule: Schedule, example: Example) -> Verification:
    """Verifies a schedule in the groups of this process; every rank of them calls it."""
    found = _empty(schedule, schedule.layout)
    if any(parameter.dtype in HALVES for parameter in schedule.root.mod.parameters()):
        found.notes.append("its 16-bit weights were computed with in float32")
        example = example.mapped(lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor)
    comparison = ModuleComparison(schedule, example)

    def right_without(calls: Sequence[Call]) -> bool:
        try:
            return comparison.judge(comparison.run(calls))[2] is None
        except (MegaschedError, RuntimeError):  # it can't be planned, or does not run, without them
            return False

    def guilty(suspects: Sequence[Call]) -> tuple[Call, ...]:
        near, all_calls = (sorted(calls, key=_is_shard) for calls in (suspects, comparison.calls))
        return bisect_records(near, all_calls, right_without)

    try:
        steps = comparison.run()
    except MegaschedError as error:
        found.verdict, found.why = "refused", str(error)
        return found
    except RuntimeError as error:
        found.verdict, found.why = "failed", str(error)
        found.notes += [f"all is right without {asked}  ({source})" for _, asked, source in guilty(())]
        return found
    found.checks, found.why, found.finding = comparison.judge(steps)
    found.notes += comparison.notes(steps)
    if found.finding is not None:
        found.verdict = "wrong"
        found.finding = replace(found.finding, guilty=guilty(found.finding.records))
    return found


def _is_shard(call: Call) -> bool:
    """Returns whether a call cuts a module, which is rarely what is wrong; others are left out first."""
    return call[1].partition(": ")[2].startswith("shard(")


def _empty(schedule: Schedule, layout: ParallelDims) -> Verification:
    calls = f"a schedule of {len(schedule.records)} calls"
    return Verification(calls, "", layout, type(schedule.root.mod).__name__, False, 0, "equal")


def _by_name(model: nn.Module, inputs: Any) -> Mapping[str, Any]:
    if isinstance(inputs, Mapping):
        return inputs
    arguments = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return inspect.signature(model.forward).bind(*arguments).arguments


def _refuse(schedule: Schedule, example: Example, layout: ParallelDims) -> None:
    """Raises ConfigError where there is nothing to compare."""
    if schedule.built:
        raise ConfigError("the schedule is built, and the module as it was is gone: verify before build")
    if layout != schedule.layout and current_layout().world_size > 1:
        raise ConfigError(
            f"this job has ranks at {current_layout()}, and {layout} takes others: leave tp and dp out"
        )
    if (shared := layout.tp * layout.cp * layout.data_parallel_size) % layout.ep:
        raise ConfigError(
            f"EP {layout.ep} shares experts out over TP x CP x DP, and {layout} has {shared} such ranks: give dp"
        )
    if any(parameter.device.type == "meta" for parameter in schedule.root.mod.parameters()):
        raise ConfigError("verify compares numbers, and weights are deferred: materialize(model, source) first")
    if example.samples % layout.data_parallel_size:
        ranks = f"{layout.data_parallel_size} data-parallel ranks"
        raise ConfigError(f"{example.samples} samples can't be split over {ranks}")


# ranks that are started ------------------------------------------------------------------------------


class ModulePickler(pickle.Pickler):
    """Pickles a module, and refuses what the ranks could not import."""

    def reducer_override(self, obj: Any) -> Any:
        """Leaves all to pickle, but for classes and functions of the program itself.

        Raises:
            ConfigError: the object is one of those.
        """
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise ConfigError(f"{obj.__qualname__} is defined in the program itself (__main__). {REMEDY}")
        return NotImplemented


def _pack(schedule: Schedule, example: Example, layout: ParallelDims) -> bytes:
    """Returns a module on the CPU, its schedule and its example as bytes for ``verify_packed``."""
    model, records, buffer = schedule.root.mod, schedule.records, io.BytesIO()
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        model, records = copy.deepcopy((model, records))
        model.cpu()
    example = example.mapped(lambda tensor: tensor.detach().cpu())
    try:
        ModulePickler(buffer, pickle.HIGHEST_PROTOCOL).dump((model, records, schedule.roles, layout, example))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"{error}. {REMEDY}") from error
    return buffer.getvalue()


def verify_packed(packed: bytes) -> Verification:
    """Verifies what ``_pack`` has packed, in a rank of a pool."""
    model, records, roles, layout, example = pickle.loads(packed)
    init_megatron(tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, etp=1 if layout.ep > 1 else None)
    schedule = create_schedule(model, layout, roles)
    replay(records, schedule)
    return verify_here(schedule, example)


def _in_ranks(pool: RankPool, packed: bytes, found: Verification, timeout: float) -> Verification:
    try:
        found = pool.run(found.layout.world_size, verify_packed, packed, timeout=timeout)[0]
    except RankError as error:
        outcome = failure(str(error))
        found.verdict, found.why = outcome.verdict, refusal_of(str(error)) or outcome.why  # type: ignore[assignment]
    return found
