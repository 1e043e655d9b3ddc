"""From config to definition: meta parameters, real buffers, and errors that teach."""

import json
import random
import subprocess
import sys
import warnings
from importlib.metadata import requires

import numpy
import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megasched.definition import build
from megasched.definition.build import (
    build_definition,
    check_transformers,
    init_empty_weights,
    kept_in_float32,
    load_config,
)
from megasched.definition.small_models.small_models import small_config
from megasched.errors import CheckpointError, ConfigError
from megasched.versions import TESTED
from megasched.weights.random_init import RandomInit
from megasched.weights.source import materialize
from tests import remote

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "pad_token_id": 0,
}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "opt", "gpt_neox"]


def tiny_config(family):
    return AutoConfig.for_model(family, **TINY)


class Block(torch.nn.Module):
    """Everything that registration has to cope with."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.tied = torch.nn.Linear(3, 2, bias=False)
        self.tied.weight = self.linear.weight
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        marked = torch.nn.Parameter(torch.ones(2))
        marked.mark = "kept"
        self.marked = marked
        shared = torch.nn.Parameter(torch.ones(2))
        self.shared, self.linear.shared = shared, shared
        self.register_parameter("absent", None)
        self.register_buffer("table", torch.arange(3.0))


@pytest.fixture
def block():
    with init_empty_weights():
        return Block()


def test_parameters_are_on_meta_and_buffers_real(block):
    assert {name for name, _ in block.named_parameters()} == {
        "linear.weight",
        "linear.bias",
        "frozen",
        "marked",
        "shared",
    }
    assert all(param.is_meta and isinstance(param, torch.nn.Parameter) for param in block.parameters())
    assert block.table.tolist() == [0.0, 1.0, 2.0]


def test_shapes_and_dtypes_are_kept(block):
    real = dict(Block().named_parameters())
    for name, param in block.named_parameters():
        assert (param.shape, param.dtype) == (real[name].shape, real[name].dtype)


def test_ties_are_kept(block):
    assert block.tied.weight is block.linear.weight
    assert block.shared is block.linear.shared


def test_requires_grad_attributes_and_absent_parameters_are_kept(block):
    assert [block.frozen.requires_grad, block.linear.weight.requires_grad] == [False, True]
    assert block.marked.mark == "kept"
    assert block.absent is None


@pytest.mark.parametrize("fails", [False, True])
def test_registration_is_as_before_afterwards(fails):
    before = torch.nn.Module.register_parameter
    with pytest.raises(ZeroDivisionError) if fails else init_empty_weights():
        if fails:
            with init_empty_weights():
                raise ZeroDivisionError
        assert torch.nn.Module.register_parameter is not before
    assert torch.nn.Module.register_parameter is before
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


def test_it_may_be_switched_off():
    with init_empty_weights(enable=False):
        block = Block()
    assert not any(parameter.is_meta for parameter in block.parameters())
    assert block.table.tolist() == [0.0, 1.0, 2.0]


def test_buffers_may_be_deferred_too_and_are_not_filled():
    register = torch.nn.Module.register_buffer
    with init_empty_weights(include_buffers=True):
        block = Block()
    assert torch.nn.Module.register_buffer is register
    assert block.table.is_meta
    assert (block.table.shape, block.table.dtype) == (Block().table.shape, Block().table.dtype)
    with init_empty_weights(include_buffers=True):
        model = LlamaForCausalLM(tiny_config("llama"))
    with pytest.raises(CheckpointError, match=r"buffers that are on the meta device: model\.rotary_emb\.inv_freq"):
        materialize(model, RandomInit(model, seed=1))


def test_nothing_of_a_parameters_size_is_touched():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with init_empty_weights():
        layer = torch.nn.Linear(1 << 14, 1 << 15)
    assert layer.weight.nbytes == 2 << 30
    # ru_maxrss is in KiB: 2 GiB of weight must not show as even a half.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19


@pytest.mark.parametrize("family", FAMILIES)
def test_build_definition(family):
    config = tiny_config(family)
    build = build_definition(config)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    assert type(build) is MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] is type(model)
    assert build.config.use_cache is False
    real = dict(model.named_parameters())
    params = dict(build.named_parameters())
    assert list(params) == list(real)
    for name, param in params.items():
        assert param.is_meta
        assert (param.shape, param.dtype) == (real[name].shape, torch.float32)
        assert param.requires_grad
    buffers = dict(build.named_buffers())
    assert list(buffers) == [name for name, _ in model.named_buffers()]
    for name, buffer in model.named_buffers():
        assert (buffers[name].device.type, buffers[name].dtype) == ("cpu", buffer.dtype)
        assert torch.equal(buffers[name], buffer), name
    head, embedding = build.get_output_embeddings(), build.get_input_embeddings()
    assert (head.weight is embedding.weight) is bool(config.tie_word_embeddings)


def test_both_tied_and_untied_families_are_among_the_nine():
    tied = {family for family in FAMILIES if tiny_config(family).tie_word_embeddings}
    assert {"gpt2", "gemma2", "opt"} <= tied
    assert {"llama", "gpt_neox"}.isdisjoint(tied)


def test_parameters_are_float32_whatever_the_config_says():
    config = tiny_config("llama")
    config.dtype = torch.bfloat16
    assert {param.dtype for param in build_definition(config).parameters()} == {torch.float32}


def test_a_config_without_causal_language_model_is_refused():
    with pytest.raises(ConfigError, match="no causal language model for this config"):
        build_definition(AutoConfig.for_model("vit"))
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.fixture
def folder(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    return tmp_path


def test_a_package_that_transformers_lacks_is_named(monkeypatch):
    def from_config(*args, **kwargs):
        raise ImportError("\nTimmWrapperModel requires the timm library:\n`pip install timm`.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    with pytest.raises(
        ConfigError, match=r"causal language model: .* requires the timm library: `pip install timm`"
    ):
        build_definition(LlamaConfig())


def test_load_config_of_a_folder_and_of_the_file(folder):
    for where in (folder, str(folder), folder / "config.json"):
        config = load_config(where)
        assert type(config) is LlamaConfig
        assert config.hidden_size == 32


def test_overrides_are_json_where_they_parse_and_text_otherwise(folder):
    config = load_config(
        folder,
        [
            "hidden_size=64",
            "rms_norm_eps=1e-3",
            "tie_word_embeddings=true",
            "hidden_act=gelu",
            "rope_parameters.rope_theta=5000.0",
            "eos_token_id=[1, 2]",
        ],
    )
    assert config.hidden_size == 64
    assert config.rms_norm_eps == 1e-3
    assert config.tie_word_embeddings is True
    assert config.hidden_act == "gelu"
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert config.eos_token_id == [1, 2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hidden_size", r"--hf-override 'hidden_size': expected key=value"),
        ("hiden_size=64", r"'hiden_size=64': LlamaConfig has no field 'hiden_size'"),
        ("rope_parameters.thetta=1", r"LlamaConfig has no field 'rope_parameters\.thetta'"),
        ("text_config.hidden_size=64", r"LlamaConfig has no field 'text_config\.hidden_size'"),
        ("a.b.c=1", r"LlamaConfig has no field 'a\.b\.c'"),
    ],
)
def test_overrides_that_name_nothing_are_refused(folder, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(folder, [override])


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ConfigError, match=r"the folder has no config\.json"):
        load_config(tmp_path)


IN_LITTLE_MEMORY = """
import resource
from megasched.definition.build import build_definition
from transformers import AutoConfig
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
model = build_definition(AutoConfig.for_model("deepseek_v3", num_hidden_layers=5))
experts = model.model.layers[4].mlp.experts
print(experts.gate_up_proj.device, experts.gate_up_proj.nbytes >> 30, model.model.rotary_emb.inv_freq.device)
"""


def test_experts_larger_than_memory():
    """A layer's are one tensor of 28 GiB in DeepSeek-V3: it may not even be asked for."""
    run = subprocess.run([sys.executable, "-c", IN_LITTLE_MEMORY], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["meta", "28", "cpu"], run.stderr[-2000:]


@pytest.mark.parametrize("name", ["nowhere", "nowhere/config.json"])
def test_a_path_that_is_not_there(tmp_path, name):
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_config(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json: line 1, column 2: it is no JSON"),
        (json.dumps({"model_type": "no_such_type"}), "can't load the HF config"),
        (json.dumps({"hidden_size": 3}), "can't load the HF config"),
        (json.dumps({"model_type": "llama", "vocab_size": "x"}), r"without the field vocab_size \('x'\)"),
        (json.dumps({"model_type": "llama", "num_hidden_layers": 10**9}), "num_hidden_layers is 1000000000; more"),
        (json.dumps({"model_type": "llama", "hidden_size": 2**40}), f"hidden_size is {2**40}; no size of a model"),
        (json.dumps({"model_type": "llama", "hidden_size": 2**30, "vocab_size": 2**30}), "which no memory holds"),
    ],
)
def test_a_config_that_can_not_be_read(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path)


