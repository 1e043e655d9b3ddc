"""Compares token ids with the vocabulary: those of the data before the first step, those of each batch.

An embedding that is cut over TP gives zeros for an id that no rank has, and a loss that is cut has no logit for
such a label: the run would go on, with wrong numbers.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError
from megasched.files import write_whole
from megasched.layers.embedding import refuse_ids
from megasched.reading.files import MIB, Expected
from megasched.reading.idx_file import Idx, map_tokens, read_idx
from megasched.reading.json_file import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BLOCK = 16 * MIB
# Of a larger .bin file so many blocks are looked at, spread evenly; what lies between is met by `refuse_ids`.
BLOCKS = 256
FOUND = Expected("the largest id of a data set", most=MIB)


@dataclass(frozen=True)
class Range:
    """Holds the range of the ids in a .bin file, or in a sample of it.

    Attributes:
        size, changed: size of the file in bytes, and when it was changed, in nanoseconds since the epoch.
        smallest, largest: ids.
        smallest_at, largest_at: byte offsets where they stand first.
    """

    size: int
    changed: int
    smallest: int
    largest: int
    smallest_at: int
    largest_at: int


def vocabulary_of(config: PretrainedConfig) -> int | None:
    """Returns the number of ids that the model has; None for a model that reads no text."""
    found = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    return found if isinstance(found, int) else None


def check_data(prefix: str, vocabulary: int | None, cache: str | None) -> None:
    """Checks a data set of Megatron's, once: the range of its ids is kept in the folder of caches.

    Args:
        prefix: path of ``.bin`` and ``.idx`` without these endings.
        vocabulary: size of the model's vocabulary; None: the index alone is looked at.
        cache: ``--data-cache-path``; beside the data, if not given.

    Raises:
        ConfigError: a file is missing, the index is damaged, or an id is outside the vocabulary; says which file
            and document.
    """
    missing = [name for name in (f"{prefix}.bin", f"{prefix}.idx") if not Path(name).is_file()]
    if missing:
        raise ConfigError(f"no data at {prefix}: {' and '.join(missing)} missing")
    path = Path(f"{prefix}.bin")
    status = path.stat()
    idx = read_idx(f"{prefix}.idx", status.st_size)
    if vocabulary is None or not idx.dtype.startswith(("int", "uint")):
        return
    found = _known(path, idx, status, cache)
    for id_, at in ((found.largest, found.largest_at), (found.smallest, found.smallest_at)):
        if not 0 <= id_ < vocabulary:
            raise ConfigError(
                f"{path}: document {idx.document_at(at)} has the token id {id_}, and the model's vocabulary ends "
                f"with {vocabulary - 1}: the data were made with the tokenizer of another model"
            )


def _known(path: Path, idx: Idx, status: os.stat_result, cache: str | None) -> Range:
    """Returns the range from the cache, if it is of this very file; else finds it, and keeps it if possible."""
    # Data sets of several folders may have one name.
    name = f"{path.stem}-{sha256(os.fsencode(path.absolute())).hexdigest()[:16]}-ids.json"
    kept = (Path(cache) if cache else path.parent / "cache") / name
    form = dict.fromkeys(Range.__dataclass_fields__, int)
    with suppress(ConfigError):  # not there, or damaged: it is made anew
        known = Range(**{key: read_json(kept, FOUND, form)[key] for key in form})
        if (known.size, known.changed) == (status.st_size, status.st_mtime_ns):
            return known
    found = _range(path, idx, status)
    with suppress(OSError):  # the folder of the data may be one that is only read
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, [json.dumps(asdict(found)), "\n"])
    return found


def _range(path: Path, idx: Idx, status: os.stat_result) -> Range:
    import numpy

    itemsize = numpy.dtype(idx.dtype).itemsize
    count = status.st_size // itemsize
    smallest = largest = (0, 0)
    if count:
        ids = map_tokens(path, idx, count)
        length = BLOCK // itemsize
        blocks = -(-count // length)
        for block in numpy.unique(numpy.linspace(0, blocks - 1, min(blocks, BLOCKS)).astype(int)).tolist():
            part = ids[block * length : (block + 1) * length]
            low, high = int(part.argmin()), int(part.argmax())
            smallest = min(smallest, (int(part[low]), (block * length + low) * itemsize))
            if int(part[high]) > largest[0]:
                largest = int(part[high]), (block * length + high) * itemsize
    return Range(status.st_size, status.st_mtime_ns, smallest[0], largest[0], smallest[1], largest[1])


def checked_ids(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Checks the ids and labels that this stage has; a hook before the forward of a ``ScheduledModel``."""
    import torch

    vocabulary = vocabulary_of(module.definition.config)
    if vocabulary is None:
        return
    ids = named.get("input_ids", given[0] if given else None)
    if isinstance(ids, torch.Tensor):
        refuse_ids("input_ids", ids, vocabulary, below_zero=True)
    labels = named.get("labels")
    if isinstance(labels, torch.Tensor) and labels.dim() > 1:  # else classes of images
        refuse_ids("labels", labels, vocabulary, below_zero=False)
