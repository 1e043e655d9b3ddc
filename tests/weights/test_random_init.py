"""RandomInit against HF's own initialisation of a real model."""

import hashlib
import math
import random
import re
import weakref
from collections import defaultdict

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_tie_weights

from megasched.definition.build import build_definition, init_empty_weights
from megasched.errors import CheckpointError, ConfigError
from megasched.plan.placement import Placement
from megasched.weights.random_init import RandomInit
from megasched.weights.source import canonical_names

SEED = 1234


def whole(definition, name):
    return Placement(name, tuple(definition.get_parameter(name).shape))


def everything(definition, source, names=None):
    names = names or [name for name, _ in definition.named_parameters()]
    return {name: source.local(whole(definition, name), 0, 1) for name in names}


def expected(model, name, source_name):
    """The parameter after a full pass of HF's initialisation in which all others count as initialised."""
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    for other in model.parameters():
        other._is_hf_initialized = True
    param = model.get_parameter(source_name)
    del param._is_hf_initialized
    with torch.no_grad():
        param.fill_(float("nan"))
    digest = hashlib.sha256(f"{SEED}:{name}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:4], "big"))
    model.initialize_weights()
    return param.detach().clone()


def test_equals_a_full_pass_of_hf_bit_for_bit(config, definition):
    with no_tie_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    got = everything(definition, RandomInit(definition, SEED))
    tied = {source: target for target, source in definition.all_tied_weights_keys.items()}
    assert set(got) == set(canonical_names(definition).values())
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert value.device.type == "cpu"
        # In all nine families the source of a tie is named first.
        assert name not in tied.values()
        assert torch.equal(value, expected(model, name, name)), name


def test_initialisations_by_numpy_and_python_are_the_same_on_every_rank():
    """Their generators begin with other states in each process."""

    def by_others(module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data = torch.from_numpy(numpy.random.rand(*module.weight.shape)) + random.random()

    with init_empty_weights():
        model = torch.nn.Linear(3, 2, bias=False)
    drawn = []
    for seed in range(2):
        numpy.random.seed(seed)
        random.seed(seed)
        drawn.append(everything(model, RandomInit(model, SEED, by_others))["weight"])
    assert torch.equal(*drawn)


def test_statistics_are_those_of_from_config(config, definition):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    got, reference = defaultdict(list), defaultdict(list)
    for name, value in everything(definition, RandomInit(definition, SEED)).items():
        kind = re.sub(r"\.\d+\.", ".N.", name)
        got[kind].append(value.flatten())
        reference[kind].append(model.get_parameter(name).detach().flatten())
    for kind in reference:
        ours, theirs = torch.cat(got[kind]), torch.cat(reference[kind])
        spread = theirs.std().item()
        if spread == 0:
            assert torch.equal(ours, theirs), kind
        else:
            # Five standard errors of an estimated deviation, on both sides.
            assert ours.std().item() == pytest.approx(spread, rel=10 / math.sqrt(2 * ours.numel())), kind
            assert abs(ours.mean().item()) < 5 * spread / math.sqrt(ours.numel()), kind


@pytest.mark.parametrize("size", [2, 4])
def test_slices_concatenate_to_the_full_parameter(definition, size):
    source = RandomInit(definition, SEED)
    for name, full in everything(definition, source).items():
        for axis in range(full.dim()):
            placement = Placement(name, tuple(full.shape), axis=axis)
            pieces = [source.local(placement, rank, size) for rank in range(size)]
            assert torch.equal(torch.cat(pieces, dim=axis), full), name
            assert all(piece.untyped_storage().nbytes() == piece.nbytes for piece in pieces), name


def test_parts_that_are_asked_for_one_by_one_are_made_once(tiny, monkeypatch):
    """Experts of a layer are parameters of their own in Megatron's, and one in HF's."""
    made = []
    real = RandomInit._initialised
    monkeypatch.setattr(RandomInit, "_initialised", lambda self, name: made.append(name) or real(self, name))
    definition = build_definition(tiny("mixtral"))
    source = RandomInit(definition, SEED)
    name, other = (f"model.layers.0.mlp.experts.{own}" for own in ("gate_up_proj", "down_proj"))
    shape = tuple(definition.get_parameter(name).shape)
    parts = [source.local(Placement(name, shape, axis=0), rank, shape[0]) for rank in range(shape[0])]
    source.local(whole(definition, other), 0, 1)
    assert torch.equal(torch.cat(parts), source.local(whole(definition, name), 0, 1))
    assert made == [name, other, name]


def test_no_more_than_one_full_parameter_is_in_memory(tiny, monkeypatch):
    """An embedding of a large model is gigabytes: neither may it outlive its shard, nor a stack the next one."""
    alive: list[weakref.ref] = []
    real = RandomInit._initialised

    def initialised(self, name):
        assert not [ref for ref in alive if ref() is not None], name
        full = real(self, name)
        alive.append(weakref.ref(full.untyped_storage()))
        return full

    monkeypatch.setattr(RandomInit, "_initialised", initialised)
    definition = build_definition(tiny("mixtral"))
    source = RandomInit(definition, SEED)
    head, stack = "lm_head.weight", "model.layers.0.mlp.experts.down_proj"
    shapes = {name: tuple(definition.get_parameter(name).shape) for name in (head, stack)}
    shards = [source.local(Placement(head, shapes[head], axis=0), 1, 2)]
    assert alive[-1]() is None
    shards += [source.local(Placement(stack, shapes[stack], axis=0), 0, shapes[stack][0])]
    shards += [source.local(Placement(head, shapes[head], axis=0), 0, 2)]
    assert len(alive) == 3
    assert not [ref for ref in alive if ref() is not None]


def test_packed_transposed_slices(tiny):
    definition = build_definition(tiny("gpt2"))
    source = RandomInit(definition, SEED)
    name = "transformer.h.0.attn.c_attn.weight"
    placement = Placement(name, (32, 96), axis=1, components=(32, 32, 32), transposed=True)
    pieces = [source.local(placement, rank, 2) for rank in range(2)]
    assert [tuple(piece.shape) for piece in pieces] == [(48, 32), (48, 32)]
    assert all(piece.is_contiguous() for piece in pieces)
    assert torch.equal(placement.unshard(pieces), source.local(whole(definition, name), 0, 1))


def test_values_do_not_depend_on_order_or_on_others(config, definition):
    names = [name for name, _ in definition.named_parameters()]
    forward = everything(definition, RandomInit(definition, SEED), names)
    backward = everything(definition, RandomInit(definition, SEED), names[::-1])
    alone = {name: everything(definition, RandomInit(definition, SEED), [name])[name] for name in names[::5]}
    assert all(torch.equal(forward[name], backward[name]) for name in names)
    assert all(torch.equal(forward[name], value) for name, value in alone.items())


def test_values_differ_by_seed_and_by_name(tiny):
    definition = build_definition(tiny("llama"))
    source, other = RandomInit(definition, 1), RandomInit(definition, 2)
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    first, second = everything(definition, source, names).values()
    assert not torch.equal(first, second)
    assert not torch.equal(first, everything(definition, other, names[:1])[names[0]])


def test_the_callers_random_state_and_definition_are_untouched(definition):
    state = torch.random.get_rng_state()
    before = {id(param): dict(param.__dict__) for param in definition.parameters()}
    everything(definition, RandomInit(definition, SEED))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {id(param): dict(param.__dict__) for param in definition.parameters()} == before
    assert all(param.is_meta for param in definition.parameters())


def test_the_caller_may_change_the_definition_afterwards(tiny):
    definition = build_definition(tiny("llama"))
    source = RandomInit(definition, SEED)
    name = "model.layers.1.mlp.up_proj.weight"
    placement = whole(definition, name)
    before = source.local(placement, 0, 1)
    definition.model.layers[1].mlp = torch.nn.Identity()
    assert torch.equal(source.local(placement, 0, 1), before)


def test_gpt2_scales_what_adds_to_the_residual(tiny):
    definition = build_definition(tiny("gpt2", num_hidden_layers=8, hidden_size=64))
    got = everything(definition, RandomInit(definition, SEED))
    for layer in range(8):
        for path in ("attn", "mlp"):
            scaled = got[f"transformer.h.{layer}.{path}.c_proj.weight"]
            assert scaled.std().item() == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.05)
        assert got[f"transformer.h.{layer}.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(("family", "name"), [("qwen2", "model.embed_tokens.weight"), ("opt", None)])
def test_padding_row_is_zero(tiny, family, name):
    definition = build_definition(tiny(family, pad_token_id=5))
    name = name or "model.decoder.embed_tokens.weight"
    value = RandomInit(definition, SEED).local(whole(definition, name), 0, 1)
    assert torch.count_nonzero(value[5]) == 0
    assert torch.count_nonzero(value[4]) > 0


def test_a_tie_is_initialised_as_its_source_even_when_named_second(tiny):
    definition = build_definition(tiny("qwen2", pad_token_id=5))
    # A head that is registered before the body, as some classes do.
    body = definition._modules.pop("model")
    definition._modules["model"] = body
    assert next(iter(canonical_names(definition).values())) == "lm_head.weight"
    value = RandomInit(definition, SEED).local(whole(definition, "lm_head.weight"), 0, 1)
    assert torch.count_nonzero(value[5]) == 0


def test_a_parameter_that_hf_leaves_alone_is_an_error_that_names_it(tiny):
    definition = build_definition(tiny("llama"))
    definition.model.layers[1].register_parameter(
        "gate", torch.nn.Parameter(torch.ones(4, device="meta"), requires_grad=True)
    )
    source = RandomInit(definition, SEED)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.gate: .*leaves it uninitialised"):
        source.local(Placement("model.layers.1.gate", (4,)), 0, 1)


def test_a_partly_initialised_parameter_is_an_error(tiny, monkeypatch):
    definition = build_definition(tiny("llama"))

    def first_row_only(self, module):
        if isinstance(module, torch.nn.Embedding):
            module.weight[0].zero_()

    monkeypatch.setattr(type(definition), "_init_weights", first_row_only)
    monkeypatch.setattr(type(definition.model), "_init_weights", first_row_only)
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight"):
        RandomInit(definition, SEED).local(whole(definition, "model.embed_tokens.weight"), 0, 1)


def test_an_initialisation_that_reads_other_parameters_is_an_error(tiny, monkeypatch):
    definition = build_definition(tiny("llama"))

    def reads_a_neighbour(self, module):
        if hasattr(module, "up_proj"):
            module.up_proj.weight.copy_(module.gate_proj.weight)

    monkeypatch.setattr(type(definition.model), "_init_weights", reads_a_neighbour)
    source = RandomInit(definition, SEED)
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: .*on meta"):
        source.local(whole(definition, name), 0, 1)
    # The parameter is back on meta: nothing of it is left behind.
    assert all(param.is_meta for param in source._skeleton.parameters())


def test_unknown_names_and_wrong_shapes(tiny):
    definition = build_definition(tiny("llama"))
    source = RandomInit(definition, SEED)
    with pytest.raises(CheckpointError, match=r"model\.nowhere: LlamaForCausalLM has no such parameter"):
        source.local(Placement("model.nowhere", (4,)), 0, 1)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: .*\[96, 32\], expected \[128, 32\]"):
        source.local(Placement("lm_head.weight", (128, 32)), 0, 1)
    names = set(canonical_names(definition).values())
    source.check(names)
    with pytest.raises(CheckpointError, match=r"(?s)missing \(1\):\s+extra.*unexpected \(1\):\s+lm_head\.weight"):
        source.check(names - {"lm_head.weight"} | {"extra"})


def test_a_filled_definition_is_refused(tiny, trained):
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight is on cpu, not on meta"):
        RandomInit(trained(tiny("llama")), SEED)
