"""Every tensor in a nested structure, in the order in which pytree finds them."""

from collections import OrderedDict, namedtuple
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import CausalLMOutputWithPast

from megasched.analysis.recording.meta_call import tensors_in

Pair = namedtuple("Pair", ["first", "second"])

leaves = st.one_of(
    st.builds(torch.empty, st.integers(0, 3)),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=2),
    st.sampled_from([torch.float32, torch.device("meta"), slice(1), object()]),
)


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(CausalLMOutputWithPast, logits=inner, hidden_states=inner),
    )


@given(st.recursive(leaves, _around, max_leaves=8))
def test_it_finds_what_pytree_finds(value: Any) -> None:
    wanted = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    assert [id(tensor) for tensor in tensors_in(value)] == [id(tensor) for tensor in wanted]
