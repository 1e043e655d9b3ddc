"""Kimi Linear, MiMo-V2-Flash and others: only their experts are known, which are DeepSeek-V3's or similar."""

from dataclasses import replace

from megasched.model_adapters.families.deepseek import EXPERTS
from megasched.model_adapters.registry import Adapter

ADAPTER = [
    Adapter(model_types=("bailing_hybrid", "kimi_linear", "mimo_v2_flash"), moe=EXPERTS),
    Adapter(model_types=("axk2",), moe=replace(EXPERTS, best_of_group=0)),
    Adapter(model_types=("beam",), moe=replace(EXPERTS, scale="routed_scaling_factor")),
]
