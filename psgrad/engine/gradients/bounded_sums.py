"""Weighted sums in which the norm of each sample's contribution is at most its weight times the norm from
which the weight was computed.

The norm of one product a sample, or of a stored value, no wider than float32, is computed in float64 from the
numbers that are summed, which cannot cancel (`single_product`). Other norms and their sums are computed in
different orders of contraction. Both are rounded, so they differ, and by any factor if a sample's positions
cancel. So the norm is computed a second time, from the numbers that are summed:

- If the value is stored, or costs little compared with its products, it is materialised in the precision of
  its factors, a block of samples at a time. Norm and sum are computed from this tensor, in float64.
- Otherwise the factors are cast to float64, and norm and sum are computed from them.

If the computed norm m of a sample exceeds the given norm a, its weight w is reduced to w * a / m. The norm of
its contribution is then, with u = 2^-53,

    |contribution| <= w * (a + e),    e = (k + c) * u * S,

where S is `absolute_sum` of the sample's gradient, k is the number of products that are added up in sequence
(its own positions, at most `ROWS` positions of a piece of the batch, one for each further piece), and c is a
small constant for the roundings of the norm, of the weight and of one product (Higham, "Accuracy and
Stability of Numerical Algorithms", 2002, sections 3.1 and 3.5: the error of a sum of k products in any order
is at most k * u times the sum of their absolute values). For the same reason the error of the sum of N
samples is at most k * u * sum_n w_n S_n. So if one sample is added or removed, the sum changes by at most
this sample's contribution plus twice that error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.square_norms import square_norms
from psgrad.engine.gradients.terms import Dense, Term, accumulating_dtype, blocks, square_norm

# Positions of the samples that one float64 product adds up.
ROWS = 1 << 11
# The number of multiplications for each sample and element from which the value costs less than float64
# products. To read and add an element takes as long as about 16 multiplications in float32 (a CPU, one
# thread: 64 x 64 x 3 x 3 and 256 x 1024 over 8 to 256 positions).
_WORTH_A_VALUE = 32


def single_product(gradient: DeferredGradient) -> Term | None:
    """The term of a gradient that is one product a sample, or a stored value, of a type whose squares float64
    holds; None for another.
    """
    if len(gradient.terms) != 1:
        return None
    term = gradient.terms[0].term
    return term if term.summands == 1 and term.dtype != torch.float64 else None


def summed_square_norms(term: Term) -> torch.Tensor:
    """[n] float64: the squared norms of a `single_product`, from the numbers that `bounded_sum` sums."""
    elements = sum(factor.shape[1:].numel() for factor in term.factors)
    parts = [
        term.at(block, torch.float64).square_norms()
        for block in blocks(term.samples, 3 * torch.float64.itemsize * elements, term.device)
    ]
    if not parts:  # every sample of the chunk is excluded
        return torch.zeros(0, dtype=torch.float64, device=term.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def absolute_sum(gradient: DeferredGradient) -> torch.Tensor:
    """[n] float64: the sum of the norms of all products in a sample's gradient, which has at least one term.

    The rounding error of norms and sums is proportional to it. For more than `ROWS` positions of one sample
    it is multiplied by their number over `ROWS`.
    """
    parts = [
        placed.term.absolute_sums().double() * max(1.0, placed.term.summands / ROWS)
        for placed in gradient.terms
    ]
    return torch.stack(parts).sum(0)


def bounded_sum(
    gradient: DeferredGradient, weights: torch.Tensor, norms: torch.Tensor | None
) -> torch.Tensor:
    """[*shape] float64: the sum over samples, each times its weight [n]. The norm of no contribution exceeds
    weight times norm [n]. norms: None for the `summed_square_norms` of this gradient, from which the
    weights are already.
    """
    terms = [placed.term for placed in gradient.terms]
    if not terms or not terms[0].samples:
        return torch.zeros(gradient.shape, dtype=torch.float64, device=gradient.device)
    parts = _sums_of_values if _value_is_cheaper(terms, gradient.shape.numel()) else _sums_of_products
    first, *others = parts(gradient, weights.double(), None if norms is None else norms.double())
    for part in others:
        first += part
    return first


def _sums_of_values(
    gradient: DeferredGradient, weights: torch.Tensor, norms: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """The sums over blocks of samples, from values in the precision of the factors."""
    elements, kind = gradient.shape.numel(), accumulating_dtype(gradient.terms[0].term.dtype)
    for block in blocks(len(weights), 3 * kind.itemsize * elements, gradient.device):
        value = gradient.at(block, kind).materialise().double().reshape(block.stop - block.start, elements)
        limited = weights[block]
        if norms is not None:
            limited = reduced(limited, norms[block], square_norm(value).sqrt())
        # `limited @ value` squeezes its result in place, which a recorder refuses
        yield torch.mm(limited.unsqueeze(0), value).reshape(gradient.shape)


def _sums_of_products(
    gradient: DeferredGradient, weights: torch.Tensor, norms: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """The sums over pieces of at most `ROWS` positions, or of one sample, from factors in float64."""
    step = max(1, ROWS // max(1, *(placed.term.summands for placed in gradient.terms)))
    for start in range(0, len(weights), step):
        piece = slice(start, min(start + step, len(weights)))
        exact = gradient.at(piece, torch.float64)
        limited = weights[piece]
        if norms is not None:
            limited = reduced(limited, norms[piece], square_norms([exact])[0].sqrt())
        yield exact.weighted_sum(limited)


def reduced(weights: torch.Tensor, norms: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """The weights, reduced where the computed norm is more than the given one."""
    return torch.where(measured > norms, weights * (norms / measured), weights)


def _value_is_cheaper(terms: list[Term], elements: int) -> bool:
    if all(isinstance(term, Dense) for term in terms):
        return True
    return sum(term.multiplications for term in terms) >= _WORTH_A_VALUE * elements
