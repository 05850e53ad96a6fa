"""Per-sample gradients of a batch, by parameter, and the queries that contract them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map

from psgrad.engine.gradients.deferral import DeferredGradient, Placed, oriented
from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.norms import square_norms
from psgrad.engine.gradients.projections import Projection
from psgrad.engine.gradients.terms import Term, accumulating
from psgrad.errors import TransformError

Per = Literal["total", "parameter", "module"]


@dataclass(frozen=True)
class PerSampleGradients:
    """Per-sample gradients, by parameter name, and the queries on them. All results are plain tensors.

    Attributes:
        gradients: name -> deferred gradient.
        losses: [n], each sample's loss.
        aux: what the loss returned besides, sample axis in front; None without `has_aux`.
    """

    gradients: dict[str, DeferredGradient]
    losses: torch.Tensor
    aux: Any = None

    @classmethod
    def of_groups(cls, parts: list[PerSampleGradients], groups: list[torch.Tensor]) -> PerSampleGradients:
        """The gradients of groups of samples as one; `groups` holds each one's places."""
        count = sum(len(part) for part in parts)

        def gradient(name: str) -> DeferredGradient:
            terms = [
                Placed(placed.term.among(group, count), placed.layout)
                for part, group in zip(parts, groups, strict=True)
                for placed in part.gradients[name].terms
            ]
            return parts[0].gradients[name].with_terms(merged(terms))

        losses, aux = _in_order([(part.losses, part.aux) for part in parts], groups)
        return cls({name: gradient(name) for name in parts[0].gradients}, losses, aux)

    def __len__(self) -> int:
        return int(self.losses.shape[0])

    def square_norms(self, per: Per = "total") -> Any:
        """Squared Euclidean norms, float64 [n] whatever the parameters' dtype.

        per: 'total' over all parameters; 'parameter' as name -> [n]; 'module' likewise, by the parameters' owner
        ('' for parameters of the model itself).
        """
        zero = torch.zeros(len(self), dtype=torch.float64, device=self.losses.device)
        found = square_norms(list(self.gradients.values()))
        return _grouped({name: norms if norms is not None else zero for name, norms in zip(self.gradients, found, strict=True)}, per)

    def weighted_sum(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """name -> [*shape]: the sum over samples of the gradients, each times its weight [n]."""
        weights = torch.as_tensor(weights, device=self.losses.device)
        if weights.shape != self.losses.shape:
            raise TransformError(
                f"weighted_sum: weights of shape {tuple(weights.shape)} for {len(self)} samples", expected=f"shape ({len(self)},)"
            )
        return {
            name: _summed(gradient, lambda term, layout: layout.apply(term.weighted_sum(weights)))
            for name, gradient in self.gradients.items()
        }

    def mean(self) -> dict[str, torch.Tensor]:
        """name -> [*shape]: the mean gradient."""
        return self.weighted_sum(torch.full_like(self.losses, 1 / max(len(self), 1)))

    def dot(self, vector: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[n]: the inner product of each sample's gradient with one vector, given as name -> [*shape]. Absent names count zero."""
        unknown = set(vector) - set(self.gradients)
        if unknown:
            raise TransformError(f"dot: no gradient of the name(s) {sorted(unknown)}", expected=f"names among {list(self.gradients)[:8]}")
        total = torch.zeros(len(self), dtype=accumulating(self.losses).dtype, device=self.losses.device)
        for name, direction in vector.items():
            gradient = self.gradients[name]
            if direction.shape != gradient.shape:
                raise TransformError(f"dot: {name} has shape {tuple(direction.shape)}", expected=f"{tuple(gradient.shape)}")
            for placed in gradient.terms:
                total = total + placed.term.dot(placed.layout.invert(direction, placed.term.shape))
        return total

    def project(self, projection: Projection) -> torch.Tensor:
        """[n, k] float32 (float64 where gradients are): each sample's gradient, randomly projected without being written out.

        `projection.columns(names)` says which columns are whose, `Projection` what the inner products of the rows estimate.
        """
        return projection.apply(self.gradients, len(self), self.losses.device)

    def materialise(self) -> dict[str, torch.Tensor]:
        """name -> [n, *shape]: every per-sample gradient written out."""
        return {
            name: gradient.materialise()
            if gradient.terms
            else torch.zeros(len(self), *gradient.shape, dtype=gradient.dtype, device=gradient.device)
            for name, gradient in self.gradients.items()
        }

    def select(self, names: Iterable[str]) -> PerSampleGradients:
        """The same for some of the parameters."""
        return PerSampleGradients({name: self.gradients[name] for name in names}, self.losses, self.aux)

    def describe(self) -> dict[str, str]:
        """name -> how its norms are computed."""
        return {name: gradient.describe() for name, gradient in self.gradients.items()}


@dataclass(frozen=True)
class SquareNorms:
    """What is left of per-sample gradients when only their norms were wanted.

    Attributes:
        by_parameter: name -> [n] float64, the squared norms.
        losses, aux: as in PerSampleGradients.
        computed_as: name -> how its norms were computed.
    """

    by_parameter: dict[str, torch.Tensor]
    losses: torch.Tensor
    aux: Any
    computed_as: dict[str, str]

    @classmethod
    def of_groups(cls, parts: list[SquareNorms], groups: list[torch.Tensor]) -> SquareNorms:
        """The norms of groups of samples as one; `groups` holds each one's places."""
        norms, losses, aux = _in_order([(part.by_parameter, part.losses, part.aux) for part in parts], groups)
        ways = {name: " | ".join(dict.fromkeys(part.computed_as[name] for part in parts)) for name in parts[0].computed_as}
        return cls(norms, losses, aux, ways)

    def __len__(self) -> int:
        return int(self.losses.shape[0])

    def square_norms(self, per: Per = "total") -> Any:
        """As PerSampleGradients.square_norms."""
        return _grouped(self.by_parameter, per)

    def describe(self) -> dict[str, str]:
        """name -> how its norms were computed."""
        return self.computed_as


def _grouped(norms: dict[str, torch.Tensor], per: Per) -> Any:
    """Squared norms by parameter, added up as `per` says."""
    if per == "parameter":
        return norms
    if per == "total":
        return torch.stack(list(norms.values())).sum(0)
    if per != "module":
        raise ValueError(f"per={per!r}: expected 'total', 'parameter' or 'module'")
    modules: dict[str, torch.Tensor] = {}
    for name, square in norms.items():
        owner = name.rpartition(".")[0]
        modules[owner] = modules[owner] + square if owner in modules else square
    return modules


def _summed(gradient: DeferredGradient, query: Callable[[Term, Layout], torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor | None = None
    for placed in gradient.terms:
        part = query(placed.term, placed.layout)
        total = part if total is None else total + part
    if total is None:
        return torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return total


def _in_order(parts: list[Any], groups: list[torch.Tensor]) -> Any:
    """What each group of samples gave (a pytree of tensors, sample axis in front), joined in the samples' order."""
    order = torch.cat(groups).argsort()
    return tree_map(lambda *items: torch.cat(items).index_select(0, order) if isinstance(items[0], torch.Tensor) else items[0], *parts)


def merged(terms: Iterable[Placed]) -> list[Placed]:
    """Terms of one kind and layout as one: more positions of the same product. What is left over has cross terms of its own."""
    groups: dict[Any, list[Placed]] = {}
    for placed in map(_upright, terms):
        groups.setdefault((placed.layout, placed.term.kin()), []).append(placed)
    return [
        Placed(first.term.plus([placed.term for placed in others]), first.layout) if others else first for first, *others in groups.values()
    ]


def _upright(placed: Placed) -> Placed:
    """The same with its elements in the parameter's order where that costs nothing, so that a weight and its transpose meet."""
    term = oriented(placed)
    layout = Layout.identity(term.shape).reshape(placed.layout.shape) if term is not None else None
    return Placed(term, layout) if term is not None and layout is not None else placed
