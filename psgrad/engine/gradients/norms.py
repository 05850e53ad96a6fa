"""Squared norms of deferred gradients: of each term, vetted, and of the pairs of terms that meet in one parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from psgrad.engine.gradients.deferral import DeferredGradient, Placed, oriented
from psgrad.engine.gradients.doubts import is_noting, samples_where
from psgrad.engine.gradients.terms import CANCELLATION, Product, Rows, Term, accumulating, accumulating_dtype, blocks, sum_of_products

# Squares leave float32's range long before gradients do.
_TINY = 1e-30


def square_norms(gradients: Sequence[DeferredGradient]) -> list[Any]:
    """[n] float64 for each gradient: the squared norms of its samples; None for a gradient without terms."""
    terms = [placed.term for gradient in gradients for placed in gradient.terms]
    norms = iter(reliable_square_norms(terms))
    return [_of_sum(gradient.terms, [next(norms) for _ in gradient.terms]) if gradient.terms else None for gradient in gradients]


def _of_sum(terms: Sequence[Placed], norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n] float64: the squared norms of a sum, of which those of its terms are known.

    Taken again in float64 for the samples in which the terms cancel, or whose products left the range of float32.
    """
    if len(terms) == 1:
        return norms[0]
    alone = torch.stack(list(norms)).sum(0)
    total = alone + 2 * _pairs(terms)
    doubtful = ~torch.isfinite(total) | (total < CANCELLATION * alone) | ((alone > 0) & (alone < _TINY))
    if terms[0].term.dtype != torch.float64 and len(samples := samples_where(doubtful)):
        exact = [Placed(placed.term.at(samples, torch.float64), placed.layout) for placed in terms]
        total[samples] = torch.stack([placed.term.square_norms() for placed in exact]).sum(0) + 2 * _pairs(exact)
    return total.clamp_(min=0)  # rounding may leave a tiny negative number


def _pairs(terms: Sequence[Placed]) -> torch.Tensor:
    """[n] float64: the inner products of every two terms."""
    return torch.stack([cross_products(placed, other) for place, placed in enumerate(terms) for other in terms[:place]]).sum(0)


def reliable_square_norms(terms: Sequence[Term]) -> list[torch.Tensor]:
    """[n] float64 for each term; taken again in float64 for the samples whose squares left the range of float32."""
    if not terms:
        return []
    norms = torch.stack([term.square_norms().double() for term in terms])
    doubtful = ~torch.isfinite(norms) | (norms < _TINY)
    rounded = [place for place, term in enumerate(terms) if term.dtype != torch.float64]
    if is_noting():  # a doubt costs a whole chunk: true zeros and infinities are sorted out at once
        for place in rounded:
            samples_where(doubtful[place] & _are_products(terms[place]))
    elif rounded and len(samples_where(doubtful.any(0))):
        for place in rounded:
            if len(samples := samples_where(doubtful[place])):
                _retake(terms[place], norms[place], samples)
    return list(norms)


def _retake(term: Term, norms: torch.Tensor, samples: torch.Tensor) -> None:
    """Write float64 norms of some samples into `norms` [n]. Exact zeros and true infinities stay what they are."""
    retry = samples[_are_products(term.at(samples))]
    if len(retry):
        norms[retry] = term.at(retry, torch.float64).square_norms()


def _are_products(term: Term) -> torch.Tensor:
    """[n]: whether all factors are finite and not zero throughout, so that a norm of zero or infinity comes of multiplying them."""
    factors = [f.flatten(1) for f in term.factors if f.dtype.is_floating_point and f[:1].numel()]
    if not factors:
        return torch.zeros(term.samples, dtype=torch.bool, device=term.device)
    largest = torch.stack([torch.linalg.vector_norm(f, math.inf, 1) for f in factors])
    return (torch.isfinite(largest) & (largest > 0)).all(0)


def cross_products(a: Placed, b: Placed) -> torch.Tensor:
    """[n] float64: each sample's inner product of two terms of one parameter."""
    x, y = oriented(a), oriented(b)
    if isinstance(x, Product) and isinstance(y, Rows):
        x, y = y, x
    if isinstance(x, Rows) and isinstance(y, Product) and y.shape == (1, *x.shape):
        return _rows_with_product(x, y)
    return _written_out(a, b)


def _rows_with_product(table: Rows, product: Product) -> torch.Tensor:
    """A tied table: sum over positions t, s of left[t, index[s]] * <right[t], rows[s]>, in which no table-sized value appears."""
    out = torch.empty(table.samples, dtype=torch.float64, device=table.device)
    left, right, rows = accumulating(product.left).squeeze(1), accumulating(product.right).squeeze(1), accumulating(table.rows)
    positions, looked_up = left.shape[1], rows.shape[1]
    for block in blocks(table.samples, 2 * positions * looked_up * left.element_size(), table.device):
        picked = torch.gather(left[block], 2, table.index[block].unsqueeze(1).expand(-1, positions, -1))  # [n, t, s]
        inner = torch.bmm(right[block], rows[block].transpose(1, 2))  # [n, t, s]
        out[block] = sum_of_products(picked, inner).double()
    return out


def _written_out(a: Placed, b: Placed) -> torch.Tensor:
    """Terms of unlike kinds: both are made real, a block of samples at a time."""
    kind = accumulating_dtype(a.term.dtype)
    size = 2 * kind.itemsize * math.prod(a.layout.shape)
    out = torch.empty(a.term.samples, dtype=torch.float64, device=a.term.device)
    for block in blocks(a.term.samples, size, a.term.device):
        x, y = (p.layout.apply(p.term.at(block, kind).materialise(), lead=1).flatten(1) for p in (a, b))
        out[block] = sum_of_products(x, y).double()
    return out
