"""What stands for a model while it is verified: a small copy of it, or the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megasched.definition.build import load_config
from megasched.definition.small_models.shrink import LAYERS
from megasched.errors import ConfigError
from megasched.language.parallel_dims import Layout
from megasched.verify.dropout_masks import switch


@dataclass(frozen=True)
class Subject:
    """A folder with config and weights.

    Attributes:
        folder: with every dropout of the config off.
        model: what the architecture is called.
        layers: that it has.
        vocabulary: tokens that it knows.
        weights: file of safetensors by the names of parameters; None where they are a checkpoint of HF's.
        batches: file for what it is verified on.
        small: whether it is a copy that was made for this.
        notes: what was changed of the model, and what is not seen of it.
    """

    folder: str
    model: str
    layers: int
    vocabulary: int
    weights: str | None
    batches: str
    trust_remote_code: bool
    small: bool
    notes: tuple[str, ...] = ()


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
        target: where the folder is made.
        layers: of a small copy; enough for the layout by default.

    Raises:
        ConfigError: no small copy can be made, or options that do not go together.
    """
    from megasched.definition.small_models.small_models import copy_code, small_copy, write_model
    from megasched.verify.batches import unreached_windows

    config = load_config(hf_model, overrides, trust_remote_code=trust_remote_code)
    name = type(config).__name__.removesuffix("Config")
    depth, own, notes = layers or max(LAYERS, layout.pp * layout.vpp), False, []
    if full_size:
        if overrides or layers is not None:
            raise ConfigError(
                "--hf-override and --layers change a small copy; --full-size takes the model as it is"
            )
        depth, own = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0), _has_weights(hf_model)
        dropouts = switch(config, 0.0)
        notes += [f"dropouts are off on both sides: {', '.join(dropouts)}"] if dropouts else []
    else:
        config = small_copy(config, layers=depth)
    windows = unreached_windows(config, layout)
    notes += [f"no sequence is longer than {field} {value}" for field, value in windows.items()]
    target.mkdir()
    if own:
        _link(hf_model, target)
        config.save_pretrained(target)
    else:
        copy_code(hf_model, target, trust_remote_code)
        write_model(config, target, trust_remote_code=trust_remote_code)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    weights = None if own else str(target / "model.safetensors")
    batches = str(target.with_name("batches.safetensors"))
    found = Subject(str(target), name, depth, vocabulary, weights, batches, trust_remote_code, not full_size)
    return replace(found, notes=tuple(notes))


def _has_weights(hf_model: str) -> bool:
    return any(Path(hf_model).glob("*.safetensors"))


def _link(hf_model: str, target: Path) -> None:
    """Everything of a folder but its config, which gets its dropouts switched off."""
    for path in Path(hf_model).resolve().iterdir():
        if path.name != "config.json" and path.is_file():
            (target / path.name).symlink_to(path)
