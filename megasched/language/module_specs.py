"""The specs say how a definition's decoder layer, attention, MLP and experts are put together, as Megatron's own
modules need it to stand for them.

A spec says how the modules of a definition are put together, so that Megatron's are made and filled alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


@dataclass(frozen=True)
class ExpertSpec:
    """An expert spec says what an expert computes, and how HF keeps all of them (``use_experts_implementation`` in
    transformers/integrations/moe.py).

    Attributes:
        activation: SiLU of a gate; the square of what is positive, without a gate; or ``x * sigmoid(1.702 x)`` of
            a gate. Megatron's flags have these names.
        biased: linears have biases: ``gate_up_proj_bias`` [experts, 2 f], ``down_proj_bias`` [experts, h]; and so
            has the router.
        transposed: weights are kept [experts, in, out].
        interleaved: the features of gate and up take turns.
        limit: at which gates are clamped from above, and what they are multiplied with on both sides; None: not.
        offset: added to what gates are multiplied with.
    """

    activation: Literal["swiglu", "squared_relu", "quick_geglu"] = "swiglu"
    biased: bool = False
    transposed: bool = False
    interleaved: bool = False
    limit: float | None = None
    offset: float = 0.0

    @property
    def gated(self) -> bool:
        return self.activation != "squared_relu"

    @property
    def stacked(self) -> Mapping[str, str]:
        """Maps Megatron's parameter of an expert to HF's of all experts."""
        weights = {"linear_fc1": "gate_up_proj" if self.gated else "up_proj", "linear_fc2": "down_proj"}
        found = {f"{linear}.weight": name for linear, name in weights.items()}
        if self.biased:
            found |= {f"{linear}.bias": f"{name}_bias" for linear, name in weights.items()}
        return found


@dataclass(frozen=True)
class MoeSpec:
    """A MoE spec describes experts in place of an MLP; a router chooses by scores of its logits, in float32.

    Paths are relative to the layer.

    Attributes:
        router: module with the router's ``weight`` [experts, h].
        experts: module in HF's form of experts (``megasched.definition.experts``): ``gate_up_proj``
            [experts, 2 f, h], or ``up_proj`` [experts, f, h] without gates, and ``down_proj`` [experts, h, f]. The
            module that it is in is the mixture as a whole: of [b, s, h] it makes [b, s, h].
        expert: what each of them computes, and the shared one, but for biases.
        with_scores: the mixture returns that and the router's scores, which nobody reads.
        top_k: experts of each token.
        normalized: the weights of a token's experts add up to one; otherwise they are the scores. Of sigmoids they
            do where more than one is chosen.
        scores: what is made of the logits.
        float32: the logits are computed in float32, too.
        correction: buffer [experts] that is added to scores where experts are chosen, and not in their weights;
            empty for none.
        expert_groups, group_top_k: experts lie in so many groups, and are chosen from those ``group_top_k`` that
            have the largest sums of their best ``top_k / group_top_k`` scores; 1: from all.
        scale: of the weights.
        shared: MLP that every token goes through beside, of ``gate_proj`` (if there are gates), ``up_proj`` and
            ``down_proj``; empty for none.
        shared_gate: linear [1, h] whose sigmoid ``shared``'s output is multiplied with; empty for none.
    """

    router: str
    experts: str
    top_k: int
    normalized: bool
    scores: Literal["softmax", "sigmoid"] = "softmax"
    float32: bool = False
    correction: str = ""
    expert_groups: int = 1
    group_top_k: int = 1
    scale: float = 1.0
    shared: str = ""
    shared_gate: str = ""
    expert: ExpertSpec = ExpertSpec()
    with_scores: bool = False

    @property
    def module(self) -> str:
        """The path of the mixture as a whole."""
        return self.experts.rpartition(".")[0]

    @property
    def shared_inputs(self) -> tuple[str, ...]:
        """The paths of the projections of ``shared`` to gate and up, if there is one."""
        names = ("gate_proj", "up_proj") if self.expert.gated else ("up_proj",)
        return tuple(f"{self.shared}.{name}" for name in names if self.shared)

    @property
    def shared_outputs(self) -> tuple[str, ...]:
        """The path of the projection back of ``shared``, if there is one."""
        return (f"{self.shared}.down_proj",) if self.shared else ()


@dataclass(frozen=True)
class MlaSpec:
    """An MLA spec describes attention whose q, k and v are made of compressed forms (arXiv 2405.04434). Paths are
    relative to the layer.

    Attributes:
        kv_down: projection to the compressed form of k and v, and to the rotated part of k, which all heads share.
        kv_norm, kv_up: RMS norm of the compressed form; projection of it to each head's rest of k, then its v.
        q_down, q_norm, q_up: the same for q, of which each head's rotated part comes last.
        q_lora_rank, kv_lora_rank: sizes of the compressed forms.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: sizes of a head: what of q and k has no positions, what
            has, and v. Pairs that are rotated together lie side by side.
        eps: of both norms.
        rotary_factor: of the rotated parts.
        softmax_factor, softmax_mscale: ``factor`` and ``mscale_all_dim`` of YaRN (arXiv 2309.00071), by which the
            softmax is scaled; 1 and 0 without.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    eps: float = 1e-6
    rotary_factor: float = 1.0
    softmax_factor: float = 1.0
    softmax_mscale: float = 0.0
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"
    q_down: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"


