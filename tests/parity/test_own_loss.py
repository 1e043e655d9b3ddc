"""Losses that the code of a class computes by itself: a run's are the same, on whole logits of the last stage."""

from __future__ import annotations

import pytest

from megasched.definition.small_models.small_models import write_small_model
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from megasched.verify.parity import LAYOUTS, CheckedLayout, check_layout, compare
from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import batches_of, train
from tests import remote
from tests.own_losses import LOSSES, NEEDS_SHIFTED, SHIFTING, step_by_shifted, write
from tests.parity.cases import slow, spread
from tests.parity.steps import assert_equal, assert_same_run, step_of_own_code

ALL = {name: LAYOUTS[name] for name in ("one", "pp2", "tp2-sp", "tp2")}
ALL |= {"dp2": CheckedLayout(2, 1, ""), "tp2-pp2": LAYOUTS["tp2-pp2"]}


def step(ranks, folder, layout, mask=True):
    return step_of_own_code(ranks, folder, ALL[layout], mask=mask)


# Terms of the whole logits, as other losses have them: smoothing is refused below, and in NEEDS_SHIFTED.
TWINS = ("label smoothing", "a z-loss by hand", "one id left out")


@pytest.mark.parametrize(
    ("loss", "layout"),
    [*spread(LOSSES, list(ALL)[:-1], twins=TWINS), *(slow(loss, "tp2-pp2") for loss in LOSSES)],
)
def test_a_step_equals_plain_transformers(ranks, tmp_path, loss, layout):
    """Four micro-batches, of which a loss mask counts other numbers of labels."""
    assert_equal(step(ranks, write(tmp_path / "model", LOSSES[loss]), layout))


@pytest.mark.parametrize(
    ("code", "layout"),
    [(SHIFTING, "tp2-sp"), (NEEDS_SHIFTED, "pp2"), slow(SHIFTING, "pp2"), slow(NEEDS_SHIFTED, "tp2")],
    ids=["two calls, tp2-sp", "a function, pp2", "two calls, pp2", "a function, tp2"],
)
def test_labels_that_are_moved_already(ranks, tmp_path, code, layout):
    """Where it takes those, the label of the last position counts, which ids alone do not give."""
    folder = remote.write(tmp_path / "model", code)
    size, flags = ALL[layout].world_size, [*ALL[layout].flags.split(), "--trust-remote-code"]
    reports = ranks.run(size, train, folder, flags, iterations=1, as_it_is=True)
    (expected,) = ranks.run(1, step_by_shifted, folder, batches_of(reports))
    assert_equal(compare(reports, expected, ALL[layout].tp))


@pytest.mark.parametrize(
    ("code", "layout"),
    [(SHIFTING, "pp2"), slow(NEEDS_SHIFTED, "tp2"), slow(SHIFTING, "tp2-sp"), slow(NEEDS_SHIFTED, "pp2")],
    ids=["two calls, pp2", "a function, tp2", "two calls, tp2-sp", "a function, pp2"],
)
def test_labels_that_such_code_moves_by_itself(ranks, tmp_path, code, layout):
    assert_equal(step(ranks, remote.write(tmp_path / "model", code), layout))


@pytest.mark.parametrize("more", [["--pipeline-model-parallel-size", "2"], slow([])], ids=["pp2", "dp2"])
def test_parameters_after_three_steps_are_those_of_one_rank(ranks, tmp_path, more):
    """Of the distributed optimizer, on two stages, or on ranks that have other micro-batches."""
    folder = write(tmp_path / "model", LOSSES["two heads"])
    flags = ["--trust-remote-code", "--use-distributed-optimizer"]
    whole = ranks.run(1, train, folder, flags, iterations=3, mask=True)
    assert_same_run(ranks.run(2, train, folder, [*flags, *more], iterations=3, mask=True), whole)


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [("prophetnet", "tp2"), ("git", "pp2"), slow("prophetnet", "pp2"), slow("git", "tp2")]
    + [slow(one, layout) for one in ("prophetnet", "git") for layout in ("tp2-sp", "pp2-vpp2", "tp2-pp2")],
)
def test_stock_classes(ranks, tmp_path, model_type, layout):
    """ProphetNet predicts each token twice, from other positions; GIT leaves out those of its pictures."""
    (folder,) = ranks.run(1, write_small_model, model_type, str(tmp_path))
    outcome = check_layout(ranks, folder, layout)
    assert_equal(outcome)


# refused ---------------------------------------------------------------------------------------------

SMOOTHED = LOSSES["label smoothing"]
ONE_HOT = """hot = F.one_hot(labels[:, 1:], logits.shape[-1]).float()
        return -0.9 * (hot * logits[:, :-1].log_softmax(-1)).sum(-1).mean()"""


def test_labels_that_are_all_ids_need_masks_of_ones(ranks, tmp_path):
    folder = write(tmp_path / "model", ONE_HOT)
    assert step(ranks, folder, "tp2", mask=False).verdict == "equal"
    with pytest.raises(RankError, match=r"loss mask of a batch is not 1 everywhere.*labels of -100 for others"):
        ranks.run(1, train, folder, ["--trust-remote-code"], iterations=1, mask=True)


def test_context_parallelism_is_refused(tmp_path):
    folder = write(tmp_path / "model", SMOOTHED)
    session = open_session("auto", folder, ParallelDims(context_parallel_size=2), trust_remote_code=True)
    with pytest.raises(ScheduleError, match="needs whole sequences"):
        _ = session.plan


def test_packed_sequences_are_refused(tmp_path):
    folder = write(tmp_path / "model", SMOOTHED)
    session = open_session("auto", folder, ParallelDims(packed_sequences=True), trust_remote_code=True)
    with pytest.raises(ScheduleError, match="takes a row for one sequence"):
        _ = session.plan


def test_weights_by_labels_are_refused(ranks, tmp_path):
    folder = write(tmp_path / "model", SMOOTHED)
    flags = ["--trust-remote-code", "--calculate-per-token-loss"]
    with pytest.raises(RankError, match="needs the loss of each label"):
        ranks.run(1, train, folder, flags, iterations=1)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ("return F.cross_entropy(logits.transpose(1, 2), labels, reduction='none')", "can't be told by trying it"),
        ("return 0 * shifted(logits, labels)", "can't be told by trying"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, loss, why):
    session = open_session("auto", write(tmp_path / "model", loss), ParallelDims(), trust_remote_code=True)
    with pytest.raises(ScheduleError, match=why):
        _ = session.plan


TERMS_IN_A_LIST = """
from transformers.models.llama.modeling_llama import LlamaMLP

TERMS = []


class Mlp(LlamaMLP):
    def forward(self, x):
        TERMS.append(x.square().mean())
        return super().forward(x)


class Mine(Mine):
    def forward(self, labels=None, **kwargs):
        TERMS.clear()
        output = super().forward(labels=labels, **kwargs)
        if labels is not None:
            output.loss = output.loss + 0.1 * torch.stack(TERMS).sum()
        return output
"""


@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_terms_that_layers_leave_in_a_list(ranks, tmp_path, layout):
    """On several stages each has those of its own layers alone: what is read for the loss is read, too."""
    folder = remote.write(tmp_path / "model", TERMS_IN_A_LIST)
    if layout == "one":
        assert_equal(step(ranks, folder, layout))
        return
    with pytest.raises(RankError, match=r"what comes after the layers reads what layer 0 made of"):
        step(ranks, folder, layout)
