"""The squared norms of per-sample gradients, of one parameter after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from psgrad.engine.gradients.bounded_sums import absolute_sum, single_product, summed_square_norms
from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.norm_results import SquareNorms
from psgrad.engine.gradients.square_norms import checked_square_norms, square_norms
from psgrad.engine.gradients.terms import Dense, Product, Term
from psgrad.engine.transforms.private_torch import DisableTorchFunction, storage_key


class NormsByName:
    """Collects the squared norms of each parameter's gradient when the backward pass completes it.

    names: of all parameters, in order. absolute: whether `SquareNorms.absolute` is computed too.
    """

    def __init__(self, names: list[str], absolute: bool = False) -> None:
        self._order = names
        self.norms: dict[str, torch.Tensor] = {}
        self.absolute: dict[str, torch.Tensor] | None = {} if absolute else None
        self.computed_as: dict[str, str] = {}
        # Small factors wait: name -> (group, key) of each; group -> key -> the factor [n, length]. And the
        # terms whose norms are checked. A group is what is stacked: factors of one length, or a single one.
        self._names: dict[str, list[tuple[Any, Any]]] = {}
        self._terms: dict[str, Term] = {}
        self._waiting: dict[Any, dict[Any, torch.Tensor]] = {}
        self._waiting_bytes = 0

    def add(self, name: str, gradient: DeferredGradient) -> None:
        terms = gradient.terms
        if self.absolute is not None and (product := single_product(gradient)) is not None:
            self.norms[name] = summed_square_norms(product)
            self.absolute[name] = self.norms[name].sqrt()
            self.computed_as[name] = gradient.describe()
            return
        if len(terms) == 1 and (small := _small_factors(terms[0].term)):
            self._wait(name, small)
        elif len(terms) == 1 and _has_small_value(terms[0].term):
            self._terms[name] = terms[0].term
            self._wait(name, [terms[0].term.materialise()])
        elif terms:
            self.norms[name] = square_norms([gradient])[0]
        if self.absolute is not None and terms:
            self.absolute[name] = absolute_sum(gradient)
        self.computed_as[name] = gradient.describe()

    def _wait(self, name: str, factors: Sequence[torch.Tensor]) -> None:
        places = self._names[name] = []
        for factor in factors:
            factor = factor.reshape(factor.shape[0], factor.shape[1:].numel())
            with DisableTorchFunction():  # a recorder would take it for a read of the memory
                storage = storage_key(factor.untyped_storage())
            # One of a layer's weight is often its bias's gradient.
            key = storage, factor.storage_offset(), factor.stride(), factor.dtype
            group = factor.shape[1] if factor.numel() <= _MOST_STACKED else key
            places.append((group, key))
            self._waiting.setdefault(group, {})[key] = factor
            self._waiting_bytes += factor.numel() * factor.element_size()
        if self._waiting_bytes > _MOST_WAITING or self.absolute is not None:
            self._add_waiting()

    def _add_waiting(self) -> None:
        """The norms of what waits, of small factors of one length together: kernels are what they cost."""
        squares = dict[Any, torch.Tensor]()
        for group, waiting in self._waiting.items():
            factors = list(waiting.values())
            stacked = factors[0].unsqueeze(0) if len(factors) == 1 else torch.stack(factors)
            norms = torch.linalg.vector_norm(stacked.double(), dim=2).square_()
            squares.update(zip(((group, key) for key in waiting), norms.unbind(), strict=True))
        for name, places in self._names.items():
            first, *second = (squares[place] for place in places)
            self.norms[name] = first * second[0] if second else first
        if self._terms:
            found = [self.norms[name] for name in self._terms]
            found = checked_square_norms(list(self._terms.values()), found)
            self.norms.update(zip(self._terms, found, strict=True))
        self._names.clear()
        self._terms.clear()
        self._waiting.clear()
        self._waiting_bytes = 0

    def result(self, losses: torch.Tensor, aux: Any) -> SquareNorms:
        """The squared norms [n] of all parameters. losses: [n]."""
        self._add_waiting()
        zero = torch.zeros(losses.shape, dtype=torch.float64, device=losses.device)
        found = {name: self.norms.get(name, zero) for name in self._order}
        absolute = self.absolute and {name: self.absolute.get(name, zero) for name in self._order}
        return SquareNorms(found, losses, aux, self.computed_as, absolute or {})


# Entries of a factor, or of a parameter (such as a bias), whose norm is computed in float64 at once.
_SMALL = 1024
# Numbers of a factor of all samples that is stacked with others: a larger one would only take memory.
_MOST_STACKED = 1 << 14
# Bytes of such values that wait for others.
_MOST_WAITING = 1 << 18
# Numbers of a parameter's gradients for all samples that are materialised to wait for others.
_MOST_VALUES = 1 << 14


def _small_factors(term: Term) -> Sequence[torch.Tensor]:
    """[n, ...] each: the factors of an outer product, or the value, whose norms make the term's in float64
    without a check; none where they are large.
    """
    if isinstance(term, Product):
        one = term.is_outer_product and term.shape[0] == 1 and term.dtype != torch.float64
        factors: Sequence[torch.Tensor] = term.factors if one else ()
    else:
        factors = term.factors if isinstance(term, Dense) else ()
    return factors if all(f.shape[1:].numel() <= _SMALL for f in factors) else ()


def _has_small_value(term: Term) -> bool:
    """Whether the norm is that of a small value in float32, which its factors do not show to be in range."""
    size = term.samples * math.prod(term.shape)
    return (
        math.prod(term.shape) <= _SMALL
        and 0 < size <= _MOST_VALUES
        and term.dtype == torch.float32
        and term.order() == "materialise"
    )
