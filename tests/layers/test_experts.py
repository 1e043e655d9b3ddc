"""Pairs of token and expert that travel between EP ranks: every form of HF's experts, any routing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megasched.definition.experts import returns_beyond
from megasched.verify.reference import relative

TOKENS, CHOICES, EXPERTS = 6, 2, 4
ROUTINGS = {
    "everywhere": [[0, 3], [2, 1], [3, 2], [1, 0], [0, 2], [3, 1]],
    "nothing for the last rank": [[0, 1], [1, 0]] * 3,
    "none at all": [[EXPERTS, EXPERTS]] * TOKENS,
    "beyond the experts": [[0, EXPERTS], [EXPERTS, 3], [2, 1], [EXPERTS, EXPERTS], [1, 2], [0, 3]],
}


def experts_of(model_type: str, implementation: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from megasched.definition.small_models.small_models import small_config

    config = small_config(model_type)
    config._experts_implementation = implementation
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation(implementation)
    experts = model.model.layers[1].mlp.experts
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    return experts


def dispatch_case(
    model_type: str, implementation: str, routing: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """On a rank: what it gets and what is right, of results and of gradients; its tokens are its own."""
    import torch.distributed as dist

    from megasched.layers.experts import _dispatch

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    whole, mine = experts_of(model_type, implementation), experts_of(model_type, implementation)
    each, returns = EXPERTS // size, returns_beyond(whole)
    for name, parameter in list(mine.named_parameters()):
        setattr(mine, name, nn.Parameter(of_rank(parameter.detach(), rank, size).clone()))
    if hasattr(mine, "num_experts"):
        mine.num_experts = each
    index = torch.tensor(ROUTINGS[routing])
    gates = [torch.rand(TOKENS, CHOICES, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    states = [torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(9 + r)) for r in range(size)]
    x, w = states[rank].clone().requires_grad_(), gates[rank].clone().requires_grad_()
    got = _dispatch(mine, EXPERTS, group, x, index, w, spare=EXPERTS if returns else None)
    got.square().sum().backward()

    # Where there are none beyond, the whole module can't be asked for them: such pairs weigh nothing.
    kept = torch.ones_like(index, dtype=torch.bool) if returns else index < EXPERTS
    pairs = [(s.clone().requires_grad_(), g.clone().requires_grad_()) for s, g in zip(states, gates, strict=True)]
    results = [whole(s, index * kept, g * kept) for s, g in pairs]
    sum(result.square().sum() for result in results).backward()
    found = {
        "results": (got, results[rank]),
        "tokens": (x.grad, pairs[rank][0].grad),
        "weights": (w.grad, pairs[rank][1].grad),
    }
    for name, parameter in mine.named_parameters():
        gradient = dict(whole.named_parameters())[name].grad
        rows = torch.zeros_like(whole.get_parameter(name)) if gradient is None else gradient
        found[name] = parameter.grad, of_rank(rows, rank, size)
    return {name: (a.detach(), b.detach()) for name, (a, b) in found.items()}


def of_rank(rows: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's experts, and its share of the rows that are beyond them."""
    return torch.cat([part.chunk(size)[rank] for part in (rows[:EXPERTS], rows[EXPERTS:]) if len(part)])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("model_type", "implementation"),
    [
        ("mixtral", "eager"),
        ("mixtral", "grouped_mm"),
        ("mixtral", "batched_mm"),
        ("gpt_oss", "eager"),
        ("gpt_oss", "grouped_mm"),
        ("longcat_flash", "eager"),  # numbers beyond its experts choose ones that return their input
    ],
)
def test_every_form_of_experts(ranks, model_type, implementation, routing):
    for found in ranks.run(2, dispatch_case, model_type, implementation, routing):
        for name, (got, expected) in found.items():
            assert relative(got, expected, floor=1e-2) < 1e-5, name


def batches_case() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """On a rank: what batched experts make of its tokens, of which the ranks have different numbers."""
    import torch.distributed as dist
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    from megasched.definition.small_models.small_models import small_config
    from megasched.layers.experts import _dispatch_batches

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(1)
    whole, mine = (Llama4TextExperts(small_config("llama4_text")) for _ in range(2))
    each, own = EXPERTS // size, slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    for name, parameter in whole.named_parameters():
        nn.init.normal_(parameter, std=0.2)
        setattr(mine, name, nn.Parameter(parameter.detach()[own].clone()))
    mine.num_experts = each
    states = [
        torch.randn(TOKENS + r, EXPERTS, 64, generator=torch.Generator().manual_seed(r)) for r in range(size)
    ]
    x = states[rank].clone().requires_grad_()
    got = _dispatch_batches(mine, EXPERTS, group, x.flatten(1)).view_as(x)
    got.square().sum().backward()

    rows = [state.clone().requires_grad_() for state in states]
    results = [whole(s.transpose(0, 1).flatten(0, 1)).view(EXPERTS, len(s), 64).transpose(0, 1) for s in rows]
    sum(result.square().sum() for result in results).backward()
    found = {"results": (got, results[rank]), "tokens": (x.grad, rows[rank].grad)}
    for name, parameter in mine.named_parameters():
        found[name] = parameter.grad, dict(whole.named_parameters())[name].grad[own]
    return {name: (a.detach(), b.detach()) for name, (a, b) in found.items()}


def test_batched_experts_of_ranks_with_other_numbers_of_tokens(ranks):
    for found in ranks.run(2, batches_case):
        for name, (got, expected) in found.items():
            assert relative(got, expected, floor=1e-2) < 1e-5, name