def test_a_buffer_that_no_memory_holds_is_refused_before_it_is_made():
    config = AutoConfig.for_model("llama", hidden_size=32, head_dim=2**31 - 8, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"the config makes a buffer of \[1073741820\], 4\.0 GiB"):
        build_definition(config)


def test_experts_that_begin_as_zeros():
    """Llama 4 makes those of a layer by ``torch.zeros``, 5 GiB. A buffer, whose values count, is refused."""
    model = build_definition(AutoConfig.for_model("llama4_text", num_hidden_layers=1))
    experts = model.model.layers[0].feed_forward.experts
    assert (experts.gate_up_proj.shape, experts.gate_up_proj.device.type) == ((16, 5120, 16384), "meta")
    with (
        pytest.raises(ConfigError, match=r"makes a buffer of \[16, 5120, 16384\], 5\.0 GiB; no model has"),
        init_empty_weights(),
    ):
        torch.nn.Module().register_buffer("table", torch.zeros(16, 5120, 16384))
    with pytest.raises(ConfigError, match=r"makes a buffer of \[536870912\]"), init_empty_weights():
        torch.nn.Module().register_buffer("table", torch.zeros(2**29)[:8].bool())
    with pytest.raises(ConfigError, match=r"makes a buffer of \[536870912\]"), init_empty_weights():
        torch.ones(2**29)
    module = torch.nn.Module()
    module.register_buffer("table", None)
    with pytest.raises(ConfigError, match=r"makes a buffer of \[536870912\]"), init_empty_weights():
        module.table = torch.zeros(2**29)[:8]


