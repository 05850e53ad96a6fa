"""Squares of deferred gradients: the squared norm of each sample, and the sum over samples of each element's
square.

A squared norm is that of each term, with a check of its precision, and of the pairs of terms that overlap in
one parameter. For a sum of squares of one outer product a sample, it is a product of squared factors,
sum_n (l_n r_n^T)^2 = (L^2)^T (R^2). For a table, rows of one sample and index are added first, and then
squared. All other values are materialised, a block of samples at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.engine.gradients.inner.regions import apart, regions, value_parts
from psgrad.engine.gradients.terms import (
    CANCELLATION,
    Term,
    accumulating_dtype,
    blocks,
    square_norm,
    sum_of_products,
)
from psgrad.engine.gradients.terms.numerics import (
    TINY_SQUARE,
    Flags,
    samples_to_recompute,
)
from psgrad.engine.transforms.recorder import assumed

# If a difference of float64 inner products is less than this share of them, its error exceeds 1e-10.
_LOST = 1e-3
# The count of numbers up to which one kernel is faster than three.
_FEW_NUMBERS = 1024
# The number of norms up to which a comparison in Python is faster than a kernel.
_FEW = 128


def square_norms(gradients: Sequence[DeferredGradient]) -> list[Any]:
    """[n] float64 for each gradient: the squared norms of its samples; None for a gradient without terms."""
    terms = [placed.term for gradient in gradients for placed in gradient.terms]
    norms = iter(reliable_square_norms(terms))
    return [
        _of_sum(gradient.terms, [next(norms) for _ in gradient.terms]) if gradient.terms else None
        for gradient in gradients
    ]


def _of_sum(terms: Sequence[Placed], norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n] float64: the squared norms of a sum, given those of its terms.

    Computed again in float64 for the samples in which terms cancel, or products leave the range of float32;
    and from the materialised value if they cancel so far that the inner products lose their digits in float64
    too, or leave its range, as the difference of two infinite numbers is NaN.
    """
    if len(terms) == 1:
        return norms[0]
    alone = torch.stack(list(norms)).sum(0)
    total = alone + 2 * _pairs(terms)
    tiny = (alone > 0) & (alone < TINY_SQUARE)
    inaccurate = ~torch.isfinite(total) | (total < CANCELLATION * alone) | tiny
    if len(samples := samples_to_recompute(inaccurate)):
        exact = [placed.at(samples, torch.float64) for placed in terms]
        alone = torch.stack([placed.term.square_norms() for placed in exact]).sum(0)
        total[samples] = alone + 2 * _pairs(exact)
        lost = torch.nonzero(~((total[samples] >= _LOST * alone) & torch.isfinite(alone))).squeeze(1)
        if len(lost):
            total[samples[lost]] = _materialised([placed.at(lost) for placed in exact])
    return total.clamp_(min=0)  # rounding may leave a tiny negative number


def _materialised(terms: Sequence[Placed]) -> torch.Tensor:
    """[n] float64: the squared norms of a sum of terms in float64, from its value, without cancellation
    between norms.
    """
    values = _value_blocks(terms, torch.float64)
    return torch.cat([square_norm(torch.stack(parts).sum(0)) for _, parts in values])


def _value_blocks(terms: Sequence[Placed], kind: torch.dtype) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """For a block of samples after the other the values of each term, [k, elements] in this type."""
    size, some = terms[0].layout.size, terms[0].term
    for block in blocks(some.samples, (len(terms) + 1) * torch.float64.itemsize * size, some.device):
        yield block, value_parts([placed.at(block, kind) for placed in terms], size)


def _pairs(terms: Sequence[Placed]) -> torch.Tensor:
    """[n] float64: the inner products of every two terms."""
    pairs = [cross_products(placed, other) for place, placed in enumerate(terms) for other in terms[:place]]
    return pairs[0] if len(pairs) == 1 else torch.stack(pairs).sum(0)


def reliable_square_norms(terms: Sequence[Term]) -> list[torch.Tensor]:
    """[n] float64 for each term; computed again in float64 for the samples whose squares left the range of
    float32.
    """
    found = [term.square_norms() for term in terms]
    doubtful = [
        place
        for place, (term, norms) in enumerate(zip(terms, found, strict=True))
        if norms.dtype != torch.float64 or term.dtype == torch.float64
    ]
    some = [found[place].double() for place in doubtful]
    if doubtful:
        some = checked_square_norms([terms[place] for place in doubtful], some)
    for place, norms in zip(doubtful, some, strict=True):
        found[place] = norms
    return found


def checked_square_norms(terms: Sequence[Term], of_terms: list[torch.Tensor]) -> list[torch.Tensor]:
    """As reliable_square_norms; of_terms: [n] float64 for each term, as computed at first."""
    if (flags := assumed(Flags)) is not None:
        for term, each in zip(terms, of_terms, strict=True):
            flags.add_squares(each, largest_of_factors(term), exact=term.dtype == torch.float64)
        return of_terms
    norms = torch.stack(of_terms) if len(of_terms) > 1 else of_terms[0].unsqueeze(0)
    if norms.numel() and _all_in_range(norms):
        return list(norms)
    inaccurate = torch.stack(
        [
            each.isnan() if term.dtype == torch.float64 else ~torch.isfinite(each) | (each < TINY_SQUARE)
            for term, each in zip(terms, norms, strict=True)
        ]
    )
    if len(samples_to_recompute(inaccurate.any(0))):
        for term, each, place in zip(terms, norms, range(len(terms)), strict=True):
            if len(samples := samples_to_recompute(inaccurate[place])):
                _recompute(term, each, samples)
    return list(norms)


