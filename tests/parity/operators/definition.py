"""A definition of one's own, as small as can be: an operator stands between columns and rows, or decides about
what passes there.

What the columns give to the tokens 0, 1, 2, ... is what a sample of torch's database of operators has, so that an
operator gets what it is made for: a matrix that can be decomposed, numbers in its domain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from megasched.definition.build import init_empty_weights

BATCH = 2
BLOCK = "layers.0.mlp"
MOST_RESULTS = 3  # of an operator, of which each has a row linear

# Its results are what goes on; or they decide about that, and what it took goes on.
Form = Literal["between", "gate"]
# Each element of the result says whether one passes; it scales what passes; its mean does so; or it is a number.
Gate = Literal["elements", "scales", "mean", "number"]


@dataclass(frozen=True)
class Call:
    """A call of an operator, and what is done around it; no tensors, so that a definition can be copied.

    Attributes:
        values: arguments, flattened; None where a tensor stands.
        main: position of the tensor that the first column gives.
        columns: positions of all that columns give; ``main`` is the first.
        shape: of these.
        dim: along which they are cut where the columns are.
        direct: the operator takes what the columns give [b, s, f] as it is, or flattened [b*s, f]; else as many
            tokens as the sample's shape has in front of ``dim``.
        gate: how the operator's first result decides.
        threshold: of a gate that lets pass what is larger.
    """

    function: Callable[..., Any]
    values: tuple[Any, ...]
    spec: pytree.TreeSpec
    columns: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int
    form: Form
    direct: bool = False
    gate: Gate = "mean"
    threshold: float = 0.0

    @property
    def rows(self) -> int:
        """Tokens of which the operator takes the features."""
        return prod(self.shape[: self.dim])

    @property
    def features(self) -> int:
        return prod(self.shape[self.dim :])

    def taken(self, column: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """What the operator takes of a column's output [b, s, f].

        Args:
            places: 0 to ``rows`` - 1.
        """
        if self.direct:
            return column if len(self.shape) == 3 else column.flatten(0, 1)
        tokens = column.flatten(0, 1)
        chosen = tokens[places % tokens.shape[0]]
        return chosen.view(*self.shape[: self.dim], -1, *self.shape[self.dim + 1 :])

    def results(self, given: Sequence[torch.Tensor], constants: dict[int, torch.Tensor]) -> list[Any]:
        """What the operator gives, flattened."""
        values = list(self.values)
        for index, tensor in [*constants.items(), *zip(self.columns, given, strict=True)]:
            values[index] = tensor
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return pytree.tree_leaves(self.function(*args, **kwargs))

    def passed(self, given: Sequence[torch.Tensor], constants: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """What goes to the row linears, each with its features in the last dimension."""
        if self.form == "between":
            found = [_real(value) for value in self.results(given, constants) if _has_numbers(value)]
        else:
            x = given[0]
            found = [self._let_pass(x, self.results([x.clone(), *given[1:]], constants)[0])]
        return [self._features_last(tensor).to(given[0].dtype) for tensor in found[:MOST_RESULTS]]

    def _features_last(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return tensor.reshape(1)
        alike = not self.direct and tensor.dim() == len(self.shape)
        return tensor.movedim(self.dim, -1) if alike else tensor

    def _let_pass(self, x: torch.Tensor, result: Any) -> torch.Tensor:
        if self.gate == "number":
            return x * (1.5 if result else 0.5)
        value = _real(result)
        if self.gate == "elements":
            return torch.where(value > self.threshold, x, 0.5 * x)
        value = value.to(x.dtype)
        return x * (1 + torch.tanh(value if self.gate == "scales" else value.mean()))

    def with_gate(self, x: torch.Tensor, result: Any) -> Call:
        """With the gate that suits the operator's first result.

        Args:
            x: what is to pass.
        """
        if not isinstance(result, torch.Tensor):
            return replace(self, gate="number")
        value = _real(result)
        if value.shape == x.shape:
            return replace(self, gate="elements", threshold=_between_values(value))
        scales = value.dim() <= x.dim() and all(
            one in (1, other) for one, other in zip(reversed(value.shape), reversed(x.shape), strict=False)
        )
        return replace(self, gate="scales" if scales else "mean")


def _between_values(values: torch.Tensor) -> float:
    """A number that is as far from all values as one can be that stands between them: rounding changes no gate."""
    ordered = values.double().flatten().sort().values
    ordered = ordered[ordered.isfinite()]
    if len(ordered) < 2:
        return 0.0
    place = int(ordered.diff().argmax())
    return float(ordered[place : place + 2].mean())


def _has_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _real(value: torch.Tensor) -> torch.Tensor:
    return value.real + value.imag if value.is_complex() else value


class OperatorConfig(PreTrainedConfig):
    model_type = "operator_of_a_test"
    vocab_size: int = 8
    hidden_size: int = 8
    num_hidden_layers: int = 1
    num_attention_heads: int = 2


class Block(nn.Module):
    """[b, s, h] -> [b, s, h].

    Args:
        widths: features of what goes to each row linear.
        constants: the operator's other tensors, by their positions.
    """

    def __init__(self, hidden: int, call: Call, widths: Sequence[int], constants: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.call, self.positions = call, tuple(constants)
        self.ups = nn.ModuleList(nn.Linear(hidden, call.features) for _ in call.columns)
        self.downs = nn.ModuleList(nn.Linear(width, hidden) for width in widths)
        self.register_buffer("places", torch.arange(call.rows))
        for index, tensor in constants.items():
            self.register_buffer(f"given_{index}", tensor.clone())

    def given(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """What the operator takes of the columns."""
        return [self.call.taken(up(hidden), self.places) for up in self.ups]

    def constants(self) -> dict[int, torch.Tensor]:
        return {index: getattr(self, f"given_{index}") for index in self.positions}

    def passed(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return self.call.passed(self.given(hidden), self.constants())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        for down, tensor in zip(self.downs, self.passed(hidden_states), strict=True):
            out = down(tensor)
            if out.numel() == result.numel() and self.call.direct:
                result = result + out.view_as(result)
                continue
            out = out.flatten(0, -2) if out.dim() > 1 else out[None]
            each = torch.arange(1, out.shape[0] + 1, dtype=out.dtype, device=out.device)
            result = result + (out * each[:, None]).sum(0) / each.sum()
        return result


class Layer(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.mlp = block

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.mlp(hidden_states)


class OperatorModel(PreTrainedModel):
    config_class = OperatorConfig
    main_input_name = "input_ids"

    def __init__(
        self, config: OperatorConfig, call: Call, widths: Sequence[int], constants: dict[int, torch.Tensor]
    ) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(Block(config.hidden_size, call, widths, constants))])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, use_cache: bool = False
    ) -> CausalLMOutput:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


@dataclass(frozen=True)
class Model:
    """One case's definition, and the batch.

    Attributes:
        state: values of parameters and buffers.
        in_16_bits: something is computed in 16 bits, and so are gradients.
    """

    config: OperatorConfig
    call: Call
    widths: tuple[int, ...]
    constants: dict[int, torch.Tensor]
    state: dict[str, torch.Tensor]
    ids: torch.Tensor
    labels: torch.Tensor
    in_16_bits: bool

    def plain(self, dtype: torch.dtype = torch.float32) -> OperatorModel:
        """With its values."""
        model = OperatorModel(self.config, self.call, self.widths, self.constants)
        model.load_state_dict(self.state)
        return model.to(dtype).train()

    def on_meta(self, dtype: torch.dtype = torch.float32) -> OperatorModel:
        """As ``build_definition`` makes definitions."""
        with init_empty_weights():
            return OperatorModel(self.config, self.call, self.widths, self.constants).to(dtype).train()


def make_model(call: Call, tensors: dict[int, torch.Tensor]) -> Model:
    """A model in which the operator gets a sample's tensors.

    Args:
        tensors: all of the sample, by their positions.
    """
    generator = torch.Generator().manual_seed(5)
    tokens = max(8, -(-call.rows // 8) * 8)
    hidden = max(8, tokens)
    constants = {index: tensor for index, tensor in tensors.items() if index not in call.columns}
    config = OperatorConfig(vocab_size=tokens, hidden_size=hidden)
    embedding = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))[0][:tokens]
    state = {"embed.weight": embedding, f"{BLOCK}.places": torch.arange(call.rows)}
    state["lm_head.weight"] = torch.randn(tokens, hidden, generator=generator)
    for number, index in enumerate(call.columns):
        wanted = tensors[index].reshape(-1, call.features)
        wanted = wanted[torch.arange(tokens) % len(wanted)]
        bias = torch.randn(call.features, generator=generator) / 4
        state[f"{BLOCK}.ups.{number}.weight"] = (wanted - bias).T @ embedding
        state[f"{BLOCK}.ups.{number}.bias"] = bias
    state |= {f"{BLOCK}.given_{index}": tensor for index, tensor in constants.items()}
    ids = torch.arange(tokens).view(BATCH, -1)
    labels = torch.randint(tokens, ids.shape, generator=generator)
    first = OperatorModel(config, call, (), constants)
    first.load_state_dict(state)
    block, embedded = first.layers[0].mlp, first.embed(ids)
    with torch.no_grad():
        given = block.given(embedded)
        results = call.results([tensor.clone() for tensor in given], block.constants())
        if call.form == "gate":
            block.call = call = call.with_gate(given[0], results[0])
        passed = block.passed(embedded)
    for number, tensor in enumerate(passed):
        weight = torch.randn(hidden, tensor.shape[-1], generator=generator)
        state[f"{BLOCK}.downs.{number}.weight"] = weight / (tensor.abs().max() * tensor.shape[-1] + 1e-3)
        state[f"{BLOCK}.downs.{number}.bias"] = torch.randn(hidden, generator=generator) / 4
    widths = tuple(tensor.shape[-1] for tensor in passed)
    in_16_bits = any(_has_numbers(result) and result.element_size() == 2 for result in results)
    return Model(config, call, widths, constants, state, ids, labels, in_16_bits)
