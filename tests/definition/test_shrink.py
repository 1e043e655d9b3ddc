"""Small configs: every architecture gets one in the sizes of the checks, and nothing in it hides a mistake."""

import re
from typing import ClassVar

import pytest
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megasched.definition.small_models.shrink import LAYERS, MULTIPLIER, TOKENS, VOCABULARY, shrink, shrink_copy
from megasched.definition.small_models.small_models import causal_lm_types, small_config, small_copy
from megasched.errors import ConfigError

TYPES = causal_lm_types()

# Model type -> hidden size and depth, where they are not 64 and 4.
OTHER_SIZES = {
    "blt": (None, None),  # three stacks, none of which is the text model
    "hrm_text": (64, 32),  # layers x cycles
    "longcat_flash": (64, 8),  # two attentions a layer, counted twice
    "prophetnet": (64, 2),  # counts the encoder's
}
# Windows of 16 tokens or more, which the sequences of the checks do not fill.
WIDE_WINDOWS = {
    "blt": {"local_attention_window_len": 512},
    "gemma4_assistant": {"sliding_window": 512},
}
WINDOW = re.compile(r".*window(_size|_len)?|attention_chunk_size|local_attention")
TOKEN = re.compile(r".*(_token_id|_token_index)")
MULTIPLIERS = re.compile(r".*(multiplier|logits?_scal(ing|e)|scale_emb|embedding_scale|scale_depth)")


def numbers(config):
    """Fields of the text model's config that are numbers."""
    text = config.get_text_config(decoder=True)
    return {name: v for name, v in vars(text).items() if isinstance(v, int | float) and not isinstance(v, bool)}


def field(config, name):
    return getattr(config.get_text_config(decoder=True), name, None)


@pytest.mark.parametrize("model_type", TYPES)
def test_every_architecture_has_a_small_config(model_type):
    config = small_config(model_type)
    sizes = field(config, "hidden_size"), field(config, "num_hidden_layers")
    assert sizes == OTHER_SIZES.get(model_type, (64, LAYERS))
    found = numbers(config)
    ones = [name for name, value in found.items() if MULTIPLIERS.fullmatch(name) and value == 1]
    assert ones == []
    wide = {name: value for name, value in found.items() if WINDOW.fullmatch(name) and value >= 16}
    assert wide == WIDE_WINDOWS.get(model_type, {})
    special = {name: value for name, value in found.items() if TOKEN.fullmatch(name)}
    assert {name for name, value in special.items() if TOKENS[0] <= value < TOKENS[1]} == set()
    assert [name for name, value in found.items() if "drop" in name and isinstance(value, float) and value] == []


def test_there_are_many_architectures():
    assert len(TYPES) > 150


def test_exceptions_are_of_types_there_are():
    assert {*OTHER_SIZES, *WIDE_WINDOWS} <= set(TYPES)


def test_a_type_that_transformers_does_not_know():
    with pytest.raises(ConfigError) as raised:
        small_config("llama7")
    assert str(raised.value) == "the installed transformers has no model type 'llama7'"


def test_sizes_of_one_class():
    config = shrink(CONFIG_MAPPING["granite"], {"intermediate_size": 48})
    wanted = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    wanted |= {"intermediate_size": 48, "embedding_multiplier": MULTIPLIER, "logits_scaling": MULTIPLIER}
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_layers_keep_every_kind_of_the_full_depth():
    full = CONFIG_MAPPING["gemma3_text"]()
    assert len(set(full.layer_types)) == 2
    assert set(small_config("gemma3_text").layer_types) == set(full.layer_types)


# ---- copies of a given config -----------------------------------------------------------------------


def test_a_copy_keeps_flags_and_choices():
    config = CONFIG_MAPPING["llama"](
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        hidden_act="gelu",
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    )
    small = shrink_copy(config)
    assert type(small) is type(config)
    kept = ("hidden_act", "attention_bias", "tie_word_embeddings", "rms_norm_eps", "rope_parameters")
    assert {name: getattr(small, name) for name in kept} == {name: getattr(config, name) for name in kept}
    assert (small.hidden_size, small.num_hidden_layers, small.vocab_size) == (64, 4, VOCABULARY)
    assert (config.hidden_size, config.num_hidden_layers) == (4096, 32)


