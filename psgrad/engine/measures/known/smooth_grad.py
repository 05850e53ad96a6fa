"""How steeply each sample's loss, or a logit, rises around its input: the mean gradient under noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from psgrad.engine.measures.attribution import Attribution, Point
from psgrad.engine.measures.attribution.points import Of, Values
from psgrad.engine.measures.measure import Arrays, Setting
from psgrad.engine.measures.row_passes import random_normals


@dataclass
class SmoothGrad(Attribution):
    """The mean of the gradients at noisy copies of the input; for inputs of ids, the noise is added to the embeddings that are looked up.

    The noise is normal, and drawn for each sample from the number of its row. A map shows the mean gradient with its sign; for ids, its
    norm over the entries of the embedding.

    Options:
        of: what is differentiated: loss, or the output for the class of the label (target) or of the model's own prediction (prediction).
        samples: noisy copies of each input, at least 1.
        noise: standard deviation of the noise, as a share of the range of the sample's own values (largest minus smallest), more than 0.
    """

    of: Of = "loss"
    samples: int = 16
    noise: float = 0.1

    name: ClassVar[str] = "smooth_grad"
    title: ClassVar[str] = "SmoothGrad"
    formula: ClassVar[str] = "|mean_j d l / d x at x + e_j|_2, e_j normal with deviation noise x (max x - min x)"
    unit: ClassVar[str] = "{loss} (or logit) per unit of input"
    source: ClassVar[str] = "Smilkov et al.: SmoothGrad: removing noise by adding noise (2017), section 3"
    cost: ClassVar[str] = "a pass of its own; each noisy copy is a forward and backward pass, without gradients of parameters"
    meanings: ClassVar[dict[str, str]] = {
        "smooth_grad": "L2 norm of the mean gradient in noisy copies of the sample's inputs ({loss} or logit per unit of input)",
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
            mean = tuple(total + g / self.samples for total, g in zip(mean, point.gradient(here), strict=True))
        return mean, {}

    def _noise(self, point: Point, place: int, sample: int) -> torch.Tensor:
        """What is added to the values of a place, of their shape and type."""
        flat = point.values[place].flatten(1) if point.values[place].dim() > 1 else point.values[place].unsqueeze(1)
        deviation = self.noise * (flat.amax(1, keepdim=True) - flat.amin(1, keepdim=True))
        drawn = random_normals(self._seed, f"{self.name} {place}", point.rows, flat.shape[1], sample)[:, 0]
        return (deviation * drawn.to(flat.dtype)).view(point.values[place].shape)