def _all_in_range(norms: torch.Tensor) -> bool:
    """Whether all norms are in float32's safe range."""
    if norms.device.type == "cpu" and norms.numel() <= _FEW:
        return all(TINY_SQUARE <= norm < math.inf for norm in norms.flatten().tolist())
    smallest, largest = torch.stack(torch.aminmax(norms)).tolist()  # NaN counts as both
    return bool(smallest >= TINY_SQUARE and largest < math.inf)


def _recompute(term: Term, norms: torch.Tensor, samples: torch.Tensor) -> None:
    """Write float64 norms of some samples into `norms` [n]. Exact zeros and true infinities stay."""
    largest, some = largest_numbers(term.at(samples)), norms[samples]
    _set_zeros(some, largest)
    norms[samples] = some
    retry = samples[_are_products(largest)]
    if len(retry) and term.dtype != torch.float64:
        norms[retry] = term.at(retry, torch.float64).square_norms()


def _are_products(largest: torch.Tensor) -> torch.Tensor:
    """[n]: whether all factors are finite and none is entirely zero. A norm of zero or infinity then comes
    from the range of the products.

    largest: [factors, n], see largest_numbers.
    """
    return (torch.isfinite(largest) & (largest > 0)).all(0) & bool(len(largest))


def _set_zeros(norms: torch.Tensor, largest: torch.Tensor) -> None:
    """Set norms [n] to zero where they are NaN and a factor is entirely zero, all being finite: the square
    of another one has left the range of the type.
    """
    zero = torch.isfinite(largest).all(0) & (largest == 0).any(0)
    norms.masked_fill_(norms.isnan() & zero, 0)


def largest_of_factors(term: Term) -> list[torch.Tensor]:
    """[n] for each factor, without indices and empty ones: the largest size of a number in each sample."""
    factors = [f.reshape(len(f), -1) for f in term.factors if f.is_floating_point() and f[:1].numel()]
    return [_largest_size(f) for f in factors]


def _largest_size(rows: torch.Tensor) -> torch.Tensor:
    """[n, a] -> [n]. On a CPU, two reductions take a tenth of the time of the norm, but for few numbers."""
    if rows.device.type != "cpu" or rows.numel() <= _FEW_NUMBERS:
        return torch.linalg.vector_norm(rows, math.inf, 1)
    return torch.maximum(rows.amax(1), -rows.amin(1))


def largest_numbers(term: Term) -> torch.Tensor:
    """[factors, n]: as `largest_of_factors`."""
    sizes = largest_of_factors(term)
    return torch.stack(sizes) if sizes else torch.empty(0, term.samples, device=term.device)


# -- terms of one parameter that overlap -----------------------------------------------------------------


def cross_products(a: Placed, b: Placed) -> torch.Tensor:
    """[n] float64: each sample's inner product of two terms of one parameter."""
    for region in regions((a,), (b,)) if a.term.samples else ():
        (x,), (y,) = region.left, region.right
        if x.term.dtype != y.term.dtype:  # a weight that is used in two precisions
            kind = torch.promote_types(accumulating_dtype(x.term.dtype), accumulating_dtype(y.term.dtype))
            x, y = (placed.at(slice(None), kind) for placed in (x, y))
        for first, second in ((x.term, y.term), (y.term, x.term)) if region.is_aligned else ():
            if (products := first.cross_products(second)) is not None:
                return products
        return _of_values(x, y)
    return torch.zeros(a.term.samples, dtype=torch.float64, device=a.term.device)


def _of_values(a: Placed, b: Placed) -> torch.Tensor:
    """[n] float64: the inner products of the materialised values, a block of samples at a time."""
    kind = accumulating_dtype(a.term.dtype)
    out = torch.empty(a.term.samples, dtype=torch.float64, device=a.term.device)
    for block, (x, y) in _value_blocks((a, b), kind):
        out[block] = sum_of_products(x, y).double()
    return out


def sum_of_squares(gradient: DeferredGradient) -> torch.Tensor:
    """[*shape] float64: the sum over samples of the squares of the gradient's elements."""
    total = torch.zeros(gradient.shape, dtype=torch.float64, device=gradient.device)
    for places in apart(gradient.terms):
        side = [gradient.terms[place] for place in places]
        term, layout = side[0].term, side[0].layout
        squares = term.square_sums() if len(side) == 1 else None
        if squares is not None:
            total += layout.apply(squares)
            continue
        for _, parts in _value_blocks(side, accumulating_dtype(term.dtype)):
            value = parts[0].double() if len(parts) == 1 else torch.stack(parts).sum(0).double()
            total += value.square().sum(0).reshape(total.shape)
    return total
