"""``megasched.verify``: of any module, what is right is found equal, and what is wrong at its call."""

import copy
from contextlib import nullcontext

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import nn
from torch.nn import functional

import megasched
from megasched import ConfigError, ParallelDims
from megasched.verify.plain.draws import NOTE
from megasched.verify.ranks.pool import init_megatron
from tests.language.replacing import Around
from tests.lowering.models import Mlp, randomize, tiny_model, token_ids

TP2 = ParallelDims(tensor_model_parallel_size=2)


def cut(model, layout=None):
    """A schedule of a module whose ``up`` and ``down`` are cut."""
    sch = megasched.create_schedule(model, layout)
    sch["up"].shard("weight", axis=0)
    sch["down"].shard("weight", axis=1)
    return sch


def mlp(layout=None, **options):
    return cut(randomize(Mlp(**options)), layout)


def sequences():
    return torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(3))


class Convolutions(nn.Module):
    """[b, 3, 6, 6] -> [b, 4, 6, 6] through 8 channels."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.narrow = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.narrow(self.norm(self.wide(x)).relu())


def convolutions():
    sch = megasched.create_schedule(randomize(Convolutions()))
    sch["wide"].shard("weight", axis=0)
    sch["narrow"].shard("weight", axis=1)
    return sch


def pictures():
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(3))


def errors(report):
    return {check.name: check.error for check in report.checks}


def assert_equal(report, rows):
    assert (report.verdict, report.why, report.finding) == ("equal", "", None)
    assert report.right
    assert list(errors(report)) == rows
    assert all(error < (1e-3 if name == "weights" else 1e-5) for name, error in errors(report).items())


def twice(module, args, output):
    return 2 * output


# what is right ---------------------------------------------------------------------------------------


def test_an_mlp_in_this_process_and_over_two_ranks(ranks):
    rows = ["loss", "outputs", "gradients", "weights"]
    assert_equal(megasched.verify(mlp(), inputs=sequences()), rows)
    report = megasched.verify(mlp(dropout=0.5), inputs={"x": sequences()}, tp=2, ranks=ranks)
    assert_equal(report, [*rows, "copies"])
    assert errors(report)["outputs"] > 0  # parts were added up
    assert report.notes == ["dropouts are off on both sides: drop"]
    assert str(report).splitlines()[0] == "Mlp under a schedule of 2 calls at TP2, against the module alone"
    assert "\noutputs" in str(report)


class Noisy(Mlp):
    def forward(self, x):
        return super().forward(functional.dropout(x, 0.5, self.training))


def test_what_code_draws_is_the_mean_of_its_distribution(ranks):
    report = megasched.verify(cut(randomize(Noisy())), inputs={"x": sequences()}, tp=2, ranks=ranks)
    assert_equal(report, ["loss", "outputs", "gradients", "weights", "copies"])
    assert report.notes == [NOTE]


def test_random_states_stay_as_they_were():
    """Also that Megatron has none: with none in place of no states, dropouts of layers would fail afterwards."""
    sch, tracker = mlp(), get_cuda_rng_tracker()
    before, initialized = torch.get_rng_state(), tracker.is_initialized()
    assert megasched.verify(sch, inputs=sequences()).right
    assert tracker.is_initialized() == initialized
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_norm_over_tensor_and_data_parallel_ranks(ranks):
    sch = convolutions()
    sch.sync_batch_norm()
    report = megasched.verify(sch, inputs=(pictures(),), tp=2, dp=2, ranks=ranks)
    assert_equal(report, ["loss", "outputs", "gradients", "weights", "buffers", "copies"])


@pytest.mark.parametrize(("tp", "cut"), [(1, False), (2, False), (2, True)])
def test_a_llama(ranks, tp, cut):
    """Also cut along the sequence, with logits cut along the vocabulary."""
    layout = ParallelDims(tensor_model_parallel_size=tp, sequence_parallel=cut, parallel_output=cut)
    sch = megasched.create_schedule(tiny_model("llama"), layout, name="auto")
    sch["model.layers.0"].checkpoint()
    report = megasched.verify(sch, inputs={"input_ids": token_ids(), "labels": token_ids()}, ranks=ranks)
    assert_equal(report, ["loss", "outputs", "gradients", "weights", "buffers", *(["copies"] if tp > 1 else [])])
    assert report.notes == []


def test_without_a_pool_it_starts_as_many_ranks_as_the_schedule_is_for(ranks, monkeypatch):
    started = []
    pool = "megasched.verify.library.verify_module.RankPool"
    monkeypatch.setattr(pool, lambda most: started.append(most) or nullcontext(ranks))
    assert megasched.verify(mlp(TP2), inputs=sequences()).layout == TP2
    assert str(megasched.verify(mlp(TP2), inputs=sequences(), dp=2).layout) == "TP2 x DP2"
    assert started == [2, 4]


def mean_of_squares(output):
    return output.square().mean()


def test_a_loss_of_ones_own(ranks):
    report = megasched.verify(mlp(), inputs=sequences(), loss=mean_of_squares, tp=2, dp=2, ranks=ranks)
    assert_equal(report, ["loss", "outputs", "gradients", "weights", "copies"])


class Masked(nn.Module):
    """Writes into its input, and has masks of numbers and of booleans."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))
        self.register_buffer("seen", torch.ones(5, 1, dtype=torch.bool))
        self.mlp = randomize(Mlp())

    def forward(self, x):
        mixed = self.mask.softmax(-1) @ x.mul_(2).masked_fill(~self.seen, 0)
        return self.mlp(mixed), self.mask.clone()


