"""Definitions of one's own that do not do part by part what they do as a whole: right, or refused by name."""

from __future__ import annotations

from textwrap import dedent

import pytest

from megasched.verify.parity import LAYOUTS, failure
from megasched.verify.ranks.pool import RankError
from tests import remote, ways
from tests.parity.cases import case, slow, spread
from tests.parity.steps import assert_equal, step_of_own_code

# The vocabulary is padded, at one rank, too, which the definition's code must not see.
OF_LOGITS = {
    "scaled by their number": "logits = logits * (logits.shape[-1] / 90)",
    "in groups": "logits = (logits.unflatten(-1, (9, -1)) * 0.5).flatten(-2)",
    "by their places": "logits = logits - 0.1 * (torch.arange(logits.shape[-1]) > 50)",
}


@pytest.mark.parametrize(("name", "layout"), spread(OF_LOGITS, ["tp2", "one"]))
def test_logits_are_as_many_as_the_vocabulary_has(ranks, tmp_path, name, layout):
    folder = remote.write_of_logits(tmp_path / "model", OF_LOGITS[name])
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS[layout]))


# What makes logits of the table of the embeddings, and ties that the config does not tell of.
OF_THE_TABLE = {
    "by a function": "logits = F.linear(hidden, self.model.embed_tokens.weight) / 3",
    "by the head's weight": "logits = F.linear(hidden, self.lm_head.weight - self.lm_head.weight.mean(0))",
}
BY_A_WEIGHT = [
    ("by a function", "pp2", True),
    ("by a function", "tp2", False),
    ("by the head's weight", "tp2", True),
]
TIES = {
    "of the head": "self.lm_head.weight = self.model.embed_tokens.weight",
    "of a factor": """
        table = nn.Embedding(config.vocab_size, 6)
        self.model.embed_tokens = nn.Sequential(table, nn.Linear(6, config.hidden_size))
        self.lm_head = nn.Sequential(nn.Linear(config.hidden_size, 6), nn.Linear(6, config.vocab_size, bias=False))
        self.lm_head[1].weight = table.weight
        type(self).get_input_embeddings = lambda self: self.model.embed_tokens[0]
        type(self).get_output_embeddings = lambda self: self.lm_head[1]
        """,
}


@pytest.mark.parametrize(
    ("name", "layout", "tied"),
    [
        case(name, layout, tied, fast=(name, layout, tied) in BY_A_WEIGHT)
        for name in OF_THE_TABLE
        for layout in ("tp2", "pp2")
        for tied in (False, True)
    ],
)
def test_logits_by_a_weight_that_other_code_reads(ranks, tmp_path, name, layout, tied):
    """The head itself is not called: what it gave would be a rank's part."""
    folder = remote.write_of_hidden(tmp_path / "model", OF_THE_TABLE[name], tie_word_embeddings=tied)
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS[layout]))


@pytest.mark.parametrize(("name", "layout"), spread(TIES, ["pp2", "tp2"]))
def test_ties_that_the_config_does_not_tell_of(ranks, tmp_path, name, layout):
    folder = remote.write_changed(tmp_path / "model", TIES[name])
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS[layout]))


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_gradients_by_frequency_are_of_the_whole_sequence(ranks, tmp_path, layout):
    folder = remote.write_changed(tmp_path / "model", "self.model.embed_tokens.scale_grad_by_freq = True")
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS[layout]))


BOUNDED = "self.model.embed_tokens.max_norm = 0.5"  # of the rows that a batch reads
CLAMPED = """
    def clamped(module, args):
        module.weight.data.clamp_(-0.02, 0.02)

    self.lm_head.register_forward_pre_hook(clamped)
    """


def test_parameters_that_a_forward_writes_to_by_its_inputs(ranks, tmp_path):
    folder = remote.write_changed(tmp_path / "model", BOUNDED)
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS["tp2"]))
    with pytest.raises(RankError, match="each replica would come to others") as raised:
        step_of_own_code(ranks, folder, LAYOUTS["cp2"])
    assert "a forward changes parameters (model.embed_tokens.weight)" in str(raised.value)


@pytest.mark.parametrize("layout", [slow("tp2"), "cp2"])
def test_parameters_that_each_replica_writes_to_alike(ranks, tmp_path, layout):
    folder = remote.write_changed(tmp_path / "model", CLAMPED)
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS[layout]))


