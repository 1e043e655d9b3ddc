"""The library's door: roles found by themselves, schedules by name."""

import pytest
import torch
from torch import nn

import megasched
from megasched import ConfigError, ScheduleError
from megasched.language.roles import Roles
from tests.lowering.models import Mlp, tiny_model


def test_roles_of_an_hf_model_are_known():
    sch = megasched.create_schedule(tiny_model("gpt2"))
    assert [node.path for node in sch.role("qkv.packed")] == [
        "transformer.h.0.attn.c_attn",
        "transformer.h.1.attn.c_attn",
    ]


def test_roles_given_count():
    sch = megasched.create_schedule(tiny_model("llama"), roles=Roles({"lm_head": "head"}))
    assert sch.role_of("lm_head") == "head"
    with pytest.raises(ScheduleError, match="no module has the role"):
        sch.role("mlp.up")


def test_a_model_that_no_adapter_knows_has_the_roles_that_can_be_inferred():
    """HF has a causal language model for it, and no plan."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt_bigcode", vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    sch = megasched.create_schedule(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ScheduleError, match=r"roles here: column, embed\.tokens, head, row"):
        sch.role("mlp.up")
    assert sch.role_of("transformer.h.0.mlp.c_fc") == "column"


def test_any_module(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def schedule(sch, layout):\n    sch['act'].hook('fw_post', lambda m, a, o: 0 * o)\n"
    )
    model = megasched.apply_schedule(Mlp(), str(tmp_path / "mine.py"), inputs={"x": torch.ones(1, 8)})
    assert torch.equal(model(torch.ones(1, 8))[0], model.down.bias)


def test_what_the_schedule_file_lacks_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        megasched.apply_schedule(nn.Linear(1, 1), str(tmp_path / "mine.py"))


def test_public_names_are_all_there():
    for name in megasched.__all__:
        assert getattr(megasched, name) is not None
        assert name in dir(megasched)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megasched.nothing


def test_importing_the_library_imports_nothing_heavy():
    import subprocess
    import sys

    code = "import sys, megasched; print(sorted({'torch', 'transformers', 'megatron'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    )