@dataclass(frozen=True)
class MlpSpec:
    """An MLP spec describes ``MLP`` of Megatron: ``down(activation(gate(x)) * up(x))``, or that without a gate.

    Paths are relative to the layer.

    Attributes:
        gate, up, down: the projections; an empty gate: the activation is of up. Biases on all or on none.
        gate_up: gate and up in one projection, where these two are empty.
        activation: of the gate, or of up; ``gelu_tanh`` is the approximation with a hyperbolic tangent.
    """

    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate_up: str = ""
    activation: Activation = "silu"

    @property
    def gated(self) -> bool:
        return bool(self.gate or self.gate_up)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The paths of the projections to gate and up, or to what there is of them."""
        if self.gate_up:
            return (self.gate_up,)
        return (self.gate, self.up) if self.gate else (self.up,)


@dataclass(frozen=True)
class AttentionSpec:
    """An attention spec describes Megatron's ``SelfAttention``: causal attention of the hidden state to itself.

    Paths are relative to the layer.

    Attributes:
        heads, kv_heads, head_dim: attention heads, heads of k and v, and their size.
        normalization: which kind norms are, with weights, and biases or none: of heads, and of the layer in a
            ``LayerSpec``.
        zero_centered: weights of norms are kept less 1.
        eps: of norms.
        q, k, v, out: projections; biases on all of q, k and v or on none, and then perhaps on out.
        qkv: q, k and v in one projection, which counts instead; empty: there is none.
        by_heads: in ``qkv``, the q, k and v of a head lie together, as Megatron has them; else first all of q.
        gated: for each head, ``q`` gives its q and then a gate; what attention gives is multiplied with the gate's
            sigmoid.
        q_norm, k_norm: norms of each head of q and k; empty for none.
        softmax_scale: what products of q and k are multiplied with; None: ``head_dim`` to the power of -1/2.
        dropout, out_dropout: probabilities: of attention; of what the definition's module returns, which Megatron
            has where that is added to the hidden state.
        rotary: path in the model of the module whose frequencies the angles are made of; empty: attention has no
            positions.
        frequencies: buffer of ``rotary`` that has those of each layer; empty: all ``inv_freq``.
        interleaved: neighbours are rotated together; else those half of what is rotated apart.
        rotary_factor: of cosine and sine (YaRN, arXiv 2309.00071).
        rotated: whether each layer has rotary positions; empty: all have.
        windows: how many tokens a token of each layer attends to, itself included (None: all); empty: all layers
            attend to all.
        sinks: parameter [heads]: logits of a place without a value that all tokens attend to; empty for none.
        mla: how q, k and v are made where they are compressed first; the other projections and the norms of
            heads do not count then. None: they are not.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-5
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    zero_centered: bool = False
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    qkv: str = ""
    by_heads: bool = False
    gated: bool = False
    q_norm: str = ""
    k_norm: str = ""
    softmax_scale: float | None = None
    dropout: float = 0.0
    out_dropout: float = 0.0
    rotary: str = "model.rotary_emb"
    frequencies: tuple[str, ...] = ()
    interleaved: bool = False
    rotary_factor: float = 1.0
    rotated: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()
    sinks: str = ""
    mla: MlaSpec | None = None

    @property
    def module(self) -> str:
        """The path of the module that all of the attention is in."""
        return self.out.rpartition(".")[0]

    @property
    def norms(self) -> tuple[str, ...]:
        """The paths of the norms of heads."""
        return tuple(name for name in (self.q_norm, self.k_norm) if name)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The paths of the projections to q, k and v."""
        if self.mla is not None:
            return (self.mla.q_up, self.mla.kv_up)
        return (self.qkv,) if self.qkv else (self.q, self.k, self.v)

    @property
    def whole(self) -> tuple[str, ...]:
        """The paths of the linears that every TP rank has whole."""
        return () if self.mla is None else (self.mla.q_down, self.mla.kv_down)


@dataclass(frozen=True)
class LayerSpec:
    """A layer spec describes a decoder layer that computes what Megatron's ``TransformerLayer`` does: norm,
    attention, norm, MLP (in its place some have a ``MoeSpec``), either added to the hidden state. Paths are
    relative to the layer.

    Attributes:
        attention: which speaks of the layer's norms, too.
        mlp: where there is no ``MoeSpec``.
        input_norm, mlp_norm: norms before attention and before the MLP; empty: there are none.
        attention_post_norm, mlp_post_norm: of what either gives, before it is added; empty for none.
        hidden_dropout: probability of dropout in what is added.
    """

    attention: AttentionSpec
    mlp: MlpSpec = MlpSpec()
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    hidden_dropout: float = 0.0

    @property
    def norms(self) -> tuple[str, ...]:
        """The paths of the norms of the hidden state."""
        names = (self.input_norm, self.mlp_norm, self.attention_post_norm, self.mlp_post_norm)
        return tuple(name for name in names if name)