# What they hold, and leave outside of modules, is the run's own: not the trial's, and not another copy's.
HELD = {
    "a hook over another module": """
        def scaled(norm):
            return lambda module, args, output: output * (1 + norm.weight.mean())

        for layer in self.model.layers:
            layer.mlp.register_forward_hook(scaled(layer.input_layernorm))
        """,
    "a forward in another's place": """
        def halved(before):
            return lambda *args, **kwargs: before(*args, **kwargs) * 0.5

        for layer in self.model.layers:
            layer.mlp.forward = halved(layer.mlp.forward)
        """,
    "a list": """
        box = []
        for layer in self.model.layers:
            layer.mlp.register_forward_hook(lambda module, args, output: box.append(output))
        self.model.register_forward_pre_hook(lambda module, args: box.clear())
        self.model.norm.register_forward_hook(lambda module, args, output: output + 0.1 * box[1])
        """,
}


@pytest.mark.parametrize(("name", "layout"), spread(HELD, ["tp2", "one"]))
def test_what_functions_on_modules_hold(ranks, tmp_path, name, layout):
    folder = remote.write_changed(tmp_path / "model", HELD[name])
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS[layout]))


LEFT = {
    "on a class": """
        class Mlp(LlamaMLP):
            table = None

            def forward(self, x):
                if Mlp.table is None:
                    Mlp.table = torch.linspace(0.5, 1.5, x.shape[-1], device=x.device)
                return super().forward(x) * Mlp.table
        """,
    "in a cache": """
        from functools import lru_cache


        @lru_cache
        def table(size):
            return torch.linspace(0.5, 1.5, size)


        class Mlp(LlamaMLP):
            def forward(self, x):
                return super().forward(x) * table(x.shape[-1])
        """,
    "in a global": """
        calls = []


        class Mlp(LlamaMLP):
            def forward(self, x):
                calls.append(1)
                return super().forward(x) * (1 + len(calls) % 2)  # of two layers
        """,
}


@pytest.mark.parametrize("code", LEFT.values(), ids=LEFT)
def test_what_trials_leave_outside_of_modules(ranks, tmp_path, code):
    head = "from transformers.models.llama.modeling_llama import LlamaMLP\n\n\n"
    folder = remote.write(tmp_path / "model", head + dedent(code))
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS["tp2"]))


def test_a_function_that_holds_a_parameter_is_refused(ranks, tmp_path):
    lines = """
        weight = self.model.norm.weight
        self.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * weight,))
        """
    with pytest.raises(RankError, match="holds a parameter or a buffer") as raised:
        step_of_own_code(ranks, remote.write_changed(tmp_path / "model", lines), LAYOUTS["one"])
    assert "lm_head" in str(raised.value)


OF_LOSS = """
from transformers.models.llama.modeling_llama import LlamaMLP as Mlp

Other = Mine


class Mine(Other):
    def forward(self, input_ids=None, labels=None, position_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, labels=labels, position_ids=position_ids, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 0.01 * sum(
                parameter.pow(2).sum() for name, parameter in self.named_parameters() if {} in name
            )
        return output
"""
# What a rank has, or what sums its gradients, is not what code after the layers takes it for.
OF_PENALTIES = {
    ("layers", "tp2"): "",
    ("layers", "cp2"): "",
    ("layers", "tp2-sp"): "meets sharded activations in one place and whole ones in another",
    ("input_layernorm", "tp2-sp"): "meets sharded activations in one place and whole ones in another",
    ("layers", "pp2"): "what comes after the layers reads model.layers.0.self_attn.q_proj.weight, which is on",
    ("model.norm", "pp2"): "",
}


@pytest.mark.parametrize(("name", "layout"), OF_PENALTIES)
def test_penalties_on_parameters_beside_the_loss(ranks, tmp_path, name, layout):
    why = OF_PENALTIES[name, layout]
    folder = remote.write(tmp_path / "model", OF_LOSS.format(repr(name)))
    if not why:
        assert_equal(step_of_own_code(ranks, folder, LAYOUTS[layout]))
        return
    with pytest.raises(RankError) as raised:
        step_of_own_code(ranks, folder, LAYOUTS[layout])
    outcome = failure(str(raised.value))
    assert outcome.verdict == "refused"
    assert why in outcome.why


STACKED = """
if layer is self.layers[0]:
    kept, place = x.new_zeros(len(self.layers), *x.shape), 0
kept[place] = x
place += 1
if layer is self.layers[-1]:
    x = kept.mean(0)
"""


def test_what_the_code_around_layers_writes_into_a_tensor_of_its_own_crosses_stages(ranks, tmp_path):
    folder = remote.write(tmp_path / "model", ways.layers(STACKED))
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS["pp2"]))