def test_masks_and_inputs_that_are_written_into(ranks):
    sch = megasched.create_schedule(Masked())
    sch["mlp.up"].shard("weight", axis=0)
    sch["mlp.down"].shard("weight", axis=1)
    x = sequences().requires_grad_()
    report = megasched.verify(sch, inputs=x, loss=of_the_first, tp=2, ranks=ranks)
    assert_equal(report, ["loss", "outputs", "gradients", "weights", "buffers", "copies"])
    assert megasched.verify(sch, inputs=x, loss=of_the_first, tp=1).right
    assert torch.equal(x, sequences())
    assert x.grad is None


def of_the_first(output):
    return output[0].square().mean()


class Cancelling(nn.Module):
    """Adds up two halves that are a thousand times as large as their sum."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        randomize(self)
        with torch.no_grad():
            self.up.weight[8:] = self.up.weight[:8]
            self.down.weight[:, 8:] = 1e-3 * self.down.weight[:, 8:] - self.down.weight[:, :8]

    def forward(self, x):
        return self.down(self.up(x))


def test_what_rounding_explains_is_equal(ranks):
    report = megasched.verify(cut(Cancelling()), inputs=sequences(), tp=2, ranks=ranks)
    assert report.verdict == "equal"
    assert errors(report)["outputs"] > 1e-5
    assert "from float64 it is" in report.why


class WithoutFloat64(Cancelling):
    def forward(self, x):
        if torch.get_default_dtype() is torch.float64:
            raise RuntimeError("float32 alone")
        return super().forward(x)


def test_without_float64_what_is_beyond_the_tolerance_is_wrong(ranks):
    report = megasched.verify(cut(WithoutFloat64()), inputs=sequences(), tp=2, ranks=ranks)
    assert report.verdict == "wrong"
    assert report.notes == ["nothing tells rounding from mistakes, as the module has no float64: float32 alone"]


def test_sixteen_bits_are_compared_in_float32():
    report = megasched.verify(_of(randomize(Mlp()).bfloat16()), inputs=sequences().bfloat16())
    assert_equal(report, ["loss", "outputs", "gradients", "weights"])
    assert report.notes == ["its 16-bit weights were computed with in float32"]


def _of(model):
    sch = megasched.create_schedule(model)
    sch["act"].checkpoint()
    return sch


# what is wrong ---------------------------------------------------------------------------------------


def hooked(sch):
    sch["act"].hook("fw_post", twice)


def replaced(sch):
    sch["act"].replace(nn.Tanh())


def summed(sch):
    sch["drop"].sync("fwd_post", "all_reduce")


def summed_backward(sch):
    sch["drop"].sync("bwd_post", "all_reduce")


WRONG = {
    hooked: (1, "act", "forward", "it is 2 times the right value"),
    replaced: (1, "act", "forward", ""),
    summed: (2, "drop", "forward", ""),
    summed_backward: (2, "drop", "backward", ""),
}


@pytest.mark.parametrize("fault", WRONG, ids=lambda fault: fault.__name__)
def test_a_wrong_call_is_found(ranks, fault):
    tp, where, direction, relation = WRONG[fault]
    sch = mlp()
    fault(sch)
    report = megasched.verify(sch, inputs=sequences(), tp=tp, ranks=ranks)
    assert (report.verdict, report.right) == ("wrong", False)
    finding = report.finding
    assert (finding.direction, finding.where) == (direction, where)
    assert finding.relation == relation
    ((path, asked, source),) = finding.guilty
    line = fault.__code__.co_firstlineno + 1
    assert (path, source) == (sch.records[-1].path, f"{__file__}:{line}")
    assert asked == str(sch.records[-1])
    assert f"all is right without:\n    {asked}" in str(report)


def test_a_batch_norm_that_normalizes_its_own_samples(ranks):
    report = megasched.verify(convolutions(), inputs=pictures(), dp=2, ranks=ranks)
    assert report.verdict == "wrong"
    assert (report.finding.direction, report.finding.where, report.finding.guilty) == ("forward", "norm", ())
    assert "sync_batch_norm()" in report.finding.cause
    wrong = {check.name for check in report.checks if not check.equal}
    assert wrong == {"loss", "outputs", "gradients", "weights", "buffers", "copies"}


def off_on_one_rank(module, args, output):
    return output * (1 + torch.distributed.get_rank())


def nothing_comes_back(module, args, output):
    return output.detach()


def broken(module, args, output):
    raise ValueError("no such thing")


def test_one_rank_alone_a_lost_gradient_and_code_that_fails(ranks):
    sch = mlp()
    sch["down"].hook("fw_post", off_on_one_rank)
    finding = megasched.verify(sch, inputs=sequences(), tp=2, ranks=ranks).finding
    assert (finding.where, finding.ranks) == ("down", (1,))
    assert [asked for _, asked, _ in finding.guilty] == ["down: hook(mode='fw_post', fn=off_on_one_rank)"]
    sch = mlp()
    sch["act"].hook("fw_post", nothing_comes_back)
    report = megasched.verify(sch, inputs=sequences())
    assert [check.name for check in report.checks if not check.equal] == ["gradients", "weights"]
    assert (report.finding.direction, report.finding.relation) == ("backward", "it is 0 times the right value")
    assert [asked for _, asked, _ in report.finding.guilty] == [str(sch.records[-1])]
    sch = mlp()
    sch["act"].hook("fw_post", broken)
    report = megasched.verify(sch, inputs=sequences(), tp=2, ranks=ranks)
    assert (report.verdict, report.why) == ("failed", "ValueError: no such thing")
    (note,) = report.notes
    assert note.startswith(f"all is right without {sch.records[-1]}  ({__file__}:")


def test_what_build_refuses_is_refused():
    sch = mlp()
    sch["act"].replace(nn.Linear(8, 8))
    report = megasched.verify(sch, inputs=sequences())
    assert (report.verdict, report.checks) == ("refused", [])
    assert "act" in report.why


def test_what_the_schedule_makes_anew_is_told():
    sch = mlp()
    sch["up"].adapt(rank=2, alpha=4)
    report = megasched.verify(sch, inputs=sequences())
    assert report.verdict == "equal"
    told = "frozen, or made anew, by the schedule, so not compared: down.bias, down.weight, up.bias and 1 more"
    assert report.notes[0] == told


def test_what_is_inside_of_a_new_module_is_compared_by_its_first_name(ranks):
    sch = mlp()
    sch["up"].replace(Around)
    report = megasched.verify(sch, inputs=sequences(), tp=2, ranks=ranks)
    assert (report.verdict, report.notes) == ("equal", [])
    assert {check.name for check in report.checks if check.error} >= {"gradients", "weights"}


# before and after ------------------------------------------------------------------------------------


def _in_a_job_of_ones_own():
    """Verified by both ranks in their own groups, then built: as if it had not been verified."""
    init_megatron(tp=2)
    sch, sum_once = mlp(), mlp()
    sch["drop"].replace(copy.deepcopy(sch["drop"].mod))
    sum_once["drop"].sync("fwd_post", "all_reduce")
    before = {name: value.clone() for name, value in sch.mod.state_dict().items()}
    records, state = list(sch.records), torch.get_rng_state()
    reports = [megasched.verify(each, inputs=sequences()) for each in (sch, sum_once)]
    untouched = (
        sch.records == records,
        torch.equal(torch.get_rng_state(), state),
        all(torch.equal(value, before[name]) for name, value in sch.mod.state_dict().items()),
        all(parameter.grad is None for parameter in sch.mod.parameters()),
        type(sch.mod.up) is nn.Linear,
    )
    want = randomize(Mlp())(sequences())
    got = megasched.build(sch, inputs={"x": sequences()})(sequences())
    return untouched, float((got - want).abs().max()), [(each.verdict, each.finding) for each in reports]


def test_all_ranks_of_a_job_get_one_report_and_what_is_verified_stays_as_it_is(ranks):
    (untouched, apart, reports), others = ranks.run(2, _in_a_job_of_ones_own)
    assert untouched == (True,) * 5
    assert apart < 1e-6
    assert [verdict for verdict, _ in reports] == ["equal", "wrong"]
    assert [asked for _, asked, _ in reports[1][1].guilty] == ["drop: sync(mode='fwd_post', op='all_reduce')"]
    assert others[2] == reports


def _at_other_ranks():
    init_megatron(tp=2)
    megasched.verify(mlp(), inputs=sequences(), tp=4)


class Own(Mlp):
    """Stands for a class of the program itself."""


Own.__module__ = "__main__"


def test_what_other_processes_cannot_import_is_refused_with_the_way_out():
    inside = "put classes and functions into a file beside the program"
    with pytest.raises(ConfigError, match=f"Own is defined in the program itself .*{inside}"):
        megasched.verify(megasched.create_schedule(Own()), inputs=sequences(), tp=2)
    sch = mlp()
    sch["act"].hook("fw_post", lambda module, args, output: output)
    with pytest.raises(ConfigError, match=inside):
        megasched.verify(sch, inputs=sequences(), tp=2)
    assert megasched.verify(sch, inputs=sequences()).right


def test_what_can_not_be_verified_is_said(ranks):
    sch = mlp()
    megasched.build(sch)
    with pytest.raises(ConfigError, match="verify before build"):
        megasched.verify(sch, inputs=sequences())
    with pytest.raises(AssertionError, match="this job has ranks at TP2, and TP4 takes others"):
        ranks.run(2, _at_other_ranks)
    with pytest.raises(ConfigError, match=r"5 samples can't be split over 2 data-parallel ranks"):
        megasched.verify(mlp(), inputs=torch.ones(5, 1, 8), dp=2)
    with pytest.raises(ConfigError, match="without the schedule, too, the loss is nan"):
        megasched.verify(mlp(), inputs=sequences() / 0)
    with megasched.init_empty_weights():
        sch = megasched.create_schedule(Mlp())
    with pytest.raises(ConfigError, match="materialize"):
        megasched.verify(sch, inputs=sequences())
