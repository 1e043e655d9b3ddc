"""Ordinary code of other people that once ended in an internal error."""

from __future__ import annotations

import pytest

from megasched.verify.parity import LAYOUTS
from tests import remote
from tests.parity.steps import assert_equal, step_of_own_code

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
    "checks of values": """
        from transformers.models.llama.modeling_llama import LlamaMLP


        class Mlp(LlamaMLP):
            def forward(self, x):
                if not torch.isfinite(x).all():
                    raise ValueError(f"the largest is {x.max().item()}")
                h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
                assert self.is_small(h), f"of {h.shape}: {h.abs().max().item()}"
                return self.down_proj(h)

            def is_small(self, h):
                return bool((h.abs() < 1e4).all())
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

# Tokens of two sequences are flattened on one side alone of what needs them in their order.
FLATTENED = {
    "after the columns": """
        from transformers.models.llama.modeling_llama import LlamaMLP


        class Mlp(LlamaMLP):
            def forward(self, x):
                h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
                return self.down_proj(h.flatten(0, 1)).view_as(x)
        """,
    "before the columns": """
        from transformers.models.llama.modeling_llama import LlamaMLP


        class Mlp(LlamaMLP):
            def forward(self, x):
                flat = x.flatten(0, 1)
                h = self.act_fn(self.gate_proj(flat)) * self.up_proj(flat)
                return self.down_proj(h.cumsum(0) / 8).view_as(x)
        """,
    "and grouped": """
        from transformers.models.llama.modeling_llama import LlamaMLP


        class Mlp(LlamaMLP):
            def forward(self, x):
                groups = x[:, :, None].expand(-1, -1, 3, -1)
                h = self.act_fn(self.gate_proj(groups)) * self.up_proj(groups)
                return self.down_proj(h.roll(1, 2)).mean(2)
        """,
}


@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_it_is_right_at_tp2(ranks, tmp_path, code):
    is_right(ranks, tmp_path, code)


@pytest.mark.parametrize("code", FLATTENED.values(), ids=FLATTENED)
def test_tokens_keep_their_places_where_the_sequence_is_split(ranks, tmp_path, code):
    is_right(ranks, tmp_path, code, "--sequence-parallel")


def is_right(ranks, tmp_path, code, *more):
    assert_equal(step_of_own_code(ranks, remote.write(tmp_path / "model", code), LAYOUTS["tp2"], *more))
