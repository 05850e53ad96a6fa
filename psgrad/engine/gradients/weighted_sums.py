"""Sums of per-sample gradients whose weights depend on their norms: clipping, normalising, dropping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from psgrad import random_state
from psgrad.engine.free_memory import free_memory
from psgrad.engine.gradients.bounded_sums import bounded_sum, reduced, single_product, summed_square_norms
from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.per_sample import (
    BatchPass,
    NormsByName,
    SamplesDisagree,
    materialised_if_smaller,
    per_sample_square_norms,
)
from psgrad.engine.gradients.queries import SquareNorms
from psgrad.engine.gradients.terms.numerics import current_flags
from psgrad.engine.transforms.levels import Divergence
from psgrad.engine.transforms.private_torch import DisableTorchFunction, storage_key
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
        recomputed: whether a second pass was needed, because the factors of the first did not fit in memory.
    """

    sums: dict[str, torch.Tensor]
    norms: SquareNorms
    weights: Any
    recomputed: bool


def per_sample_weighted_sum(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    weights: Weights,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: str = "error",
    memory: float | None = None,
    bounded: bool = False,
    counted: torch.Tensor | None = None,
) -> WeightedSum:
    """The sum over samples of their gradients, each times a weight that is computed from the norms:
    `weights(norms)` is [n], or name -> [n] for different weights for each parameter.

    Clipping to norm C is `weights=lambda norms: (C / norms.square_norms().sqrt()).clamp(max=1)`. A sample
    without a finite norm adds nothing if its weights are 0.

    The norms are computed first. Meanwhile each parameter's gradient is stored in its smaller form, so that
    no second pass is needed (Bu, Wang, Zha and Karypis, "Differentially Private Optimization on Large Model
    at Small Cost", 2023, call this book-keeping). If this takes more than `memory` bytes (None: half of the
    free memory), the stored gradients are deleted. A second pass then sums each parameter's gradient as soon
    as it is complete. The gradient of the weighted loss would take as long. But there the weights are rounded
    with every operator of the backward pass (to eight bits in bfloat16), so its sum is a sum of other
    gradients than those of the norms. With one or two passes, the results are equal up to rounding, and the
    same random numbers are drawn.

    With `bounded`, sums are float64, and the norm of a sample's contribution to a parameter's sum is at most
    its weight times the norm from which the weight was computed, in spite of rounding (`bounded_sums`). For
    this the norm of the numbers that are summed is computed, also in a second pass. A sample whose weights
    are all 0 is left out, also if it is not finite. `norms.absolute` is computed for use by `weights`.

    counted: [n] bool, the samples that count: others add nothing. Where those disagree on a branch,
    SamplesDisagree is raised, and others follow them on it. The other arguments are those of
    `per_sample_gradients`.
    """
    stored = _StoredGradients(memory, next(iter(params.values())).device)
    before = random_state.states() if randomness != "error" else None
    job = BatchPass(loss, params, batch, in_dims, has_aux, randomness)
    job.level.counted = counted
    norms_by_name = NormsByName(absolute=bounded)

    def complete(name: str, gradient: DeferredGradient) -> None:
        gradient = gradient if stored.full else materialised_if_smaller(gradient)
        norms_by_name.add(name, gradient)
        stored.add(name, gradient)

    try:
        losses, aux = job.run(complete)
        norms = norms_by_name.of(params, losses, aux)
    except Divergence as divergence:  # the transforms split the batch, in each of two passes
        if counted is not None:
            raise SamplesDisagree(job.groups(divergence)) from None
        stored.give_up()
        if before is not None:
            random_state.restore(before)
        norms = per_sample_square_norms(loss, params, *batch, absolute=bounded, **job.settings)
    given = weights(norms)
    summing = _ParameterSum(_by_name(given, list(params), norms), norms, bounded, counted)
    if not stored.full:
        return WeightedSum(_sums(stored.gradients, list(params), summing), norms, given, recomputed=False)
    after = random_state.states() if before is not None else None
    if before is not None:
        random_state.restore(before)
    sums = _summed_again(job, batch, summing)
    if after is not None:
        random_state.restore(after)
    return WeightedSum(sums, norms, given, recomputed=True)


