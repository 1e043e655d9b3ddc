"""What the matrix says of a run, and what is refused because nothing is said."""

from types import SimpleNamespace

import pytest
from transformers import (
    AlbertConfig,
    AutoConfig,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    OlmoConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
)

from megasched.definition.build import build_definition
from megasched.definition.objectives import IMAGE_CLASSIFICATION, MASKED_LM, SEQ2SEQ_LM, set_objective
from megasched.definition.small_models.small_models import small_config
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.evidence import compatibility
from megasched.trainer.evidence.compatibility import (
    checks_for,
    products_for,
    refuse_unverified,
    unchecked_options,
    unverified,
    verify_command,
)

EQUAL = {"verdict": "equal", "why": ""}
TP2 = ParallelDims(tensor_model_parallel_size=2)
ALL = ParallelDims(
    tensor_model_parallel_size=4,
    sequence_parallel=True,
    pipeline_model_parallel_size=4,
    virtual_pipeline_model_parallel_size=2,
    expert_model_parallel_size=2,
)


@pytest.fixture(scope="module")
def llama():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))


def test_the_checks_that_speak_for_a_layout():
    assert checks_for(ParallelDims(data_parallel_size=8)) == []
    assert checks_for(TP2) == ["tp2"]
    assert checks_for(ParallelDims(pipeline_model_parallel_size=4)) == ["pp2"]
    assert checks_for(ParallelDims(context_parallel_size=2)) == ["cp2"]
    both = ParallelDims(context_parallel_size=2, tensor_model_parallel_size=2)
    assert (checks_for(both), products_for(both)) == (["tp2", "cp2"], ["cp2-tp2"])
    assert (checks_for(ALL), products_for(ALL)) == (["tp2-sp", "pp2-vpp2", "ep2"], ["tp2-pp2"])
    assert products_for(ParallelDims(pipeline_model_parallel_size=2)) == []


def test_at_one_rank_of_the_model_any_check_speaks_for_it(llama):
    many = ParallelDims(data_parallel_size=8)
    assert unverified(llama, many, {}) == ["model type 'llama' has not been checked"]
    assert unverified(llama, many, {"llama": {"pp2": EQUAL}}) == []
    failed = {"tp2": {"verdict": "failed", "why": "x"}, "facts": {"why": "x"}}
    assert unverified(llama, many, {"llama": failed}) == ["llama was equal in no check"]


def test_what_was_equal_is_verified(llama):
    assert unverified(llama, TP2, {"llama": {"tp2": EQUAL}}) == []
    applies = {"tp2-sp": EQUAL, "pp2-vpp2": EQUAL, "ep2": {"verdict": "not applicable"}}
    assert unverified(llama, ALL, {"llama": applies}) == []


def test_every_doubt_is_told(llama):
    results = {"tp2-sp": {"verdict": "wrong", "why": "loss differ"}, "tp2-pp2": {"verdict": "failed", "why": "x"}}
    results["ep2"] = {"verdict": "refused", "why": "experts cut"}
    assert unverified(llama, ALL, {"llama": results}) == [
        "llama has not been checked at pp2-vpp2",
        "llama computed wrong numbers when checked at tp2-sp: loss differ",
        "llama was refused when checked at ep2: experts cut",
        "llama failed when checked at tp2-pp2: x",
    ]


def test_an_architecture_that_nobody_checked(llama):
    assert unverified(llama, TP2, {}) == ["model type 'llama' has not been checked"]
    assert unverified(llama, TP2, {"llama": {"model": {"verdict": "failed"}}}) == [
        "model type 'llama' has not been checked"
    ]


def test_a_class_of_somebody_elses_is_not_what_was_checked(llama):
    class Mine(LlamaForCausalLM):
        """The same model type, other code."""

    mine = Mine(llama.config)
    for layout in (TP2, ParallelDims(), ParallelDims(data_parallel_size=2)):
        (doubt,) = unverified(mine, layout, {"llama": {"tp2": EQUAL}})
        assert doubt.startswith("Mine is not one of transformers' classes")


@pytest.mark.parametrize("config_class", [BertConfig, RobertaConfig, AlbertConfig, T5Config, ViTConfig])
def test_nor_is_one_of_a_model_type_with_tests_of_its_own(llama, config_class):
    class Mine(LlamaForCausalLM):
        """Whatever its type says."""

    mine = Mine(llama.config)
    mine.config = config_class()
    for objective in (MASKED_LM, SEQ2SEQ_LM, IMAGE_CLASSIFICATION):
        set_objective(mine, objective)
        (doubt,) = unverified(mine, TP2, {})
        assert doubt.startswith("Mine is not one of transformers' classes")


