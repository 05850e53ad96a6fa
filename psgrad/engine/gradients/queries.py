"""Per-sample gradients of a batch, by parameter, and the queries that contract them."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from psgrad.engine.gradients.deferred import DeferredGradient, GroupedGradient, in_order
from psgrad.engine.gradients.inner.inner_products import inner_products
from psgrad.engine.gradients.norm_results import Per, by_label, labelled
from psgrad.engine.gradients.norm_results import SquareNorms as SquareNorms
from psgrad.engine.gradients.projections import Projection
from psgrad.engine.gradients.square_norms import square_norms, sum_of_squares
from psgrad.engine.gradients.terms import accumulating, blocks
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.errors import TransformError, one_line

State = TypeVar("State")


@dataclass(frozen=True)
class PerSampleGradients:
    """Per-sample gradients, by parameter name, and the queries on them. All results are plain tensors.

    Attributes:
        gradients: name -> deferred gradient.
        losses: [n], each sample's loss.
        aux: the loss's second result, sample axis in front; None without `has_aux`.
    """

    gradients: dict[str, DeferredGradient]
    losses: torch.Tensor
    aux: Any = None

    @classmethod
    def of_groups(cls, parts: list[PerSampleGradients], groups: list[torch.Tensor]) -> PerSampleGradients:
        """The gradients of all samples, from those of groups of samples. groups: the places [k] of each
        group's samples; a single group has its samples in order.
        """
        if len(parts) == 1:
            return parts[0]
        losses, aux = in_order([(part.losses, part.aux) for part in parts], groups)
        each = len(losses) // sum(map(len, groups))  # the rows of one sample are neighbours
        places = [
            (group.to(losses.device).unsqueeze(1) * each + torch.arange(each, device=losses.device)).flatten()
            for group in groups
        ]
        gradients: dict[str, DeferredGradient] = {
            name: GroupedGradient(zip(places, [part.gradients[name] for part in parts], strict=True))
            for name in parts[0].gradients
        }
        return cls(gradients, losses, aux)

    def first(self, count: int) -> PerSampleGradients:
        """Of the first samples alone."""
        if count == len(self):
            return self
        gradients = {name: gradient.at(slice(0, count)) for name, gradient in self.gradients.items()}
        losses, aux = tree_map(lambda x: x[:count], (self.losses, self.aux))
        return PerSampleGradients(gradients, losses, aux)

    @cached_property
    def parts(self) -> list[tuple[torch.Tensor, PerSampleGradients]]:
        """The places [k] of each group of samples that was computed separately, and its gradients; one group
        of all samples if there are no others.
        """
        groups = next((gradient.groups for gradient in self.gradients.values()), ())
        if not groups:
            return [(torch.arange(len(self), device=self.losses.device), self)]
        return [(places, self._part(number, places)) for number, (places, _) in enumerate(groups)]

    def _part(self, number: int, places: torch.Tensor) -> PerSampleGradients:
        aux = None if self.aux is None else tree_map(lambda x: x[places], self.aux)
        gradients = {name: gradient.groups[number][1] for name, gradient in self.gradients.items()}
        return PerSampleGradients(gradients, self.losses[places], aux)

    def __repr__(self) -> str:
        """Three lines for any number of parameters; the terms are those of deferred gradients."""
        numbers = sum(gradient.shape.numel() for gradient in self.gradients.values())
        names = ", ".join([*self.gradients][:3]) + (", ..." if len(self.gradients) > 3 else "")
        return (
            f"PerSampleGradients of {len(self):,} samples, not materialised\n"
            f"  {numbers:,} numbers in {len(self.gradients):,} parameters: {names}\n"
            "  queries: square_norms, inner, dot, weighted_sum, mean, project, materialise"
        )

    def by_part(self, query: Callable[[PerSampleGradients], Any]) -> Any:
        """[n, ...]: the results of `query`, computed for one group of samples after the other."""
        if len(self.parts) == 1:
            return query(self)
        return in_order([query(part) for _, part in self.parts], [places for places, _ in self.parts])

    def __len__(self) -> int:
        return int(self.losses.shape[0])

    def square_norms(self, per: Per = "total") -> Any:
        """The squared Euclidean norms, float64 [n] for every dtype of the parameters.

        per: 'total' over all parameters; 'parameter' as name -> [n]; 'module' as name of the module -> [n]
        ('' for parameters of the model itself).
        """
        return by_label(dict(self._square_norms), per)

    @cached_property
    def _square_norms(self) -> dict[str, torch.Tensor]:
        """name -> [n] float64; cached, because several measures of one chunk use it. They must not write into
        it.
        """

        def norms_of(part: PerSampleGradients) -> dict[str, torch.Tensor]:
            zero = torch.zeros(len(part), dtype=torch.float64, device=part.losses.device)
            result = square_norms(list(part.gradients.values()))
            return {
                name: norms if norms is not None else zero
                for name, norms in zip(part.gradients, result, strict=True)
            }

        result: dict[str, torch.Tensor] = self.by_part(norms_of)
        return result

    def weighted_sum(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """name -> [*shape]: the sum over samples of the gradients, each times its weight [n]."""
        weights = torch.as_tensor(weights, device=self.losses.device)
        if weights.shape != self.losses.shape:
            raise TransformError(
                f"weighted_sum: weights of shape {tuple(weights.shape)} for {len(self)} samples; expected"
                f" shape ({len(self)},)",
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
        """[n, m] float64: the inner products of these samples' gradients with those of another set.

        Args:
            other: gradients of m samples, of any batch, in the same parameters.
            per: as for `square_norms`.

        No tensor of size n x m x parameters is made: each parameter is contracted by its factors, or
        materialised and multiplied in pieces, whichever is predicted to be faster. A sample whose gradient is
        not finite has numbers that are not finite in its row or column.

        Raises TransformError if the two sets differ in their parameters' names, shapes or device.
        """
        self._assert_same_parameters(other)
        products = _Products(len(self), len(other), self.losses.device)
        for rows, one in self.parts:
            for columns, another in other.parts:
                products.add(rows, columns, one._inner(another, per, symmetric=False))
        return products.result

    def gram(self, per: Per = "total") -> Any:
        """[n, n] float64, symmetric: the inner products of the samples' gradients with each other, at half
        the cost of `inner`.
        """
        products = _Products(len(self), len(self), self.losses.device)
        for number, (rows, one) in enumerate(self.parts):
            for columns, another in self.parts[:number]:
                result = one._inner(another, per, symmetric=False)
                products.add(rows, columns, result)
                products.add(columns, rows, tree_map(torch.t, result))
            products.add(rows, rows, one._inner(one, per, symmetric=True))
        return products.result

    def _inner(self, other: PerSampleGradients, per: Per, *, symmetric: bool) -> Any:
        """[n, m]: the inner products of two groups of samples, of which each was computed together.
        symmetric: whether the groups are the same.
        """
        samples, device = (len(self), len(other)), self.losses.device

        def products(names: list[str]) -> torch.Tensor:
            pairs = [(self.gradients[name], other.gradients[name]) for name in names]
            return inner_products(pairs, samples, device, symmetric=symmetric)

        return _of_groups(list(self.gradients), per, products)

    def _assert_same_parameters(self, other: PerSampleGradients) -> None:
        names = set(self.gradients), set(other.gradients)
        if names[0] != names[1]:
            raise TransformError(
                f"inner: only one of the two sets has gradients of {sorted(names[0] ^ names[1])[:8]};"
                " expected gradients of the same parameters",
                hint="two different models, or one of them is partly frozen; select(names) of both sets",
            )
        for name, gradient in self.gradients.items():
            if gradient.shape != other.gradients[name].shape:
                raise TransformError(
                    f"inner: {name} has shape {tuple(gradient.shape)} in one set and"
                    f" {tuple(other.gradients[name].shape)} in the other; expected gradients of the same"
                    " parameters",
                    hint="two models",
                )
        if self.losses.device != other.losses.device:
            raise TransformError(
                f"inner: one set is on {self.losses.device}, the other on {other.losses.device}; expected"
                " both on one device",
            )

    def dot(self, vector: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[n]: the inner product of each sample's gradient with one vector, name -> [*shape]. The vector is
        zero for absent names.
        """
        unknown = set(vector) - set(self.gradients)
        if unknown:
            raise TransformError(
                f"dot: no gradient of the name(s) {sorted(unknown)}; expected names among"
                f" {list(self.gradients)[:8]}",
            )
        for name, direction in vector.items():
            if direction.shape != self.gradients[name].shape:
                raise TransformError(
                    f"dot: {name} has shape {tuple(direction.shape)}; expected"
                    f" {tuple(self.gradients[name].shape)}",
                )

        def dot(part: PerSampleGradients) -> torch.Tensor:
            total = torch.zeros(len(part), dtype=accumulating(part.losses).dtype, device=part.losses.device)
            for name, direction in vector.items():
                for placed in part.gradients[name].terms:
                    total = total + placed.term.dot(placed.layout.invert(direction, placed.term.shape))
            return total

        result: torch.Tensor = self.by_part(dot)
        return result

    def project(self, projection: Projection) -> torch.Tensor:
        """[n, k] float32 (float64 if gradients are): each sample's gradient, randomly projected without being
        materialised.

        `projection.columns(names)` returns the columns of each parameter. `Projection` documents what the
        inner products of the rows estimate.
        """
        result: torch.Tensor = self.by_part(
            lambda part: projection.apply(part.gradients, len(part), part.losses.device)
        )
        return result

    def materialise(self) -> dict[str, torch.Tensor]:
        """name -> [n, *shape]: every per-sample gradient materialised."""
        return {name: _materialised(gradient, len(self)) for name, gradient in self.gradients.items()}

    def reduce(self, step: Callable[[State, str, slice, torch.Tensor], State], initial: State) -> State:
        """The result of a user's query on gradients that are materialised for a few samples at a time.

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
        """The gradients in some of the parameters, by their names or by patterns such as "*.weight" ("*", "?"
        and "[...]" as in file names).

        Raises TransformError for an unknown name, and for a pattern that matches no parameter.
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
                    one_line(
                        f"select: no parameter of the name {name!r}"
                        + (f"; did you mean {close[0]}?" if close else ""),
                        "expected "
                        + (f"names among {list(self.gradients)[:8]}, or a pattern that matches some"),
                    ),
                )
            chosen.update({each: self.gradients[each] for each in fitting})
        return PerSampleGradients(chosen, self.losses, self.aux)

    def describe(self) -> dict[str, str]:
        """name -> the order of contraction of its norms."""
        return {name: gradient.describe() for name, gradient in self.gradients.items()}

    @property
    def unfactored(self) -> list[str]:
        """The parameters whose gradients were materialised for each sample, because an operator needed the
        value.
        """
        return [name for name, gradient in self.gradients.items() if gradient.lost_at]


def _of_groups(names: list[str], per: Per, query: Callable[[list[str]], torch.Tensor]) -> Any:
    """A query's result for all parameters, or for each group of them by `per`."""
    if per == "total":
        return query(names)
    return {label: query(group) for label, group in labelled(names, per).items()}


class _Products:
    """Inner products [n, m], or label -> [n, m], assembled from those of groups of samples."""

    def __init__(self, n: int, m: int, device: torch.device) -> None:
        self._shape, self._device, self.result = (n, m), device, None

    def add(self, rows: torch.Tensor, columns: torch.Tensor, block: Any) -> None:
        if (len(rows), len(columns)) == self._shape and self.result is None:
            self.result = block
            return
        if self.result is None:
            self.result = tree_map(lambda x: x.new_empty(self._shape), block)
        tree_map(lambda whole, x: whole.index_put_((rows.unsqueeze(1), columns), x), self.result, block)


def _materialised(gradient: DeferredGradient, n: int) -> torch.Tensor:
    """[n, *shape], zeros where the loss does not depend on the parameter."""
    return gradient.new_zeros(n) if gradient.is_zero else gradient.materialise()
