"""Trees of arguments are those of PyTorch's pytrees, whichever of the two walks over them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten, tree_map

from psgrad.engine.transforms.trees import flatten, map_leaves, unflatten

Pair = namedtuple("Pair", ["left", "right"])
ZERO = torch.zeros(())

leaves = st.one_of(
    st.integers(),
    st.none(),
    st.booleans(),
    st.text(max_size=2),
    st.just(ZERO),
    st.just(torch.nn.Parameter(ZERO)),
)
trees = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), parts, max_size=3),
        st.dictionaries(st.text(max_size=2), parts, max_size=2).map(OrderedDict),
        st.tuples(parts, parts).map(lambda both: Pair(*both)),
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(trees, trees)
def test_tree_flatten_as_pytorch(tree: Any, other: Any) -> None:
    result, structure = flatten(tree)
    expected, spec = tree_flatten(tree)
    assert len(result) == len(expected) == structure.leaves
    assert all(x is y for x, y in zip(result, expected, strict=True))
    assert (flatten(other)[1] == structure) == (tree_flatten(other)[1] == spec)


@settings(max_examples=80, deadline=None)
@given(trees)
def test_tree_unflatten_as_pytorch(tree: Any) -> None:
    result, structure = flatten(tree)
    numbers = list(range(len(result)))
    count = iter(numbers)
    assert unflatten(numbers, structure) == tree_map(lambda _: next(count), tree)
    again = iter(numbers)
    mapped = map_leaves(lambda _: next(again), tree)
    assert mapped == unflatten(numbers, structure)
    assert type(mapped) is type(unflatten(numbers, structure))
