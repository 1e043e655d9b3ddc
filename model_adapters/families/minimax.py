"""MiniMax: Mixtral's experts at first; since M2 chosen by sigmoid scores and a correction."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, MoeFacts

ADAPTER = [
    Adapter(
        model_types=("minimax",),
        attention=AttentionFacts(one_window=True),
        moe=MoeFacts(normalized=True),
    ),
    Adapter(
        model_types=("minimax_m2",),
        moe=MoeFacts(scores="sigmoid", normalized=True, correction="e_score_correction_bias"),
    ),
]
