"""Arguments and results as PyTorch's pytrees. For plain tuples, lists and dicts this is ten times as fast as
PyTorch's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from psgrad.engine.transforms.private_torch import tree_flatten, tree_map, tree_unflatten

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


class Structure(NamedTuple):
    """A tree without its leaves."""

    kind: Any  # dict, tuple, list; None for a leaf; PyTorch's own description of anything else
    keys: tuple[Any, ...]
    parts: tuple[Structure, ...]
    leaves: int


LEAF = Structure(None, (), (), 1)


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree, in order, and its structure."""
    if isinstance(tree, torch.Tensor):
        return [tree], LEAF
    leaves: list[Any] = []
    return leaves, _flattened(tree, leaves)


def _flattened(tree: Any, leaves: list[Any]) -> Structure:
    kind = type(tree)
    if kind in _PLAIN or isinstance(tree, torch.Tensor):
        leaves.append(tree)
        return LEAF
    before = len(leaves)
    if kind is dict:
        parts = tuple([_flattened(item, leaves) for item in tree.values()])
        return Structure(dict, tuple(tree), parts, len(leaves) - before)
    if kind is tuple or kind is list:
        parts = tuple([_flattened(item, leaves) for item in tree])
        return Structure(kind, (), parts, len(leaves) - before)
    items, spec = tree_flatten(tree)
    leaves += items
    return Structure(spec, (), (), len(items))


def unflatten(leaves: list[Any], structure: Structure) -> Any:
    """The tree with this structure and these leaves."""
    return leaves[0] if structure is LEAF else _unflattened(iter(leaves), structure)


def _unflattened(leaves: Iterator[Any], structure: Structure) -> Any:
    kind = structure.kind
    if kind is None:
        return next(leaves)
    if kind is dict:
        return {
            key: _unflattened(leaves, part) for key, part in zip(structure.keys, structure.parts, strict=True)
        }
    if kind is tuple or kind is list:
        items = [_unflattened(leaves, part) for part in structure.parts]
        return items if kind is list else tuple(items)
    return tree_unflatten([next(leaves) for _ in range(structure.leaves)], kind)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `function` applied to each leaf."""
    kind = type(tree)
    if kind in _PLAIN or isinstance(tree, torch.Tensor):
        return function(tree)
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in tree.items()}
    if kind is tuple or kind is list:
        items = [map_leaves(function, item) for item in tree]
        return items if kind is list else tuple(items)
    return tree_map(function, tree)
