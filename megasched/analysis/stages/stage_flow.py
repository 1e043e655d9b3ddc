"""Finds the tensors that layers read of earlier ones beside the hidden state, by following a tape.

A *side* is a tensor that a module returns, or writes into a mapping among its arguments, and that is read past the
next layer: shared keys and values, indices, embeddings that later layers use again. A pipeline has to send it
along with the hidden state. Tensors that the model's own code makes of sides between its modules are computed
again on every stage, and so are those that depend on no parameter.

A tensor that HF's hooks record in a layer (``hooked_outputs.py``) is one, too, if code after the layers reads it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megasched.analysis.recording.chance import Chance
from megasched.analysis.recording.meta_call import is_training, tensors_in
from megasched.analysis.recording.operators import SHAPE_ONLY, base_of, storage_of, written
from megasched.analysis.recording.sites import Site
from megasched.analysis.recording.tape import Call, Operation, Question, Tape, TapeReader
from megasched.analysis.recording.trees import entries_of, leaves_of
from megasched.analysis.stages.held_state import HeldState
from megasched.analysis.stages.made_of import MadeOf
from megasched.analysis.stages.output_refs import BEFORE, OutputRef, TensorUse

if TYPE_CHECKING:
    from megasched.analysis.stages.hidden_state import HiddenStateArg


@dataclass(frozen=True)
class _Inner:
    """Stands for a tensor made inside a layer, or of the model's own parameters, that has no place yet."""

    layer: int | None
    name: str


type _Items = frozenset[int | _Inner]
_NOTHING: _Items = frozenset()


