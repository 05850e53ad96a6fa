"""The weight decay of training, read off the weights: where the mean loss and its penalty are at a minimum,
the gradient of the mean loss is minus the weight decay times the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.amounts import flat_params, objective_slope
from psgrad.engine.influence.continued import AT_MINIMUM

# Of fewer parameters a gradient points against the weights by chance in one case of a hundred, or more.
_FEWEST = 5
# A stated weight decay may differ from the estimate by this share of the estimate.
_SAME = 0.1


@dataclass(frozen=True)
class DecayEstimate:
    """value: -<g, w> / <w, w>, with g the gradient of the mean loss and w the weights. cosine: of g and -w, 1
    at a minimum with this weight decay; NaN where the gradient is rounding, or there are too few parameters.
    """

    value: float
    cosine: float

    @property
    def certain(self) -> bool:
        """Whether the weights are at a minimum with this weight decay."""
        return self.cosine > AT_MINIMUM

    def differs_from(self, decay: float) -> bool:
        """Whether the weights are at a minimum, and not with `decay`."""
        return self.certain and abs(decay - self.value) > _SAME * self.value


def estimated_decay(training: Examples, row_norms: torch.Tensor | None = None) -> DecayEstimate:
    """The weight decay of training, from one pass. row_norms: [n], of the single rows' gradients; None for
    another pass that computes them.
    """
    if row_norms is None:
        row_norms = torch.cat([part["square_norm"].sqrt() for _, part in training.norms()])
    gradient, weights = objective_slope(training) / len(training), flat_params(training)
    against, square = -(gradient @ weights), weights.square().sum()
    size = gradient.norm() * square.sqrt()
    # A sum of rows that cancel has an error of their precision; its direction means nothing below that.
    rounding = math.sqrt(torch.finfo(next(iter(training.params.values())).dtype).eps)
    if len(weights) < _FEWEST or not size > 0 or gradient.norm() <= rounding * row_norms.mean():
        return DecayEstimate(0.0, math.nan)
    return DecayEstimate(float(against / square), float(against / size))
