"""What each way to a region's inner products costs, from sizes alone: the constants are those of the machine (costs.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from psgrad.engine.gradients.inner.factored import have_factors
from psgrad.engine.gradients.inner.indexed import count_matches
from psgrad.engine.gradients.inner.regions import Region
from psgrad.engine.gradients.inner.slabs import rows_of
from psgrad.engine.gradients.inner.tiles import SIDE_BYTES, budget
from psgrad.engine.gradients.inner.written import LONGEST_SUM
from psgrad.engine.gradients.planning.costs import Machine
from psgrad.engine.gradients.terms import Convolution, Product, Rows, Term

# Ways of a region.
WRITTEN, GRAM, MATCHES = "written out", "gram", "matches"


def cheapest_way(region: Region, dtype: torch.dtype, machine: Machine) -> str:
    """The cheapest of the ways that a region's terms allow."""
    left, right = [p.term for p in region.left], [p.term for p in region.right]
    if not region.is_aligned or not have_factors(left, right):
        return WRITTEN
    pairs = [(x, y) for x in left for y in right]
    prices: dict[str, Callable[[], float]] = {
        GRAM: lambda: sum(gram_seconds(x, y, dtype, machine) for x, y in pairs),
        WRITTEN: lambda: written_seconds(region, dtype, machine),
    }
    if any(isinstance(x, Rows) and isinstance(y, Rows) for x, y in pairs):
        prices[MATCHES] = lambda: sum(
            matches_seconds(x, y, dtype, machine) if isinstance(x, Rows) and isinstance(y, Rows) else gram_seconds(x, y, dtype, machine)
            for x, y in pairs
        )
    return min(prices, key=lambda way: prices[way]())


def gram_seconds(x: Term, y: Term, dtype: torch.dtype, machine: Machine) -> float:
    """Two Gram matrices between all positions of all samples, or one and an index, and the sum of their products."""
    groups, t, a, b = _sizes(x)
    s = _sizes(y)[1]
    rows, columns = x.samples * t, y.samples * s
    both = isinstance(x, Product) and isinstance(y, Product)
    left = machine.matmul_seconds(groups, rows, columns, a, dtype) if both else 0.0
    # tiles are small enough for a cache: what is moved in them counts at the rate of small results
    rate = machine.bandwidth(1 << 20)
    passes = 2 if t == s == groups == 1 else 4
    return left + machine.matmul_seconds(groups, rows, columns, b, dtype) + passes * groups * rows * columns * dtype.itemsize / rate


def matches_seconds(x: Rows, y: Rows, dtype: torch.dtype, machine: Machine) -> float:
    """Both rows of each match are gathered, multiplied and added up. It takes a look at the indices to know how many there are."""
    width = x.rows.shape[2] * dtype.itemsize
    moved = count_matches(x, y) * (4 * width + 32)
    entries = x.samples * x.index.shape[1] + y.samples * y.index.shape[1]
    return machine.scattered_seconds(moved) + machine.scattered_seconds(entries * (4 * width + 200))


def written_seconds(region: Region, dtype: torch.dtype, machine: Machine) -> float:
    """All gradients written out, some of them again for each block of samples of the other side, and one product."""
    n, m = region.left[0].term.samples, region.right[0].term.samples
    device = region.left[0].term.device
    columns = region.elements // rows_of(region.terms) if region.is_aligned else region.elements
    width = min(region.elements, max(columns, LONGEST_SUM))
    again = math.ceil(n * width * dtype.itemsize / budget(SIDE_BYTES, device))
    left, right = ([materialise_seconds(p.term, dtype, machine) for p in side] for side in (region.left, region.right))
    return machine.matmul_seconds(1, n, m, region.elements, dtype) + sum(left) + again * sum(right)


def materialise_seconds(term: Term, dtype: torch.dtype, machine: Machine) -> float:
    """One term of all its samples written out."""
    size = math.prod(term.shape) * term.samples * dtype.itemsize
    if isinstance(term, Product):
        groups, t, a, b = _sizes(term)
        return machine.matmul_seconds(term.samples * groups, a, b, t, dtype) + machine.stream_seconds(size)
    if isinstance(term, Convolution):
        narrow = term.inputs if term.geometry.transposed else term.cotangents
        operations = 2.0 * term.samples * math.prod(term.shape) * narrow.shape[1] * math.prod(narrow.shape[3:])
        return machine.convolution_seconds(operations, size, dtype, grouped=True)
    return machine.stream_seconds(size) + machine.scattered_seconds(sum(f.numel() for f in term.factors) * dtype.itemsize)


def _sizes(term: Term) -> tuple[int, int, int, int]:
    """Groups, positions, rows and columns; a table's index needs no rows."""
    if isinstance(term, Product):
        return (*term.left.shape[1:], term.right.shape[3])
    assert isinstance(term, Rows)
    return 1, term.rows.shape[1], 0, term.rows.shape[2]
