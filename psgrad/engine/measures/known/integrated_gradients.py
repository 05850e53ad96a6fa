"""What each part of a sample's input adds to its loss, or to a logit, along the straight way from a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from psgrad.engine.measures.attribution import Attribution, Point
from psgrad.engine.measures.attribution.attribution import sum_of
from psgrad.engine.measures.attribution.points import Of, Values
from psgrad.engine.measures.measure import Arrays


@dataclass
class IntegratedGradients(Attribution):
    """The mean gradient along the line from the baseline to the input, times their difference. The sum of all parts is the rise of the loss
    (or logit) from the baseline to the input. The gap is the error of this sum, that is, of the integral.

    If the gap is large compared with the sum of absolute values, use more steps: kinks (ReLU) and steep paths need them.

    Options:
        of: what is attributed: loss, or the output for the class of the label (target) or of the model's own prediction (prediction).
        steps: points of the Gauss-Legendre rule along the line, at least 1.
        baseline: the value of every entry of an input at the start of the line, and of every entry of embeddings.
        baseline_token: for inputs of ids, the id whose embedding is the start of the line, in place of `baseline` (a padding token).
    """

    of: Of = "loss"
    steps: int = 32
    baseline: float = 0.0
    baseline_token: int | None = None

    name: ClassVar[str] = "integrated_gradients"
    title: ClassVar[str] = "Integrated gradients"
    formula: ClassVar[str] = "sum_i (x_i - b_i) integral_0^1 d l / d x_i at b + t (x - b) dt"
    unit: ClassVar[str] = "{loss} (or logit)"
    source: ClassVar[str] = "Sundararajan, Taly, Yan: Axiomatic Attribution for Deep Networks (2017), section 3, equation 1"
    cost: ClassVar[str] = "a pass of its own; each step is a forward and backward pass, without gradients of parameters"
    meanings: ClassVar[dict[str, str]] = {
        "integrated_gradients": "the sum over the parts: the rise of the loss (or logit) from the baseline to the input ({loss} or logit)",
        "integrated_gradients_l1": "the sum over the parts of their absolute values ({loss} or logit)",
        "integrated_gradients_gap": "the sum minus the rise, 0 if the integral is exact ({loss} or logit)",
        "integrated_gradients_<i>": "the sum over the parts of input i alone, if the model has several inputs",
    }

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"got {self.steps} steps, expected at least 1")

    def attributed(self, point: Point) -> tuple[Values, Arrays]:
        begin = self._baseline(point)
        nodes, weights = np.polynomial.legendre.leggauss(self.steps)
        mean: Values = tuple(torch.zeros_like(x, dtype=torch.float64) for x in point.values)
        for node, weight in zip(((nodes + 1) / 2).tolist(), (weights / 2).tolist(), strict=True):
            here = tuple(torch.lerp(b, x, node) for b, x in zip(begin, point.values, strict=True))
            mean = tuple(total + weight * g for total, g in zip(mean, point.gradient(here), strict=True))
        found = tuple((x - b) * g for x, b, g in zip(point.values, begin, mean, strict=True))
        rise = point.at(point.values) - point.at(begin)
        return found, {"integrated_gradients_gap": sum_of(found) - rise}

    def _baseline(self, point: Point) -> Values:
        plain = tuple(torch.full_like(x, self.baseline) for x in point.values)
        if self.baseline_token is None:
            return plain
        places = point.scalar.places
        return tuple(
            b if place.module is None else token
            for place, b, token in zip(places, plain, point.with_token(self.baseline_token), strict=True)
        )
