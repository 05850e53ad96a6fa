"""The inner products of two sets of deferred gradients: the cheapest order of contraction for each region,
and a second computation in float64 of the samples with large rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch

from psgrad.engine.gradients.costs import Machine
from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.engine.gradients.inner.factored import add_factored, have_factors, outer_products
from psgrad.engine.gradients.inner.materialised import LONGEST_SUM, add_by_values, bundled
from psgrad.engine.gradients.inner.regions import SIDE_BYTES, Region, budget, regions, rows_of
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.square_norms import largest_numbers, square_norms
from psgrad.engine.gradients.terms import CANCELLATION, OuterProducts, accumulating_dtype

# Orders of contraction of a region.
VALUES, GRAM = "values", "gram"

Pair = tuple[DeferredGradient, DeferredGradient]


def cheapest_order(region: Region, dtype: torch.dtype, machine: Machine) -> str:
    """The cheapest of the orders of contraction that a region's terms allow."""
    if not _has_orders(region):
        return VALUES
    prices = _prices(region, dtype, machine)
    return min(prices, key=lambda order: prices[order])


def inner_seconds(pairs: Sequence[Pair], machine: Machine) -> float:
    """The predicted time of `inner_products` of these gradients."""
    every = [region for x, y in pairs for region in regions(x.terms, y.terms)]
    return sum(min(_prices(region, _dtype(region), machine).values()) for region in every)


def _prices(region: Region, dtype: torch.dtype, machine: Machine) -> dict[str, float]:
    """The seconds of each order of contraction that a region's terms allow."""
    prices = {VALUES: values_seconds(region, dtype, machine)}
    if not _has_orders(region):
        return prices
    left, right = _factors(region)
    return prices | {GRAM: sum(gram_seconds(x, y, dtype, machine) for x in left for y in right)}


def _has_orders(region: Region) -> bool:
    """Whether the region's terms can be contracted in another order than by their values."""
    return region.is_aligned and have_factors(region.terms)


def _dtype(region: Region) -> torch.dtype:
    """The dtype in which a region's numbers are multiplied."""
    return reduce(torch.promote_types, (accumulating_dtype(term.dtype) for term in region.terms))


def gram_seconds(x: OuterProducts, y: OuterProducts, dtype: torch.dtype, machine: Machine) -> float:
    """The time of two Gram matrices between all positions of all samples (or one and an index), and of the
    sum of their products.
    """
    (groups, t, a, b), (_, s, other, _) = x.sizes, y.sizes
    rows, columns = x.samples * t, y.samples * s
    left = machine.matmul_seconds(groups, rows, columns, a, dtype) if a and other else 0.0
    # tiles are small enough for a cache: their traffic has the rate of small results
    rate = machine.bandwidth(1 << 20)
    passes = 2 if t == s == groups == 1 else 4
    return (
        left
        + machine.matmul_seconds(groups, rows, columns, b, dtype)
        + passes * groups * rows * columns * dtype.itemsize / rate
    )


def values_seconds(region: Region, dtype: torch.dtype, machine: Machine) -> float:
    """The time to materialise all gradients, some of them again for each block of samples of the other side,
    and of one product.
    """
    n, m = region.left[0].term.samples, region.right[0].term.samples
    device = region.left[0].term.device
    columns = region.elements // rows_of(region.terms) if region.is_aligned else region.elements
    width = min(region.elements, max(columns, LONGEST_SUM))
    again = math.ceil(n * width * dtype.itemsize / budget(SIDE_BYTES, device))
    left, right = (
        [p.term.materialise_seconds(dtype, machine) for p in side] for side in (region.left, region.right)
    )
    return machine.matmul_seconds(1, n, m, region.elements, dtype) + sum(left) + again * sum(right)


