"""`--hf-override`: the config by an override is the config by a file with that value in it, field by field."""

import copy
import dataclasses
import json
import logging

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megasched.definition.build import load_config
from megasched.definition.overrides import with_overrides
from megasched.definition.small_models.small_models import causal_lm_types, small_config
from megasched.errors import ConfigError

WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96}
YARN = {"rope_type": "yarn", "factor": 4.0}
# Classes that save other terms than those they are given in: what a number of layers counts is another thing in a
# file that was saved. Each field is refused, or means what it means in that file.
IN_OTHER_TERMS = {
    "dory": {"num_hidden_layers", "n_input_layers", "n_output_layers"},
    "hrm_text": {"num_hidden_layers", "num_layers_per_stack"},
}
# Its own defaults do not fit one another.
WITHOUT_DEFAULTS = ["gemma4_assistant"]


@pytest.fixture
def by_file(tmp_path):
    """The config of a file that holds just these values."""

    def load(model_type, values):
        folder = tmp_path / "native"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
        return load_config(folder)

    return load


@pytest.fixture
def by_override(tmp_path):
    """The config of a file that `save_pretrained` wrote, with overrides."""

    def load(config, *overrides):
        config.save_pretrained(tmp_path / "saved")
        return load_config(tmp_path / "saved", overrides)

    return load


def fields(config):
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def another(value):
    """Another value of a field; None where none can be told."""
    if isinstance(value, bool):
        return not value
    return 2 * value if isinstance(value, int) and value > 0 else value / 2 if isinstance(value, float) else None


def others_follow(config, changed, name):
    """Whether another field than the one that was given is another."""
    return any(vars(config).get(other) != value for other, value in vars(changed).items() if other != name)


def test_every_field_that_others_follow_from_of_every_causal_model(caplog):
    """Each in turn, of a file that `save_pretrained` wrote with all the derived fields in it."""
    caplog.set_level(logging.CRITICAL, logger="transformers")
    wrong, followed, without_defaults = [], 0, []
    for model_type in causal_lm_types():
        config_class = CONFIG_MAPPING[model_type]
        specs = config_class.sub_configs_defaults
        try:
            file = json.loads(config_class().to_json_string())
        except Exception:  # huggingface_hub's errors have no base
            without_defaults.append(model_type)
            continue
        file = config_class._decode_special_floats(file)
        parts = {name: dict(spec.init_kwargs) for name, spec in specs.items() if file.get(name) is not None}
        config = config_class(**copy.deepcopy(parts))
        part = next((name for name in specs if vars(config)[name] is text_of(config)), None)
        target = vars(config)[part] if part else config
        for field in dataclasses.fields(target):
            name, value = field.name, another(vars(target).get(field.name))
            if value is None or name in IN_OTHER_TERMS.get(model_type, ()):
                continue
            own = {part: {**parts[part], name: value}} if part else {name: value}
            try:
                wanted = config_class(**copy.deepcopy({**parts, **own}))
            except Exception:  # as above: what can't be by file is none to compare with
                continue
            if not others_follow(target, vars(wanted)[part] if part else wanted, name):
                continue
            followed += 1
            key = f"{part}.{name}" if part else name
            try:
                found = fields(with_overrides(config, file, [f"{key}={json.dumps(value)}"]))
            except ConfigError as error:
                found = str(error)
            if found != fields(wanted):
                wrong.append((model_type, key, value))
    assert wrong == []
    assert followed > 200
    assert without_defaults == WITHOUT_DEFAULTS


def text_of(config):
    return config.get_text_config(decoder=True)


def test_kinds_of_layers_follow_from_a_window(by_file, by_override):
    values = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    config = AutoConfig.for_model("qwen2", **WIDE, num_hidden_layers=2)
    assert config.layer_types == ["full_attention"] * 2
    found = by_override(config, *(f"{name}={json.dumps(value)}" for name, value in values.items()))
    assert found.layer_types == ["sliding_attention"] * 2
    assert fields(found) == fields(by_file("qwen2", {**WIDE, "num_hidden_layers": 2, **values}))


def test_fewer_layers_of_a_model_with_several_kinds(by_file, by_override):
    config = AutoConfig.for_model("qwen3_next", **WIDE, num_hidden_layers=8)
    found = by_override(config, "num_hidden_layers=4")
    assert found.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert fields(found) == fields(by_file("qwen3_next", {**WIDE, "num_hidden_layers": 4}))


def test_a_value_that_the_class_would_not_derive_stays(by_override):
    config = AutoConfig.for_model("llama", **WIDE, head_dim=8)
    assert by_override(config, "hidden_size=128").head_dim == 8
    assert by_override(AutoConfig.for_model("llama", **WIDE), "hidden_size=128").head_dim == 32


