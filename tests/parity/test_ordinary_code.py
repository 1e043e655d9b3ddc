"""Ordinary code of other people that once ended in an internal error."""

from __future__ import annotations

import pytest

from megasched.verify.parity import TOLERANCE, compare
from megasched.verify.reference import hf_step
from megasched.verify.trainer_run import batches_of, train
from tests import remote

CODE = {
    "a list under a dict": """
        from transformers.models.llama.modeling_llama import LlamaMLP


        class Mlp(nn.Module):
            def __init__(self, config):
                super().__init__()
                one, other = (nn.ModuleList([LlamaMLP(config)]) for _ in range(2))
                self.parts = nn.ModuleDict({"one": one, "other": other})

            def forward(self, x):
                return self.parts["one"][0](x) + self.parts["other"][0](x)
        """,
    "a buffer on a linear": """
        from transformers.models.llama.modeling_llama import LlamaMLP


        class Mlp(LlamaMLP):
            def __init__(self, config):
                super().__init__(config)
                gain = torch.linspace(0.5, 1.5, config.intermediate_size)
                self.up_proj.register_buffer("gain", gain, persistent=False)
                self.up_proj.register_forward_hook(lambda module, args, output: output * module.gain)
        """,
}


@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_it_is_right_at_tp2(ranks, tmp_path, code):
    folder = remote.write(tmp_path / "model", code)
    flags = ["--tensor-model-parallel-size", "2", "--trust-remote-code"]
    reports = ranks.run(2, train, folder, flags, iterations=1)
    (expected,) = ranks.run(1, hf_step, folder, batches_of(reports), trust_remote_code=True)
    outcome = compare(reports, expected, 2)
    assert outcome.verdict == "equal", outcome.why
    assert max(outcome.errors.values()) <= TOLERANCE