def inner_products(
    pairs: Sequence[Pair], samples: tuple[int, int], device: torch.device, *, symmetric: bool = False
) -> torch.Tensor:
    """[n, m] float64: the sum over parameters of the inner products of n samples' gradients with those of m
    others.

    Args:
        pairs: for each parameter the gradients of both sets.
        samples: n and m.
        symmetric: both sets are one: half is computed.

    Each region of a parameter (regions.py) is contracted by its factors or materialised piece by piece, by
    price. Numbers are multiplied in at least float32 and added up over pieces and parameters in float64.
    Samples whose positions or terms nearly cancel, or whose numbers are near the limits of float32, are
    computed again in float64. A sample whose gradient is not finite has numbers that are not finite in its
    row or column, and does not change those of others.
    """
    total = torch.zeros(samples, dtype=torch.float64, device=device)
    if not total.numel():
        return total
    by_values: dict[torch.dtype, list[Region]] = {}
    by_factors: list[tuple[Region, torch.dtype]] = []
    for region in (region for x, y in pairs for region in regions(x.terms, y.terms)):
        dtype = _dtype(region)
        if cheapest_order(region, dtype, machine(device)) == VALUES:
            by_values.setdefault(dtype, []).append(region)
        else:
            by_factors.append((region, dtype))
    is_zero = True
    for dtype, regions_of_dtype in by_values.items():
        for bundle in bundled(regions_of_dtype):
            part = _by_values(total if is_zero else torch.zeros_like(total), bundle, dtype, symmetric)
            total, is_zero = part if is_zero else total.add_(part), False
    for region, dtype in by_factors:
        _add_by_factors(total, region, dtype, symmetric)
    total = _mirrored(total) if symmetric else total
    return _with_overflow_by_values(total, pairs) if by_factors else total


def _with_overflow_by_values(total: torch.Tensor, pairs: Sequence[Pair]) -> torch.Tensor:
    """The inner products [n, m], those of finite factors that left the range of float64 by their values."""
    if (wrong := ~total.isfinite()).any():
        for x, y in pairs:
            wrong &= _is_finite(x, len(wrong)).unsqueeze(1) & _is_finite(y, wrong.shape[1])
        if len(rows := wrong.any(1).nonzero().squeeze(1)):
            exact = torch.zeros(len(rows), wrong.shape[1], dtype=torch.float64, device=total.device)
            for x, y in pairs:
                for region in regions(x.at(rows).terms, y.terms):
                    add_by_values(exact, [region], torch.float64, symmetric=False)
            total[rows] = torch.where(wrong[rows], exact, total[rows])
    return total


def _is_finite(gradient: DeferredGradient, count: int) -> torch.Tensor:
    """[n]: whether all numbers of each sample's factors are finite."""
    finite = torch.ones(count, dtype=torch.bool, device=gradient.device)
    for placed in gradient.terms:
        finite &= largest_numbers(placed.term).isfinite().all(0)
    return finite


def _add_by_factors(total: torch.Tensor, region: Region, dtype: torch.dtype, symmetric: bool) -> None:
    """Add a region's inner products by factors. The lower half of a symmetric result is undefined. A sample
    with a factor that is not finite has NaN in its row or column.
    """
    part = torch.zeros_like(total)
    add_factored(part, *_factors(region), dtype, symmetric=symmetric)
    finite = []
    for side, placed in enumerate((region.left,) if symmetric else (region.left, region.right)):
        terms = [each.term for each in placed]
        sizes = torch.cat([largest_numbers(term) for term in terms])
        finite.append(sizes.isfinite().all(0))
        places = (_inaccurate(placed, sizes, dtype) & finite[-1]).nonzero().squeeze(1)
        if len(places):
            exact = _zeros(total, side, places)
            add_factored(exact, *_factors(_of(region, side, places)), torch.float64, symmetric=False)
            _replace(part, side, places, exact, symmetric)
    total += part.masked_fill_(~(finite[0].unsqueeze(1) & finite[-1]), math.nan)


