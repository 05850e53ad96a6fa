"""The calibration of scores: whether they are amounts, equal to the change on removal, or only rank.

They are if the model is affine in its parameters, at the minimum of its training objective, without damping,
with the leverage correction, and if one Newton step comes near enough to the minimum without an example.
`continued` computes what predicted amounts are compared with: the change if training goes on from the given
weights without an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.execution.buckets import Added
from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.leverage import Corrected
from psgrad.engine.influence.method import Preconditioned, flat_rows
from psgrad.engine.transforms import grad_and_value, vmap

# Steps at most, and halvings of a step that raises the objective.
STEPS, _HALVINGS = 10, 8
# The decrement of a step, relative to the first one's, below which the minimum is reached.
_CONVERGED = 1e-12
# By how much rounding may raise an objective.
_LOSS_ROUNDING = 1e-7


@dataclass(frozen=True)
class Continued:
    """Weights after training went on from the same weights with all rows, and without each of k rows.

    params: name -> [1 + k, *shape], those with all rows first. steps: how many were taken. converged: whether
    the objectives are at their minima. length: of the steps taken, as a mean share of the full ones.
    """

    params: Vectors
    steps: int
    converged: bool
    length: float

    def changes(self, examples: Examples, row: int) -> torch.Tensor:
        """[k] float64: how much larger the scalar of one row of `examples` is with the weights of each
        removal than with all rows.
        """
        inputs, target = examples.stream.load(row, row + 1)
        over = (None, 0, None if target is None else 0)
        results = [
            _values(examples, params, inputs, target, over) for params in each_model(self.params, examples)
        ]
        values = torch.stack(results)
        return (values[1:] - values[0]).cpu()


def continued(
    fitted: Preconditioned,
    rows: Sequence[int],
    weight_decay: float,
    *,
    steps: int = STEPS,
) -> Continued:
    """Train on from the fit's weights with all rows, and without each of `rows`: steps of the full gradient
    times the fit's inverse.

    Args:
        fitted: multiplies with an inverse of the summed training loss's curvature.
        rows: [k] places in the training set.
        weight_decay: of training, on the mean loss.
        steps: at most.

    All 1 + k trainings take the same steps, so that the weights differ by the row alone. A step that raises
    an objective is halved, and the next one is tried at twice its length; where no length lowers the
    objectives, or they are not finite, training ends there. The first step of a removal is the influence
    function's own; repeated, steps lead to the minimum without the row where the training objective is
    convex. A step takes a pass over the training set for each training, and one product with the inverse.
    """
    training = fitted.training
    search = _Objectives(training, rows, weight_decay)
    here = (
        training.flat.join({name: value.unsqueeze(0) for name, value in training.params.items()})
        .double()
        .repeat(1 + len(rows), 1)
        .cpu()
    )
    values, gradients = search.at(here, same=True)
    size, lengths, first, taken, converged = 1.0, 0.0, 0.0, 0, False
    while taken < steps:
        slope = training.flat.split(gradients.to(training.device))
        step = training.flat.join(fitted.precondition(slope)).double().cpu()
        decrement = float((step * gradients).sum(1).abs().max())
        first = first or decrement
        converged = decrement <= _CONVERGED * first
        if converged or not math.isfinite(decrement):
            break
        for _ in range(_HALVINGS):
            there = here - size * step
            after, slopes = search.at(there)
            if bool((after <= values + _LOSS_ROUNDING * values.abs()).all()):
                break
            size /= 2
        else:
            break
        here, values, gradients, taken, lengths = there, after, slopes, taken + 1, lengths + size
        size = min(1.0, 2 * size)
    return Continued(training.flat.split(here.to(training.device)), taken, converged, lengths / max(taken, 1))


def affordable_steps(fitted: Preconditioned, rows: int, numbers: float) -> int:
    """How many steps `continued` may take without `rows` rows, at least one, if about `numbers` numbers of
    single examples' gradients are affordable; one where each step is a solve with passes of its own. It
    follows from the problem alone, and not from the time that a step takes: so what is found is the same on a
    slow machine.
    """
    training = fitted.training
    if fitted.makes_passes and math.isfinite(numbers):
        return 1
    return int(max(1, min(STEPS, numbers / (len(training) * training.flat.size * (1 + rows)))))


def slopes_without(
    training: Examples, rows: Sequence[int], weight_decay: float, weights: torch.Tensor
) -> torch.Tensor:
    """[k, p] float64, on the CPU: the gradients of the training objectives without each of `rows` [k], at
    weights [k, p] of its own.
    """
    search = _Objectives(training, rows, weight_decay)
    return search.at(torch.cat([torch.zeros_like(weights[:1]), weights]))[1][1:]


class _Objectives:
    """The training objectives with all rows, and without each of some."""

    def __init__(self, training: Examples, rows: Sequence[int], weight_decay: float) -> None:
        self.training, self.rows, self.decay = training, rows, len(training) * weight_decay

    def at(self, weights: torch.Tensor, same: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [1 + k] and gradients [1 + k, p] of the objectives, at weights [1 + k, p] each. same:
        whether the weights are all equal.
        """
        whole: Any = None
        sums, weights = [], weights.to(self.training.device)
        for place, params in enumerate(each_model(self.training.flat.split(weights), self.training)):
            if whole is None or not same:
                whole = self._sums(params)
            value, slope = whole
            if place:
                row_value, row_slope = self._row(params, self.rows[place - 1])
                value, slope = value - row_value, slope - row_slope
            own = weights[place].cpu()
            sums.append((value.cpu() + self.decay / 2 * own.square().sum(), slope.cpu() + self.decay * own))
        return torch.stack([value for value, _ in sums]), torch.stack([slope for _, slope in sums])

    def _sums(self, params: Vectors) -> tuple[torch.Tensor, torch.Tensor]:
        def of_chunk(loss: Any, _: Vectors, inputs: Any, target: Any, *, randomness: str, **__: Any) -> Added:
            return Added(self._slope(params, inputs, target, randomness))

        sums_and_count: tuple[torch.Tensor, torch.Tensor]
        sums_and_count = self.training.fold(lambda sums: sums.value, of_chunk)
        return sums_and_count

    def _row(self, params: Vectors, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = self.training.stream.load(row, row + 1)
        return self._slope(params, inputs, target, self.training.stream.randomness)

    def _slope(
        self, params: Vectors, inputs: Any, target: Any, randomness: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of some rows' losses, and its gradient [p], both float64."""
        loss, over = self.training.objective.loss, (0, None if target is None else 0)

        def total(params: Vectors) -> torch.Tensor:
            return (
                vmap(lambda *sample: loss(params, *sample)[0], over, randomness=randomness)(inputs, target)
                .double()
                .sum()
            )

        gradients, value = grad_and_value(total)(params)
        return (
            value,
            self.training.flat.join({name: gradient.unsqueeze(0) for name, gradient in gradients.items()})[
                0
            ].double(),
        )


def each_model(stacked: Vectors, examples: Examples) -> list[Vectors]:
    """The weights of each of k models, name -> [k, *shape], in the type and on the device of the model's."""
    count = len(next(iter(stacked.values())))
    return [
        {name: stacked[name][place].to(value) for name, value in examples.params.items()}
        for place in range(count)
    ]


def _values(examples: Examples, params: Vectors, inputs: Any, target: Any, over: Any) -> torch.Tensor:
    losses, _ = vmap(examples.objective.loss, over, randomness=examples.stream.randomness)(
        params, inputs, target
    )
    return losses[0].double()


# Samples whose outputs are compared, and directions that they are compared along.
_SAMPLES, _DIRECTIONS = 4, 3
# Samples whose removal is compared with the distance from the minimum.
_REMOVED = 16
# Leverages up to here needed no second step on any problem tried. Above it the second steps of this number of
# examples are computed. Scores are amounts if second steps are at most this long, relative to the first ones.
# On 60 problems of 24 to 100 rows a slope against retraining was off by about as much as that, and by less in
# most.
_LEVERAGE, _SECOND, _SECOND_STEP = 0.1, 4, 0.04
# Second differences of the output that are rounding, as a multiple of the type's precision, relative to the
# outputs.
_ROUNDING = 256


def is_affine(training: Examples) -> bool:
    """Whether the model's output is an affine function of the parameters, as that of a linear layer is: the
    training loss is then convex in the parameters where it is convex in the output, and its Hessian is the
    Gauss-Newton matrix.

    It is tried on a few samples, along random directions as long as the parameters: f(p + 2 d) - 2 f(p + d) +
    f(p) is zero. A model under autocast, whose products round to halves, and one whose output is not a tensor
    count as not affine.
    """
    objective = training.objective
    if objective.autocast is not None or len(training) == 0:
        return False
    rows = sorted({place * len(training) // _SAMPLES for place in range(_SAMPLES)})
    generator = torch.Generator().manual_seed(0)
    for row in rows:
        inputs, _ = training.stream.load(row, row + 1)
        for _ in range(_DIRECTIONS):
            along = {name: _direction(value, generator) for name, value in training.params.items()}
            outputs = [
                _output(
                    training,
                    {name: value + times * along[name] for name, value in training.params.items()},
                    inputs,
                )
                for times in range(3)
            ]
            if any(
                not isinstance(output, torch.Tensor) or not output.is_floating_point() for output in outputs
            ):
                return False
            first, second, third = (output.double() for output in outputs)
            size = first.abs().amax() + 2 * second.abs().amax() + third.abs().amax()
            precision = torch.finfo(outputs[0].dtype).eps
            if not bool((third - 2 * second + first).abs().amax() <= _ROUNDING * precision * size):
                return False
    return True


def _direction(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random direction, about as long as the parameter."""
    size = value.double().square().mean().sqrt() if value.numel() else 1.0
    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
    return (drawn * (size if size > 0 else 1.0)).to(value.dtype)


def _output(training: Examples, params: Vectors, inputs: Any) -> Any:
    return vmap(training.objective.predict, in_dims=(None, 0), randomness=training.stream.randomness)(
        params, inputs
    )


def calibrated(
    fitted: Corrected | Preconditioned, weight_decay: float, say: Callable[[str], None]
) -> tuple[bool, str]:
    """(whether the scores of an undamped fit to an affine model are amounts, why). `say` is called with the
    reason if they are not.
    """
    plain = fitted.solver()
    assert plain is not None
    decrement, one = distance_from_minimum(plain, weight_decay)
    if not 0 <= decrement <= one:
        excess = decrement / 2 / len(plain.training)
        reason = (
            "the weights are not at the minimum of the training objective with a weight decay of"
            f" {weight_decay:g}: one Newton step would lower it by {excess:.2g} a row"
        )
        say(
            f"{reason}, so that scores are uncalibrated; give the weight_decay of training, or train to"
            " the end"
        )
        return False, reason
    if not isinstance(fitted, Corrected):
        return (
            False,
            (
                "what a removal does to the curvature itself (leverage) is left out, so that scores are too"
                " small"
            ),
        )
    largest, left = fitted.facts["largest_leverage"], 0.0
    if largest > _LEVERAGE:
        left = second_steps(fitted, weight_decay)
    if not left <= _SECOND_STEP:
        reason = (
            f"the fit leans on single examples (the largest leverage is {largest:.2g}): the one Newton step"
            f" of a score would be followed by a second one {left:.2g} times as long, for the examples of the"
            " longest steps"
        )
        say(f"{reason}, so that scores are uncalibrated; `--evaluate loo` trains without each of them")
        return False, reason
    return (
        True,
        (
            "the training objective is convex, the weights are at its minimum, and nothing but the weight"
            " decay is added to the curvature"
        ),
    )


def second_steps(fitted: Corrected, weight_decay: float) -> float:
    """How long the second Newton step to the minimum without an example is, relative to the first one, which
    is its score's: the root mean square over the examples of the longest first steps, measured through the
    curvature. It is zero where the loss is quadratic.
    """
    plain, training = fitted.plain, fitted.plain.training
    first = fitted.decrements.nan_to_num(0.0)
    rows = first.topk(min(_SECOND, len(first))).indices.tolist()
    flat = training.flat
    own = flat.join(training.stream.gradients_at(rows).materialise()).double()
    moved = flat.join(fitted.removed.training.stream.gradients_at(rows).materialise())
    step = flat.join(plain.precondition(flat.split(moved))).double().to(own)
    here = flat.join({name: value.unsqueeze(0) for name, value in training.params.items()}).double()
    left = slopes_without(training, rows, weight_decay, here + step).to(own)
    again = flat.join(plain.precondition(flat.split(left))).double().to(own)
    return float(((left * again).sum(1) / (own * step).sum(1)).clamp_min(0).mean().sqrt())


def distance_from_minimum(fitted: Preconditioned, weight_decay: float) -> tuple[float, float]:
    """(G' A G, the mean of g_i' A g_i over some samples), A what the fit multiplies with, G the gradient of
    the training objective (the losses and the weight decay, summed over the samples), g_i that of one sample.

    At the minimum G is zero. Where the first number is below the second, the weights are nearer to the
    minimum than the removal of one sample moves them.
    """
    training, count = fitted.training, len(fitted.training)
    whole = objective_slope(training, weight_decay)
    rows = sorted({place * count // _REMOVED for place in range(_REMOVED)})
    single = training.stream.gradients_at(rows).materialise()
    vectors = {name: torch.cat([value.unsqueeze(0), single[name].double()]) for name, value in whole.items()}
    prepared = fitted.precondition(vectors)
    products = torch.stack(
        [
            (flat_rows(prepared[name]) * flat_rows(value).to(prepared[name].device)).sum(1)
            for name, value in vectors.items()
        ]
    )
    decrement, *own = products.sum(0).tolist()
    return decrement, sum(own) / len(own)


def objective_slope(training: Examples, weight_decay: float) -> Vectors:
    """The gradient of the training objective, the losses and the weight decay summed over the samples,
    float64.
    """
    total: Vectors = training.fold(_summed)
    return {
        name: value + len(training) * weight_decay * training.params[name].double()
        for name, value in total.items()
    }


def _summed(gradients: PerSampleGradients) -> Vectors:
    return {
        name: value.double()
        for name, value in gradients.weighted_sum(torch.ones_like(gradients.losses)).items()
    }
