"""What ``megasched new-adapter`` proposes, says and refuses; the check itself is faked."""

import io
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn
from transformers import AutoConfig

from megasched.cli.check.new_adapter import print_new_adapter
from megasched.definition.build import build_definition
from megasched.definition.small_models.small_models import small_config
from megasched.errors import ConfigError
from megasched.layers import attention
from megasched.model_adapters.registry import load_adapter
from megasched.verify.new_adapter import new_adapter as module
from megasched.verify.new_adapter.adapter_source import write_source
from megasched.verify.new_adapter.new_adapter import new_adapter, unusual_calls, write_new
from megasched.verify.parity import Outcome
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]

GPT2 = '''"""gpt2: proposed by megasched new-adapter (transformers {version})."""

from megasched.model_adapters.registry import Adapter

ADAPTER = Adapter(
    model_types=("gpt2",),
    roles={{
        "transformer.wte": "embed.tokens",
        "transformer.h.*.attn.c_attn": "qkv.packed",
        "transformer.h.*.attn.c_proj": "attn.out",
        "transformer.h.*.mlp.c_fc": "mlp.up",
        "transformer.h.*.mlp.c_proj": "mlp.down",
        "lm_head": "head",
    }},
    packed={{"qkv.packed": lambda config: (768, 768, 768)}},
    local_attributes={{"transformer.h.*.attn": ("split_size",)}},
)
'''

# Model type -> lines of its Adapter; all of them decoders of known form.
KNOWN_FORMS = {"llama": 14, "gpt2": 13, "gpt_neo": 14, "opt": 14, "stablelm": 15, "persimmon": 12, "gptj": 13}


# Each layer of a definition is looked at, and four show what all of them do.
FEW_LAYERS = {
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "stablelm": {"num_hidden_layers": 4},
    "persimmon": {"num_hidden_layers": 4},
    "falcon": {"num_hidden_layers": 4},
}


def proposed(model_type, folder):
    AutoConfig.for_model(model_type, **FEW_LAYERS.get(model_type, {})).save_pretrained(folder)
    return new_adapter(str(folder), check=False)


def test_the_module_for_gpt2(tmp_path):
    found = proposed("gpt2", tmp_path)
    assert found.source == GPT2.format(version=version("transformers"))
    assert (found.model, found.lines, found.planned, found.inferred, found.whole) == (
        "GPT2LMHeadModel",
        13,
        0,
        48,
        0,
    )
    assert found.installed == "gpt2 = megasched.model_adapters.families.gpt2:ADAPTER of megasched 0.1.0"
    told = "packed gives qkv.packed the sizes of this config, (768, 768, 768): write them as fields of the config"
    assert (found.still_open, found.outcomes) == ([told], {})
    assert found.right


@pytest.mark.parametrize("model_type", KNOWN_FORMS)
def test_a_decoder_of_known_form_takes_at_most_15_lines(model_type, tmp_path):
    small_config(model_type).save_pretrained(tmp_path)
    found = new_adapter(str(tmp_path), check=False)
    assert found.lines == KNOWN_FORMS[model_type] <= 15
    file = tmp_path / "adapter.py"
    file.write_text(found.source)
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--isolated", "--check", file], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


class Mean(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.out = nn.Linear(size, size, device="meta")

    def forward(self, hidden_states, **more):
        return self.out(hidden_states.cumsum(1)), None


def test_attributes_of_one_kind_of_layer_are_named_without_its_numbers(tmp_path):
    """Layers of another kind stand between them, and a copy may have its own elsewhere."""
    from megasched.verify.new_adapter.proposal import found_roles, propose

    model = build_definition(small_config("gpt_neo"))
    for layer in model.transformer.h[::2]:
        layer.attn.attention = Mean(64)
    proposal = propose(model, found_roles(model))
    assert proposal.local_attributes == {"transformer.h.*.attn.attention": ("num_heads",)}
    file = tmp_path / "adapter.py"
    file.write_text(write_source(proposal, transformers="5"))
    bound = load_adapter(str(file), "gpt_neo").bind(model)
    assert list(bound.local_attributes) == [f"transformer.h.{index}.attn.attention" for index in (1, 3)]


@pytest.mark.parametrize("family", ["gpt_neo", "stablelm", "persimmon"])
def test_the_adapter_says_of_another_size_what_is_found_there(family, tmp_path):
    """Written for one config, bound to another: the same linears are cut, with the same attributes."""
    from megasched.language.roles import ROLES
    from megasched.verify.new_adapter.proposal import found_roles

    file = tmp_path / "adapter.py"
    file.write_text(proposed(family, tmp_path).source)
    small = build_definition(small_config(family))
    attention.enable(small)
    bound, wanted = load_adapter(str(file), family).bind(small), found_roles(small)
    assert bound.local_attributes == wanted.local_attributes
    cuts = {path: ROLES[role] for path, role in bound.role.items()}
    assert cuts == {path: ROLES[role] for path, role in wanted.role.items()}


def test_a_small_copy_is_checked_with_its_own_sizes(tmp_path, monkeypatch):
    seen = []

    def check(ranks, folder, layout, *, adapter, trust_remote_code):
        seen.append(load_adapter(adapter, "gpt2").packed["qkv.packed"](AutoConfig.from_pretrained(folder)))
        return Outcome("equal", {})

    monkeypatch.setattr(module, "check_layout", check)
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    found = new_adapter(str(tmp_path))
    assert found.source == GPT2.format(version=version("transformers"))
    assert seen == [(64, 64, 64)] * 3


def test_what_stays_whole_is_open_with_its_reason(tmp_path):
    found = proposed("falcon", tmp_path)
    assert found.still_open[:2] == [
        "transformer.h.*.self_attention.query_key_value stays whole: what follows needs the whole of its output",
        "transformer.h.*.self_attention.dense stays whole: the other side of it stays whole",
    ]
    assert found.whole == 8
    assert "self_attention" not in found.source


def test_attention_of_the_definitions_own_is_unusual():
    assert unusual_calls(build_definition(tiny.config("llama"))) == []
    neo = AutoConfig.for_model("gpt_neo", hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]])
    (sentence,) = unusual_calls(build_definition(neo))
    assert sentence.startswith("attention is computed by the definition's own code, not through transformers'")


