"""Primitive ``shard``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megasched.errors import Problem, ScheduleError
from megasched.language.primitives.annotate import missing_parameter
from megasched.language.records import caller_source
from megasched.language.registry import Node, Primitive, register_primitive


@register_primitive
class Shard(Primitive):
    """Cuts a parameter over the tensor-parallel group.

    Parameters:
        param: name of the parameter in this module, e.g. ``weight``, or a list of names, each of which is cut. A
            bias follows its weight, and need not be named.
        axis: axis of the HF tensor that is cut. A Linear's weight is [out, in]: axis 0 makes it a
            ``ColumnParallelLinear``, axis 1 a ``RowParallelLinear``. HF's Conv1D is [in, out]: the other way
            round. An embedding's axis 0 is the vocabulary; along axis 1 each rank has some of the features,
            e.g. T5's table of position biases, which has a column for each head. A convolution's is
            [out, in / groups, ...]: axis 0 cuts its output channels, or its groups if there are several, axis 1
            its input channels; of a transposed one, [in, out / groups, ...], the other way round. A batch norm's
            axis 0 cuts all that it holds. That follows by itself where it takes cut channels.
        components: sizes along ``axis`` of projections packed into the tensor, e.g. ``(q, k, v)``; each is
            cut on its own. Read from the adapter where it knows them.

    What must be communicated follows from the placement; see ``sync``.

    Example: ``sch["model.layers.*.mlp.up_proj"].shard("weight", axis=0)``
    """

    name = "shard"
    of_weights = True
    instead = {"tensor_name": "here it is called param"}  # noqa: RUF012
    phase = "plan"
    keeps_product = True
    inside_megatron_module = True
    shown_by_effect = True

    def record(
        self, node: Node, param: str | Sequence[str], axis: int, components: Sequence[int] | None = None
    ) -> Sequence[Mapping[str, Any]]:
        names = [param] if isinstance(param, str) else param
        if not names:
            what, remedy = "shard names no parameter, and would do nothing", "leave the call out, or name one"
            raise ScheduleError(Problem(what, node.path, caller_source(), remedy))
        more = {} if components is None else {"components": tuple(components)}
        return [{"param": name, "axis": axis, **more} for name in names]

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        buffer = getattr(node.mod, "_buffers", {}).get(arguments["param"])  # running statistics of a batch norm
        problems = [] if buffer is not None else missing_parameter(node, arguments["param"], source)
        if problems:
            return problems
        shape = tuple(getattr(node.mod, arguments["param"]).shape)
        axis = arguments["axis"]
        if not 0 <= axis < len(shape):
            remedy = f"an axis from 0 to {len(shape) - 1}"
            return [Problem(f"{arguments['param']} {list(shape)} has no axis {axis}", node.path, source, remedy)]
        components = arguments.get("components")
        if components is not None and (sum(components) != shape[axis] or min(components, default=1) < 1):
            what = f"components {components} add up to {sum(components)}, not to {shape[axis]} along axis {axis}"
            what = f"components {components} are no sizes" if min(components, default=1) < 1 else what
            return [Problem(what, node.path, source, "the sizes of the packed projections, in their order")]
        return []