def test_a_buffer_of_weights_beside_large_ones_is_no_large_buffer():
    """Weights that a run starts from may have it: an average, the vectors of a spectral norm."""
    with init_empty_weights():
        module = torch.nn.Embedding(2**15, 2**14)
        module.register_buffer("average", module.weight.detach()[:8].clone())
    assert module.average.is_meta


def test_factories_that_fill_a_given_tensor():
    with init_empty_weights():
        eye, count = torch.nn.init.eye_(torch.empty(3, 3)), torch.arange(3, out=torch.empty(3))
    assert (eye.trace(), count.sum()) == (3, 3)


DRAWING = """
class Mine(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        import random, numpy
        self.drawn = random.random(), numpy.random.rand(), torch.rand(()).item()
        self.register_buffer("features", torch.randn(3), persistent=False)
        self.post_init()
"""


def test_what_a_class_draws_is_the_same_in_every_process(tmp_path):
    """Ranks begin with other states of Python's and numpy's generators."""
    folder = remote.write_whole(tmp_path / "model", DRAWING)
    drawn = []
    for seed in range(2):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        states = random.getstate(), numpy.random.get_state()[2], torch.get_rng_state()
        model = build_definition(load_config(folder, trust_remote_code=True), trust_remote_code=True)
        drawn.append((model.drawn, model.features.tolist()))
        assert (random.getstate(), numpy.random.get_state()[2]) == states[:2]
        assert torch.equal(torch.get_rng_state(), states[2])
    assert drawn[0] == drawn[1]


