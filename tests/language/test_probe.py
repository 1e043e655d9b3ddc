"""Probe: what it prints is what the tensors hold, on each rank; no bit of the run changes."""

import contextlib
import copy
import io
import re

import pytest
import torch
from torch import nn

import megasched
from megasched import ScheduleError
from megasched.lowering.probe import statistics
from megasched.verify import trainer_run
from megasched.verify.ranks.pool import init_megatron
from tests import tiny
from tests.language.sharding import column_row
from tests.lowering.models import Mlp, randomize, tiny_model, token_ids
from tests.lowering.parity import compare, scheduled_copy, too_far, weighted_loss
from tests.parity.steps import assert_first_step_equals_hf

X = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
NUMBER = r"(-?[\d.e+-]+)"
STATISTICS = ", ".join(f"{name} {NUMBER}" for name in ("mean", "std", "min", "max"))
LINE = re.compile(rf"(.*?): (.*), (.*), call (\d+), (.*?) (\[[\d, ]*\]) (\w+): {STATISTICS}")


def run(model, x=X):
    """What was printed, and output and all gradients."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        output = model(x)
        weighted_loss(output).backward()
    lines = [line for line in printed.getvalue().splitlines() if ", call " in line]
    return lines, [output.detach(), x.grad, *(p.grad for p in model.parameters())]


def built(model, fill, **arguments):
    sch = megasched.create_schedule(copy.deepcopy(model))
    fill(sch)
    return megasched.build(sch, **arguments)


def is_of(line, value):
    """Whether a line has the numbers of a tensor, to four digits."""
    shape, dtype, *numbers = LINE.fullmatch(line).groups()[5:]
    want = [value.mean(), value.std(correction=0), value.min(), value.max()]
    return (shape, dtype) == (str(list(value.shape)), "float32") and numbers == [f"{float(n):.4g}" for n in want]


def test_in_one_process():
    model = randomize(Mlp())
    seen = {}
    plain = copy.deepcopy(model)

    def note(module, inputs, output):
        seen["forward"] = output.detach()
        output.register_hook(lambda gradient: seen.update(backward=gradient))

    plain.act.register_forward_hook(note)
    _, want = run(plain)
    lines, found = run(built(model, lambda sch: sch["act"].probe("here")))
    assert all(torch.equal(one, two) for one, two in zip(found, want, strict=True))
    assert [LINE.fullmatch(line).groups()[:5] for line in lines] == [
        ("here", "act", "rank 0", "1", "forward, output"),
        ("here", "act", "rank 0", "1", "backward, gradient of output"),
    ]
    assert is_of(lines[0], seen["forward"])
    assert is_of(lines[1], seen["backward"])


class Several(nn.Module):
    def forward(self, x):
        return {"twice": 2 * x, "rest": (x.detach().sum(-1), "word", (x > 0).sum())}


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Several()

    def forward(self, x):
        return self.inner(x)["twice"]


def test_every_tensor_of_an_output():
    lines, _ = run(built(Reads(), lambda sch: sch["inner"].print()))
    assert [LINE.fullmatch(line).groups()[4:7] for line in lines] == [
        ("forward, output['twice']", "[2, 3, 8]", "float32"),
        ("forward, output['rest'][0]", "[2, 3]", "float32"),
        ("forward, output['rest'][2]", "[]", "int64"),
        ("backward, gradient of output['twice']", "[2, 3, 8]", "float32"),
    ]


def test_every_third_call():
    model = built(Mlp(), lambda sch: sch["act"].probe(every=3))
    calls = [LINE.fullmatch(line)[4] for _ in range(7) for line in run(model)[0]]
    assert calls == ["1", "1", "4", "4", "7", "7"]


@pytest.mark.parametrize("every", [0, -1])
def test_an_impossible_number_of_calls(every):
    with pytest.raises(ScheduleError, match=f"probe: every={every} is no number of calls"):
        built(Mlp(), lambda sch: sch["act"].probe(every=every))


def test_what_is_not_finite_is_counted_and_left_out():
    value = torch.tensor([1.0, 3.0, float("nan"), float("inf")])
    assert statistics(value) == "[4] float32: mean 2, std 1, min 1, max 3, 2 of 4 not finite"
    assert statistics(value[2:]) == "[2] float32: 2 values, none finite"
    assert statistics(torch.tensor([1, 2, 3])) == "[3] int64: mean 2, std 0.8165, min 1, max 3"
    assert statistics(torch.full((2,), 2.0).to(torch.bfloat16)) == "[2] bfloat16: mean 2, std 0, min 2, max 2"


def probed(sch):
    column_row(sch)
    for name in ("up", "act", "down"):
        sch[name].probe()


def _on_two_ranks():
    """Distances from the unscheduled model, what differs from the run without probes, and the lines."""
    init_megatron(tp=2)
    model = randomize(Mlp())
    with contextlib.redirect_stdout(io.StringIO()):
        far = too_far(compare(model, probed, {"x": X}, {"x": X}))
    (with_them, _, _), (without, _, _) = (scheduled_copy(model, fill, {"x": X}) for fill in (probed, column_row))
    (lines, found), (_, want) = run(with_them), run(without)
    half = nn.functional.gelu(without.up(X)).detach()
    return far, [torch.equal(one, two) for one, two in zip(found, want, strict=True)], lines, half


def test_on_two_ranks(ranks):
    for rank, (far, same, lines, half) in enumerate(ranks.run(2, _on_two_ranks)):
        assert far == {}
        assert len(same) == 6
        assert all(same)
        who = f"rank {rank} (TP {rank} of 2)"
        said = [LINE.fullmatch(line).groups()[1:] for line in lines]
        assert [each[:5] for each in said] == [
            (path, who, "1", what, shape)
            for what, order in (("forward, output", (0, 1, 2)), ("backward, gradient of output", (2, 1, 0)))
            for path, shape in [
                (("up", "[2, 3, 8]"), ("act", "[2, 3, 8]"), ("down", "[2, 3, 8]"))[i] for i in order
            ]
        ]
        assert is_of(lines[1], half)  # its own half of the 16 features


def test_a_recomputed_module_of_a_language_model_is_called_twice_and_no_number_changes():
    model, ids = tiny_model("llama"), token_ids()
    calls = {"input_ids": ids, "labels": ids}

    def fill(sch):
        sch["model.layers.0"].checkpoint()
        sch["model.layers.0.self_attn"].probe()
        sch["model.layers.1.mlp.act_fn"].probe()

    found = []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for each in (built(model, fill), built(model, lambda sch: sch["model.layers.0"].checkpoint())):
            output = each(**calls)
            output.loss.backward()
            found.append([output.loss, output.logits, *(p.grad for p in each.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    lines = [LINE.match(line) for line in printed.getvalue().splitlines()]
    assert [(line[2], line[5]) for line in filter(None, lines)] == [
        ("model.layers.0.self_attn", "forward, output[0]"),
        ("model.layers.1.mlp.act_fn", "forward, output"),
        ("model.layers.1.mlp.act_fn", "backward, gradient of output"),
        ("model.layers.0.self_attn", "forward, output[0]"),
        ("model.layers.0.self_attn", "backward, gradient of output[0]"),
    ]


PROBES = """
from megasched.model_adapters.default_schedule import schedule as auto


def schedule(sch, layout):
    auto(sch, layout)
    sch["model.layers.*.mlp.act_fn"].probe()
    sch["model.layers.*.self_attn"].probe()
"""


def _trained(folder, schedule):
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        report = trainer_run.train(folder, flags, iterations=1, schedule=schedule)
    lines = [found for line in printed.getvalue().splitlines() if (found := LINE.match(line))]
    return report, [(found[2], found[3], found[5].split(",")[0]) for found in lines]


def test_in_the_trainer_under_sequence_parallelism_equals_hf(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path)
    (tmp_path / "sch.py").write_text(PROBES)
    reports, lines = zip(*ranks.run(2, _trained, folder, str(tmp_path / "sch.py")), strict=True)
    assert_first_step_equals_hf(ranks, folder, reports, 2, random_init=True)
    every = {f"model.layers.{index}.{name}" for index in range(4) for name in ("mlp.act_fn", "self_attn")}
    for rank, said in enumerate(lines):
        assert {who for _, who, _ in said} == {f"rank {rank} (TP {rank} of 2)"}
        assert {(path, which) for path, _, which in said} == {
            (p, w) for p in every for w in ("forward", "backward")
        }
