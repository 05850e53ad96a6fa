"""Sums of per-sample gradients whose weights depend on their norms: clipping, normalising, dropping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.gradients.batch_pass import BatchPass
from psgrad.engine.gradients.bounded_sums import bounded_sum, reduced, single_product, summed_square_norms
from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.norm_collector import NormsByName
from psgrad.engine.gradients.norm_results import SquareNorms
from psgrad.engine.gradients.per_sample import materialised_if_smaller
from psgrad.engine.gradients.terms.numerics import Flags
from psgrad.engine.transforms.recorder import assumed
from psgrad.errors import TransformError

WeightsByName = Mapping[str, torch.Tensor]
Weights = Callable[[SquareNorms], torch.Tensor | WeightsByName]


@dataclass(frozen=True)
class WeightedSum:
    """A weighted sum of per-sample gradients, and the norms and weights behind it.

    Attributes:
        sums: name -> [*shape].
        norms: the samples' squared norms, losses and aux.
        weights: [n], or name -> [n].
    """

    sums: dict[str, torch.Tensor]
    norms: SquareNorms
    weights: Any


def per_sample_weighted_sum(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    weights: Weights,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: str = "error",
    bounded: bool = False,
    counted: torch.Tensor | None = None,
) -> WeightedSum:
    """The sum over samples of their gradients, each times a weight that is computed from the norms:
    `weights(norms)` is [n], or name -> [n] for different weights for each parameter.

    Clipping to norm C is `weights=lambda norms: (C / norms.square_norms().sqrt()).clamp(max=1)`. A sample
    without a finite norm adds nothing if its weights are 0.

    The norms are computed first. Meanwhile each parameter's gradient is stored in its smaller form, so that
    no second pass is needed (Bu, Wang, Zha and Karypis, "Differentially Private Optimization on Large Model
    at Small Cost", 2023, call this book-keeping). The gradient of the weighted loss would take a second
    backward pass, in which the weights are rounded with every operator (to eight bits in bfloat16), so its
    sum is a sum of other gradients than those of the norms.

    With `bounded`, sums are float64, and the norm of a sample's contribution to a parameter's sum is at most
    its weight times the norm from which the weight was computed, in spite of rounding (`bounded_sums`). A
    sample whose weights are all 0 is left out, also if it is not finite. `norms.absolute` is computed for use
    by `weights`.

    counted: [n] bool, the samples that count: others add nothing. Where those disagree on a branch,
    SamplesDisagree is raised, and others follow them on it. The other arguments are those of
    `per_sample_gradients`.
    """
    job = BatchPass(loss, params, batch, in_dims, has_aux, randomness, counted)
    parts, places = job.collected(lambda part: _NormsAndGradients(list(part.params), bounded))
    norms = SquareNorms.of_groups([part.norms for part in parts], places)
    given = weights(norms)
    summing = _ParameterSum(_by_name(given, list(params), norms), norms, bounded, counted)
    return WeightedSum(_sums(parts, places, list(params), summing), norms, given)


@dataclass(frozen=True)
class _Pass:
    """The gradients of samples that were computed together, until their weights are known.

    Attributes:
        gradients: name -> gradient, in the order of the backward pass.
    """

    gradients: dict[str, DeferredGradient]
    norms: SquareNorms


class _NormsAndGradients:
    """Collects the gradients of one pass, and their norms."""

    def __init__(self, names: list[str], bounded: bool) -> None:
        self._gradients, self._norms = dict[str, DeferredGradient](), NormsByName(names, absolute=bounded)

    def add(self, name: str, gradient: DeferredGradient) -> None:
        self._gradients[name] = materialised_if_smaller(gradient)
        self._norms.add(name, self._gradients[name])

    def result(self, losses: torch.Tensor, aux: Any) -> _Pass:
        return _Pass(self._gradients, self._norms.result(losses, aux))


def _by_name(
    weights: torch.Tensor | WeightsByName, names: list[str], norms: SquareNorms
) -> dict[str, torch.Tensor]:
    """name -> [n]: the weights of each parameter. Raises TransformError for wrong shapes and names."""
    if isinstance(weights, Mapping):
        if weights.keys() != set(names):
            raise TransformError(
                "per_sample_weighted_sum: only one of the parameters and weights(norms) has"
                f" {sorted(weights.keys() ^ set(names))[:8]}; expected weights for each parameter by its"
                " name, or one tensor for all",
            )
        each = {id(value): _checked(value, norms) for value in weights.values()}
        return {name: each[id(weights[name])] for name in names}
    return dict.fromkeys(names, _checked(weights, norms))


def _checked(weights: torch.Tensor, norms: SquareNorms) -> torch.Tensor:
    weights = torch.as_tensor(weights, device=norms.losses.device)
    if weights.shape != norms.losses.shape:
        raise TransformError(
            f"per_sample_weighted_sum: weights(norms) has shape {tuple(weights.shape)} for {len(norms)}"
            f" samples; expected a tensor of shape ({len(norms)},), one weight a sample",
        )
    return weights


class _ParameterSum:
    """Sums the gradient of a parameter with its weights, over the samples that take part.

    Zero times infinity is NaN. So a sample whose weights are all zero is left out if its norm is not finite;
    of a bounded sum it is always left out. There another sample takes its place, with weight 0, so that a
    sample's numbers do not depend on how many are left out: kernels round by the size of a batch.
    """

    def __init__(
        self, weights: WeightsByName, norms: SquareNorms, bounded: bool, counted: torch.Tensor | None
    ) -> None:
        distinct = {id(value): value for value in weights.values()}
        weighted = torch.stack([value != 0 for value in distinct.values()]).any(0)
        taken = weighted if bounded else weighted | torch.isfinite(norms.square_norms())
        flags = assumed(Flags)
        if flags is not None:
            flags.add(~taken)  # a program has all samples
        self._taken = None if flags is not None or bool(taken.all()) else taken
        if counted is not None:
            distinct = {key: value * counted for key, value in distinct.items()}
        self._weights = {name: distinct[id(value)] for name, value in weights.items()}
        self._norms, self._bounded = norms, bounded

    def of(self, name: str, gradient: DeferredGradient, places: torch.Tensor | None) -> torch.Tensor:
        """[*shape]: the weighted sum of the gradient in a parameter. places: the indices [k] of the
        gradient's samples among all; None if it has all of them.
        """
        weights, square_norms = self._weights[name], self._norms.by_parameter[name]
        if places is not None:
            weights, square_norms = weights[places], square_norms[places]
        if self._taken is not None:
            taken = self._taken if places is None else self._taken[places]
            chosen = torch.nonzero(taken).squeeze(1)
            if self._bounded and len(chosen):
                weights = weights * taken
                chosen = torch.where(taken, torch.arange(len(taken), device=taken.device), chosen[0])
                gradient, square_norms = gradient.at(chosen), square_norms[chosen]
            else:
                gradient, weights, square_norms = gradient.at(chosen), weights[chosen], square_norms[chosen]
        if not self._bounded:
            return gradient.weighted_sum(weights)
        measured = single_product(gradient) is not None
        if measured and assumed(Flags) is None:  # in a program nothing runs between the norms and the sum
            product = single_product(gradient)
            assert product is not None
            weights = reduced(weights, square_norms.sqrt(), summed_square_norms(product).sqrt())
        return bounded_sum(gradient, weights, None if measured else square_norms.sqrt())


def _sums(
    parts: list[_Pass], places: list[torch.Tensor], names: list[str], summing: _ParameterSum
) -> dict[str, torch.Tensor]:
    """name -> [*shape]; each parameter's gradient is deleted as soon as its sum is computed.

    The sums are computed in the order of the backward pass, in which the gradients were stored. So the
    factors of the last layers are freed before the sums of the first layers are made.
    """
    sums: dict[str, torch.Tensor] = {}
    for part, own in zip(parts, places, strict=True):
        for name in list(part.gradients):
            found = summing.of(name, part.gradients.pop(name), own if len(parts) > 1 else None)
            sums[name] = sums[name] + found if name in sums else found
    return {name: sums[name] for name in names}