def _factors(region: Region) -> tuple[list[OuterProducts], list[OuterProducts]]:
    left, right = (outer_products([placed.term for placed in side]) for side in (region.left, region.right))
    return left, right


def _by_values(out: torch.Tensor, bundle: list[Region], dtype: torch.dtype, symmetric: bool) -> torch.Tensor:
    """The inner products over a bundle of regions, in `out`, which is zero."""
    seen = add_by_values(out, bundle, dtype, symmetric=symmetric)
    for side, lengths in enumerate(seen[:1] if symmetric else seen) if dtype != torch.float64 else ():
        places = lengths.inaccurate().nonzero().squeeze(1)
        places = places[_are_products(bundle, side, places)]
        if len(places):
            exact, some = _zeros(out, side, places), [_of(region, side, places) for region in bundle]
            add_by_values(exact, some, torch.float64, symmetric=False)
            _replace(out, side, places, exact, symmetric)
    return out


def _mirrored(out: torch.Tensor) -> torch.Tensor:
    return out.triu() + out.triu(1).t()


def _of(region: Region, side: int, places: torch.Tensor) -> Region:
    return region.at(slice(None), places) if side else region.at(places, slice(None))


def _zeros(out: torch.Tensor, side: int, places: torch.Tensor) -> torch.Tensor:
    return out.new_zeros((out.shape[0], len(places)) if side else (len(places), out.shape[1]))


def _replace(
    out: torch.Tensor, side: int, places: torch.Tensor, again: torch.Tensor, symmetric: bool
) -> None:
    if side:
        out[:, places] = again
    else:
        out[places] = again
    if symmetric:
        out[:, places] = again.t()


# Powers of two: sums of products of four numbers of factors whose sizes are within these of one, and of the
# sample's gradient, are far from float32's limits, 2^-126 and 2^127.
_COMFORTABLE = 2.0**50


def _inaccurate(side: Sequence[Placed], sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bool [n]: whether a sample's products come near the limits of float32, or its positions or terms nearly
    cancel, so that rounding of their products matters. sizes: [factors, n], as of `largest_numbers`.
    """
    terms = outer_products([placed.term for placed in side])
    if dtype == torch.float64:
        return torch.zeros(terms[0].samples, dtype=torch.bool, device=terms[0].device)
    sizes = sizes.double()
    is_one_product = len(terms) == 1 and terms[0].sizes[0] * terms[0].sizes[1] <= 1
    if is_one_product:  # its norm is a little more than the product of the largest numbers
        length = sizes.prod(0)
    else:
        alone = torch.stack([term.position_square_norms() for term in terms]).sum(0)
        length = alone.sqrt()
    in_range = (length >= 1 / _COMFORTABLE) & (length <= _COMFORTABLE)
    in_range &= sizes.amax(0) <= _COMFORTABLE * length.clamp(max=1) if len(sizes) else length == 0
    inaccurate = ~in_range & (length > 0)
    if is_one_product:
        return inaccurate
    together = square_norms(
        [DeferredGradient(tuple(side), torch.Size(side[0].layout.shape), terms[0].dtype, terms[0].device)]
    )[0]
    return inaccurate | (together < CANCELLATION * alone)


def _are_products(bundle: Sequence[Region], side: int, places: torch.Tensor) -> torch.Tensor:
    """[k]: whether all factors of these samples are finite, and some term has no factor that is entirely
    zero.

    Otherwise a gradient of zero is a true zero, and one that is not finite is not finite in float64 either.
    """
    are_products = torch.zeros(len(places), dtype=torch.bool, device=places.device)
    broken = torch.zeros_like(are_products)
    for region in bundle if len(places) else ():
        for placed in (region.left, region.right)[side]:
            largest = largest_numbers(placed.term.at(places))
            if len(largest):
                are_products |= (largest > 0).all(0)
                broken |= ~largest.isfinite().all(0)
    return are_products & ~broken