def test_kinds_of_the_user_s_own_must_fit_the_depth(by_override):
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    config = AutoConfig.for_model("qwen3", **WIDE, num_hidden_layers=4, layer_types=kinds)
    with pytest.raises(ConfigError, match=r"own layer_types has 4 entries, 2 are needed.*say layer_types="):
        by_override(config, "num_hidden_layers=2")
    found = by_override(config, "num_hidden_layers=2", f"layer_types={json.dumps(kinds[:2])}")
    assert found.layer_types == kinds[:2]


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rotary_embedding_keeps_the_base_that_it_has(by_file, by_override, name):
    config = AutoConfig.for_model("llama", **WIDE, rope_theta=1e6)
    found = by_override(config, f"{name}={json.dumps(YARN)}")
    assert found.rope_parameters["rope_theta"] == 1e6
    assert fields(found) == fields(by_file("llama", {**WIDE, "rope_theta": 1e6, "rope_scaling": YARN}))


def test_a_rotary_embedding_in_several_overrides(by_override):
    config = AutoConfig.for_model("llama", **WIDE, rope_theta=1e6)
    both = ["rope_theta=5e5", f"rope_scaling={json.dumps(YARN)}"]
    for overrides in (both, both[::-1]):
        found = by_override(config, *overrides)
        assert found.rope_parameters["rope_theta"] == 5e5
        assert found.rope_parameters["rope_type"] == "yarn"
    again = by_override(found, "rope_scaling=null")
    assert again.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_the_last_of_several_values_counts(by_override):
    found = by_override(AutoConfig.for_model("llama", **WIDE), "rms_norm_eps=1e-3", "rms_norm_eps=1e-4")
    assert found.rms_norm_eps == 1e-4


def test_rotary_fields_of_a_file_of_an_older_transformers(tmp_path):
    old = {"model_type": "llama", **WIDE, "rope_theta": 1e6, "rope_scaling": YARN, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(old))
    found = load_config(tmp_path, ["rope_theta=5e5"]).rope_parameters
    assert found == {**YARN, "rope_theta": 5e5, "original_max_position_embeddings": 2048}
    found = load_config(tmp_path, ["rope_parameters.factor=2", "max_position_embeddings=4096"])
    wanted = {**YARN, "factor": 2, "rope_theta": 1e6, "original_max_position_embeddings": 4096}
    assert found.rope_parameters == wanted


def test_a_rotary_embedding_for_each_kind_of_layer(by_override):
    config = AutoConfig.for_model("gemma3_text", **WIDE, num_hidden_layers=6)
    for override, below in (("rope_theta=5e5", ".rope_theta"), (f"rope_scaling={json.dumps(YARN)}", "")):
        with pytest.raises(ConfigError, match=rf"write .*rope_parameters\.full_attention{below}=\.\.\."):
            by_override(config, override)
    found = by_override(config, "rope_parameters.full_attention.rope_theta=5e5")
    assert found.rope_parameters["full_attention"]["rope_theta"] == 5e5
    assert found.rope_parameters["sliding_attention"] == config.rope_parameters["sliding_attention"]


def test_nested_configs_are_made_anew(by_override):
    config = AutoConfig.for_model("gemma3")
    found = by_override(config, "text_config.num_hidden_layers=7")
    assert type(found.text_config) is type(config.text_config)
    assert found.text_config.layer_types == config.text_config.layer_types[:7]


def test_names_that_a_class_has_besides(by_override):
    config = AutoConfig.for_model("gpt2", n_embd=64, n_head=4)
    assert by_override(config, "hidden_size=32").n_embd == 32
    assert by_override(config, "num_labels=5").num_labels == 5
    assert by_override(config, "dtype=bfloat16").to_dict()["dtype"] == "bfloat16"


def test_a_value_that_is_there_already_is_none_to_refuse(by_override):
    """A script may say of every model what most need."""
    config = AutoConfig.for_model("llama", **WIDE)
    found = by_override(config, "rms_norm_eps=1e-6", "use_cache=true", 'rope_parameters={"rope_theta": 10000.0}')
    assert fields(found) == fields(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sliding_window=4", r"changes nothing: as its other fields are, Qwen2Config makes sliding_window = None"),
        ("model_type=llama", r"Qwen2Config has no field 'model_type'"),
        ("hiden_size=64", r"Qwen2Config has no field 'hiden_size'"),
        ("to_dict=3", r"Qwen2Config has no field 'to_dict'"),
        ("num_hidden_layers=two", r"Qwen2Config can't be made with that: .*num_hidden_layers.*expected int"),
        ('layer_types=["full_attention"]', r"can't be made with that: .*`num_hidden_layers` \(2\) must be equal"),
    ],
)
def test_overrides_that_change_nothing_or_do_not_fit(by_override, override, message):
    config = AutoConfig.for_model("qwen2", **WIDE, num_hidden_layers=2)
    with pytest.raises(ConfigError, match=message):
        by_override(config, override)


@pytest.mark.parametrize("model_type", ["lfm2", "gemma3_text"])
def test_a_model_of_fewer_layers_is_made(by_override, model_type):
    """Its classes read what belongs to a layer by its number."""
    found = by_override(AutoConfig.for_model(model_type), "num_hidden_layers=3")
    assert len(found.layer_types) == 3


def test_small_configs_can_be_changed(by_override):
    for model_type in ("bamba", "gpt_oss", "lfm2"):
        found = by_override(small_config(model_type), "vocab_size=600")
        assert found.vocab_size == 600
