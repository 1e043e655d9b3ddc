"""Checks whether a run computes with the config that its checkpoint was trained with.

Names and shapes of parameters say nothing of the base of a rotary embedding or the epsilon of a norm: a
``--hf-override`` that is forgotten on resume would go on with another model.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megasched.definition.config_file import Path as Field
from megasched.definition.config_file import config_or_none, quietly
from megasched.errors import CheckpointError
from megasched.reading.files import Expected
from megasched.reading.json_file import parse_json, read_json
from megasched.trainer.flags.position_limit import is_limit_alone
from megasched.transformers_names import MODEL_NAME
from megasched.weights.torch_dist.reader import HF_FILES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# They name files, classes, labels and ways to compute the same, or are for the first values of weights and for
# generation; `output_router_logits` is none of them: it adds to the loss.
NO_NUMBERS = {
    MODEL_NAME, "architectures", "auto_map", "transformers_version", "model_type",
    "dtype", "torch_dtype", "quantization_config", "initializer_range",
    "attn_implementation", "experts_implementation",
    "use_cache", "gradient_checkpointing", "chunk_size_feed_forward", "torchscript", "pretraining_tp",
    "output_attentions", "output_hidden_states", "return_dict", "use_return_dict",
    "keys_to_ignore_at_inference",
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class",
    "prefix",
    "bos_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id",
}  # fmt: skip
CONFIG = Expected("the JSON of an HF config", CheckpointError)
LIMIT = "max_position_embeddings"
_ABSENT = object()


class Difference(NamedTuple):
    """Describes a config field that differs between a checkpoint and a run.

    Attributes:
        field: its name, after the names of the parts that it is in.
        then, now: value in the checkpoint and in the run; ``_ABSENT`` where there is no such field.
    """

    field: Field
    then: Any
    now: Any

    def __str__(self) -> str:
        name = ".".join(self.field)
        then, now = (
            "nothing" if value is _ABSENT else json.dumps(value, default=str) for value in (self.then, self.now)
        )
        if self.field == ("model_type",):
            return f"{name}: {then} in the checkpoint, {now} in this run: --hf-model names another model"
        what = f"{name}: {then} in the checkpoint, {now} in this run"
        if self.then is _ABSENT:
            return what
        value = self.then if isinstance(self.then, str) else then
        return f"{what}: --hf-override {shlex.quote(f'{name}={value}')}"


def config_differences(checkpoint: Path, config: PretrainedConfig) -> list[Difference] | None:
    """Returns the fields that matter for training and differ between a checkpoint's config and a run's.

    The run's class makes both anew from what ``to_json_string`` writes, so that fields which it derives from
    others agree where those do.

    Args:
        checkpoint: folder of one checkpoint.
        config: config of the run; not changed.

    Returns:
        None if the checkpoint has no config.

    Raises:
        CheckpointError: the file of the config can't be read.
    """
    path = checkpoint / HF_FILES / "config.json"
    if not path.is_file():
        return None
    then = read_json(path, CONFIG, {})
    now = parse_json(config.to_json_string(use_diff=True))
    if then.get("model_type", now.get("model_type")) != now.get("model_type"):
        return [Difference(("model_type",), then["model_type"], now.get("model_type"))]
    with quietly():
        made = [config_or_none(config, file) for file in (then, now)]
    # There are classes that refuse what they have written: the files are compared then.
    whole = [parse_json(one.to_json_string(use_diff=False)) for one in made if one is not None]
    fields, limit_alone = whole if len(whole) == 2 else (then, now), is_limit_alone(config)
    return [
        difference
        for difference in _differences(*fields)
        if not NO_NUMBERS.intersection(difference.field) and not (limit_alone and difference.field[-1] == LIMIT)
    ]


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], part: Field = ()) -> Iterator[Difference]:
    for name in sorted({*then, *now}):
        one, other = then.get(name, _ABSENT), now.get(name, _ABSENT)
        # Of what has other fields, one can't be set without the rest.
        alike = (
            isinstance(one, dict)
            and isinstance(other, dict)
            and one.keys() - NO_NUMBERS == other.keys() - NO_NUMBERS
        )
        if alike:
            yield from _differences(one, other, (*part, name))
        elif one != other:
            yield Difference((*part, name), one, other)


def refuse_another_config(checkpoint: Path, config: PretrainedConfig) -> None:
    """Refuses to go on from a checkpoint that was trained with another config.

    Raises:
        CheckpointError: fields that training depends on are not those of the checkpoint.
    """
    found = config_differences(checkpoint, config)
    if found is None:
        print(
            f"megasched: {checkpoint} has no {HF_FILES}/config.json: whether this run's config is the one that it "
            "was trained with is not known"
        )
    elif found:
        title = f"{checkpoint}: it was trained with another config than this run's ({len(found)}):"
        remedy = (
            "with these values it would go on as another model. Say the same --hf-model and --hf-override as the "
            "run that wrote it, or begin anew from its weights (--finetune); where the change is meant, and the "
            f"run is to go on, write it into {HF_FILES}/config.json of the checkpoint"
        )
        raise CheckpointError("\n".join([title, *(f"    {one}" for one in found), f"  {remedy}"]))


def tell_of_another_config(checkpoint: Path, config: PretrainedConfig) -> None:
    """Prints how a checkpoint's config differs, for a run that begins anew from its weights.

    Another config may well be meant there, so nothing is refused.

    Raises:
        CheckpointError: the checkpoint's config can't be read.
    """
    found = config_differences(checkpoint, config)
    if found:
        print(f"megasched: {checkpoint} was trained with another config than this run's, which begins anew:")
        for one in found:
            print(f"    {one}")