def test_a_module_of_somebody_elses_in_a_stock_class_is_not_what_was_checked(llama):
    class Norm(type(llama.model.norm)):
        """The same, perhaps."""

    changed = LlamaForCausalLM(llama.config)
    changed.model.norm = Norm(8)
    (doubt,) = unverified(changed, ParallelDims(), {"llama": {"tp2": EQUAL}})
    assert doubt.startswith("Norm is not one of transformers' classes")


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LlamaConfig(hidden_size=4096, rms_norm_eps=1e-6, num_key_value_heads=8), []),
        (
            LlamaConfig(tie_word_embeddings=True, attention_bias=True),
            ["attention_bias=True", "tie_word_embeddings=True"],
        ),
        (OlmoConfig(clip_qkv=8.0), ["clip_qkv=8.0"]),
        (MistralConfig(sliding_window=None), ["sliding_window=None"]),
        (MixtralConfig(num_local_experts=64), []),
        (
            LlamaConfig(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
            ["rope_parameters={'rope_type': 'linear'}"],
        ),
    ],
    ids=str,
)
def test_options_away_from_what_was_checked_are_told(config, options):
    assert unchecked_options(SimpleNamespace(config=config)) == options


def test_that_a_masked_model_is_no_decoder_is_no_option():
    model = SimpleNamespace(config=BertConfig())
    assert "is_decoder=False" in unchecked_options(model)
    set_objective(model, MASKED_LM)
    assert unchecked_options(model) == []


def test_the_command_that_checks_a_run_says_its_objective():
    assert verify_command("auto", "DIR", TP2, objective="masked_lm").endswith("--objective masked_lm")
    assert "--objective" not in verify_command("auto", "DIR", TP2)


def test_fields_that_differ_from_layer_to_layer_are_options_too():
    """Which transformers does not let anyone read off the config itself."""
    config = small_config("dots3_note")
    assert unchecked_options(SimpleNamespace(config=config)) == []
    per_layer = {index: {"head_dim": 24, "scale": True} for index in (2, 3)}
    scaled = type(config)(**{**config.to_dict(), "scale": False, "per_layer_config": per_layer})
    (option,) = unchecked_options(SimpleNamespace(config=scaled))
    assert option == "per_layer_config={'2': {'scale': True}, '3': {'scale': True}}"


def test_the_refusal_says_what_can_be_done(llama, monkeypatch):
    monkeypatch.setattr(compatibility, "load_matrix", lambda: {"types": {}})
    with pytest.raises(ConfigError, match="not known to be right") as refused:
        refuse_unverified(llama, TP2)
    assert "model type 'llama' has not been checked" in str(refused.value)
    assert "megasched archs" not in str(refused.value)  # which would say the same
    assert "`megasched verify --certificate FILE` checks it, and --require-certificate FILE" in str(refused.value)
    assert "--allow-unverified" in str(refused.value)
    wrong = {"verdict": "wrong", "errors": {}, "why": "loss differ"}
    monkeypatch.setattr(compatibility, "load_matrix", lambda: {"types": {"llama": {"tp2": wrong}}})
    with pytest.raises(ConfigError, match=r"megasched archs llama` shows what is known; `megasched verify"):
        refuse_unverified(llama, TP2)


def test_of_a_class_of_ones_own_verify_is_the_way(llama):
    class Mine(LlamaForCausalLM):
        """The same model type, other code."""

    with pytest.raises(ConfigError, match="`megasched verify --certificate FILE` checks it"):
        refuse_unverified(Mine(llama.config), ParallelDims())


def test_of_another_objective_verify_is_the_way_too():
    model = build_definition(AutoConfig.for_model("electra"), MASKED_LM)
    with pytest.raises(ConfigError, match="`megasched verify --objective masked_lm --certificate FILE` checks it"):
        refuse_unverified(model, ParallelDims())


def test_the_families_of_the_readme_are_verified(llama):
    refuse_unverified(llama, ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True))


def test_other_objectives_than_the_matrixs_are_checked_by_tests_of_their_own(llama):
    mine = LlamaForCausalLM(llama.config)
    set_objective(mine, MASKED_LM)
    assert unverified(mine, TP2, {"llama": {"tp2": EQUAL}}) == [
        "llama has not been checked as a masked language model"
    ]
    mine.config = BertConfig()
    assert unverified(mine, TP2, {}) == []
