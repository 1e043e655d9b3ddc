"""Defines specs of how a definition's decoder layer, attention, MLP and experts are built.

Megatron's own modules are built and filled from these specs, so that they can replace the definition's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


@dataclass(frozen=True)
class ExpertSpec:
    """Describes the computation of one expert, and HF's layout of the weights of all experts.

    See ``use_experts_implementation`` in transformers/integrations/moe.py.

    Attributes:
        activation: SiLU of a gate; squared ReLU without a gate; or ``x * sigmoid(1.702 x)`` of a gate. Megatron's
            flags have these names.
        biased: linears have biases: ``gate_up_proj_bias`` [experts, 2 f], ``down_proj_bias`` [experts, h]; the
            router has one, too.
        transposed: weights are stored as [experts, in, out].
        interleaved: features of gate and up alternate.
        limit: upper bound of gates, and bound on both sides of their factors (the up projection); None: no clamp.
        offset: added to the factors of gates (the up projection).
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
        """Maps the name of Megatron's parameter of one expert to the name of HF's parameter of all experts."""
        weights = {"linear_fc1": "gate_up_proj" if self.gated else "up_proj", "linear_fc2": "down_proj"}
        found = {f"{linear}.weight": name for linear, name in weights.items()}
        if self.biased:
            found |= {f"{linear}.bias": f"{name}_bias" for linear, name in weights.items()}
        return found


