"""What counts as equal: numbers within the tolerance, or as far from float64 as the unscheduled model is."""

import pytest
import torch

from megasched.definition.small_models.small_models import write_small_model
from megasched.plan.placement import Placement
from megasched.verify.bfloat16 import compare_bf16
from megasched.verify.library.module_comparison import _of_copies
from megasched.verify.library.module_step import ModuleStep
from megasched.verify.parity import compare, failure
from megasched.verify.recording import RankReport
from megasched.verify.reference import (
    IGNORED,
    Float64,
    HfStep,
    Rounding,
    differences,
    hf_step,
    relative,
    rounding_of,
)

WEIGHT = torch.tensor([1.0, 0.5])
DECAY = torch.tensor([2e-2, -1e-2])


def step(decay=DECAY, loss=2.0, dtype=torch.float32):
    gradients = {"weight": WEIGHT.to(dtype), "decay": decay.to(dtype)}
    return HfStep(loss, [torch.ones(1, 2, 3, dtype=dtype)], gradients, 1.0)


def report(decay=DECAY, loss=2.0, names=("weight", "decay")):
    tensors = {"weight": WEIGHT, "decay": decay}
    gradients = {name: (tensors[name], Placement(name, (2,))) for name in names}
    found = RankReport(tp_rank=0, dp_rank=0, pp_rank=0, gradients=gradients)
    found.losses, found.grad_norms, found.logits = [loss], [1.0], {0: [torch.ones(1, 2, 3)]}
    return found


def test_what_is_within_the_tolerance_is_equal():
    outcome = compare([report(DECAY + 1e-7)], step(), 1)
    assert (outcome.verdict, outcome.worst, outcome.why) == ("equal", "decay", "")
    assert outcome.errors["gradient"] == pytest.approx(1e-7 / 2e-2, rel=1e-2)
    assert outcome.errors["loss"] == outcome.errors["logits"] == outcome.errors["grad_norm"] == 0


def test_what_is_beyond_it_is_wrong_and_named():
    outcome = compare([report(DECAY + 1e-6)], step(), 1)
    assert (outcome.verdict, outcome.worst) == ("wrong", "decay")
    assert outcome.why == "gradient differ by more than 1e-05; gradients of decay"
    outcome = compare([report(loss=2.1)], step(), 1)
    assert outcome.why == "loss differ by more than 1e-05"


def test_rounding_that_the_unscheduled_model_has_too_is_allowed():
    exact = step(DECAY.double() + 5e-7, dtype=torch.float64)  # float32 is 2.5e-5 off by itself
    rounding = Rounding(exact, differences(step(), exact))
    outcome = compare([report(DECAY - 1e-6)], step(), 1, rounding)  # 1.5e-6 from float64: three times as far
    assert outcome.verdict == "equal"
    assert (
        outcome.why == "decay differs by 5.0e-05; from float64 it is 7.5e-05, and the unscheduled model's 2.5e-05"
    )
    outcome = compare([report(DECAY - 3e-6)], step(), 1, rounding)  # seven times
    assert (outcome.verdict, outcome.worst) == ("wrong", "decay")


@pytest.mark.parametrize("place", ["logits", "gradient", "grad_norm"])
def test_a_number_that_is_none_is_wrong_wherever_it_stands(place):
    """Of several the largest error counts, and NaN is larger than none and smaller than none."""
    reports, expected = [report(), report()], step()
    if place == "logits":
        expected.logits *= 2
        for one in reports:
            one.logits[0] = [torch.ones(1, 2, 3), torch.full((1, 2, 3), torch.nan)]
    elif place == "gradient":
        for one in reports:
            one.gradients["decay"] = (torch.tensor([2e-2, torch.nan]), Placement("decay", (2,)))
    else:
        reports[1].grad_norms = [torch.nan]
    assert compare(reports, expected, 1).verdict == "wrong"
    assert not all(check.equal for check in compare_bf16(reports, expected, step(dtype=torch.float64), 1))


def test_a_copy_that_holds_no_number_is_told():
    """On one rank alone, behind others that are right."""

    def holding(rank, value):
        found = ModuleStep(tp_rank=rank, dp_rank=0, pp_rank=0)
        found.weights = {name: (one, Placement(name, (2,))) for name, one in (("a", WEIGHT), ("b", value))}
        return found

    (check,) = _of_copies([holding(0, WEIGHT), holding(1, torch.tensor([1.0, torch.nan]))])
    assert (check.equal, check.worst) == (False, "b")


