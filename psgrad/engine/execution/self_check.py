"""The self-check: compares a few samples' gradients with those of PyTorch's own autograd, one sample at a
time.

This is the only module of psgrad that calls torch.autograd, for comparison and never as a source of results.
Nothing that computes may import it; only the workflows do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.ranks import spread_rows
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import PerSampleGradients
from psgrad.errors import SelfCheckError

# Largest relative error of a whole gradient. Both sides round, so it finds mistakes and does not measure
# precision.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 1e-1}
# Under autocast, autograd's own gradient says how far half precision is from float32 on a sample, which
# depends on the model's depth and on how much cancels in the sample's gradient. Ours is as far from float32,
# so the two differ by at most twice that; a third time is a margin. Besides, autograd stores each weight's
# gradient in half precision before it is cast back, and ours does not.
_TIMES_THE_ROUNDING = 3


@dataclass(frozen=True)
class SelfCheck:
    """How far our gradients are from those of PyTorch's autograd.

    rows: the samples that were checked, in one batch. errors: for each, the larger of two relative errors: of
    the whole gradient (the norm of the difference) and of its norm as the queries compute it. Relative to the
    gradient's norm, or to a thousandth of the largest among them, so that rounding in a vanishing gradient
    does not count as an error. NaN where the gradient is not finite on either side. Under autocast, else
    empty: rounding: how far autograd's gradient itself is from its gradient in float32; norm_rounding: the
    relative errors of our norms against float32's.
    """

    rows: list[int]
    errors: list[float]
    rounding: list[float] = field(default_factory=list)
    norm_rounding: list[float] = field(default_factory=list)

    @property
    def worst(self) -> float:
        return _largest(self.errors)

    @property
    def worst_rounding(self) -> float:
        return _largest(self.rounding)

    @property
    def worst_norm_rounding(self) -> float:
        return _largest(self.norm_rounding)


def _largest(errors: list[float]) -> float:
    return max((error for error in errors if not math.isnan(error)), default=math.nan)


def self_check(objective: Objective, stream: Stream, count: int, wanted: int) -> SelfCheck:
    """Compare `wanted` samples' gradients with torch.autograd's.

    Raises SelfCheckError where they differ by more than rounding explains.
    """
    rows = spread_rows(count, wanted)
    if not rows:
        return SelfCheck([], [])
    gradients = stream.gradients(rows)
    our_norms = gradients.square_norms().sqrt().tolist()
    norms, exact_norms, apart, rounded = [], [], [], []
    for index, row in enumerate(rows):
        inputs, target = stream.load([row])
        found = _SampleComparison(gradients, index)
        _witness(objective, inputs, target, objective.precision(), found.add)
        norms.append(found.norm)
        apart.append(max(found.distance, abs(our_norms[index] - found.norm)))
        if objective.autocast is not None:
            halves, exact = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
            _witness(objective, inputs, target, objective.precision(), halves.__setitem__)
            _witness(objective, inputs, target, nullcontext(), exact.__setitem__)
            rounded.append(math.sqrt(sum(_square(halves[name].double() - exact[name]) for name in halves)))
            exact_norms.append(math.sqrt(sum(map(_square, exact.values()))))
    scale = max((n for n in norms if math.isfinite(n)), default=0.0)
    errors = [_relative(*found, scale) for found in zip(apart, norms, our_norms, strict=True)]
    kind, tolerances = stream.dtype, [TOLERANCE.get(stream.dtype, 1e-3)] * len(rows)
    rounding = [
        _relative(distance, norm, norm, scale) for distance, norm in zip(rounded, norms, strict=False)
    ]
    if objective.autocast is not None:
        kind = objective.autocast
        tolerances = [
            _TIMES_THE_ROUNDING * (0.0 if math.isnan(share) else share) + torch.finfo(kind).eps
            for share in rounding
        ]
    _require_agreement(rows, errors, tolerances, kind)
    of_norms = [
        _relative(abs(ours - exact), exact, ours, scale)
        for ours, exact in zip(our_norms, exact_norms, strict=False)
    ]
    return SelfCheck(rows, errors, rounding, of_norms)


class _SampleComparison:
    """One sample's gradients beside autograd's, of which one parameter at a time is in memory."""

    def __init__(self, gradients: PerSampleGradients, index: int) -> None:
        self.gradients = gradients.at(slice(index, index + 1))
        self.squares = self.squares_apart = 0.0

    def add(self, name: str, witness: torch.Tensor) -> None:
        self.squares += _square(witness)
        self.squares_apart += _square(self.gradients.select(name).materialise()[name][0], witness)

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    @property
    def distance(self) -> float:
        return math.sqrt(self.squares_apart)


def _relative(apart: float, norm: float, our_norm: float, scale: float) -> float:
    """A difference as a share of the gradient; infinite where one side alone is finite, NaN where none is."""
    if not math.isfinite(norm) and not math.isfinite(our_norm):
        return math.nan
    if not math.isfinite(apart):
        return math.inf
    return apart / max(norm, scale / 1000) if apart else 0.0


def _require_agreement(
    rows: list[int], errors: list[float], tolerances: list[float], dtype: torch.dtype
) -> None:
    for row, error, tolerance in zip(rows, errors, tolerances, strict=True):
        if not math.isnan(error) and not error <= tolerance:
            raise SelfCheckError(
                f"the self-check failed on row {row}: our gradient differs from a plain one-sample"
                f" gradient by {error:.2e} of its norm; expected at most {tolerance:.0e} in"
                f" {str(dtype).removeprefix('torch.')}",
                hint=(
                    "a rule of psgrad is wrong for this model, or the model behaves differently from"
                    " one call to the next; please report the model; engine.verify: 0 goes on without"
                    " the check, with numbers that may be wrong"
                ),
            )


def differentiable_kernels(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """A context in which autograd differentiates recurrent layers on a GPU: cuDNN does it in training mode
    only, and only once.
    """
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    if not any(parameter.is_cuda for module in recurrent for parameter in module.parameters()):
        return nullcontext()
    context: AbstractContextManager[Any] = torch.backends.cudnn.flags(enabled=False)
    return context


def _witness(
    objective: Objective,
    inputs: tuple[torch.Tensor, ...],
    target: torch.Tensor | None,
    precision: AbstractContextManager[Any],
    take: Callable[[str, torch.Tensor], None],
) -> None:
    """Calls `take` with each parameter's name and gradient by autograd, as soon as that is complete; it is
    not kept here.
    """
    parameters = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
    waiting = set(parameters)

    def taken(name: str, gradient: torch.Tensor) -> torch.Tensor:
        waiting.discard(name)
        take(name, gradient.detach())
        return gradient.new_zeros(()).expand(gradient.shape)  # in its place, so that its memory is free

    hooks = [p.register_hook(partial(taken, name)) for name, p in parameters.items()]
    try:
        with torch.enable_grad():
            with precision, differentiable_kernels(objective.model):
                loss = objective.plain_loss(inputs, target)
            torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise SelfCheckError(
            f"the self-check can't run, as PyTorch's autograd fails: {str(error).partition(chr(10))[0]}",
            hint=(
                "psgrad has a rule where PyTorch has no derivative, or none for this dtype;"
                " engine.verify: 0 goes on without the check; or run the model with an implementation"
                " that PyTorch differentiates (experts_implementation: eager, dequantised weights)"
            ),
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    for name in waiting:  # the loss does not depend on them
        take(name, parameters[name].new_zeros(()).expand(parameters[name].shape))


# Numbers that are compared in float64 at a time.
_PIECE = 1 << 22


def _square(value: torch.Tensor, other: torch.Tensor | None = None) -> float:
    """The squared norm of a tensor, or of the difference of two, in float64."""
    ours = value.reshape(-1).split(_PIECE)
    theirs = [torch.zeros((), device=value.device)] * len(ours)
    if other is not None:
        theirs = list(other.reshape(-1).split(_PIECE))
    return sum(float((a.double() - b.double()).square_().sum()) for a, b in zip(ours, theirs, strict=True))
