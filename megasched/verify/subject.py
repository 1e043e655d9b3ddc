"""What stands for a model while it is verified: a small copy of it, or the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megasched.definition import load_config
from megasched.errors import ConfigError
from megasched.layout import Layout
from megasched.verify.shrink import LAYERS, TOKENS


@dataclass(frozen=True)
class Subject:
    """A folder with config and perhaps weights.

    Attributes:
        model: what the architecture is called.
        layers: that it has.
        vocabulary: tokens that it knows.
        tokens: half-open range that batches are drawn from; None for what Megatron's mock data has.
        random_init: it has no weights of its own.
    """

    folder: str
    model: str
    layers: int
    vocabulary: int
    tokens: tuple[int, int] | None
    random_init: bool
    trust_remote_code: bool

    @property
    def small(self) -> bool:
        """Whether it is a copy that was made for this."""
        return self.tokens is not None


def make_subject(
    hf_model: str,
    target: Path,
    layout: Layout,
    *,
    full_size: bool,
    layers: int | None,
    overrides: Sequence[str],
    trust_remote_code: bool,
) -> Subject:
    """
    Args:
        target: where a small copy is written.
        layers: of the copy; enough for the layout by default.

    Raises:
        ConfigError: no small copy can be made, or options that do not go together.
    """
    from megasched.verify.small_models import copy_code, small_copy, write_model

    config = load_config(hf_model, overrides, trust_remote_code=trust_remote_code)
    name = type(config).__name__.removesuffix("Config")
    text = config.get_text_config(decoder=True)
    if full_size:
        if overrides or layers is not None:
            raise ConfigError(
                "--hf-override and --layers change a small copy; --full-size takes the model as it is"
            )
        kept = any(Path(hf_model).glob("*.safetensors"))
        depth = getattr(text, "num_hidden_layers", 0)
        return Subject(hf_model, name, depth, text.vocab_size, None, not kept, trust_remote_code)
    depth = layers or max(LAYERS, layout.pp * layout.vpp)
    small = small_copy(config, layers=depth)
    target.mkdir()
    copy_code(hf_model, target, trust_remote_code)
    write_model(small, target, trust_remote_code=trust_remote_code)
    vocabulary = small.get_text_config(decoder=True).vocab_size
    return Subject(str(target), name, depth, vocabulary, TOKENS, False, trust_remote_code)
