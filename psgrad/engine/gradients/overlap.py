"""The overlap of two terms of one parameter, and their inner products."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from psgrad.engine.gradients.deferral import oriented
from psgrad.engine.gradients.deferred import Placed
from psgrad.engine.gradients.layout import Run
from psgrad.engine.gradients.terms import accumulating_dtype, blocks, sum_of_products
from psgrad.engine.gradients.terms.placed import narrowed


def common_parts(a: Placed, b: Placed) -> list[tuple[Placed, Placed]] | None:
    """Both terms, restricted to the window that they share; an empty list if they share none; None if a term
    would have to be materialised.
    """
    if a.layout.window is None and b.layout.window is None:
        return [(a, b)]
    runs = [_runs(placed) for placed in (a, b)]
    if any(
        _are_apart(one, one_length, other, length)
        for (one, one_length), (other, length) in zip(*runs, strict=True)
    ):
        return []
    parts = [_within(placed, other) for placed, other in zip((a, b), reversed(runs), strict=True)]
    if None in parts:
        return None
    return [(one, other) for one in parts[0] or [] for other in parts[1] or []]


def _runs(placed: Placed) -> list[tuple[Run, int]]:
    layout = placed.layout
    window = layout.window if layout.window is not None else [Run(0, 1, size) for size in layout.inner]
    return list(zip(window, layout.inner, strict=True))


def _are_apart(one: Run, one_length: int, other: Run, length: int) -> bool:
    """Whether two runs surely have no place in common."""
    if one.end(one_length) <= other.start or other.end(length) <= one.start:
        return True
    return one.step == other.step and (one.start - other.start) % one.step != 0


def _within(placed: Placed, runs: Sequence[tuple[Run, int]]) -> list[Placed] | None:
    """The part of a term within a window, with no window of its own."""
    for dim, (run, length) in enumerate(runs):
        own, count = _runs(placed)[dim]
        if own == run and count == length:
            continue
        if own.step == run.step != 1:  # of compatible steps the common places
            first, last = max(own.start, run.start), min(own.end(count), run.end(length))
            places = (first, own.step, len(range(first, last, own.step)))
        else:
            places = (run.start, run.step, length)
        part = narrowed(placed, dim, *places)
        if not part:
            return part
        (placed,) = part
    return [Placed(placed.term, placed.layout.bare)]


def cross_products(a: Placed, b: Placed) -> torch.Tensor:
    """[n] float64: each sample's inner product of two terms of one parameter."""
    common = common_parts(a, b) if a.term.samples else []
    if common is None:
        return _of_values(a, b)
    if not common:
        return torch.zeros(a.term.samples, dtype=torch.float64, device=a.term.device)
    ((a, b),) = common
    if a.term.dtype != b.term.dtype:  # a weight that is used in two precisions
        kind = torch.promote_types(accumulating_dtype(a.term.dtype), accumulating_dtype(b.term.dtype))
        a, b = (Placed(placed.term.at(slice(None), kind), placed.layout) for placed in (a, b))
    for one, other in ((a, b), (b, a)):
        if (products := one.term.placed_products(one.layout, other)) is not None:
            return products
    straight = oriented(a), oriented(b)
    if straight[0] is not None and straight[1] is not None:
        x, y = straight[0].simplified(), straight[1].simplified()
        for first, second in ((x, y), (y, x)):
            if (products := first.cross_products(second)) is not None:
                return products
    return _of_values(a, b)


def _of_values(a: Placed, b: Placed) -> torch.Tensor:
    """[n] float64: the inner products of the materialised values, a block of samples at a time."""
    kind = accumulating_dtype(a.term.dtype)
    size = 2 * kind.itemsize * math.prod(a.layout.shape)
    out = torch.empty(a.term.samples, dtype=torch.float64, device=a.term.device)
    for block in blocks(a.term.samples, size, a.term.device):
        values = [p.layout.apply(p.term.at(block, kind).materialise(), lead=1) for p in (a, b)]
        x, y = (value.reshape(len(value), a.layout.size) for value in values)
        out[block] = sum_of_products(x, y).double()
    return out
