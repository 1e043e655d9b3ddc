"""Training loops at random, as a library: each call, gradient and weight is that of plain HF.

python -m tests.fuzz.loops SECONDS [SEED [TYPE ...]]
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn
from transformers import AutoModelForCausalLM

import megasched
from megasched.definition.small_models.small_models import small_config
from megasched.lowering.build import placements_of
from megasched.model_adapters.default_schedule import schedule as default
from megasched.verify.parity import Outcome, failure
from megasched.verify.ranks.pool import RankError, RankPool, init_megatron
from tests.fuzz.flags import TYPES
from tests.fuzz.run_configs import hunt
from tests.lowering.parity import distance


@dataclass(frozen=True)
class Setting:
    """Megatron's groups of a run, and whether activations are split along the sequence."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    world: int = 2
    sp: bool = False


SETTINGS = {
    "tp2": Setting(tp=2),
    "tp2-sp": Setting(tp=2, sp=True),
    "cp2": Setting(cp=2),
    "ep2": Setting(ep=2),
    "dp2": Setting(),
    "tp2-dp2-sp": Setting(tp=2, world=4, sp=True),
    "tp2-cp2-sp": Setting(tp=2, cp=2, world=4, sp=True),
    "tp2-ep2-sp": Setting(tp=2, ep=2, world=4, sp=True),
}
# What a schedule may have beside the default one; none of it changes what is computed.
CALLS: dict[str, Callable[[Any], Any]] = {
    "checkpoint": lambda node: node.checkpoint(),
    "fused": lambda node: node.level("fused", required=False),
    "trace": lambda node: node.trace(),
}
VOCABULARY = 64
# Rounding adds up over the steps of a loop, and a router's choice may turn on it.
MOST = 2e-4


class Differs(AssertionError):
    """A number of the built model is not that of plain HF."""