@dataclass(frozen=True)
class MoeSpec:
    """Describes experts in place of an MLP; a router chooses them by scores that it computes in float32.

    Paths are relative to the layer.

    Attributes:
        router: module with the router's ``weight`` [experts, h].
        experts: module in HF's form of experts (``megasched.definition.experts``): ``gate_up_proj``
            [experts, 2 f, h], or ``up_proj`` [experts, f, h] without gates, and ``down_proj`` [experts, h, f]. Its
            parent is the whole mixture, which maps [b, s, h] to the same shape, or ``flat``.
        expert: computation of each expert, and of the shared one, which has no biases.
        flat: the mixture returns [b * s, h].
        with_scores: the mixture returns a tuple of its output and the router's scores, which nobody reads.
        weighted_inputs: the weight of an expert multiplies its input, not its output; Megatron does that where a
            token has one expert.
        top_k: number of experts of each token.
        normalized: the weights of a token's experts are normalised to a sum of one; otherwise they are the scores.
            Those of sigmoids always are if a token has more than one expert.
        scores: function that makes scores of the logits.
        float32: the logits are computed in float32, too.
        correction: buffer [experts] that is added to the scores to choose experts, but not to their weights; empty
            for none.
        expert_groups, group_top_k: number of groups that experts are divided into, and how many of them a token's
            experts are chosen from: those with the largest sums of their best ``top_k / group_top_k`` scores.
            1: experts are chosen from all.
        scale: factor of the weights.
        shared: MLP that every token passes through in addition, with ``gate_proj`` (if there are gates),
            ``up_proj`` and ``down_proj``; empty for none.
        shared_gate: linear [1, h] whose sigmoid multiplies the output of ``shared``; empty for none.
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
    flat: bool = False
    weighted_inputs: bool = False

    @property
    def module(self) -> str:
        """Returns the path of the mixture as a whole."""
        return self.experts.rpartition(".")[0]

    @property
    def shared_inputs(self) -> tuple[str, ...]:
        """Returns the paths of the gate and up projections of ``shared``; empty if there is no shared expert."""
        names = ("gate_proj", "up_proj") if self.expert.gated else ("up_proj",)
        return tuple(f"{self.shared}.{name}" for name in names if self.shared)

    @property
    def shared_outputs(self) -> tuple[str, ...]:
        """Returns the path of the down projection of ``shared``; empty if there is no shared expert."""
        return (f"{self.shared}.down_proj",) if self.shared else ()


@dataclass(frozen=True)
class MlaSpec:
    """Describes attention whose q, k and v are projected from low-rank compressed forms (MLA, arXiv 2405.04434).

    Paths are relative to the layer.

    Attributes:
        kv_down: projection to the compressed form of k and v, and to the rotated part of k, which all heads share.
        kv_norm, kv_up: RMS norm of the compressed form; its projection to each head's unrotated part of k, then v.
        q_down, q_norm, q_up: the equivalents for q; the rotated part of each head comes last.
        q_lora_rank, kv_lora_rank: sizes of the compressed forms.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: sizes of a head: of the part of q and k without positions,
            of the part with rotary positions, and of v. Pairs that are rotated together are adjacent.
        eps: epsilon of both norms.
        rotary_factor: factor of the rotated parts.
        softmax_factor, softmax_mscale: ``factor`` and ``mscale_all_dim`` of YaRN (arXiv 2309.00071), by which the
            softmax is scaled; 1 and 0 without YaRN.
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
    """Describes Megatron's ``MLP``: ``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))``.

    Paths are relative to the layer.

    Attributes:
        gate, up, down: projections; with an empty gate, the activation is of up. All have biases or none.
        gate_up: one projection to gate and up, used if ``gate`` and ``up`` are empty.
        activation: function of the gate, or of up; ``gelu_tanh`` is the approximation with a hyperbolic tangent.
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
        """Returns the paths of the projections to gate and up: the packed one, both, or up alone."""
        if self.gate_up:
            return (self.gate_up,)
        return (self.gate, self.up) if self.gate else (self.up,)


@dataclass(frozen=True)
class AttentionSpec:
    """Describes Megatron's ``SelfAttention``: causal attention of the hidden state to itself.

    Paths are relative to the layer.

    Attributes:
        heads, kv_heads, head_dim: number of attention heads, number of KV heads, and size of a head.
        normalization: kind of all norms, of heads and of the layer (``LayerSpec``), with weights; biases are
            optional.
        zero_centered: norms store their weights minus 1.
        eps: epsilon of norms.
        q, k, v, out: projections. Either q, k and v all have biases and ``out`` may have one, or none has.
        qkv: one projection to q, k and v, used instead of ``q``, ``k`` and ``v``; empty for none.
        by_heads: in ``qkv``, q, k and v of a head are adjacent, as in Megatron; otherwise all of q comes first.
        gated: for each head, ``q`` computes q and then a gate, whose sigmoid multiplies the output of attention.
        q_norm, k_norm: norms of each head of q and k; empty for none.
        softmax_scale: factor of the products of q and k; None: ``head_dim ** -0.5``.
        dropout, out_dropout: probabilities of dropout: of the attention weights; of the output of the definition's
            module, which Megatron applies where it adds the output to the hidden state.
        rotary: path in the model of the module whose frequencies give the angles; empty: no rotary positions.
        frequencies: for each layer, the buffer of ``rotary`` with its frequencies; empty: ``inv_freq`` for all.
        interleaved: neighbouring features are rotated as a pair; otherwise features half the rotated size apart.
        rotary_factor: factor of cosine and sine (YaRN, arXiv 2309.00071).
        rotated: for each layer, whether it has rotary positions; empty: all layers have.
        windows: for each layer, how many tokens a token attends to, itself included (None: all); empty: all layers
            attend to all.
        sinks: parameter [heads] with the logits of an extra place without a value, which all tokens attend to;
            empty for none.
        mla: how q, k and v are projected from compressed forms; the other projections and the norms of heads are
            then ignored. None: they are not compressed.
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
        """Returns the path of the module that holds the whole attention."""
        return self.out.rpartition(".")[0]

    @property
    def norms(self) -> tuple[str, ...]:
        """Returns the paths of the norms of heads."""
        return tuple(name for name in (self.q_norm, self.k_norm) if name)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Returns the paths of the projections to q, k and v."""
        if self.mla is not None:
            return (self.mla.q_up, self.mla.kv_up)
        return (self.qkv,) if self.qkv else (self.q, self.k, self.v)

    @property
    def whole(self) -> tuple[str, ...]:
        """Returns the paths of the linears that are replicated over TP ranks."""
        return () if self.mla is None else (self.mla.q_down, self.mla.kv_down)


@dataclass(frozen=True)
class LayerSpec:
    """Describes a decoder layer that computes the same as Megatron's ``TransformerLayer``.

    It applies norm, attention, norm, and MLP or mixture (``MoeSpec``); the outputs of attention and of the MLP are
    added to the hidden state. Paths are relative to the layer.

    Attributes:
        attention: spec of the attention; its kind of norms holds for the layer's norms, too.
        mlp: spec of the MLP, for layers without a ``MoeSpec``.
        input_norm, mlp_norm: norms before attention and before the MLP; empty for none.
        attention_post_norm, mlp_post_norm: norms of the outputs of attention and MLP before they are added; empty
            for none.
        hidden_dropout: probability of dropout in the outputs that are added.
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
        """Returns the paths of the norms of the hidden state."""
        names = (self.input_norm, self.mlp_norm, self.attention_post_norm, self.mlp_post_norm)
        return tuple(name for name in names if name)
