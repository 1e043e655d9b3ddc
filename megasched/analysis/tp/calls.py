"""Applies calls of modules to labels, on top of what operations do (``operations.py``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megasched.analysis.recording.backward_code import handed_to_hooks
from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.tape import Call, RecordedAttention, RecordedLoss
from megasched.analysis.tp.backward import BackwardLabels
from megasched.analysis.tp.channels import given_channels
from megasched.analysis.tp.facts import TpSpec
from megasched.analysis.tp.shared_inputs import ColumnCall
from megasched.analysis.tp.sliced_args import ArgRef
from megasched.definition.images.convolutions import feature_dim, is_convolution
from megasched.language.tensor_types import FEATURE_SHARD, INVARIANT, REPLICATE, SEQUENCE_SHARD, ShardDim


def _split(dim: int) -> TpSpec:
    """Returns the label of an activation that is split along the sequence, in this dimension."""
    return TpSpec(SEQUENCE_SHARD, active=True, fed=True, along=ShardDim(dim))


class Labelling(BackwardLabels):
    """Applies calls of modules, of the attention function and of the loss function to labels.

    Args:
        loss_takes_shards: whether the loss function takes logits that are cut over the vocabulary.
    """

    def __init__(self, *given: Any, loss_takes_shards: bool = False, **more: Any) -> None:
        super().__init__(*given, **more)
        self.loss_takes_shards = loss_takes_shards
        self.attending: list[TpSpec] = []  # labels of what attention functions that run will give
        for tensor in tensors_in(dict(self.tape.inputs)):
            # A float input is an activation; what is made of ids alone (masks, positions) carries no gradient.
            self._set(tensor, TpSpec(fed=True, active=tensor.is_floating_point()))

    def read(self) -> None:
        """Reads the tape, and gathers the model's output unless the loss takes shards."""
        self.tape.read(self)
        logits = getattr(self.tape.output, "logits", None)
        if isinstance(logits, torch.Tensor):  # of which the trainer computes the loss, unless the definition does
            self._note_logits(logits)
        if not self.loss_takes_shards:
            for tensor in tensors_in(self.tape.output):
                self._gather(self.label(tensor).columns, "the model returns it")

    def enter(self, call: Call) -> None:
        for source, alias in call.entered:
            self._pass_on(source, alias)
        path = call.path
        self.stack.append(call)
        self.tp_facts.called.add(path)
        self._enter_layer(call)
        if path == self._around():
            self._enter_region(call)
            self._take_parts(call)
        if path in self.experts:
            self.tp_facts.experts[path] = self.label(tensors_in((call.args, call.kwargs))[0]).type
        if self.channels.is_channelwise(path) and not self.silent:
            self._enter_channelwise(call)
        if path in self.cuts:
            if not self.silent:
                self._enter_cut(call)
                if self.packing:
                    self._refuse_packing()
            self._meet(call.module.parameters())
            self.silent += 1

    def leave(self, call: Call) -> None:
        path, output, arguments = call.path, call.output, (call.args, call.kwargs)
        leaving = self._outside_of(call)
        for tensor in handed_to_hooks(call.module, *arguments, output):
            self.hooked(tensor)
        self.stack.pop()
        handed = {self.origin(tensor) for tensor in tensors_in(arguments)}
        for tensor in tensors_in(output):
            if self.origin(tensor) in handed:  # what it was given goes out again, to whoever uses it next
                self.other_uses[self.origin(tensor)].add(path)
        if path in self.cuts:
            self.silent -= 1
            if not self.silent:
                result = tensors_in(output)[0]
                self.cut_outputs[id(result)] = path
                self._set(result, self._cut_output(call, result.dim(), tensors_in(arguments)[0]))
        for source, alias in call.exited:
            self._pass_on(source, alias)
            if (label := leaving.get(id(source))) is not None:
                self._set_anew(alias, label)
        self._note_sides(call)
        if self.sequence_parallel and self.structure and path == self.structure.layer_path(self.structure.last):
            self._set_anew(self.structure.slot.result(call.returned), TpSpec(active=True, fed=True))

    def _outside_of(self, call: Call) -> dict[int, TpSpec]:
        """Returns a module's output labels outside of it, where they differ from inside, by the tensors' ids."""
        if call.path in self.regions:
            return self._leave_region(call)
        if call.path in self.wanted_regions:
            self._as_if_region(call.output)
        elif call.path and self.structure is not None and self.structure.holds_layers(call.path):
            return self._leave_layers(call)
        return {}

    def _note_sides(self, call: Call) -> None:
        """Notes how tensors are cut that later layers read beside the hidden state."""
        for side in self.structure.stage_inputs if self.structure else ():
            place = side.places[0]
            if place.path == call.path and call.path:
                label = self.label(place.tensor(*call.left, call.returned))
                if label.type in (FEATURE_SHARD, SEQUENCE_SHARD):
                    self.tp_facts.stage_inputs[place] = label.along.dim if label.along else None

    def _enter_layer(self, call: Call) -> None:
        """Splits activations along the sequence as they enter the layers, under sequence parallelism.

        The hidden state is split at the first layer. Other tensors made of the whole sequence before the layers
        are split at each layer that they enter.
        """
        if call.path not in self.layers or self.structure is None:
            return
        hidden = self.structure.slot.get(call.args, call.kwargs)
        dim = self.structure.sequence_dim
        self.tokens = hidden.shape[dim - 1 : dim + 1]
        found = _arguments(call)
        whole = [key for key, value in found.items() if value is not hidden and self._of_sequence(value)]
        if whole:
            self.tp_facts.split_slots[call.path] = tuple(whole)
        for key in whole:
            self._set(found[key], _split(1))
        if call.path == self.structure.layer_path(self.structure.first):
            self._set(hidden, _split(dim))

    def _of_sequence(self, value: Any) -> bool:
        """Returns whether this is an activation [b, s, ...] that every TP rank has whole."""
        if not isinstance(value, torch.Tensor) or value.shape[:2] != self.tokens:
            return False
        label = self.label(value)
        return value.is_floating_point() and label.active and label.type == INVARIANT

    def _enter_region(self, call: Call) -> None:
        """Notes which arguments with a gradient could enter TP at a module, and labels them so in a region."""
        path, found = call.path, _arguments(call)
        active = {
            slot: value
            for slot, value in found.items()
            if any(self.label(tensor).active and tensor.is_floating_point() for tensor in tensors_in(value))
        }
        labels = {
            key: self.label(v) if isinstance(v, torch.Tensor) else TpSpec(FEATURE_SHARD)
            for key, v in active.items()
        }
        known = ((INVARIANT, None), (SEQUENCE_SHARD, ShardDim(1)))
        usable = all((label.type, label.along) in known for label in labels.values())
        slots = tuple(active) if usable else ()
        self.tp_facts.whole_slots[path] = {key for key in slots if labels[key].type == INVARIANT}
        if self.slots.setdefault(path, slots) != slots:
            slots = self.slots[path] = ()
        if path not in self.regions:
            return
        if not slots:
            self.not_regions.add(path)
            return
        self.tp_facts.needed_regions.add(path)
        for slot in slots:
            self._set(active[slot], TpSpec(REPLICATE, active=True, fed=True))

    def _take_parts(self, call: Call) -> None:
        """Cuts the constants among a module's arguments that are known to be cut, and offers the others."""
        for slot, value in _arguments(call).items():
            argument = ArgRef(call.path, slot)
            part = self.parts.known.get(argument)
            constant = isinstance(value, torch.Tensor) and self._is_constant(value)
            if part is None:
                if constant:
                    self.parts.offer(argument, value)
            elif not constant:  # in another call it was one
                self._gather(part.columns, "what it meets is a constant in one call and none in another")
            elif part.columns.isdisjoint(self.gather):
                self._set(value, TpSpec(FEATURE_SHARD, part.columns, along=part.along(value)))
                self.tp_facts.parts[argument] = part

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is equal on all TP ranks, and carries no gradient."""
        label = self.label(tensor)
        return label.type == INVARIANT and not label.active and not label.params

    def _leave_region(self, call: Call) -> dict[int, TpSpec]:
        """Returns the labels that ``_outside`` gives to whole tensors that leave a region, by the tensors' ids."""
        leaving: dict[int, TpSpec] = {}
        if not self.slots.get(call.path):
            return leaving
        for index, leaf in enumerate(torch.utils._pytree.tree_leaves(call.output)):
            if isinstance(leaf, torch.Tensor) and self._is_inside(leaf):
                leaving[id(leaf)] = self._outside(leaf)
                self.tp_facts.exits[call.path][index] = leaving[id(leaf)].along
        return leaving

    def _leave_layers(self, call: Call) -> dict[int, TpSpec]:
        """Returns labels for tensors that HF's hooks recorded inside of regions, by the tensors' ids.

        They are whole once the module around the layers returns them.
        """
        leaves, _ = torch.utils._pytree.tree_flatten_with_path(call.output)
        inside = {path: leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor) and self._is_inside(leaf)}
        if inside:
            self.tp_facts.recorded[call.path] = tuple(inside)
        return {id(leaf): TpSpec(active=True, fed=True) for leaf in inside.values()}

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is whole inside of a region, and carries a gradient."""
        return self.label(tensor).type == REPLICATE and tensor.is_floating_point()

    def _along_sequence(self, leaf: torch.Tensor) -> ShardDim | None:
        """Returns how [b, s, ...] or flattened [b*s, ...] is cut along the sequence; None for another shape."""
        if leaf.shape[:2] == self.tokens:
            return ShardDim(1)
        return ShardDim(0, outer=self.tokens[0]) if leaf.shape[:1] == (self.tokens.numel(),) else None

    def _as_if_region(self, output: Any) -> None:
        """Labels a module's output as that of a region, which it will be in the next run.

        So no module after it asks for a region in this run: one run for each layer would be quadratic.
        """
        for tensor in tensors_in(output):
            label = self.label(tensor)
            if label.type == SEQUENCE_SHARD and label.along is None and tensor.dim() > 1:
                self._set(tensor, replace(label, along=ShardDim(1)))
            elif self._is_inside(tensor):
                self._set(tensor, self._outside(tensor))

    def _outside(self, inside: torch.Tensor) -> TpSpec:
        """Returns the label of a whole tensor that leaves a region.

        It is split along the sequence as before the region, or else whole, with a whole gradient.
        """
        along = self._along_sequence(inside) if self.sequence_parallel else None
        return TpSpec(INVARIANT if along is None else SEQUENCE_SHARD, active=True, fed=True, along=along)

    def _enter_cut(self, call: Call) -> None:
        path, source = call.path, tensors_in((call.args, call.kwargs))[0]
        label = self.label(source)
        cut = self.cuts[path]
        if cut == "column":
            self._gather(label.columns, "another column-parallel linear reads it")
            if label.type == REPLICATE:
                self.tp_facts.inside.add(path)
            else:
                if label.type == INVARIANT and self.sequence_parallel and self._in_layers(path):
                    self.tp_facts.whole_inputs.add(path)
                around = [(one.path, self._origins_of_arguments(one)) for one in self.stack]
                self.column_calls.append(ColumnCall(path, self.origin(source), around))
        elif cut == "row" and label.type != FEATURE_SHARD:
            self._gather(label.columns, "a row-parallel linear reads it where it is whole on each rank")
            self.channels.whole.add(path)
            self._gather(self.channels.of_both(path), "a row-parallel module reads a whole tensor in another call")
            self.tp_facts.scatter.add(path)
            if label.type == REPLICATE:
                self.tp_facts.inside.add(path)
            elif self._in_layers(path) and self.sequence_parallel:
                self.tp_facts.rows_of_tokens.add(path)
        elif cut == "row" and not self._takes_features(call, source.dim(), label):
            # it takes a contiguous part of the last dimension, and nothing else
            self._gather(label.columns, "a row-parallel linear reads it in another order")

    def _takes_features(self, call: Call, dims: int, label: TpSpec) -> bool:
        """Returns whether a row takes features as they are cut: in one piece; a convolution also by components."""
        if is_convolution(call.module):
            taken = self.channels.enter(call.path, call.module, dims, label)
            self.tp_facts.input_components = dict(self.channels.components)
            return taken
        self.channels.columns[call.path] |= label.columns
        return label.along == ShardDim(dims - 1) and call.path not in self.tp_facts.scatter

    def _enter_channelwise(self, call: Call) -> None:
        """Cuts a batch norm or a grouped convolution in a call on cut channels."""
        source = tensors_in((call.args, call.kwargs))[0]
        self.cuts.pop(call.path, None)
        if self.channels.enter(call.path, call.module, source.dim(), self.label(source)):
            self.cuts[call.path] = "channels"
        self._gather(self.channels.of_both(call.path), "a module takes whole channels in another call")
        self.tp_facts.input_components = dict(self.channels.components)

    def _origins_of_arguments(self, call: Call) -> dict[int | str, int]:
        tensors = {key: value for key, value in _arguments(call).items() if isinstance(value, torch.Tensor)}
        return {key: self.origin(tensor) for key, tensor in tensors.items()}

    def _cut_output(self, call: Call, dims: int, source: torch.Tensor) -> TpSpec:
        """Returns the label of the output, of so many dimensions, of what is cut and takes ``source``."""
        path, last = call.path, feature_dim(call.module, dims)
        cut = self.cuts[path]
        if cut == "channels":
            along = given_channels(call.module, dims, self.channels.components[path])
            return TpSpec(FEATURE_SHARD, self.label(source).columns, active=True, fed=True, along=along)
        split = self.sequence_parallel and self._in_layers(path)
        if cut == "column" and path not in self.gather:
            along = ShardDim(
                last, components=self.assume.components.get(path, ()), heads=self.assume.heads.get(path, ())
            )
            if along.heads == (1,):
                return TpSpec(REPLICATE, frozenset([path]), active=True, fed=True)
            return TpSpec(FEATURE_SHARD, frozenset([path]), active=True, fed=True, along=along)
        if cut == "column" and self.label(source).type == REPLICATE:
            return TpSpec(REPLICATE, active=True, fed=True)
        if cut == "column" and split:
            if not self._want_region():
                self._problem(
                    "the gathered output of a column-parallel linear is whole along the sequence",
                    "pair it with a row-parallel linear, or switch sequence parallelism off",
                )
            return TpSpec(REPLICATE, active=True, fed=True)
        if path in self.assume.rows_inside:
            return TpSpec(REPLICATE, active=True, fed=True)
        if cut == "features":
            return TpSpec(FEATURE_SHARD, frozenset([path]), active=True, fed=True, along=ShardDim(last))
        split = split and cut == "row"
        rows = frozenset([path]) if cut == "row" else frozenset()
        # Tokens may be flattened: [b*s, h].
        place = ShardDim(1) if last > 1 else ShardDim(0, outer=self.tokens[0])
        return TpSpec(
            SEQUENCE_SHARD if split else INVARIANT,
            rows=rows,
            active=True,
            fed=True,
            along=place if split else None,
        )

    def enter_attention(self, call: RecordedAttention) -> None:
        """Checks that attention, which treats heads apart, gets q, k and v [b, heads, s, d] cut by heads."""
        operands = tensors_in((call.query, call.key, call.value, call.args, call.kwargs))
        self.tp_facts.attention[self._path()] = (
            call.query.shape[1],
            self.label(call.query).type == FEATURE_SHARD,
        )
        self._meet(operands)
        label = self._join([self.label(tensor) for tensor in operands])
        if label.type == FEATURE_SHARD:
            cut = [self.label(tensor).along for tensor in operands if self.label(tensor).type == FEATURE_SHARD]
            # Ranks may have the same heads of key and value: the function takes fewer of them than of query.
            cut = [cut[0], *(along and replace(along, heads=()) for along in cut[1:])]
            whole = [t for t in operands if self.label(t).type != FEATURE_SHARD and id(t) not in self.alike]
            # Sinks, biases. The function takes those of its heads of a parameter.
            of_heads = [t for t in whole if t.dim() == 1 or (t.dim() == 4 and t.shape[1] > 1)]
            of_heads = [t for t in of_heads if t is not call.kwargs.get("s_aux") or not self.label(t).params]
            met = [(t, ShardDim(1 if t.dim() == 4 else 0)) for t in of_heads]
            by_heads = all(along == ShardDim(1) for along in cut)
            if not by_heads or (met and not self.parts.want(met, label.columns, self._around())):
                self._gather(label.columns, "attention reads it, and it is not cut by heads")
        if label.type == SEQUENCE_SHARD:
            self._need_sequence()
        self.attending.append(label)
        self.silent += 1

    def leave_attention(self, call: RecordedAttention) -> None:
        self.silent -= 1
        label = self.attending.pop()
        self._set(call.output[0], replace(label, along=ShardDim(2) if label.type == FEATURE_SHARD else None))

    def enter_loss(self, call: RecordedLoss) -> None:
        self._note_logits(call.logits)
        if not self.loss_takes_shards:
            self._gather(self.label(call.logits).columns, "the loss needs whole logits")
        self.silent += 1

    def _note_logits(self, logits: torch.Tensor) -> None:
        if self.loss_takes_shards and (label := self.label(logits)).type == FEATURE_SHARD:
            self.tp_facts.logits |= label.columns

    def leave_loss(self, call: RecordedLoss) -> None:
        """Labels the loss as active, as a forward may add terms to it that it makes of parameters."""
        self.silent -= 1
        self._set(call.output, TpSpec(active=True, fed=True))


def _arguments(call: Call) -> dict[int | str, Any]:
    """Returns the arguments of a call by position or name."""
    return dict([*enumerate(call.args), *call.kwargs.items()])
