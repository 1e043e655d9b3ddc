"""Defines the data that describe an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Shape = Callable[[Any, int, int], tuple[int, ...]]


def of_tokens(config: Any, batch: int, length: int) -> tuple[int, ...]:
    """Returns the shape [b, s]."""
    return batch, length


def vocabulary(config: Any) -> tuple[int, str]:
    """Returns the size of the vocabulary and the field that holds it: ``Objective.classes`` for predicted tokens.

    Raises:
        AttributeError: the config has no vocabulary.
    """
    text = config.get_text_config(decoder=True)
    return text.vocab_size, f"{text.attribute_map.get('vocab_size', 'vocab_size')} = {text.vocab_size}"


@dataclass(frozen=True)
class Objective:
    """Describes the task that a model is trained on.

    The loss is the same for all: cross entropy of each label, over logits [..., classes], summed over the labels
    that the loss mask counts and divided by their number.

    Attributes:
        name: value of ``--objective``.
        script: bundled entry script that trains it, without ``.py``.
        auto_class: class of transformers that finds the HF class for a config, e.g. ``AutoModelForCausalLM``.
        model: name of such a model in messages.
        inputs: arguments of the forward, without labels -> dtype, e.g. ``int64``.
        shape, label_shape: (HF config, batch, length) -> shape of each input, and of the labels.
        classes: HF config -> number of classes of a label, and the field that holds it.
        constants: further arguments of every forward.
        sequence_length: HF config -> length of the sequences in the layers if the config fixes it, and the reason.
        small_copy: fields that a small copy of a model gets besides its sizes.
        predicts_next: whether a label is the token that comes next, so that the class may move labels by itself.
    """

    name: str
    script: str
    auto_class: str
    model: str
    inputs: Mapping[str, str]
    shape: Shape = of_tokens
    label_shape: Shape = of_tokens
    classes: Callable[[Any], tuple[int, str]] = vocabulary
    constants: Mapping[str, Any] = field(default_factory=dict)
    sequence_length: Callable[[Any], tuple[int, str] | None] = lambda config: None
    small_copy: Mapping[str, Any] = field(default_factory=dict)
    predicts_next: bool = False

    def trial_inputs(self, config: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
        """Returns arguments of a forward without labels: zeros on meta."""
        import torch

        shape = self.shape(config, batch, length)
        return {
            name: torch.zeros(shape, dtype=getattr(torch, dtype), device="meta")
            for name, dtype in self.inputs.items()
        }

    def trial(self, config: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
        """Returns arguments of a forward with labels (int64): zeros on meta."""
        import torch

        labels = torch.zeros(self.label_shape(config, batch, length), dtype=torch.long, device="meta")
        return {**self.trial_inputs(config, batch, length), "labels": labels}
