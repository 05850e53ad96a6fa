"""The self-check: a few samples' gradients beside those of PyTorch's own autograd, one sample at a time.

This is the one module of psgrad that calls torch.autograd, as a witness and never as a source of results. Nothing that computes
may import it; only the workflows do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.streaming import Stream
from psgrad.engine.objective import Objective, first
from psgrad.errors import SelfCheckError

# Of the relative error of a whole gradient; both sides round, so this is a bound on mistakes and not a claim of precision.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-2}


@dataclass(frozen=True)
class SelfCheck:
    """How far our gradients are from the witness's.

    rows: the samples that were checked, in one batch. errors: for each, the larger of two relative errors: of the whole gradient
    (the norm of the difference) and of its norm as the queries compute it. Relative to the gradient's norm, or to a thousandth of
    the largest among them, so that rounding in a vanishing gradient does not count as an error. NaN where the gradient is not
    finite on either side.
    """

    rows: list[int]
    errors: list[float]

    @property
    def worst(self) -> float:
        return max((error for error in self.errors if not math.isnan(error)), default=math.nan)


def spread_rows(count: int, wanted: int) -> list[int]:
    """`wanted` rows, evenly spread over a dataset of `count`."""
    wanted = min(wanted, count)
    return [index * count // wanted for index in range(wanted)]


def self_check(objective: Objective, stream: Stream, count: int, wanted: int) -> SelfCheck:
    """Compare `wanted` samples' gradients with torch.autograd's.

    Raises SelfCheckError where they differ by more than rounding explains.
    """
    rows = spread_rows(count, wanted)
    if not rows:
        return SelfCheck([], [])
    gradients = stream.gradients_at(rows)
    our_norms = gradients.square_norms().sqrt().tolist()
    norms, apart = [], []
    for place, row in enumerate(rows):
        witness = _witness(objective, *stream.load(row, row + 1))
        norms.append(_norm(witness.values()))
        apart.append(max(_distance(gradients, place, witness), abs(our_norms[place] - norms[-1])))
    scale = max((n for n in norms if math.isfinite(n)), default=0.0)
    errors = [_relative(*found, scale) for found in zip(apart, norms, our_norms, strict=True)]
    _require_agreement(rows, errors, TOLERANCE.get(stream.dtype, 1e-3), stream.dtype)
    return SelfCheck(rows, errors)


def _distance(gradients: PerSampleGradients, place: int, witness: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of one sample's gradients, of which one parameter at a time is written out."""

    def difference(name: str) -> torch.Tensor:
        deferred = gradients.gradients[name]
        return deferred.at(slice(place, place + 1)).materialise()[0].double() - witness[name] if deferred.terms else witness[name]

    return _norm(difference(name) for name in witness)


def _relative(apart: float, norm: float, our_norm: float, scale: float) -> float:
    """A difference as a share of the gradient; infinite where one side alone is finite, NaN where none is."""
    if not math.isfinite(norm) and not math.isfinite(our_norm):
        return math.nan
    if not math.isfinite(apart):
        return math.inf
    return apart / max(norm, scale / 1000) if apart else 0.0


def _require_agreement(rows: list[int], errors: list[float], tolerance: float, dtype: torch.dtype) -> None:
    for row, error in zip(rows, errors, strict=True):
        if not math.isnan(error) and not error <= tolerance:
            raise SelfCheckError(
                f"the self-check failed on row {row}: our gradient differs from a plain one-sample gradient by {error:.2e} of its norm",
                expected=f"at most {tolerance:.0e} in {str(dtype).removeprefix('torch.')}",
                cause="a rule of psgrad is wrong for this model, or the model behaves differently from one call to the next",
                next_step="please report the model; engine.verify: 0 goes on without the check, with numbers that may be wrong",
            )


def _witness(objective: Objective, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None) -> dict[str, torch.Tensor]:
    parameters = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        loss = objective.criterion(first(objective.model(*inputs)), None if target is None else target[0])
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter, dtype=torch.float64) if gradient is None else gradient.detach().double()
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }


def _norm(gradient: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradient))
