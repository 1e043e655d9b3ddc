"""Lists the private names of transformers that megasched uses, each with the reason.

Public names stand at the top of ``transformers``; any other may move in a release. ``megasched doctor`` says which
of them the installed transformers lacks, and tests keep the table complete.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megasched.reading.files import Expected, read_text

# Names that several files of ours use.
ATTENTION = "_attn_implementation"  # of a config: the name by which attention is called
EXPERTS = "_experts_implementation"  # of a config, the same
INIT_WEIGHTS = "_init_weights"  # of a model
MODEL_NAME = "_name_or_path"  # of a config that is a dict; `name_or_path` of an object is public
PACKED = "transformers.masking_utils:find_packed_sequence_indices"

_CONFIG = "transformers.configuration_utils:PreTrainedConfig"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_LOADING, _MOE = "transformers.core_model_loading", "transformers.integrations.moe"
_IN_FLOAT32 = "says which tensors of a class stay in float32 where it is loaded in half precision"
_LAYOUT = "belongs to how files' tensors become a definition's; in public, whole models are loaded"

# ``module``, ``module:name`` or ``module:Class.name`` -> the reason, which goes on from "which".
NAMES = {
    f"{_CONFIG}.{ATTENTION}": "says by what name attention is called; set_attn_implementation() refuses some",
    f"{_CONFIG}.{EXPERTS}": "says whether experts run in their grouped form, and nothing public does",
    f"{_CONFIG}.{MODEL_NAME}": "names a config's folder, which is no difference between two configs",
    f"{_MODEL}.{INIT_WEIGHTS}": "gives one module its first values; init_weights() is for a whole model",
    f"{_MODEL}._initialize_weights": "calls the same, and computes nothing in a run where a class has its own",
    f"{_MODEL}._from_config": "makes a model of a given class in another dtype; Auto classes choose the class",
    f"{_MODEL}._keep_in_fp32_modules": _IN_FLOAT32,
    f"{_MODEL}._keep_in_fp32_modules_strict": _IN_FLOAT32,
    f"{_MODEL}._keys_to_ignore_on_load_unexpected": "says which stored tensors a class does without",
    f"{_MODEL}._supports_sdpa": "is unset where a class reads additive masks alone, as eager attention gets them",
    "transformers.initialization": "has the functions that give first values, which tensors on meta do without",
    "transformers.initialization:_is_hf_initialized": "marks tensors whose first values stay",
    f"{_MOE}:_apply_gate": "is the gate of grouped experts, which runs as one kernel",
    f"{_MOE}:_grouped_linear": "computes the products of grouped experts as HF's own forward does",
    PACKED: "takes a jump in positions for a new sequence, and a context parallel rank's have one",
    "transformers.masking_utils:causal_mask_function": "tells a mask of causality alone from others",
    "transformers.utils.import_utils:is_fake_tensor": "has masks made for fake tensors that no run makes",
    "transformers.utils:TRANSFORMERS_DYNAMIC_MODULE_NAME": "is the package of code that comes with a model",
    "transformers.models.auto.modeling_auto:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": (
        "lists the types of causal language models; the public mapping imports each of them"
    ),
    "transformers.conversion_mapping:get_model_conversion_mapping": _LAYOUT,
    f"{_LOADING}:PrefixChange": _LAYOUT,
    f"{_LOADING}:dot_natural_key": _LAYOUT,
    f"{_LOADING}:rename_source_key": _LAYOUT,
    f"{_LOADING}:revert_weight_conversion": _LAYOUT,
    f"{_LOADING}:_weight_conversions": "holds the rules of a model that revert_weight_conversion() reverts",
}

_SOURCE = Expected("a source file of transformers")


@dataclass(frozen=True)
class PrivateName:
    """Describes a private name of transformers: why it is used, and whether the installed transformers has it."""

    name: str
    reason: str
    found: bool


def private_names() -> list[PrivateName]:
    """Looks each name up in the source of the installed transformers, and imports none of it."""
    spec = find_spec("transformers")
    top = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    written: dict[str, list[str]] = defaultdict(list)
    for name in NAMES:
        written[name.partition(":")[0]].append(name)
    found = {name for module, names in written.items() if top is not None for name in _found(top, module, names)}
    return [PrivateName(name, reason, name in found) for name, reason in NAMES.items()]


def missing_names() -> list[PrivateName]:
    """Returns the names that the installed transformers lacks."""
    return [name for name in private_names() if not name.found]


def _found(top: Path, module: str, names: list[str]) -> Iterator[str]:
    """Yields those of a module's names that its source has."""
    stem = top.joinpath(*module.split(".")[1:])
    path = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
    if path is None:
        return
    tree = ast.parse(read_text(path, _SOURCE))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    names_in = cache(_names_in)  # one class may be asked for many names
    for name in names:
        owner, _, last = name.partition(":")[2].rpartition(".")
        scope = classes.get(owner) if owner else tree
        if scope is not None and (not last or last in names_in(scope)):
            yield name


def _names_in(scope: ast.AST) -> set[str]:
    """Returns what is defined, imported, assigned, or asked for by ``getattr`` within a part of a source."""
    names = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            names |= {
                one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
    return names
