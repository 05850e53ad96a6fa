"""Per-sample gradients of a batch, by parameter, and the queries that contract them."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch

from psgrad.engine.gradients.deferred import DeferredGradient, Placed, upright
from psgrad.engine.gradients.inner import inner_products
from psgrad.engine.gradients.norms import square_norms
from psgrad.engine.gradients.projections import Projection
from psgrad.engine.gradients.second_moments import sum_of_squares
from psgrad.engine.gradients.terms import accumulating, blocks
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.errors import TransformError

Per = Literal["total", "parameter", "module"]
State = TypeVar("State")


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

        per: 'total' over all parameters; 'parameter' as name -> [n]; 'module' likewise, by the parameters'
        owner ('' for parameters of the model itself).
        """
        return _grouped(dict(self._square_norms), per)

    @cached_property
    def _square_norms(self) -> dict[str, torch.Tensor]:
        """name -> [n] float64; cached, because several measures of one chunk use it, and none of them writes
        into it.
        """
        zero = torch.zeros(len(self), dtype=torch.float64, device=self.losses.device)
        results = square_norms(list(self.gradients.values()))
        return {
            name: norms if norms is not None else zero
            for name, norms in zip(self.gradients, results, strict=True)
        }

    def weighted_sum(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """name -> [*shape]: the sum over samples of the gradients, each times its weight [n]."""
        weights = torch.as_tensor(weights, device=self.losses.device)
        if weights.shape != self.losses.shape:
            raise TransformError(
                f"weighted_sum: weights of shape {tuple(weights.shape)} for {len(self)} samples",
                expected=f"shape ({len(self)},)",
            )
        return {name: gradient.weighted_sum(weights) for name, gradient in self.gradients.items()}

    def mean(self) -> dict[str, torch.Tensor]:
        """name -> [*shape]: the mean gradient."""
        return self.weighted_sum(torch.full_like(self.losses, 1 / max(len(self), 1)))

    def second_moment(self) -> dict[str, torch.Tensor]:
        """name -> [*shape] float64: the mean over samples of the squares of the gradients' elements (the
        empirical Fisher's diagonal).
        """
        return {
            name: sum_of_squares(gradient) / max(len(self), 1) for name, gradient in self.gradients.items()
        }

    def inner(self, other: PerSampleGradients, per: Per = "total") -> Any:
        """[n, m] float64: the inner product of each sample's gradient with each of another set's.

        Args:
            other: gradients of m samples, of any batch, in the same parameters.
            per: as for `square_norms`.

        Nothing of the size n x m x parameters is made: each parameter is contracted by its factors, or
        materialised and multiplied piece by piece, by price. A sample whose gradient is not finite has
        numbers that are not finite in its row or column.

        Raises TransformError if the two sets differ in their parameters' names, shapes or device.
        """
        self._assert_same_parameters(other)
        pairs = {name: (gradient, other.gradients[name]) for name, gradient in self.gradients.items()}
        samples, device = (len(self), len(other)), self.losses.device
        return _of_groups(
            list(pairs), per, lambda names: inner_products([pairs[name] for name in names], samples, device)
        )

    def gram(self, per: Per = "total") -> Any:
        """[n, n] float64, symmetric: the inner products of the samples' gradients with one another, for half
        the work of `inner`.
        """
        samples, device = (len(self), len(self)), self.losses.device

        def products(names: list[str]) -> torch.Tensor:
            pairs = [(self.gradients[name], self.gradients[name]) for name in names]
            return inner_products(pairs, samples, device, symmetric=True)

        return _of_groups(list(self.gradients), per, products)

    def _assert_same_parameters(self, other: PerSampleGradients) -> None:
        names = set(self.gradients), set(other.gradients)
        if names[0] != names[1]:
            raise TransformError(
                f"inner: only one of the two sets has gradients of {sorted(names[0] ^ names[1])[:8]}",
                expected="gradients of the same parameters",
                cause="two models, or one of them frozen in part",
                next_step="select(names) of both sets",
            )
        for name, gradient in self.gradients.items():
            if gradient.shape != other.gradients[name].shape:
                raise TransformError(
                    f"inner: {name} has shape {tuple(gradient.shape)} in one set and"
                    f" {tuple(other.gradients[name].shape)} in the other",
                    expected="gradients of the same parameters",
                    cause="two models",
                )
        if self.losses.device != other.losses.device:
            raise TransformError(
                f"inner: one set is on {self.losses.device}, the other on {other.losses.device}",
                expected="both on one device",
            )

    def dot(self, vector: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[n]: the inner product of each sample's gradient with one vector, given as name -> [*shape]. Absent
        names count zero.
        """
        unknown = set(vector) - set(self.gradients)
        if unknown:
            raise TransformError(
                f"dot: no gradient of the name(s) {sorted(unknown)}",
                expected=f"names among {list(self.gradients)[:8]}",
            )
        total = torch.zeros(len(self), dtype=accumulating(self.losses).dtype, device=self.losses.device)
        for name, direction in vector.items():
            gradient = self.gradients[name]
            if direction.shape != gradient.shape:
                raise TransformError(
                    f"dot: {name} has shape {tuple(direction.shape)}", expected=f"{tuple(gradient.shape)}"
                )
            for placed in gradient.terms:
                total = total + placed.term.dot(placed.layout.invert(direction, placed.term.shape))
        return total

    def project(self, projection: Projection) -> torch.Tensor:
        """[n, k] float32 (float64 if gradients are): each sample's gradient, randomly projected without being
        materialised.

        `projection.columns(names)` gives the columns of each parameter, `Projection` describes what the inner
        products of the rows estimate.
        """
        return projection.apply(self.gradients, len(self), self.losses.device)

    def materialise(self) -> dict[str, torch.Tensor]:
        """name -> [n, *shape]: every per-sample gradient materialised."""
        return {name: _materialised(gradient, len(self)) for name, gradient in self.gradients.items()}

    def reduce(self, step: Callable[[State, str, slice, torch.Tensor], State], initial: State) -> State:
        """A query of your own, from gradients that are materialised for a few samples at a time.

        Args:
            step: (state, name, samples, block) to the next state; block [k, *shape] holds the gradients in
                the parameter `name` of the samples that the slice names. It is called for each parameter, and
                block by block in the samples' order.
            initial: the first state.

        The largest entry of each sample's gradient:

            def step(largest, name, samples, block):
                largest[samples] = torch.maximum(largest[samples], block.abs().flatten(1).amax(1))
                return largest


            grads.reduce(step, torch.zeros(len(grads)))

        One block of one parameter exists at a time, and holds as many samples as fit the block size of the
        device, at least one.
        """
        state = initial
        for name, gradient in self.gradients.items():
            each = math.prod(gradient.shape) * max(gradient.dtype.itemsize, 4)
            for samples in blocks(len(self), 2 * each, gradient.device):
                state = step(
                    state, name, samples, _materialised(gradient.at(samples), samples.stop - samples.start)
                )
        return state

    def select(self, names: str | Iterable[str]) -> PerSampleGradients:
        """The same for some of the parameters, by their names or by patterns such as "*.weight" ("*", "?" and
        "[...]" as in file names).

        Raises TransformError for a name that is no parameter's, and for a pattern that fits none.
        """
        chosen: dict[str, DeferredGradient] = {}
        for name in [names] if isinstance(names, str) else names:
            if name in self.gradients:
                chosen[name] = self.gradients[name]
                continue
            fitting = fnmatch.filter(self.gradients, name)
            if not fitting:
                close = difflib.get_close_matches(name, self.gradients, n=1)
                raise TransformError(
                    f"select: no parameter of the name {name!r}"
                    + (f"; did you mean {close[0]}?" if close else ""),
                    expected=f"names among {list(self.gradients)[:8]}, or a pattern that fits some of them",
                )
            chosen.update({each: self.gradients[each] for each in fitting})
        return PerSampleGradients(chosen, self.losses, self.aux)

    def describe(self) -> dict[str, str]:
        """name -> how its norms are computed."""
        return {name: gradient.describe() for name, gradient in self.gradients.items()}

    @property
    def unfactored(self) -> list[str]:
        """The parameters whose gradients were materialised, sample by sample, because an operator needed the
        value.
        """
        return [name for name, gradient in self.gradients.items() if gradient.lost_at]


@dataclass(frozen=True)
class SquareNorms:
    """The part of per-sample gradients that remains if only their norms are computed.

    Attributes:
        by_parameter: name -> [n] float64, the squared norms.
        losses, aux: as in PerSampleGradients.
        computed_as: name -> how its norms were computed.
        absolute: name -> [n] float64, to which the rounding of norms and sums is proportional
            (`bounded_sums.absolute_sum`); empty if not requested.
    """

    by_parameter: dict[str, torch.Tensor]
    losses: torch.Tensor
    aux: Any
    computed_as: dict[str, str]
    absolute: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of_groups(cls, parts: list[SquareNorms], groups: list[torch.Tensor]) -> SquareNorms:
        """The norms of groups of samples as one; `groups` holds each one's places."""
        norms, losses, aux, absolute = _in_order(
            [(part.by_parameter, part.losses, part.aux, part.absolute) for part in parts], groups
        )
        computed_as = {
            name: " | ".join(dict.fromkeys(part.computed_as[name] for part in parts))
            for name in parts[0].computed_as
        }
        return cls(norms, losses, aux, computed_as, absolute)

    def __len__(self) -> int:
        return int(self.losses.shape[0])

    def square_norms(self, per: Per = "total") -> Any:
        """As PerSampleGradients.square_norms."""
        return _grouped(self.by_parameter, per)

    def describe(self) -> dict[str, str]:
        """name -> how its norms were computed."""
        return self.computed_as

    @property
    def unfactored(self) -> list[str]:
        """As PerSampleGradients.unfactored."""
        return [name for name, order in self.computed_as.items() if "materialise after" in order]


def _grouped(norms: dict[str, torch.Tensor], per: Per) -> Any:
    """Squared norms by parameter, added up by `per`."""
    if per == "parameter":
        return norms
    if per == "total":
        return torch.stack(list(norms.values())).sum(0)
    return {
        owner: torch.stack([norms[name] for name in names]).sum(0)
        for owner, names in _groups(list(norms), per).items()
    }


def _of_groups(names: list[str], per: Per, query: Callable[[list[str]], torch.Tensor]) -> Any:
    """A query's result for all parameters, or for each group of them by `per`."""
    if per == "total":
        return query(names)
    return {label: query(group) for label, group in _groups(names, per).items()}


def _groups(names: list[str], per: Per) -> dict[str, list[str]]:
    """The parameters of each label: their own name, or that of the module that they belong to."""
    if per not in ("parameter", "module"):
        raise ValueError(f"per={per!r}: expected 'total', 'parameter' or 'module'")
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name if per == "parameter" else name.rpartition(".")[0], []).append(name)
    return groups


def _materialised(gradient: DeferredGradient, n: int) -> torch.Tensor:
    """[n, *shape], zeros where the loss does not depend on the parameter."""
    if gradient.terms:
        return gradient.materialise()
    return torch.zeros(n, *gradient.shape, dtype=gradient.dtype, device=gradient.device)


def _in_order(parts: list[Any], groups: list[torch.Tensor]) -> Any:
    """The results of each group of samples (a pytree of tensors, sample axis in front), joined in the
    samples' order.
    """
    order = torch.cat(groups).argsort()
    return tree_map(
        lambda *items: (
            torch.cat(items).index_select(0, order) if isinstance(items[0], torch.Tensor) else items[0]
        ),
        *parts,
    )


def merged(terms: Iterable[Placed]) -> list[Placed]:
    """Terms of one kind and layout as one: more positions of the same product. The remaining terms have cross
    terms.
    """
    groups: dict[Any, list[Placed]] = {}
    for placed in map(upright, terms):
        groups.setdefault((placed.layout, placed.term.kin()), []).append(placed)
    return [
        Placed(first.term.plus([placed.term for placed in others]), first.layout) if others else first
        for first, *others in groups.values()
    ]
