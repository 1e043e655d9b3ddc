"""Finds a model's embedding and head, and embeddings whose table can be sharded.

These are torch's, and subclasses' instances that only look up rows.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from megasched.definition.build import input_embedding
from megasched.definition.instances import calls_forward, real_tensors
from megasched.definition.undisturbed import undisturbed

if TYPE_CHECKING:
    import torch
    from torch import nn


def ends_of(definition: Any) -> tuple[str | None, str | None]:
    """Returns the paths of the embedding of tokens and of the head of an HF definition; None for one without.

    It is for the definition before replacements: HF looks for them by names, which a new module may lack.
    """
    paths: dict[Any, str] = {module: path for path, module in definition.named_modules()}
    return paths.get(input_embedding(definition)), paths.get(definition.get_output_embeddings())


def looks_up(module: nn.Module) -> bool:
    """Returns whether a module uses its table only through ``nn.Embedding``'s plain lookup, without extra options.

    HF subclasses ``nn.Embedding`` to scale or normalise the rows. An instance of such a class is called without
    its table: it may read the table only through ``super().forward``.
    """
    from torch import nn

    if not isinstance(module, nn.Embedding) or "forward" in vars(module) or set(module._parameters) != {"weight"}:
        return False
    if not calls_forward(module) or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return False
    return type(module).forward is nn.Embedding.forward or _reads_no_table(module)


def _reads_no_table(module: nn.Embedding) -> bool:
    import torch
    from torch import nn

    class Lookup(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.empty(*input.shape, self.embedding_dim, device="meta")

    class Unread(torch.Tensor):
        """Stands in for the table, and allows reading only its dtype and device, for computing scales."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in (torch.Tensor.dtype.__get__, torch.Tensor.device.__get__):
                raise TypeError("the table is read")
            return super().__torch_function__(func, types, args, kwargs or {})

    cls = type(module)
    alone = copy.copy(module)
    alone.__dict__ = {
        **vars(module),
        "_parameters": {"weight": torch.empty(0).as_subclass(Unread)},
        "_buffers": {name: held if held is None else held.to("meta") for name, held in module._buffers.items()},
        "_modules": {name: copy.deepcopy(child).to("meta") for name, child in module._modules.items()},
    }
    alone.__class__ = type(cls.__name__, (cls, Lookup), {"__module__": cls.__module__})
    try:
        with (
            undisturbed(alone),
            real_tensors(),
            torch.random.fork_rng(devices=[]),
            torch.device("meta"),
            torch.no_grad(),
        ):
            found = alone.forward(torch.zeros(2, 3, dtype=torch.long))
    except Exception:  # of whatever kind: the table is read, or it can't be called so
        return False
    return isinstance(found, torch.Tensor) and found.shape == (2, 3, module.embedding_dim)