@dataclass
class Loop:
    """A built model beside plain HF, in a loop whose next action is drawn.

    Attributes:
        values: draws tokens, alike on all ranks.
        pending: losses of both whose backward has not been run.
        told: what was done.
    """

    built: Any
    model: Any
    setting: Setting
    draw: random.Random
    optimizers: tuple[torch.optim.Optimizer, ...]
    values: torch.Generator
    pending: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def run(self, actions: int) -> None:
        for _ in range(actions):
            self._draw()(self)
        self.backward()
        self.step()

    def _draw(self) -> Callable[[Loop], None]:
        names = ["forward"] * 3 + (["backward", "one_backward", "kept_backward", "grad"] if self.pending else [])
        names += ["evaluate", "zero_grad", "mode"]
        names += [] if self.pending else ["step", "freeze", "load"]
        names += [] if self.setting.cp > 1 else ["embedded", "masked", "states", "packed"]
        names += [] if self.setting.cp > 1 or self.setting.sp else ["generate", "cached", "last_logits"]
        chosen = self.draw.choice(names)
        self.told.append(chosen)
        return getattr(Loop, chosen)

    # --- what is done -----------------------------------------------------------------------------------------

    def forward(self) -> None:
        self._pend([{"input_ids": ids, "labels": ids} for ids in self._ids()])

    def masked(self) -> None:
        """Pads some rows, on the left or on the right."""
        left, given = self.draw.random() < 0.5, []
        for ids in self._ids():
            mask = torch.ones_like(ids)
            mask[0, :3] = 0
            mask = mask if left else mask.flip(1)
            labels = ids.masked_fill(mask == 0, -100)
            given.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
        self._pend(given)

    def packed(self) -> None:
        """Packs two texts in each row, told by positions that begin anew."""
        given = []
        for ids in self._ids():
            positions = torch.arange(ids.shape[1]) % (ids.shape[1] // 2)
            # With a cache HF takes the rows for one text each.
            told = {"position_ids": positions.expand_as(ids), "use_cache": False}
            given.append({"input_ids": ids, "labels": ids} | told)
        self._pend(given)

    def cached(self) -> None:
        """Reads a text in two pieces, the second with the keys of the first."""
        ids, logits = self._ids()[self.dp_rank], []
        for each in self._both:
            mode = each.training
            with torch.no_grad():
                first = each.eval()(input_ids=ids[:, :5], use_cache=True)
                kept = first.get("past_key_values") or first.get("cache_params")
                name = "cache_params" if "cache_params" in first else "past_key_values"
                second = each(input_ids=ids[:, 5:6], use_cache=True, **{name: kept})
            logits.append(torch.cat([first.logits, second.logits], dim=1))
            each.train(mode)
        self._close("logits of two pieces", *logits)

    def last_logits(self) -> None:
        ids = self._ids()[self.dp_rank]
        with torch.no_grad():
            got, want = (each(input_ids=ids, logits_to_keep=2).logits for each in self._both)
        self._close("the last logits", got, want)

    def embedded(self) -> None:
        """Gives embeddings of the loop's own, and compares their gradients."""
        width = self.model.get_input_embeddings().weight.shape[1]
        batches = self._ids()
        first = [torch.randn(*ids.shape, width, generator=self.values) for ids in batches]
        leaves = [value.clone().requires_grad_() for value in first]
        own = leaves[self.dp_rank].detach().clone().requires_grad_()
        labels = batches[self.dp_rank]
        self.built(inputs_embeds=own, labels=labels).loss.backward()
        losses = [self.model(inputs_embeds=x, labels=ids).loss for x, ids in zip(leaves, batches, strict=True)]
        (sum(losses) / self.dp).backward()
        self._close("the gradient of embeddings", own.grad, leaves[self.dp_rank].grad * self.dp)
        self._compare_gradients()

    def states(self) -> None:
        ids = self._ids()[self.dp_rank]
        with torch.no_grad():
            got, want = (each(input_ids=ids, output_hidden_states=True).hidden_states for each in self._both)
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            self._close(f"hidden state {number}", one, other)

    def evaluate(self) -> None:
        ids, without = self._ids()[self.dp_rank], self.draw.choice((torch.no_grad, torch.inference_mode))
        modes = [each.training for each in self._both]
        for each in self._both:
            each.eval()
        with without():
            got, want = (each(input_ids=ids, labels=ids) for each in self._both)
        for each, mode in zip(self._both, modes, strict=True):
            each.train(mode)
        self._close("the loss of an evaluation", got.loss, want.loss)
        self._close("the logits of an evaluation", got.logits, want.logits)

    def generate(self) -> None:
        ids = self._ids()[self.dp_rank]
        modes = [each.training for each in self._both]
        got, want = (
            each.eval().generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for each in self._both
        )
        for each, mode in zip(self._both, modes, strict=True):
            each.train(mode)
        if not torch.equal(got, want):
            raise Differs(f"generated {got.tolist()}, not {want.tolist()}")

    def backward(self) -> None:
        if self.pending:
            for loss in map(sum, zip(*self.pending, strict=True)):
                loss.backward()
            self.pending.clear()
            self._compare_gradients()

    def one_backward(self) -> None:
        for loss in self.pending.pop(self.draw.randrange(len(self.pending))):
            loss.backward()
        self._compare_gradients()

    def kept_backward(self) -> None:
        for loss in self.draw.choice(self.pending):
            loss.backward(retain_graph=True)
        self._compare_gradients()

    def grad(self) -> None:
        """Takes gradients by ``torch.autograd.grad``, and keeps them as if a backward had."""
        chosen = self.pending.pop(self.draw.randrange(len(self.pending)))
        for each, loss in zip(self._both, chosen, strict=True):
            parameters = [parameter for parameter in each.parameters() if parameter.requires_grad]
            for parameter, value in zip(
                parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
            ):
                if value is not None:
                    parameter.grad = value if parameter.grad is None else parameter.grad + value
        self._compare_gradients()

    def step(self) -> None:
        self._average()
        if self.draw.random() < 0.5:
            norms = (
                megasched.clip_grad_norm_(self.built, 0.5),
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5),
            )
            self._close("the gradient norm", *map(torch.as_tensor, norms))
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()
        state = megasched.full_state_dict(self.built)
        for name, value in self.model.state_dict().items():
            if name in state:
                self._close(f"the weight {name}", state[name], value, 1e-2)

    def zero_grad(self) -> None:
        to_none = self.draw.random() < 0.5
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def load(self) -> None:
        """Puts the built model's state back into it."""
        self.built.load_state_dict({name: value.clone() for name, value in self.built.state_dict().items()})

    def mode(self) -> None:
        mode = self.draw.random() < 0.5
        for each in self._both:
            each.train(mode)

    def freeze(self) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        chosen, trained = self.draw.sample(names, len(names) // 4), self.draw.random() < 0.5
        for each in self._both:
            for name, parameter in each.named_parameters():
                if name in chosen:
                    parameter.requires_grad_(trained)

    # --- how --------------------------------------------------------------------------------------------------

    @property
    def _both(self) -> tuple[Any, Any]:
        return self.built, self.model

    @property
    def dp(self) -> int:
        return self.setting.world // (self.setting.tp * self.setting.cp)

    @property
    def dp_rank(self) -> int:
        return parallel_state.get_data_parallel_rank()

    def _ids(self) -> list[torch.Tensor]:
        """Returns the tokens [b, s] of each data-parallel rank."""
        shape = self.draw.choice((1, 2, 3)), self.draw.choice((8, 16))
        return [torch.randint(1, VOCABULARY, shape, generator=self.values) for _ in range(self.dp)]

    def _pend(self, given: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Calls both: plain HF with what each data-parallel rank is given, whose losses' mean counts."""
        got = self.built(**given[self.dp_rank])
        want = [self.model(**each) for each in given]
        self._close("the loss", got.loss, want[self.dp_rank].loss)
        trained = given[self.dp_rank]["labels"] != -100
        self._close("logits", got.logits[trained], want[self.dp_rank].logits[trained])
        if got.loss.requires_grad:
            self.pending.append((got.loss, sum(each.loss for each in want) / self.dp))

    def _averaged(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns a gradient, over data parallelism; experts' have their mean already."""
        gradient = parameter.grad.clone()
        if self.dp > 1 and getattr(parameter, "allreduce", True):
            torch.distributed.all_reduce(gradient, group=parallel_state.get_data_parallel_group())
            gradient /= self.dp
        return gradient

    def _average(self) -> None:
        for parameter in self.built.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(self._averaged(parameter))

    def _compare_gradients(self) -> None:
        placements, wanted = placements_of(self.built), dict(self.model.named_parameters())
        norms = [float(parameter.grad.abs().max()) for parameter in wanted.values() if parameter.grad is not None]
        least = 1e-2 * max(norms, default=1.0)
        for name, parameter in self.built.named_parameters():
            placement, want = placements[name], wanted[name].grad
            if parameter.grad is None or want is None:
                zero = all(grad is None or not grad.any() for grad in (parameter.grad, want))
                if not zero:
                    raise Differs(f"the gradient of {name}: one of both has none")
                continue
            group = (
                parallel_state.get_expert_model_parallel_group()
                if placement.group == "ep"
                else parallel_state.get_tensor_model_parallel_group()
            )
            gradient = self._averaged(parameter)
            every = [torch.empty_like(gradient) for _ in range(group.size())]
            torch.distributed.all_gather(every, gradient.contiguous(), group=group)
            whole = placement.unshard(every) if placement.sharded else gradient
            self._close(f"the gradient of {name}", whole, want, least)

    def _close(self, what: str, got: torch.Tensor, want: torch.Tensor, least: float = 1e-6) -> None:
        if got.shape != want.shape:
            raise Differs(f"{what} is {list(got.shape)}, not {list(want.shape)}")
        gap = distance(got.detach(), want.detach(), least) if want.numel() else 0.0
        if not gap <= MOST:
            raise Differs(f"{what} differs by {gap:.1e}")


def _schedule(sch: Any, draw: random.Random) -> list[str]:
    """Fills a schedule: the default one, and perhaps recomputes; returns what it adds to that."""
    default(sch, sch.layout)
    if draw.random() < 0.4:
        return []
    paths = [path for path, module in sch.mod.named_modules() if path and not isinstance(module, nn.ModuleList)]
    told = []
    for name in draw.sample(sorted(CALLS), draw.choice((1, 2))):
        chosen = re.sub(r"\.\d+(?=\.|$)", ".*", draw.choice(paths), count=1)
        CALLS[name](sch[chosen])
        told.append(f"{name} of {chosen}")
    return told


def run_loop(model_type: str, name: str, seed: str, actions: int) -> tuple[list[str], str]:
    """Returns what a loop has done, and what differed, if anything; in each rank."""
    draw, setting = random.Random(seed), SETTINGS[name]
    init_megatron(tp=setting.tp, cp=setting.cp, ep=setting.ep, etp=1)
    torch.manual_seed(draw.randrange(1000))
    config = small_config(model_type)
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    sch = megasched.create_schedule(copy.deepcopy(model), sequence_parallel=setting.sp)
    try:
        told = _schedule(sch, draw)
        built = megasched.build(sch)
    except megasched.ScheduleError as error:
        return [], f"refused: {error}"
    sgd = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (built, model)]
    values = torch.Generator().manual_seed(draw.randrange(1000))
    loop = Loop(built, model, setting, draw, tuple(sgd), values, told=told)
    try:
        loop.run(actions)
    except Differs as differs:
        return loop.told, str(differs)
    return loop.told, ""


def outcomes(ranks: RankPool, types: Sequence[str], seed: int) -> Iterator[tuple[str, Outcome]]:
    """What is tried of the types in turn, and what comes of it."""
    draw = random.Random(seed)
    for number in count():
        model_type, name = types[number % len(types)], draw.choice(list(SETTINGS))
        told = f"{model_type} at {name}, loop {seed} {number}"
        try:
            found = ranks.run(
                SETTINGS[name].world, run_loop, model_type, name, f"{seed} {number}", 10, timeout=240
            )
        except RankError as error:
            yield told, failure(str(error))
            continue
        done, differs = next((one for one in found if one[1]), found[0])
        verdict = "refused" if differs.startswith("refused") else "wrong" if differs else "equal"
        yield f"{told}: {', '.join(done)}", Outcome(verdict, {}, why=differs)


if __name__ == "__main__":
    from tests.fuzz import loops  # by whose name the ranks find its functions

    hunt(TYPES, loops.outcomes)
