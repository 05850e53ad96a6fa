"""Per-sample gradients of a batch, by parameter, and the queries that contract them."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.inner.inner_products import inner_products
from psgrad.engine.gradients.norm_results import Per, by_label, labelled
from psgrad.engine.gradients.norm_results import SquareNorms as SquareNorms
from psgrad.engine.gradients.parts import Part, in_order, in_short, of_samples
from psgrad.engine.gradients.projections import Projection
from psgrad.engine.gradients.square_norms import square_norms, sum_of_squares
from psgrad.engine.gradients.terms import accumulating_dtype, blocks
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.errors import TransformError, one_line

State = TypeVar("State")


@dataclass(frozen=True)
class PerSampleGradients:
    """Per-sample gradients, by parameter name, and the queries on them. All results are plain tensors.

    Attributes:
        parts: the gradients of the samples, those that were computed together in one part.
        losses: [n], each sample's loss.
        aux: the loss's second result, sample axis in front; None without `has_aux`.
    """

    parts: tuple[Part, ...]
    losses: torch.Tensor
    aux: Any = None

    @classmethod
    def of(
        cls, gradients: dict[str, DeferredGradient], losses: torch.Tensor, aux: Any = None
    ) -> PerSampleGradients:
        """The gradients of samples that were all computed together."""
        return cls((Part(torch.arange(len(losses), device=losses.device), gradients),), losses, aux)

    @classmethod
    def of_groups(
        cls, groups: Sequence[PerSampleGradients], places: Sequence[torch.Tensor]
    ) -> PerSampleGradients:
        """The gradients of all samples, from those of groups of samples. places: [k] of each group, the
        indices of its samples; a single group has its samples in order.
        """
        if len(groups) == 1:
            return groups[0]
        losses, aux = in_order([(group.losses, group.aux) for group in groups], places)
        each = len(losses) // sum(map(len, places))  # the rows of one sample are neighbours
        among = torch.arange(each, device=losses.device)
        rows = [(some.to(losses.device).unsqueeze(1) * each + among).flatten() for some in places]
        parts = [
            Part(own[part.places], part.gradients)
            for own, group in zip(rows, groups, strict=True)
            for part in group.parts
        ]
        return cls(tuple(parts), losses, aux)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """name -> the parameter's shape."""
        return {name: gradient.shape for name, gradient in self.parts[0].gradients.items()}

    def at(self, samples: slice | torch.Tensor) -> PerSampleGradients:
        """Of some of the samples: a slice of n, or their indices [k]."""
        losses, aux = of_samples((self.losses, self.aux), samples)
        if len(self.parts) == 1:
            gradients = self.parts[0].gradients.items()
            return PerSampleGradients.of({name: each.at(samples) for name, each in gradients}, losses, aux)
        device = self.losses.device
        wanted = torch.arange(len(self), device=device)[samples]
        place, owner = torch.empty(2, len(self), dtype=torch.int64, device=device)
        for number, part in enumerate(self.parts):
            place[part.places], owner[part.places] = torch.arange(len(part), device=device), number
        parts = []
        for number, part in enumerate(self.parts):
            places = torch.nonzero(owner[wanted] == number).squeeze(1)
            if len(places) or (number == 0 and not len(wanted)):  # there is a part without samples, too
                own = place[wanted[places]]
                parts.append(Part(places, {name: each.at(own) for name, each in part.gradients.items()}))
        return PerSampleGradients(tuple(parts), losses, aux)

    def __repr__(self) -> str:
        """Three lines for any number of parameters; the terms are those of deferred gradients."""
        shapes = self.shapes
        numbers = sum(shape.numel() for shape in shapes.values())
        names = ", ".join([*shapes][:3]) + (", ..." if len(shapes) > 3 else "")
        return (
            f"PerSampleGradients of {len(self):,} samples, not materialised\n"
            f"  {numbers:,} numbers in {len(shapes):,} parameters: {names}\n"
            "  queries: square_norms, inner, dot, weighted_sum, mean, project, materialise"
        )

    def by_part(self, query: Callable[[Part], Any]) -> Any:
        """[n, ...]: the results of `query` on each part, in the order of the samples."""
        found = [query(part) for part in self.parts]
        return found[0] if len(found) == 1 else in_order(found, [part.places for part in self.parts])

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

        def norms_of(part: Part) -> dict[str, torch.Tensor]:
            zero = torch.zeros(len(part), dtype=torch.float64, device=part.device)
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
        whole = len(self.parts) == 1
        return self._sums(
            lambda part, name: part.gradients[name].weighted_sum(weights if whole else weights[part.places])
        )

    def _sums(self, query: Callable[[Part, str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """name -> the sum over parts of a query's results for each parameter."""
        return {
            name: functools.reduce(torch.add, (query(part, name) for part in self.parts))
            for name in self.shapes
        }

    def mean(self) -> dict[str, torch.Tensor]:
        """name -> [*shape]: the mean gradient."""
        return self.weighted_sum(torch.full_like(self.losses, 1 / max(len(self), 1)))

    def second_moment(self) -> dict[str, torch.Tensor]:
        """name -> [*shape] float64: the mean over samples of the squares of the gradients' elements (the
        empirical Fisher's diagonal).
        """
        sums = self._sums(lambda part, name: sum_of_squares(part.gradients[name]))
        return {name: total / max(len(self), 1) for name, total in sums.items()}

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
        products = _Products(len(self), len(other))
        for part in self.parts:
            for another in other.parts:
                products.add(part.places, another.places, _inner(part, another, per, symmetric=False))
        return products.result

    def gram(self, per: Per = "total") -> Any:
        """[n, n] float64, symmetric: the inner products of the samples' gradients with each other, at half
        the cost of `inner`.
        """
        products = _Products(len(self), len(self))
        for number, part in enumerate(self.parts):
            for another in self.parts[:number]:
                result = _inner(part, another, per, symmetric=False)
                products.add(part.places, another.places, result)
                products.add(another.places, part.places, tree_map(torch.t, result))
            products.add(part.places, part.places, _inner(part, part, per, symmetric=True))
        return products.result

    def _assert_same_parameters(self, other: PerSampleGradients) -> None:
        shapes, others = self.shapes, other.shapes
        if shapes.keys() != others.keys():
            raise TransformError(
                "inner: only one of the two sets has gradients of"
                f" {sorted(shapes.keys() ^ others.keys())[:8]}; expected gradients of the same parameters",
                hint="two different models, or one of them is partly frozen; select(names) of both sets",
            )
        for name, shape in shapes.items():
            if shape != others[name]:
                raise TransformError(
                    f"inner: {name} has shape {tuple(shape)} in one set and {tuple(others[name])} in the"
                    " other; expected gradients of the same parameters",
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
        shapes = self.shapes
        if unknown := vector.keys() - shapes.keys():
            raise TransformError(
                f"dot: no gradient of the name(s) {sorted(unknown)}; expected names among {list(shapes)[:8]}",
            )
        for name, direction in vector.items():
            if direction.shape != shapes[name]:
                raise TransformError(
                    f"dot: {name} has shape {tuple(direction.shape)}; expected {tuple(shapes[name])}",
                )
        kind = accumulating_dtype(self.losses.dtype)

        def dot(part: Part) -> torch.Tensor:
            total = torch.zeros(len(part), dtype=kind, device=part.device)
            for name, direction in vector.items():
                for placed in part.gradients[name].terms:
                    total = total + placed.dot(direction)
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
            lambda part: projection.apply(part.gradients, len(part), part.device)
        )
        return result

    def materialise(self) -> dict[str, torch.Tensor]:
        """name -> [n, *shape]: every per-sample gradient materialised."""
        return {name: self._value(name) for name in self.shapes}

    def _value(self, name: str) -> torch.Tensor:
        """[n, *shape]"""
        value: torch.Tensor = self.by_part(lambda part: part.materialise(name))
        return value

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
        for name, gradient in self.parts[0].gradients.items():
            each = math.prod(gradient.shape) * max(gradient.dtype.itemsize, 4)
            one = self.select(name)
            for samples in blocks(len(self), 2 * each, gradient.device):
                state = step(state, name, samples, one.at(samples)._value(name))
        return state

    def select(self, names: str | Iterable[str]) -> PerSampleGradients:
        """The gradients in some of the parameters, by their names or by patterns such as "*.weight" ("*", "?"
        and "[...]" as in file names).

        Raises TransformError for an unknown name, and for a pattern that matches no parameter.
        """
        shapes, chosen = self.shapes, dict[str, None]()
        for name in [names] if isinstance(names, str) else names:
            fitting = [name] if name in shapes else fnmatch.filter(shapes, name)
            if not fitting:
                close = difflib.get_close_matches(name, shapes, n=1)
                raise TransformError(
                    one_line(
                        f"select: no parameter of the name {name!r}"
                        + (f"; did you mean {close[0]}?" if close else ""),
                        f"expected names among {list(shapes)[:8]}, or a pattern that matches some",
                    ),
                )
            chosen.update(dict.fromkeys(fitting))
        parts = [Part(part.places, {name: part.gradients[name] for name in chosen}) for part in self.parts]
        return PerSampleGradients(tuple(parts), self.losses, self.aux)

    def describe(self) -> dict[str, str]:
        """name -> the order of contraction of its norms."""
        return {
            name: in_short(part.gradients[name].describe() for part in self.parts) for name in self.shapes
        }

    @property
    def unfactored(self) -> list[str]:
        """The parameters whose gradients were materialised for each sample, because an operator needed the
        value.
        """
        return [name for name in self.shapes if any(part.gradients[name].lost_at for part in self.parts)]


def _inner(part: Part, other: Part, per: Per, *, symmetric: bool) -> Any:
    """[n, m]: the inner products of two parts' samples; by label if not for all parameters together.
    symmetric: whether the parts are the same.
    """

    def products(names: list[str]) -> torch.Tensor:
        pairs = [(part.gradients[name], other.gradients[name]) for name in names]
        return inner_products(pairs, (len(part), len(other)), part.device, symmetric=symmetric)

    names = list(part.gradients)
    if per == "total":
        return products(names)
    return {label: products(group) for label, group in labelled(names, per).items()}


class _Products:
    """Inner products [n, m], or label -> [n, m], assembled from those of parts."""

    def __init__(self, n: int, m: int) -> None:
        self._shape, self.result = (n, m), None

    def add(self, rows: torch.Tensor, columns: torch.Tensor, block: Any) -> None:
        if (len(rows), len(columns)) == self._shape and self.result is None:
            self.result = block
            return
        if self.result is None:
            self.result = tree_map(lambda x: x.new_empty(self._shape), block)
        tree_map(lambda whole, x: whole.index_put_((rows.unsqueeze(1), columns), x), self.result, block)
