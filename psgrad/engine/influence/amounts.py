"""The calibration of scores: whether they are amounts, equal to the change on removal, or only rank.

They are if the model is affine in its parameters, at the minimum of its training objective, without damping,
with the leverage correction, and if one Newton step comes near enough to the minimum without an example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.continued import slopes_without
from psgrad.engine.influence.leverage import Corrected
from psgrad.engine.influence.method import Preconditioned, row_products
from psgrad.engine.transforms import vmap

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
        inputs, _ = training.stream.load([row])
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
    largest, left = fitted.largest, 0.0
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
    own = flat.join(training.stream.gradients(rows).materialise()).double()
    moved = flat.join(fitted.removed.training.stream.gradients(rows).materialise())
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
    flat, whole = training.flat, objective_slope(training, weight_decay).unsqueeze(0)
    rows = sorted({place * count // _REMOVED for place in range(_REMOVED)})
    single = flat.join(training.stream.gradients(rows).materialise()).double()
    vectors = flat.split(torch.cat([whole, single]))
    decrement, *own = row_products(fitted.precondition(vectors), vectors).tolist()
    return decrement, sum(own) / len(own)


def objective_slope(examples: Examples, weight_decay: float = 0.0) -> torch.Tensor:
    """[p] float64: the gradient of the sum of the losses, and of n decay / 2 |theta|^2."""
    total: Vectors = examples.fold(_summed)
    slope = examples.flat.join({name: value.unsqueeze(0) for name, value in total.items()})[0]
    return slope + len(examples) * weight_decay * flat_params(examples)


def flat_params(examples: Examples) -> torch.Tensor:
    """[p] float64: the parameters."""
    return examples.flat.join({name: x.unsqueeze(0) for name, x in examples.params.items()})[0].double()


def _summed(gradients: PerSampleGradients) -> Vectors:
    summed = gradients.weighted_sum(torch.ones_like(gradients.losses))
    return {name: value.double() for name, value in summed.items()}