OF_VALUES = """
class Mine(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        raise ValueError("rows must be even")
"""


def test_code_that_may_not_run_is_said_to_be_there(tmp_path):
    folder = remote.write_whole(tmp_path / "model", OF_VALUES)
    said = "the model has Python code of its own; read it, and run it with --trust-remote-code"
    with pytest.raises(ConfigError) as raised:
        load_config(folder)
    assert str(raised.value) == f"--hf-model {folder}: {said}"
    with pytest.raises(ConfigError) as raised:
        build_definition(load_config(folder, trust_remote_code=True))
    assert str(raised.value) == said


def test_what_a_constructor_refuses_is_not_taken_for_a_missing_class(tmp_path):
    folder = remote.write_whole(tmp_path / "model", OF_VALUES)
    with pytest.raises(
        ConfigError, match=r"MineConfig can't be made of this config: ValueError: rows must be even"
    ):
        build_definition(load_config(folder, trust_remote_code=True), trust_remote_code=True)


NO_HALF = """
class Mine(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("basis", torch.linalg.qr(torch.ones(3, 3))[0], persistent=False)
        self.post_init()
"""


def test_a_class_that_is_not_made_in_bfloat16(tmp_path):
    """torch has no QR decomposition in it."""
    folder = remote.write_whole(tmp_path / "model", NO_HALF)
    model = build_definition(load_config(folder, trust_remote_code=True), trust_remote_code=True)
    assert model.basis.dtype == torch.float32
    assert build.buffers_following_dtype(model) == frozenset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("model_type", ["llama", "glm4_moe", "ernie4_5_moe", "bailing_hybrid", "gpt_oss"])
def test_what_transformers_loads_in_float32(tmp_path, model_type, dtype):
    """A correction (a buffer), one that is a parameter and a router, a convolution and a decay; norms in fp16."""
    config = small_config(model_type)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    wanted = {name for name, value in loaded.items() if value.dtype == torch.float32}
    nothing = {"llama": (torch.bfloat16, torch.float16), "gpt_oss": (torch.bfloat16,)}
    assert bool(wanted) == (dtype not in nothing.get(model_type, ()))
    found = kept_in_float32(build_definition(config), dtype, loaded)
    assert found == (set() if dtype == torch.float32 else wanted)


@pytest.fixture
def transformers_of(monkeypatch):
    """Another version in the place of the installed one."""
    check_transformers.cache_clear()
    yield lambda found: monkeypatch.setattr(build, "version", lambda name: found)
    check_transformers.cache_clear()


def test_an_older_transformers_is_refused_before_anything_is_read(transformers_of):
    transformers_of("4.57.6")
    with pytest.raises(ConfigError, match=r"transformers 4.57.6 is older than .*'transformers>=5.17,<5.25'"):
        load_config("nowhere")


def test_a_newer_transformers_is_warned_of_once(transformers_of):
    transformers_of("5.25.0")
    with pytest.warns(UserWarning, match=r"transformers 5.25.0 is newer than what megasched was tested with"):
        check_transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_transformers()


def test_the_supported_range_is_what_the_package_requires():
    wanted = {r.name: r.specifier for r in map(Requirement, requires("megasched"))}
    assert wanted["transformers"] == SpecifierSet(TESTED["transformers"])
    assert wanted["megatron-core"] == SpecifierSet(TESTED["megatron-core"])
