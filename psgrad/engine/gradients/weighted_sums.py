"""Sums of per-sample gradients whose weights depend on their norms: clipping, normalising, dropping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.gradients.memory import free_memory
from psgrad.engine.gradients.per_sample import NormsByName, Pass, per_sample_square_norms
from psgrad.engine.gradients.placed import DeferredGradient
from psgrad.engine.gradients.queries import SquareNorms
from psgrad.engine.gradients.settling import settled
from psgrad.engine.transforms import generators
from psgrad.engine.transforms.branching import Divergence
from psgrad.engine.transforms.differentiate import grad
from psgrad.engine.transforms.vectorize import vmap
from psgrad.errors import TransformError

Weights = Callable[[SquareNorms], torch.Tensor]


@dataclass(frozen=True)
class WeightedSum:
    """A weighted sum of per-sample gradients, and what its weights were made from.

    Attributes:
        sums: name -> [*shape].
        norms: the samples' squared norms, losses and aux.
        weights: [n].
        recomputed: whether a second pass was needed, because the first one's factors did not fit.
    """

    sums: dict[str, torch.Tensor]
    norms: SquareNorms
    weights: torch.Tensor
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
) -> WeightedSum:
    """The sum over samples of their gradients, each times a weight that follows from the norms: `weights(norms)` is [n].

    Clipping to norm C is `weights=lambda norms: (C / norms.square_norms().sqrt()).clamp(max=1)`. A sample of weight 0 adds nothing,
    whatever its gradient.

    The norms come first. What the sum needs of each parameter's gradient is kept meanwhile, in its smaller form, so that there is no
    second pass (Bu, Wang, Zha and Karypis, "Differentially Private Optimization on Large Model at Small Cost", 2023, call this
    book-keeping). Where that takes more than `memory` bytes (None: half of what is free), it is dropped, and the sum is the gradient
    of the weighted loss, in a second pass. Both give the same numbers, to rounding, and draw the same random numbers.

    The other arguments are those of `per_sample_gradients`.
    """
    kept = _Kept(memory, next(iter(params.values())).device)
    before = generators.states() if randomness != "error" else None
    job = Pass(loss, params, batch, in_dims, has_aux, randomness)
    found = NormsByName()

    def complete(name: str, gradient: DeferredGradient) -> None:
        gradient = gradient if kept.full else settled(gradient)
        found.add(name, gradient)
        kept.add(name, gradient)

    try:
        losses, aux = job.run(complete)
        norms = found.of(params, losses, aux)
    except Divergence:  # the transforms split the batch, in each of two passes
        kept.give_up()
        if before is not None:
            generators.restore(before)
        norms = per_sample_square_norms(loss, params, *batch, in_dims=in_dims, has_aux=has_aux, randomness=randomness)
    factors = _checked(weights(norms), norms)
    poisoned = ~torch.isfinite(norms.square_norms()) & (factors == 0)  # nothing times infinity is no number
    if not kept.full:
        return WeightedSum(_sums(kept.gradients, list(params), factors, poisoned), norms, factors, recomputed=False)
    after = generators.states() if before is not None else None
    if before is not None:
        generators.restore(before)
    if bool(poisoned.all()):
        return WeightedSum({name: torch.zeros_like(value) for name, value in params.items()}, norms, factors, recomputed=True)
    if bool(poisoned.any()):
        batch = job.batch_of(_in_place_of(poisoned))
    sums = _summed_again(loss, params, batch, factors, in_dims, has_aux, randomness)
    if after is not None:
        generators.restore(after)
    return WeightedSum(sums, norms, factors, recomputed=True)


# Bytes that are kept without asking how much memory is free, which takes longer than a small network's pass.
_WITHOUT_ASKING = 64 << 20


class _Kept:
    """Gradients that wait for their weights, up to so many bytes (None: half of what is free); past that none."""

    def __init__(self, memory: float | None, device: torch.device) -> None:
        self.gradients: dict[str, DeferredGradient] = {}
        self.full = memory is not None and memory <= 0
        self._device = device
        self._asked = memory is not None
        self._left = _WITHOUT_ASKING if memory is None else memory
        self._seen: set[int] = set()  # tensors share storages: an input serves several weights

    def add(self, name: str, gradient: DeferredGradient) -> None:
        if self.full:
            return
        self.gradients[name] = gradient
        for placed in gradient.terms:
            for factor in placed.term.factors:
                storage = factor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self._left -= storage.nbytes()
        if self._left < 0 and not self._asked:
            self._asked = True
            self._left += free_memory(self._device) / 2
        if self._left < 0:
            self.give_up()

    def give_up(self) -> None:
        self.full = True
        self.gradients.clear()


def _checked(weights: torch.Tensor, norms: SquareNorms) -> torch.Tensor:
    weights = torch.as_tensor(weights, device=norms.losses.device)
    if weights.shape != norms.losses.shape:
        raise TransformError(
            f"per_sample_weighted_sum: weights(norms) has shape {tuple(weights.shape)} for {len(norms)} samples",
            expected=f"a tensor of shape ({len(norms)},), one weight a sample",
        )
    return weights


def _sums(kept: dict[str, DeferredGradient], names: list[str], weights: torch.Tensor, poisoned: torch.Tensor) -> dict[str, torch.Tensor]:
    """name -> [*shape]; each parameter's gradient is dropped as soon as its sum is there.

    In the order of the pass back, as they were kept: a layer's input is the next one's output, and goes with the last of the two, so that
    the first layers' sums, mostly the last to come, don't meet the last layers' factors.
    """
    clean = torch.nonzero(~poisoned).squeeze(1) if bool(poisoned.any()) else None
    if clean is None:
        sums = {name: kept.pop(name).weighted_sum(weights) for name in list(kept)}
    else:
        sums = {name: kept.pop(name).at(clean).weighted_sum(weights[clean]) for name in list(kept)}
    return {name: sums[name] for name in names}


def _in_place_of(poisoned: torch.Tensor) -> torch.Tensor:
    """[n]: the samples themselves, and the first good one in place of those that would spoil a sum that they have no part in.

    All keep their places, so that random draws stay whose they were.
    """
    rows = torch.arange(len(poisoned), device=poisoned.device)
    return torch.where(poisoned, poisoned.logical_not().int().argmax(), rows)


def _summed_again(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    batch: tuple[Any, ...],
    weights: torch.Tensor,
    in_dims: Any,
    has_aux: bool,
    randomness: str,
) -> dict[str, torch.Tensor]:
    """name -> [*shape]: the gradient of the weighted sum of the losses, which sums over samples as an ordinary backward pass does."""

    def total(params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        def of_one(*sample: Any) -> torch.Tensor:
            found = loss(params, *sample)
            return found[0] if has_aux else found

        losses = vmap(of_one, in_dims=in_dims, randomness=randomness)(*batch)
        return (losses * weights.to(losses.dtype)).sum()

    sums: dict[str, torch.Tensor] = grad(total)(dict(params))
    return sums
