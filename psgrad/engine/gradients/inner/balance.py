"""Factors brought near one, so that the products of four of them stay inside the range of float32.

Powers of two are moved between the factors of a term, position by position, and taken out sample by sample where a gradient as a
whole is far from one. No digit is lost, but for what is negligible beside the same sample's other positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from psgrad.engine.gradients.terms import Product, Rows, Term

# Sums of products of four factors whose sizes are within these powers of two of one are far from float32's limits, 2^-126 and 2^127.
_COMFORTABLE = 40
# The exponent of zero: less than any other, and than any two of them.
_OF_ZERO = -10_000
# Powers of two that bring a factor to one must be numbers of float32 themselves; what is smaller stays a little smaller than one.
_SMALLEST = -120


@dataclass(frozen=True)
class Balanced:
    """Terms in the precision asked for, times 2^-exponents.

    Attributes:
        terms: products and rows.
        exponents: [n]; None where they are all zero.
        finite: [n], whether all of a sample's factors are.
    """

    terms: list[Term]
    exponents: torch.Tensor | None
    finite: torch.Tensor

    def scale(self) -> torch.Tensor | None:
        """[n] float64: what a sample's terms are to be multiplied by to be what they were."""
        return None if self.exponents is None else torch.exp2(self.exponents.double())


def balanced(terms: Sequence[Term], dtype: torch.dtype) -> Balanced:
    """Products and rows of the same samples, balanced where `dtype` is float32; float64 has range enough."""
    found = [_exponents(term) for term in terms]
    finite = torch.stack([finite for *_, finite in found]).all(0)
    wide = [term.at(slice(None), dtype) for term in terms]
    if dtype == torch.float64:
        return Balanced(wide, None, finite)
    bounds = torch.stack([_bound(term, first, second) for term, (first, second, _) in zip(terms, found, strict=True)]).amax(0)
    bounds = bounds.where(bounds > _OF_ZERO // 2, 0)
    if not bounds.numel() or int(bounds.abs().max()) <= _COMFORTABLE:
        taken, target = None, torch.zeros_like(bounds)
    else:
        taken = target = bounds
    spread = [_spread(term, first, second, target) for term, (first, second, _) in zip(wide, found, strict=True)]
    return Balanced(spread, taken, finite)


def _exponents(term: Term) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a product those of both factors at each position, [n, g, t]; of rows theirs, [n, t], and zeros. And which samples are finite."""
    if isinstance(term, Product):
        (left, left_finite), (right, right_finite) = _exponent(term.left), _exponent(term.right)
        return left, right, (left_finite & right_finite).flatten(1).all(1)
    assert isinstance(term, Rows)
    rows, finite = _exponent(term.rows)
    return rows, torch.zeros_like(rows), finite.all(1)


def _exponent(factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., a] -> [...]: the power of two just above the largest number, zero where it is not finite; and whether it is."""
    if not factor.numel():
        shape = factor.shape[:-1]
        return torch.full(shape, _OF_ZERO, device=factor.device), torch.ones(shape, dtype=torch.bool, device=factor.device)
    largest = torch.maximum(factor.amax(-1), -factor.amin(-1)).double()
    finite = torch.isfinite(largest)
    exponent = torch.frexp(largest.where(finite, 1.0)).exponent.long().clamp_(min=_SMALLEST)
    return exponent.masked_fill_(largest == 0, _OF_ZERO), finite


def _bound(term: Term, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[n]: the exponent of a sample's largest position."""
    positions = (first + second).flatten(1)
    if not positions.shape[1]:
        return positions.new_full((term.samples,), _OF_ZERO)
    return positions.amax(1)


def _spread(term: Term, first: torch.Tensor, second: torch.Tensor, target: torch.Tensor) -> Term:
    """The term times 2^-target [n], what is left divided evenly between both factors of each position."""
    if isinstance(term, Rows):
        return term if not bool(target.any()) else replace(term, rows=term.rows * _power(-target, term.dtype)[:, None, None])
    assert isinstance(term, Product)
    left = (first + second).clamp(min=_OF_ZERO) - target[:, None, None]
    half = torch.div(left, 2, rounding_mode="floor")
    return replace(
        term,
        left=term.left * _power(half - first, term.dtype).masked_fill_(first == _OF_ZERO, 0).unsqueeze(3),
        right=term.right * _power(left - half - second, term.dtype).masked_fill_(second == _OF_ZERO, 0).unsqueeze(3),
    )


def _power(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.exp2(exponent.double()).to(dtype)
