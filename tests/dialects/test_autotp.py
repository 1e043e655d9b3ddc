"""DeepSpeed's own tensor parallelism, AutoTP, at TP2: the table of docs/deepspeed.md, of eight families."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megasched
from megasched.dialects.deepspeed.engine import imported
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import BATCH, Steps, adamw, batches, beyond, gaps, one_process
from tests.dialects.test_zero import zero_config
from tests.lowering.models import auto, tiny_model
from tests.test_docs import ROOT

# Family -> its name on the page, and what AutoTP of DeepSpeed 0.19.8 says where it refuses.
FAMILIES = {
    "llama": ("Llama", ""),
    "qwen3": ("Qwen3", ""),
    "gpt_neox": ("GPT-NeoX", ""),
    "gemma2": ("Gemma 2", ""),
    "opt": ("OPT", ""),
    "gpt2": ("GPT-2", "AutoTP not supported for model"),
    "phi3": ("Phi-3", "unsupported partition style(s): ['rowwise_split_input']"),
    "mixtral": ("Mixtral", "unsupported partition style(s): ['moe_tp_experts', 'packed_colwise']"),
}


def numbers(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def by_autotp(family: str) -> tuple[Steps, int]:
    """Five steps under ZeRO-1, and how many numbers a rank holds of the parameters.

    Both ranks have the whole batch; the whole weights come to the first one alone.

    Raises:
        AssertionError, ValueError: as AutoTP refuses a model.
    """
    model = tiny_model(family)
    settings = zero_config(1, tensor_parallel={"autotp_size": 2}, train_micro_batch_size_per_gpu=BATCH)
    engine, *_ = imported().initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    losses, norms, held = [], [], numbers(engine.module)
    for ids in batches():
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        norms.append(float(engine.get_global_grad_norm()))
    weights = engine._replace_module_consolidated_state_dict()
    engine.destroy()
    return Steps(losses, norms, weights), held


def by_schedule(family: str) -> int:
    """How many numbers a rank holds under the default schedule."""
    sch = megasched.create_schedule(tiny_model(family))
    auto(sch)
    return numbers(megasched.build(sch))


def _found(family: str) -> dict[str, Any]:
    init_megatron(tp=2)
    imported().utils.groups._release_process_group_references()  # of the case before
    whole = numbers(tiny_model(family))
    found = {"schedule": by_schedule(family) / whole}
    try:
        steps, held = by_autotp(family)
    except (AssertionError, ValueError) as error:
        return {**found, "refused": str(error)}
    wanted = one_process(family)
    if torch.distributed.get_rank() == 0:
        steps.weights = {name: steps.weights[name] for name in wanted.weights}  # a tied head is there twice
    else:
        steps.weights = wanted.weights
    return {**found, "autotp": held / whole, "gaps": gaps(steps, wanted)}


def row(family: str, found: dict[str, float]) -> str:
    """The line of the page; of a vocabulary that TP does not divide the ranks hold different shares."""
    name, refusal = FAMILIES[family]
    theirs = f"refused: `{refusal}` | " if refusal else f"equal | {found['autotp']:.0%}"
    return f"| {name} | {theirs} | equal | {found['schedule']:.0%} |"


@pytest.mark.parametrize("family", FAMILIES)
def test_autotp_does_what_the_page_says(deepspeed_ranks: Any, family: str) -> None:
    page = (ROOT / "docs" / "deepspeed.md").read_text().splitlines()
    refusal = FAMILIES[family][1]
    every = deepspeed_ranks.run(2, _found, family)
    for found in every:
        assert ("refused" in found) == bool(refusal)
        assert refusal in found.get("refused", "")
        assert beyond(found.get("gaps", {})) == {}
    most = {key: max(found.get(key, 0.0) for found in every) for key in ("autotp", "schedule")}
    assert row(family, most) in page
