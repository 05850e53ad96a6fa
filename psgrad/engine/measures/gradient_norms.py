"""The norm of each sample's gradient, in all parameters and parameter by parameter."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from psgrad.engine.gradients import PerSampleGradients, SquareNorms
from psgrad.engine.measures.measure import Arrays, Measure


class GradientNorms(Measure):
    """Columns `loss` and `grad_norm`, the L2 norm of the gradient of a sample's loss in all parameters, in
    units of loss per unit of parameter.

    Besides, it keeps the distribution of the norm in each parameter, over all samples with finite numbers, in
    bounded memory, how the norms were computed, and which parameters' gradients had to be materialised.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, NormDistribution] = {}
        self.computed_as: dict[str, str] = {}
        self.unfactored: list[str] = []
        self._chunk: dict[str, torch.Tensor] = {}

    def columns(self, gradients: PerSampleGradients | SquareNorms) -> dict[str, torch.Tensor]:
        squares = gradients.square_norms(per="parameter")
        stacked = torch.stack(list(squares.values()))  # [parameters, n]
        total = stacked.sum(0)
        finite = torch.isfinite(total) & torch.isfinite(gradients.losses)
        norms = torch.cat(
            [stacked.sqrt(), finite.to(stacked.dtype).unsqueeze(0)]
        ).cpu()  # one transfer from a GPU
        self._chunk = dict(zip(squares, norms[:-1, norms[-1] == 1], strict=True))
        self.computed_as = gradients.describe()
        self.unfactored = list(dict.fromkeys([*self.unfactored, *gradients.unfactored]))
        return {"loss": gradients.losses.double(), "grad_norm": total.sqrt()}

    def keep(self) -> None:
        for name, norms in self._chunk.items():
            self.parameters.setdefault(name, NormDistribution()).add(norms)
        self._chunk = {}

    def state(self) -> Arrays:
        words = {
            "computed_as": self.computed_as,
            "unfactored": self.unfactored,
            "parameters": list(self.parameters),
        }
        state = {"words": text_tensor(words)}
        for place, distribution in enumerate(self.parameters.values()):
            state |= {f"{place}.{part}": value for part, value in distribution.state().items()}
        return state

    def restore(self, state: Arrays) -> None:
        words = from_text_tensor(state["words"])
        self.computed_as, self.unfactored = words["computed_as"], words["unfactored"]
        self.parameters = {}
        for place, name in enumerate(words["parameters"]):
            distribution = self.parameters[name] = NormDistribution()
            distribution.restore({part: state[f"{place}.{part}"] for part in distribution.state()})

    def merge(self, state: Arrays) -> None:
        others = GradientNorms()
        others.restore(state)
        for name, distribution in others.parameters.items():
            self.parameters.setdefault(name, NormDistribution()).merge(distribution)
        self.computed_as = self.computed_as or others.computed_as
        self.unfactored = list(dict.fromkeys([*self.unfactored, *others.unfactored]))


def text_tensor(content: Any) -> torch.Tensor:
    """Plain values as a tensor of bytes [length] uint8, for a state."""
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def from_text_tensor(tensor: torch.Tensor) -> Any:
    """The plain values of a tensor of bytes [length], from `text_tensor`."""
    return json.loads(bytes(tensor.tolist()))


class NormDistribution:
    """Mean, spread, extremes and quantiles of a stream of non-negative numbers.

    Mean and variance are updated as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm
    for Computing Sample Variances" (1979). Quantiles come from a histogram with 64 bins a decade, so they are
    right to 2 %.
    """

    _PER_DECADE = 64
    _LOWEST = -24  # decades; smaller numbers, zero among them, are counted in the first bin
    _HIGHEST = 24

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # sum of squared deviations from the mean
        self.mean_square = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf
        self._bins = torch.zeros((self._HIGHEST - self._LOWEST) * self._PER_DECADE + 1, dtype=torch.int64)

    def add(self, values: torch.Tensor) -> None:
        """values: [n], non-negative and finite."""
        if not len(values):
            return
        values = values.cpu().double()
        added = NormDistribution()
        added.count, added.mean = len(values), float(values.mean())
        added._squares = float((values - added.mean).square().sum())
        added.mean_square = float(values.square().mean())
        added.minimum, added.maximum = float(values.min()), float(values.max())
        places = ((values.log10() - self._LOWEST) * self._PER_DECADE).floor().clamp(
            -1, len(self._bins) - 2
        ) + 1
        added._bins = torch.bincount(places.long(), minlength=len(self._bins))
        self.merge(added)

    def merge(self, other: NormDistribution) -> None:
        """Add the numbers of another stream."""
        if not other.count:
            return
        difference, total = other.mean - self.mean, self.count + other.count
        self._squares += other._squares + difference**2 * self.count * other.count / total
        self.mean += difference * other.count / total
        self.mean_square += (other.mean_square - self.mean_square) * other.count / total
        self.count = total
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self._bins += other._bins

    def state(self) -> Arrays:
        """All of it: `numbers` [6] float64, and `bins` [2, filled bins] int64, their places and counts."""
        filled = self._bins.nonzero().squeeze(1)  # most are empty
        numbers = [self.mean, self._squares, self.mean_square, self.minimum, self.maximum]
        return {
            "numbers": torch.tensor([self.count, *numbers], dtype=torch.float64),
            "bins": torch.stack([filled, self._bins[filled]]),
        }

    def restore(self, state: Arrays) -> None:
        """Continue from a result of `state`."""
        count, self.mean, self._squares, self.mean_square, self.minimum, self.maximum = state[
            "numbers"
        ].tolist()
        self.count = int(count)
        places, counts = state["bins"]
        self._bins.zero_()[places] = counts

    @property
    def std(self) -> float:
        """The sample standard deviation; NaN for fewer than two values."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else math.nan

    def quantile(self, q: float) -> float:
        """The value under which a share q lies; the middle of its bin, inside the extremes."""
        if not self.count:
            return math.nan
        place = int(torch.searchsorted(self._bins.cumsum(0), max(1, math.ceil(q * self.count))))
        middle = 0.0 if place == 0 else 10 ** (self._LOWEST + (place - 0.5) / self._PER_DECADE)
        return min(max(middle, self.minimum), self.maximum)