class Declared(PretrainedConfig):
    model_type = "declared"

    def __init__(self, vocab_size=99, hidden_size=512, num_hidden_layers=9, depth_scale=1.0, period=6, **more):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.depth_scale, self.period, self.inner = depth_scale, period, 3 * hidden_size
        super().__init__(**more)


class OfLlama(LlamaConfig):
    model_type = "of_llama"

    def __init__(self, period=6, *, needed, **more):
        self.period, self.needed = period, needed
        super().__init__(**more)


class Plain(LlamaConfig):
    model_type = "plain"


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (Declared(hidden_size=2048, period=3, depth_scale=0.5), {"period": 3, "depth_scale": 0.5, "inner": 192}),
        (Declared(own_switch=True), {"period": 6, "own_switch": True}),
        (OfLlama(needed=2, period=3, hidden_act="relu"), {"period": 3, "needed": 2, "hidden_act": "relu"}),
        (Plain(own_switch=True, hidden_act="relu"), {"own_switch": True, "hidden_act": "relu"}),
    ],
)
def test_a_copy_of_a_config_of_ones_own_has_what_it_was_given(config, kept):
    """A class may have a constructor of its own, and transformers makes a dataclass of it all the same."""
    small = small_copy(config)
    assert {name: getattr(small, name) for name in kept} == kept
    assert (small.hidden_size, small.num_hidden_layers, small.vocab_size) == (64, 4, VOCABULARY)


class Renamed(PretrainedConfig):
    model_type = "renamed"
    attribute_map: ClassVar = {"num_hidden_layers": "depth", "hidden_size": "width"}

    def __init__(self, width=512, depth=9, **more):
        self.width, self.depth = width, depth
        super().__init__(**more)


@pytest.mark.parametrize("layers", [4, 6])
def test_a_copy_goes_by_the_usual_names_of_fields_that_a_config_calls_otherwise(layers):
    small = small_copy(Renamed(), layers=layers)
    assert (small.width, small.depth, small.num_hidden_layers) == (64, layers, layers)


@pytest.mark.parametrize(("groups", "small"), [(32, 4), (8, 2), (1, 1)])
def test_a_copy_groups_heads_as_the_given_config(groups, small):
    config = CONFIG_MAPPING["llama"](num_attention_heads=32, num_key_value_heads=groups)
    copy = shrink_copy(config)
    assert (copy.num_attention_heads, copy.num_key_value_heads) == (4, small)


def test_a_copy_has_the_kinds_of_layers_of_the_given_config():
    kinds = ["full_attention"] * 3 + ["sliding_attention"] * 3
    config = CONFIG_MAPPING["ministral"](num_hidden_layers=6, layer_types=kinds)
    assert small_copy(config).layer_types == ["sliding_attention", "full_attention"] * 2  # as quirks.py says
    assert shrink_copy(config).layer_types == ["full_attention", "sliding_attention"] * 2


def test_a_copy_without_a_window_has_none():
    assert shrink_copy(CONFIG_MAPPING["mistral"](sliding_window=None)).sliding_window is None
    assert shrink_copy(CONFIG_MAPPING["mistral"](sliding_window=4096)).sliding_window == 8


def test_a_copy_of_a_composite_config_has_small_parts():
    config = CONFIG_MAPPING["gemma3"](text_config={"hidden_size": 640, "attention_bias": True})
    text = shrink_copy(config).text_config
    assert (text.hidden_size, text.num_hidden_layers, text.attention_bias) == (64, 4, True)


def test_a_copy_that_can_not_be_made_says_why():
    with pytest.raises(ConfigError) as raised:
        small_copy(CONFIG_MAPPING["falcon_h1"]())
    assert str(raised.value).startswith("no small copy of this FalconH1Config can be made: ")
