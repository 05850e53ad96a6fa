"""Measures of input attribution: input gradient, gradient x input, integrated gradients, SmoothGrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from psgrad.engine.measures.attribution_base import Attribution, Point, sum_of
from psgrad.engine.measures.attribution_points import Of, Values
from psgrad.engine.measures.measure import Arrays, Setting
from psgrad.engine.measures.passes import random_normals


@dataclass
class InputGradient(Attribution):
    """The gradient in the input; for inputs of ids, in the embeddings that are looked up.

    A map shows the gradient with its sign; for ids, its norm over the entries of the embedding.

    Options:
        of: what is differentiated: loss, or the output for the class of the label (target) or of the model's
            own prediction (prediction).
    """

    of: Of = "loss"

    name: ClassVar[str] = "input_gradient"
    title: ClassVar[str] = "Input gradient"
    formula: ClassVar[str] = "|d l / d x|_2"
    unit: ClassVar[str] = "{loss} (or logit) per unit of input"
    source: ClassVar[str] = (
        "Simonyan, Vedaldi, Zisserman: Deep Inside Convolutional Networks: Visualising Image Classification"
        " Models and Saliency Maps (2013), section 3"
    )
    cost: ClassVar[str] = "a pass of its own, forward and backward, without gradients of parameters"
    meanings: ClassVar[dict[str, str]] = {
        "input_gradient": (
            "L2 norm of the gradient in the sample's inputs ({loss} or logit per unit of input)"
        ),
        "input_gradient_<i>": "the same of input i alone, if the model has several inputs",
    }
    additive: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def attributed(self, point: Point) -> tuple[Values, Arrays]:
        return point.gradient(), {}


@dataclass
class GradientXInput(Attribution):
    """The gradient in the input times the input, entry by entry; for inputs of ids, of the embeddings that
    are looked up.

    Options:
        of: what is attributed: loss, or the output for the class of the label (target) or of the model's own
            prediction (prediction).
    """

    of: Of = "loss"

    name: ClassVar[str] = "gradient_x_input"
    title: ClassVar[str] = "Gradient x input"
    formula: ClassVar[str] = "sum_i x_i d l / d x_i"
    unit: ClassVar[str] = "{loss} (or logit)"
    source: ClassVar[str] = (
        "Shrikumar et al.: Not Just a Black Box: Learning Important Features Through Propagating Activation"
        " Differences (2016), section 2.1"
    )
    cost: ClassVar[str] = "a pass of its own, forward and backward, without gradients of parameters"
    meanings: ClassVar[dict[str, str]] = {
        "gradient_x_input": (
            "rise of the loss (or logit) per relative growth of the whole input: the sum over its parts"
            " ({loss} or logit)"
        ),
        "gradient_x_input_l1": "the sum over the parts of their absolute values ({loss} or logit)",
        "gradient_x_input_<i>": "the sum over the parts of input i alone, if the model has several inputs",
    }
    draws: ClassVar[bool] = True

    def attributed(self, point: Point) -> tuple[Values, Arrays]:
        return tuple(x * g for x, g in zip(point.values, point.gradient(), strict=True)), {}


@dataclass
class IntegratedGradients(Attribution):
    """The mean gradient along the line from the baseline to the input, times their difference. The sum of all
    parts is the rise of the loss (or logit) from the baseline to the input. The gap is the error of this sum,
    that is, of the integral.

    If the gap is large compared with the sum of absolute values, use more steps: kinks (ReLU) and steep paths
    need them.

    Options:
        of: what is attributed: loss, or the output for the class of the label (target) or of the model's own
            prediction (prediction).
        steps: points of the Gauss-Legendre rule along the line, at least 1.
        baseline: the value of every entry of an input at the start of the line, and of every entry of
            embeddings.
        baseline_token: for inputs of ids, the id whose embedding is the start of the line, in place of
            `baseline` (a padding token).
    """

    of: Of = "loss"
    steps: int = 32
    baseline: float = 0.0
    baseline_token: int | None = None

    name: ClassVar[str] = "integrated_gradients"
    title: ClassVar[str] = "Integrated gradients"
    formula: ClassVar[str] = "sum_i (x_i - b_i) integral_0^1 d l / d x_i at b + t (x - b) dt"
    unit: ClassVar[str] = "{loss} (or logit)"
    source: ClassVar[str] = (
        "Sundararajan, Taly, Yan: Axiomatic Attribution for Deep Networks (2017), section 3, equation 1"
    )
    cost: ClassVar[str] = (
        "a pass of its own; each step is a forward and backward pass, without gradients of parameters"
    )
    meanings: ClassVar[dict[str, str]] = {
        "integrated_gradients": (
            "the sum over the parts: the rise of the loss (or logit) from the baseline to the input ({loss}"
            " or logit)"
        ),
        "integrated_gradients_l1": "the sum over the parts of their absolute values ({loss} or logit)",
        "integrated_gradients_gap": "the sum minus the rise, 0 if the integral is exact ({loss} or logit)",
        "integrated_gradients_<i>": (
            "the sum over the parts of input i alone, if the model has several inputs"
        ),
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
        result = tuple((x - b) * g for x, b, g in zip(point.values, begin, mean, strict=True))
        rise = point.at(point.values) - point.at(begin)
        return result, {"integrated_gradients_gap": sum_of(result) - rise}

    def _baseline(self, point: Point) -> Values:
        plain = tuple(torch.full_like(x, self.baseline) for x in point.values)
        if self.baseline_token is None:
            return plain
        places = point.scalar.places
        return tuple(
            b if place.module is None else token
            for place, b, token in zip(places, plain, point.with_token(self.baseline_token), strict=True)
        )


@dataclass
class SmoothGrad(Attribution):
    """The mean of the gradients at noisy copies of the input; for inputs of ids, the noise is added to the
    embeddings that are looked up.

    The noise is normal, and drawn for each sample from the number of its row. A map shows the mean gradient
    with its sign; for ids, its norm over the entries of the embedding.

    Options:
        of: what is differentiated: loss, or the output for the class of the label (target) or of the model's
            own prediction (prediction).
        samples: noisy copies of each input, at least 1.
        noise: standard deviation of the noise, as a share of the range of the sample's own values (largest
            minus smallest), more than 0.
    """

    of: Of = "loss"
    samples: int = 16
    noise: float = 0.1

    name: ClassVar[str] = "smooth_grad"
    title: ClassVar[str] = "SmoothGrad"
    formula: ClassVar[str] = (
        "|mean_j d l / d x at x + e_j|_2, e_j normal with deviation noise x (max x - min x)"
    )
    unit: ClassVar[str] = "{loss} (or logit) per unit of input"
    source: ClassVar[str] = "Smilkov et al.: SmoothGrad: removing noise by adding noise (2017), section 3"
    cost: ClassVar[str] = (
        "a pass of its own; each noisy copy is a forward and backward pass, without gradients of parameters"
    )
    meanings: ClassVar[dict[str, str]] = {
        "smooth_grad": (
            "L2 norm of the mean gradient in noisy copies of the sample's inputs ({loss} or logit per unit of"
            " input)"
        ),
        "smooth_grad_<i>": "the same of input i alone, if the model has several inputs",
    }
    additive: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"got {self.samples} samples, expected at least 1")
        if self.noise <= 0:
            raise ValueError(f"got a noise of {self.noise}, expected more than 0")

    def prepare(self, setting: Setting) -> None:
        super().prepare(setting)
        self._seed = setting.seed

    def attributed(self, point: Point) -> tuple[Values, Arrays]:
        mean: Values = tuple(torch.zeros_like(x, dtype=torch.float64) for x in point.values)
        for sample in range(self.samples):
            here = tuple(x + self._noise(point, number, sample) for number, x in enumerate(point.values))
            mean = tuple(
                total + g / self.samples for total, g in zip(mean, point.gradient(here), strict=True)
            )
        return mean, {}

    def _noise(self, point: Point, place: int, sample: int) -> torch.Tensor:
        """The noise for the values of a place, of their shape and type."""
        flat = (
            point.values[place].flatten(1)
            if point.values[place].dim() > 1
            else point.values[place].unsqueeze(1)
        )
        deviation = self.noise * (flat.amax(1, keepdim=True) - flat.amin(1, keepdim=True))
        drawn = random_normals(self._seed, f"{self.name} {place}", point.rows, flat.shape[1], sample)[:, 0]
        return (deviation * drawn.to(flat.dtype)).view(point.values[place].shape)