class StageFlow(TapeReader):
    """Follows which sides and parameters each tensor of a tape is made of.

    Args:
        tape: tape of a forward.
        layers: paths of the layers, in the order in which they run.
        outside: paths of modules with parameters of their own that are in no layer.
        slot: where the hidden state stands in a layer's call.
        recorded: places of the tensors that HF's hooks record inside of layers.
        first_stage_only: the argument of the forward that later stages do not have.

    Attributes:
        found: every tensor with a place, in the order of their making; the first are the token ids.
        bare: module -> where other modules read its parameters: the number of layers for code after them, None for
            the model's own code before.
        changed_buffers: buffers that a forward writes to or replaces.
        changed_parameters: parameters that it writes to, under any name -> whether the inputs decide the values.
        refused: why the model can't be cut into stages; empty where it can.
        by_chance: whether code around the layers uses random numbers that each stage would draw anew.
        asked: questions in code around the layers, about values that most stages do not have.
    """

    def __init__(
        self,
        tape: Tape,
        layers: Collection[str],
        outside: Collection[str],
        slot: HiddenStateArg,
        recorded: Sequence[OutputRef] = (),
        first_stage_only: str | None = None,
    ) -> None:
        self._recorded: dict[str, list[OutputRef]] = defaultdict(list)
        for place in recorded:
            self._recorded[place.path].append(place)
        self._tape, self._outside, self._slot = tape, outside, slot
        self._order = {path: index for index, path in enumerate(layers)}
        self._indices = [int(path.rpartition(".")[2]) for path in layers]
        self._parameters = {id(parameter): name for name, parameter in tape.model.named_parameters()}
        self._held = HeldState(tape, {path: int(path.rpartition(".")[2]) for path in layers})
        self._made_of = MadeOf[int | _Inner]()
        self._numbers: dict[int, int] = {}
        self._stored_numbers: dict[int, set[int]] = defaultdict(set)  # storage -> of tensors with a place in it
        self._made: set[int] = set()
        self._state: dict[int, int] = {}  # id of a tensor that outlives a forward -> layer that wrote to it last
        self._entries: dict[tuple[Any, Any], list[int]] = {}
        self._running: list[tuple[str, set[int]]] = []  # modules outside of the layers, or one layer
        self._called_in_layer: list[str] = []  # modules that run in it, itself among them
        self._calls: Counter[str] = Counter()
        self._changed: set[int] = set()
        self._done = 0
        self._drew = False  # Python's or numpy's random numbers, around the layers
        self.found: list[TensorUse] = []
        self.bare: dict[str, set[int | None]] = {}
        self.changed_buffers = set(tape.replaced_buffers)
        self.changed_parameters: dict[str, bool] = {}
        self.refused = ""
        self.by_chance = False
        self._chance = Chance()
        self.asked: set[Site] = set()
        self._begin(first_stage_only)
        tape.read(self)
        self._end_of_forward()

    def _begin(self, first_stage_only: str | None) -> None:
        inputs, model = self._tape.inputs, self._tape.model
        self._made.update(id(tensor) for tensor in tensors_in(dict(inputs)))
        # Those that are not kept in checkpoints are made of something else again (rotary frequencies).
        kept = model.state_dict(keep_vars=True)
        held = {name: one for name, one in self._tape.held.items() if not isinstance(one.tensor, nn.Parameter)}
        self._buffers = {one.storage: name for name, one in held.items() if name in kept}
        self.changed_buffers &= kept.keys()
        if first_stage_only is not None:
            ids = inputs[first_stage_only]
            self.found.append(TensorUse(ids, BEFORE, places=[OutputRef("")]))
            self._numbers[id(ids)] = 0
            self._stored_numbers[storage_of(ids)].add(0)
            self._made_of.tell(ids, frozenset([0]))
            if "labels" in inputs:  # which the last stage alone has
                self._made_of.tell(inputs["labels"], frozenset([_Inner(self._end, "the labels")]))

    def _end_of_forward(self) -> None:
        self._drew = self._drew or self._tape.drew_at_end
        self._note_draws()
        if is_training() and (name := self._held.rewritten()):
            of = "which the backward of micro-batches before needs as it was"
            self._refuse(f"a forward changes {name} in place, {of}")
        self._join_entries()
        for found in self.stage_inputs():
            where = found.places[0].path
            if self._numbers[id(found.tensor)] in self._changed:
                self._refuse(f"what {where} returns is changed in place by the model's own code, and read later")
            if self._calls[where] > 1:
                self._refuse(f"{where} runs {self._calls[where]} times, and what it returns is read later")

    # where we are -----------------------------------------------------------------------------------

    @property
    def ran(self) -> int:
        """Returns how many layers ran."""
        return self._done

    @property
    def _next(self) -> int:
        """Returns the index of the layer that runs or runs next; the number of layers after the last one."""
        return self._indices[self._done] if self._done < len(self._indices) else self._end

    def _place(self) -> int | None:
        """Returns the layer that reads tensors now; None for the model's own code, which runs on every stage."""
        if self._done == len(self._indices):
            return self._next
        if not self._running:
            return None
        inside = self._running[0][0] in self._order
        return self._next if inside or self._done else BEFORE

    def question(self, question: Question) -> None:
        """Notes a question of code that every stage runs, about data that most stages do not have."""
        of_data = any(self._made_of.of(tensor) for tensor in question.tensors)
        if question.site is not None and of_data and self._place() in (None, BEFORE):
            self.asked.add(question.site)

    # operations -------------------------------------------------------------------------------------

    def operation(self, operation: Operation) -> None:
        func, args, kwargs = operation.func, operation.args, operation.kwargs
        operands = operation.operands
        place = self._place()
        if not self._running and self._chance.asks(func, args, operands):
            self.by_chance = True
            self._refuse("the code around them asks for a number that it draws, and each stage would draw another")
        self._chance.follow(func, args, kwargs, operands, operation.outputs)
        items: _Items = _NOTHING.union(*map(self._made_of.of, operands))
        items = frozenset(map(self._as_read, items))
        for item in sorted(items, key=repr) if place is not None else ():
            self._read(item, place)
        names = [self._parameters[id(tensor)] for tensor in operands if id(tensor) in self._parameters]
        items |= {_Inner(place, name) for name in names}
        changed = written(func, args, kwargs)
        # What is changed by numbers alone tells nothing of itself to other code: each stage changes what it has.
        by_numbers = bool(names and changed) and {*map(storage_of, operands)} == {*map(storage_of, changed)}
        if not by_numbers:
            self._note_bare(names, place)
            self._note_homes(operands, place)
        self._note_state(operands, changed, place, by_inputs=any(isinstance(item, int) for item in items))
        self._held.note_changed(func, changed)
        for storage in map(storage_of, changed):
            if not by_numbers:
                self._made_of.write(storage, items)
            if place is None:
                self._changed |= self._stored_numbers[storage]
        if str(func).startswith(SHAPE_ONLY):
            items = _NOTHING
        for tensor in operation.outputs:
            self._made.add(id(tensor))
            if id(tensor) not in self._numbers and not by_numbers:
                self._made_of.tell(tensor, items)

    def _note_bare(self, names: list[str], place: int | None) -> None:
        """Notes parameters that are read by the code of another module than their own."""
        running = {path for path, _ in self._running}
        for name in names:
            if not running & (self._held.owners[name] | self._order.keys()):
                owners = {name.rpartition(".")[0]}
                if place == self._end:  # of a tie, code there may read the weight of the head
                    owners |= self._held.owners[name]
                for owner in owners:
                    self.bare.setdefault(owner, set()).add(place)

    def _note_homes(self, read: list[torch.Tensor], place: int | None) -> None:
        """Refuses reads of a layer's parameters from other stages, and of parameters in no layer from a layer.

        A layer may read the latter by calling their modules.
        """
        inside = bool(self._running) and self._running[0][0] in self._order
        for name, layers, owners in self._held.read(read):
            if layers and place not in layers:
                reader = "the code around them" if place is None else self._reader(place)
                self._refuse(f"{reader} reads {name}, which is on the stage of layer {min(layers)} alone")
            if not layers and inside and owners.isdisjoint(self._called_in_layer):
                self._refuse(f"layer {place} reads {name}, which is in no layer")

    def _note_draws(self) -> None:
        """Refuses code around the layers that drew Python's random numbers since a module ended."""
        if self._drew:
            self.by_chance = True
            self._refuse(
                "the code around them draws Python's or numpy's random numbers, and each stage would draw others"
            )

    def _note_state(
        self, read: list[torch.Tensor], changed: list[torch.Tensor], place: int | None, by_inputs: bool
    ) -> None:
        """Follows writes to tensors that outlive a forward: a layer's writes are on its own stage alone."""
        for base in map(base_of, read):
            layer = self._state.get(id(base))
            if layer is not None and layer != place:
                reader = self._reader(place)
                self._refuse(f"{reader} reads a tensor that layer {layer} wrote to, and was not handed it")
        for base in map(base_of, changed):
            if (name := self._held.parameter(base)) is not None:
                self.changed_parameters[name] = self.changed_parameters.get(name, False) or by_inputs
            if id(base) in self._made or name is not None:
                continue
            if (buffer := self._buffers.get(storage_of(base))) is not None:
                self.changed_buffers.add(buffer)
            if place is not None:
                self._state[id(base)] = place

    def _as_read(self, item: int | _Inner) -> int | _Inner:
        """Returns an item as code reads it: recorded tensors belong to their layer until the layers have ended."""
        if isinstance(item, _Inner) or self._done == len(self._indices):
            return item
        found = self.found[item]
        path = found.places[0].path
        return _Inner(found.made, path) if path in self._recorded else item

    def _read(self, item: int | _Inner, place: int) -> None:
        if isinstance(item, int):
            self.found[item].read = max(self.found[item].read, place)
        elif item.layer is None and place not in (BEFORE, self._end):
            self._refuse(f"{item.name}, which is in no layer, goes into what layer {place} reads")
        elif item.layer == self._end and place != self._end:
            self._refuse(f"layer {place} reads {item.name}, which the last stage alone has")
        elif item.layer is not None and item.layer != place:
            reader = self._reader(place)
            self._refuse(f"{reader} reads what layer {item.layer} made of {item.name}, and was not handed it")

    def _reader(self, place: int | None) -> str:
        return "what comes after the layers" if place in (None, self._end) else f"layer {place}"

    @property
    def _end(self) -> int:
        """Returns the index that stands for code after the layers."""
        return self._indices[-1] + 1

    def _refuse(self, why: str) -> None:
        self.refused = self.refused or why

    # modules ----------------------------------------------------------------------------------------

    def enter(self, call: Call) -> None:
        for source, alias in call.entered:
            self._pass_on(source, alias)
        path = call.path
        self._drew = self._drew or call.drew_before
        if self._called_in_layer or path in self._order:
            self._called_in_layer.append(path)
        if path not in self._order and not self._is_outside(path):
            return
        if not self._running:
            self._note_draws()
        if path in self._order and not self._done:
            # The hidden state comes to the first layer over the wire where this is on another stage, so
            # whatever went into it is not read here.
            hidden = self._slot.get(call.args, call.kwargs)
            self._numbers.pop(id(hidden), None)
            self._made_of.renew(hidden, frozenset([_Inner(self._next, "the hidden state")]))
        self._running.append((path, {id(tensor) for tensor in tensors_in((call.args, call.kwargs))}))
        if path in self._order:
            self._entries = {place: _ids(entry) for place, entry in entries_of(call.args, call.kwargs)}

    def _pass_on(self, source: torch.Tensor, alias: torch.Tensor) -> None:
        """Copies all that is known of a tensor to its alias."""
        self._made.add(id(alias))
        self._made_of.pass_on(source, alias)
        if (number := self._numbers.get(id(source))) is not None:
            self._numbers[id(alias)] = number

    def _is_outside(self, path: str) -> bool:
        in_layer = bool(self._running) and self._running[0][0] in self._order
        return path in self._outside and not in_layer

    def leave(self, call: Call) -> None:
        self._drew = self._drew or call.drew_inside
        self._leave(call)
        for source, alias in call.exited:
            self._pass_on(source, alias)

    def _leave(self, call: Call) -> None:
        path, output = call.path, call.output
        if self._called_in_layer:
            self._called_in_layer.pop()
        if path in self._recorded:
            self._calls[path] += 1
            for recorded in self._recorded[path]:
                tensor = recorded.tensor((), {}, output)
                self._mark(tensor, self._next, set(), lambda index, place=recorded: place)
        if not self._running or self._running[-1][0] != path:
            return
        _, handed = self._running.pop()
        if not self._running:
            self._drew = False  # what modules draw, they draw on one stage
        if path not in self._order:
            self._calls[path] += 1
            made = BEFORE if not self._done else self._next
            self._mark(output, made, handed, lambda index: OutputRef(path, index))
            return
        for (argument, key), entry in entries_of(*call.left):
            if self._entries.get((argument, key)) != _ids(entry):
                self._mark(entry, self._next, set(), lambda index, a=argument, k=key: OutputRef(path, index, a, k))
        self._mark(output, self._next, handed, lambda index: OutputRef(path, index))
        self._done += 1

    def _mark(
        self, value: Any, made: int, handed: Collection[int], place: Callable[[int | None], OutputRef]
    ) -> None:
        """Gives a place to each tensor in a value, but not to one that a module only passes on."""
        for index, tensor in leaves_of(value):
            number = self._numbers.get(id(tensor))
            if number is None and id(tensor) in handed:
                continue
            if number is None:
                number = self._numbers[id(tensor)] = len(self.found)
                self.found.append(TensorUse(tensor, made))
                self._made_of.tell_whole(tensor, frozenset([number]))  # what was written to it comes with it now
                self._stored_numbers[storage_of(tensor)].add(number)
            self.found[number].places.append(place(index))

    # results ----------------------------------------------------------------------------------------

    def stage_inputs(self) -> list[TensorUse]:
        """Returns the tensors that a pipeline may have to carry beside the hidden state."""
        return [found for found in self.found if found.read > self._until(found)]

    def _join_entries(self) -> None:
        """Extends the reads of each tensor in an entry of a mapping to those of the whole entry."""
        last: dict[tuple[Any, ...], int] = defaultdict(lambda: BEFORE)
        entries = [(found, found.places[0]) for found in self.found if found.places[0].argument is not None]
        for found, place in entries:
            entry = (place.path, place.argument, place.key)
            last[entry] = max(last[entry], found.read)
        for found, place in entries:
            found.read = last[place.path, place.argument, place.key]

    def _until(self, found: TensorUse) -> int:
        """Returns the last layer that gets the tensor without a side."""
        if found.places[0] == self._hidden_of(found.made):
            later = [index for index in self._indices if index > found.made]
            return later[0] if later else self._end
        return found.made

    def _hidden_of(self, layer: int) -> OutputRef | None:
        path = next((path for path, order in self._order.items() if self._indices[order] == layer), None)
        return None if path is None else OutputRef(path, self._slot.output)


def _ids(entry: Any) -> list[int]:
    """Returns the ids of an entry's tensors, equal for entries of the same tensors."""
    return [id(tensor) for _, tensor in leaves_of(entry)]