# Bytes that are stored without a query of the free memory, which takes longer than a small network's pass.
_WITHOUT_QUERY = 64 << 20


class _StoredGradients:
    """Gradients that are stored until their weights are known, up to `memory` bytes (None: half of the free
    memory). If they take more, all are deleted.
    """

    def __init__(self, memory: float | None, device: torch.device) -> None:
        self.gradients: dict[str, DeferredGradient] = {}
        self.full = memory is not None and memory <= 0
        self._device = device
        self._is_limited = memory is not None
        self._left = _WITHOUT_QUERY if memory is None else memory
        self._seen: set[int] = (
            set()
        )  # storages that are counted already: an input may belong to several weights

    def add(self, name: str, gradient: DeferredGradient) -> None:
        if self.full:
            return
        self.gradients[name] = gradient
        with DisableTorchFunction():  # a recorder would take this for a read of the values
            for placed in gradient.terms:
                for factor in placed.term.factors:
                    storage = factor.untyped_storage()
                    if storage_key(storage) not in self._seen:
                        self._seen.add(storage_key(storage))
                        self._left -= storage.nbytes()
        if self._left < 0 and not self._is_limited:
            self._is_limited = True
            self._left += free_memory(self._device) / 2
        if self._left < 0:
            self.give_up()

    def give_up(self) -> None:
        self.full = True
        self.gradients.clear()


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
        flags = current_flags()
        if flags is not None:
            flags.add(~taken)  # a program has all samples
        self._taken = None if flags is not None or bool(taken.all()) else taken
        if counted is not None:
            distinct = {key: value * counted for key, value in distinct.items()}
        self._weights = {name: distinct[id(value)] for name, value in weights.items()}
        self._norms, self._bounded = norms, bounded
        self.samples = len(norms)

    def of(self, name: str, gradient: DeferredGradient, places: torch.Tensor | None = None) -> torch.Tensor:
        """[*shape]: the weighted sum of the gradient in a parameter. places: the indices [k] of the
        gradient's samples among all; None if it is the gradient whose norms were computed.
        """
        measured = places is None and single_product(gradient) is not None
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
        if measured and current_flags() is None:  # in a program nothing runs between the norms and the sum
            product = single_product(gradient)
            assert product is not None
            weights = reduced(weights, square_norms.sqrt(), summed_square_norms(product).sqrt())
        return bounded_sum(gradient, weights, None if measured else square_norms.sqrt())


def _sums(
    stored: dict[str, DeferredGradient], names: list[str], summing: _ParameterSum
) -> dict[str, torch.Tensor]:
    """name -> [*shape]; each parameter's gradient is deleted as soon as its sum is computed.

    The sums are computed in the order of the backward pass, in which the gradients were stored. So the
    factors of the last layers are freed before the sums of the first layers are made.
    """
    sums = {name: summing.of(name, stored.pop(name)) for name in list(stored)}
    return {name: sums[name] for name in names}


def _summed_again(
    first: BatchPass, batch: tuple[Any, ...], summing: _ParameterSum
) -> dict[str, torch.Tensor]:
    """name -> [*shape], by a second pass that repeats the first. The gradients of two parameters never exist
    at the same time.
    """
    params, in_dims = first.params, first.settings["in_dims"]
    dims = (*(in_dims if isinstance(in_dims, (tuple, list)) else [in_dims] * len(batch)), 0)

    def of_one(params: Mapping[str, torch.Tensor], *sample: Any) -> Any:
        return first.loss(params, *sample[:-1])

    def summed(*some: Any) -> dict[str, torch.Tensor]:
        """The sum over some of the samples. The last argument is their places, because a branch may split
        them.
        """
        places: torch.Tensor = some[-1]
        sums: dict[str, torch.Tensor] = {}
        job = BatchPass(of_one, params, some, **{**first.settings, "in_dims": dims})
        job.level.counted = None if first.level.counted is None else first.level.counted[places]
        try:
            job.run(lambda name, gradient: sums.__setitem__(name, summing.of(name, gradient, places)))
        except Divergence as divergence:
            return job.split(divergence, summed, lambda parts, _: _added(parts))
        return {name: sums[name] for name in params}

    return summed(*batch, torch.arange(summing.samples, device=next(iter(params.values())).device))


def _added(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