def test_equal_infinities_are_no_difference():
    masked = torch.tensor([1.0, -torch.inf])
    assert relative(masked, masked.clone()) == relative(masked + torch.tensor([0.5, 0]), masked) - 0.5 == 0
    assert relative(-masked, masked) == relative(masked, WEIGHT) == torch.inf


def test_what_differs_from_itself_by_more_than_rounding_excuses_nothing():
    exact = step(-DECAY.double(), dtype=torch.float64)  # another draw of a router
    outcome = compare([report(DECAY * 0.9)], step(), 1, Rounding(exact, differences(step(), exact)))
    assert (outcome.verdict, outcome.worst) == ("wrong", "decay")


def test_a_good_float32_excuses_nothing():
    exact = step(dtype=torch.float64)
    outcome = compare([report(DECAY + 1e-6)], step(), 1, Rounding(exact, differences(step(), exact)))
    assert outcome.verdict == "wrong"


def test_a_gradient_on_one_side_alone():
    outcome = compare([report(names=("weight",))], step(), 1)
    assert (outcome.verdict, outcome.why) == ("wrong", "not on both sides: decay")


def test_float64_reaches_what_asks_for_float32():
    values = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    with Float64():
        assert values.float().sum().item() == 1.000000001
        assert values.to(torch.float32).dtype == torch.float64
        assert torch.zeros(1, dtype=torch.float32).dtype == torch.float64
        assert torch.softmax(values, 0, dtype=torch.float32).dtype == torch.float64
    assert values.float().dtype == torch.float32


def test_the_reference_in_float64(tmp_path):
    folder = write_small_model("qwen3_moe", str(tmp_path))
    tokens = torch.randint(10, 490, (1, 9), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    labels[:, -1] = IGNORED
    batches = [(tokens[:, :-1], labels)]
    rounding = rounding_of(folder, batches, random_init=False)
    assert {gradient.dtype for gradient in rounding.exact.gradients.values()} == {torch.float64}
    off = differences(hf_step(folder, batches, random_init=False), rounding.exact)
    assert 0 < max(off.values()) <= max(rounding.errors.values()) < 1e-5
    # Draws of roundings: the luck of one is that of no other.
    assert all(rounding.errors[name] >= error for name, error in off.items())
    assert sum(rounding.errors[name] > error for name, error in off.items()) > len(off) / 3


def test_a_refusal_is_told_without_paths():
    lines = [
        "Traceback (most recent call last):",
        "megasched.errors.ScheduleError: the schedule has a problem:",
        "  - TP 3 does not divide 4 heads",
        "    module: model.layers.0",
        "    asked for at: /home/me/schedule.py:23",
        "    remedy: TP 2",
        "    its output: something else",
    ]
    outcome = failure("\n".join(lines))
    assert outcome.verdict == "refused"
    assert outcome.why == "TP 3 does not divide 4 heads module: model.layers.0 remedy: TP 2"


def test_of_errors_that_led_to_one_another_the_last_is_told():
    lines = [
        "megasched.errors.ConfigError: no file",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "megasched.errors.ScheduleError: the schedule has a problem:",
        "  - it raised ConfigError: no file",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "RuntimeError: the connection was lost",
        "--- rank 1 failed:",
        "megasched.errors.ConfigError: something else",
    ]
    outcome = failure("\n".join(lines))
    assert (outcome.verdict, outcome.why) == ("refused", "it raised ConfigError: no file")


def test_any_error_of_megascheds_is_a_refusal():
    outcome = failure("megasched.errors.MegaschedError: attention with sinks")
    assert (outcome.verdict, outcome.why) == ("refused", "attention with sinks")
    outcome = failure("RuntimeError: [x] gloo\nValueError: bad")
    assert (outcome.verdict, outcome.why) == ("failed", "ValueError: bad")


def test_a_long_reason_ends_with_a_whole_word():
    for kind in ("megasched.errors.ConfigError", "RuntimeError"):
        outcome = failure(f"{kind}: {'run it without --context-parallel-size ' * 20}")
        assert len(outcome.why) <= 400
        assert outcome.why.endswith((" it …", " run …", " without …", " --context-parallel-size …"))