def test_the_proposal_is_what_is_checked(tmp_path, monkeypatch):
    seen = []

    def check(ranks, folder, layout, *, adapter, trust_remote_code):
        config = AutoConfig.from_pretrained(folder)
        types = load_adapter(adapter, "gpt_neo").model_types
        seen.append((layout, config.hidden_size, config.activation_function, types))
        return Outcome("wrong" if layout == "pp2" else "equal", {})

    monkeypatch.setattr(module, "check_layout", check)
    AutoConfig.for_model("gpt_neo", activation_function="relu").save_pretrained(tmp_path)
    told = []
    found = new_adapter(str(tmp_path), progress=told.append)
    assert told == ["tp2", "tp2-sp", "pp2"]
    assert seen == [(layout, 64, "relu", ("gpt_neo",)) for layout in told]
    assert not found.right


def test_a_config_of_which_no_small_copy_can_be_made(tmp_path):
    AutoConfig.for_model("falcon_h1").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^no small copy of this FalconH1Config can be made: "):
        new_adapter(str(tmp_path))


REMOTE = {
    "configuration_mine.py": "from transformers import LlamaConfig\n"
    'class MineConfig(LlamaConfig):\n    model_type = "mine_remote"\n',
    "modeling_mine.py": "from transformers import LlamaForCausalLM\n"
    "from .configuration_mine import MineConfig\n"
    "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n",
    "config.json": '{"model_type": "mine_remote", "auto_map": {"AutoConfig": "configuration_mine.MineConfig", '
    '"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}, "hidden_size": 128, "num_hidden_layers": 6, '
    '"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256, "pad_token_id": 0}',
}


def test_code_that_comes_with_a_model_goes_along_with_its_copy(tmp_path, monkeypatch):
    seen = []

    def check(ranks, folder, layout, *, adapter, trust_remote_code):
        model = build_definition(
            AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True
        )
        types = load_adapter(adapter, "mine_remote").model_types
        seen.append((type(model).__name__, model.config.hidden_size, types))
        assert trust_remote_code
        return Outcome("equal", {})

    monkeypatch.setattr(module, "check_layout", check)
    for name, text in REMOTE.items():
        (tmp_path / name).write_text(text)
    assert new_adapter(str(tmp_path), trust_remote_code=True).right
    assert seen == [("MineForCausalLM", 64, ("mine_remote",))] * 3


def test_a_model_without_a_list_of_layers_is_told_that_no_adapter_helps(tmp_path):
    """It said that none is needed."""
    code = REMOTE["modeling_mine.py"] + (
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.model.only = self.model.layers[0]\n        del self.model.layers\n"
        "        self.model.layers = []\n"
        "        self.model.norm.register_forward_pre_hook(lambda norm, args: (self.model.only.mlp(args[0]),))\n"
    )
    for name, text in (REMOTE | {"modeling_mine.py": code}).items():
        (tmp_path / name).write_text(text)
    found = new_adapter(str(tmp_path), trust_remote_code=True, check=False)
    assert not found.layered
    out = io.StringIO()
    print_new_adapter(found, None, Console(file=out, width=100))
    assert "An adapter is of no use yet: the model has no list of layers" in out.getvalue()


# ---- the file ---------------------------------------------------------------------------------------


def test_a_file_that_exists_is_left_alone(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("mine\n")
    with pytest.raises(ConfigError) as raised:
        write_new("theirs\n", file)
    assert str(raised.value) == f"--output {file}: the file exists; name another, or replace it with --force"
    assert file.read_text() == "mine\n"
    write_new("theirs\n", file, force=True)
    assert file.read_text() == "theirs\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_a_file_that_comes_meanwhile_is_left_alone(tmp_path, monkeypatch):
    file, real = tmp_path / "mine.py", os.link
    monkeypatch.setattr(os, "link", lambda *given: (file.write_text("mine\n"), real(*given)))
    with pytest.raises(ConfigError, match="the file exists"):
        write_new("theirs\n", file)
    assert file.read_text() == "mine\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_a_link_to_nothing_is_there_as_well(tmp_path):
    """Nothing was written, and the command said that all was."""
    (tmp_path / "mine.py").symlink_to("gone.py")
    with pytest.raises(ConfigError, match="the file exists"):
        write_new("theirs\n", tmp_path / "mine.py")


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError) as raised:
        write_new("", tmp_path / "no" / "mine.py")
    assert str(raised.value) == f"--output {tmp_path}/no/mine.py: there is no folder {tmp_path}/no"
