"""Private names of transformers in the product, by its source: what a release may move without a word.

    python -m tests.house.private_names

prints each with its sites. Private is what does not stand at the top of ``transformers``: a name that is imported
from one of its modules, or such a module, also in a string; and an attribute that begins with an underscore and is
neither ours nor another package's (``OTHERS``), or a string of that form that is a word of transformers' source.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megasched.transformers_names import NAMES
from tests.house import survey

TABLE = "megasched/transformers_names.py"
# Underscored names of Python, torch, Megatron and files' layouts: one that is not transformers' is added here.
OTHERS = frozenset(
    (
        *(
            "_asdict",
            "_callmethod",
            "_exit",
            "_getframe",
            "_make",
            "_replace",
            "_Unpickler",
            "_actions",
            "_option_string_actions",
        ),
        *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_IncompatibleKeys", "_version"),
        *("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks", "_call_impl"),
        *("_is_full_backward_hook", "_cdata", "_schema", "_ops", "_pytree", "_utils", "_get_layout", "_sleep"),
        *("_DisableTorchDispatch", "_DropoutNd", "_NormBase", "_ForceDispatchKeyGuard", "_TorchDispatchModeKey"),
        *("_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_current_graph_task_id"),
        *("_init_tp_mesh_device", "_active_ddp_module", "_set_params_and_buffers_to_ignore_for_model"),
        *("_dispatch_has_kernel_for_dispatch_key", "_dispatch_tls_local_exclude_set", "_get_dispatch_mode"),
        *("_dispatch_tls_local_include_set", "_grouped_mm", "_local_scalar_dense", "_log_softmax", "_unique2"),
        "_upsample_bilinear2d_aa",
        *(
            "_reshape_alias",
            "_scaled_mm",
            "_upsample_bilinear2d_aa",
            "_to_copy",
            "_unsafe_view",
            "_checkpoint_offset",
            "_extra_state",
        ),
        *(
            "_clear_sharding_prop_cache",
            "_disabled_torch_function_impl",
            "_local_tensor",
            "_make_wrapper_subclass",
        ),
        *("_CHECKPOINT_VERSION", "_LOADED_ITERATION", "_STARTUP_TIMESTAMPS", "_async_calls_queue"),
        "_build_optimizer_group_ranges",
        *("_get_field_docstrings", "_model_config", "_set_global_memory_buffer", "_yarn_concentration_factor"),
        *(
            "_set_main_param_and_optimizer_states",
            "_bias",
            "_blocks",
            "_scale_inv",
            "_scales",
            "_size",
            "_token_id",
        ),
    )
)
_WORD = re.compile(r"_[A-Za-z]\w*")
_DOTTED = re.compile(r"transformers(\.\w+)+(:[\w.]+)?|transformers_modules\.?")


def uses() -> dict[str, list[str]]:
    """Name -> sites, each ``path:line``. Of an attribute the name alone is seen, not whose it is."""
    found = defaultdict(list)
    for path, tree in survey.sources().items():
        for node in _of_the_table(tree) if path == TABLE else [tree]:
            for name, line in _uses_in(node):
                found[name].append(f"{path}:{line}")
    return {name: sorted(set(sites)) for name, sites in sorted(found.items())}


def rows_of(name: str) -> list[str]:
    """The rows of the table that a name of ``uses`` is."""
    return [row for row in NAMES if row == name or (name[0] == "_" and re.split("[:.]", row)[-1] == name)]


def _of_the_table(tree: ast.Module) -> Iterator[ast.AST]:
    """What the table's file offers to other files: the rest is the table."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id[0] != "_" and target.id != "NAMES":
            yield node


def _uses_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.name, node.lineno) for one in node.names if one.name.startswith("transformers."))
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("transformers."):
            private = [
                one.name for one in node.names if node.module != "transformers" or one.name not in _public()
            ]
            yield from ((f"{node.module}:{name}", node.lineno) for name in private)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "transformers":
                yield from [(f"transformers:{node.attr}", node.lineno)] if node.attr not in _public() else []
            elif _WORD.fullmatch(node.attr) and node.attr not in _not_theirs():
                yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and _is_theirs(node.value):
            yield node.value, node.lineno


def _is_theirs(value: object) -> bool:
    return isinstance(value, str) and (_DOTTED.fullmatch(value) is not None or value in _theirs())


@cache
def _public() -> frozenset[str]:
    """What stands at the top of transformers, but for its modules."""
    import transformers

    return frozenset(name for name in dir(transformers) if not (_folder() / f"{name}.py").exists())


@cache
def _not_theirs() -> frozenset[str]:
    """The names that our code defines, and those of other packages; what is in the table is transformers'."""
    names = set(OTHERS)
    for tree in survey.sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                names |= {node.attr} if ours else set()
    return frozenset(name for name in names if not rows_of(name))


@cache
def _theirs() -> frozenset[str]:
    """Underscored words of transformers' source, but for its models', that are nobody else's."""
    paths = [path for path in _folder().rglob("*.py") if "models" not in path.relative_to(_folder()).parts]
    return frozenset(word for path in paths for word in re.findall(r"\b_[A-Za-z]\w*", path.read_text())) - OTHERS


def _folder() -> Path:
    return Path(find_spec("transformers").origin).parent


if __name__ == "__main__":
    for found_name, found_sites in uses().items():
        print(f"{found_name}: {', '.join(found_sites)}")
