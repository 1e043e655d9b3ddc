"""``megasched verify --objective``: models that do not predict the next token, held against their own classes."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from megasched.definition.objectives import IMAGE_CLASSIFICATION, MASKED_LM, OBJECTIVES, SEQ2SEQ_LM
from megasched.definition.small_models.small_models import small_config, small_copy, write_model
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.verify.batches import IGNORED, make_batches
from megasched.verify.bfloat16 import compare_bf16
from megasched.verify.compare_step import StepComparison
from megasched.verify.plain.runs import PlainModel
from megasched.verify.recording import RankReport
from megasched.verify.reference import HfStep
from megasched.verify.steps import Steps, make_subject
from megasched.verify.verify import certify, verify_schedule

FAULTS = Path(__file__).with_name("faults_of_code.py")
TP2 = ParallelDims(tensor_model_parallel_size=2)
CHUNKS = ParallelDims(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)


def save(family, folder):
    AutoConfig.for_model(family).save_pretrained(folder)
    return str(folder)


def verified(family, folder, layout, objective, ranks, **options):
    return verify_schedule("auto", save(family, folder), layout, objective=objective, ranks=ranks, **options)


@pytest.fixture(scope="module")
def found_of(ranks, tmp_path_factory):
    """What is found of a model at a layout, once for all tests."""

    @cache
    def found(family, name, layout):
        return verified(family, tmp_path_factory.mktemp(family), layout, OBJECTIVES[name], ranks)

    return found


@pytest.mark.parametrize(
    ("family", "objective", "layout"),
    [
        pytest.param("bert", MASKED_LM, TP2, marks=pytest.mark.slow),
        ("roberta", MASKED_LM, CHUNKS),
        ("vit", IMAGE_CLASSIFICATION, CHUNKS),
        pytest.param("vit", IMAGE_CLASSIFICATION, TP2, marks=pytest.mark.slow),
        pytest.param("t5", SEQ2SEQ_LM, TP2, marks=pytest.mark.slow),
        pytest.param("mt5", SEQ2SEQ_LM, TP2, marks=pytest.mark.slow),
        pytest.param("umt5", SEQ2SEQ_LM, TP2, marks=pytest.mark.slow),
        ("bart", SEQ2SEQ_LM, TP2),
    ],
)
def test_what_is_right_is_found_equal(found_of, family, objective, layout):
    found = found_of(family, objective.name, layout)
    assert (found.verdict, found.finding) == ("equal", None)
    numbers = {check.name: check.error for check in found.checks if check.error is not None}
    assert list(numbers)[:6] == ["loss", "logits", "hidden states", "gradients", "gradient norm", "weights"]
    limit = 2e-5 if family == "mt5" else 1e-5  # its own rounding
    assert all(error < limit for name, error in numbers.items() if name != "weights")
    assert numbers["weights"] < 1e-3
    assert f"for {objective.name}" in str(found)


def test_padding_that_is_attended_to_is_found(ranks, tmp_path):
    options = {"full_size": False, "layers": 2, "overrides": (), "trust_remote_code": False}
    subject = make_subject(save("bert", tmp_path), tmp_path / "model", TP2, objective=MASKED_LM, **options)
    steps = Steps(ranks, subject, TP2, False, 120, lambda doing: None)
    checks, _, finding = StepComparison(steps, f"{FAULTS}:mask_lost").judge()
    ranks.renew()
    assert not all(check.equal for check in checks)
    assert finding.where.startswith("bert.encoder.layer.0.attention")


@pytest.mark.slow
def test_in_bf16_plain_hf_is_the_measure(ranks, tmp_path):
    found = verified("vit", tmp_path, TP2, IMAGE_CLASSIFICATION, ranks, bf16=True)
    assert (found.verdict, found.why) == ("equal", "")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batches_have_padding_and_labels_that_do_not_count(name):
    objective = OBJECTIVES[name]
    family = {"image_classification": "vit", "seq2seq_lm": "t5"}.get(name, "bert")
    config = small_copy(AutoConfig.for_model(family), objective=objective)
    batches = make_batches(config, TP2, objective=objective)
    assert list(batches.inputs) == list(objective.inputs)
    assert (batches.steps, batches.micro_batches) == (3, 4)
    counted = batches.labels != IGNORED
    assert counted.any(dim=-1).flatten(1).any(dim=1).all()
    assert not counted[0, 2].all()
    assert int(batches.labels.max()) < objective.classes(config)[0]
    for name, values in batches.inputs.items():
        if name.endswith("attention_mask"):
            assert values[0, 1, 0].tolist() == [1] * 16 + [0] * 16
            ids = batches.inputs[name.replace("attention_mask", "input_ids")]
            assert set(ids[values == 0].tolist()) == {config.pad_token_id}
            assert not counted[0, 1, 0, 16:].any()


def test_parameters_that_the_class_freezes_are_frozen(ranks, tmp_path):
    """transformers trains whatever it has loaded: Pegasus' sinusoids, too."""
    config = small_copy(AutoConfig.for_model("pegasus"), objective=SEQ2SEQ_LM)
    folder = write_model(config, tmp_path, objective=SEQ2SEQ_LM)
    given = PlainModel(folder, f"{folder}/model.safetensors", SEQ2SEQ_LM.auto_class, predicts_next=False)
    run = ranks.plain.run(given, make_batches(config, ParallelDims(), 1, SEQ2SEQ_LM))
    assert run.changes["model.encoder.embed_positions.weight"] == 0
    assert run.changes["model.encoder.layers.0.fc1.weight"] > 0


@pytest.mark.parametrize(
    ("family", "objective", "words"),
    [
        ("llama", MASKED_LM, "no masked language model for this config"),
        ("bert", IMAGE_CLASSIFICATION, "no classifier of images for this config"),
    ],
)
def test_a_model_without_such_a_class_is_refused(tmp_path, family, objective, words):
    with pytest.raises(ConfigError, match=words):
        verified(family, tmp_path, TP2, objective, None)


def test_a_certificate_says_what_it_was_trained_to_do(found_of, tmp_path):
    certify(found_of("roberta", MASKED_LM.name, CHUNKS), tmp_path / "certificate")
    assert '"objective": "masked_lm"' in (tmp_path / "certificate").read_text()


def test_in_bf16_a_gradient_that_is_zero_is_not_held_to_another_sum_of_roundings():
    exact = {"weight": torch.ones(100, dtype=torch.float64), "bias": torch.zeros(4, dtype=torch.float64)}

    def judged(bias):
        plain = {"weight": exact["weight"] * 1.01, "bias": torch.full((4,), 1e-5)}
        report = RankReport(0, 0, 0, losses=[1.0], grad_norms=[10.0])
        report.logits[0] = [torch.ones(2, 3, 4)]
        report.gradients = {name: (value, Whole()) for name, value in {**plain, "bias": bias}.items()}
        steps = [HfStep(1.0, [torch.ones(2, 3, 4)], gradients, 10.0) for gradients in (plain, exact)]
        return next(check for check in compare_bf16([report], *steps, 1) if check.name == "each gradient")

    assert judged(torch.full((4,), 5e-5)).equal
    wrong = judged(torch.full((4,), 5e-3))
    assert (wrong.equal, wrong.worst) == (False, "bias")


class Whole:
    group = "tp"

    @staticmethod
    def unshard(shards):
        return shards[0]


def test_a_masked_model_is_no_decoder():
    config = small_config("bert")
    config.is_decoder = False
    assert small_copy(config, objective=MASKED_LM).is_decoder is False
    assert small_copy(config).is_decoder is True
