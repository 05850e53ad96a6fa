"""The norm of each sample's gradient: in all parameters, parameter by parameter, layer by layer, and relative
to the norm of the parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from psgrad.engine.gradients import PerSampleGradients, SquareNorms
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, Setting, finite_rows, nan_elsewhere


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


OF_THE_MODEL = "(model)"
"""What parameters of the model itself are said to belong to."""


@dataclass
class LayerNorms(Measure):
    """A column for each layer, or for each parameter; an array [n, layers] float32 if the model has more of
    them.

    Options:
        per: module (the parameters of one layer together) or parameter.
        columns_up_to: the largest number of layers that get a column each.
    """

    per: Literal["module", "parameter"] = "module"
    columns_up_to: int = 32

    name: ClassVar[str] = "layer_norms"
    title: ClassVar[str] = "Norms by layer"
    formula: ClassVar[str] = "|g_i,m|_2, g_i,m the part of g_i in the parameters of layer m"
    unit: ClassVar[str] = "{loss} per unit of parameter"
    source: ClassVar[str] = "the definition; the squares over all layers add up to grad_norm squared"
    cost: ClassVar[str] = "nothing beyond the pass: the norms are computed anyway"
    meanings: ClassVar[dict[str, str]] = {
        "layer_norm.<layer>": (
            "norm of the sample's gradient in the parameters of this layer ({loss} per unit of parameter)"
        )
    }

    def __post_init__(self) -> None:
        if self.columns_up_to < 0:
            raise ValueError("columns_up_to is a number of layers, 0 or more")

    def prepare(self, setting: Setting) -> None:
        self._layers = layers_of(setting, self.per)

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        finite = finite_rows(gradients)
        norms = {
            layer: nan_elsewhere(squares.sqrt(), finite)
            for layer, squares in gradients.square_norms(per=self.per).items()
        }
        if len(norms) <= self.columns_up_to:
            return {f"layer_norm.{layer or OF_THE_MODEL}": column for layer, column in norms.items()}
        return {"layer_norms": torch.stack(list(norms.values()), 1).float()}

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        arrays = {"layer_norms": rows["layer_norms"]} if "layer_norms" in rows else {}
        return Gathered(numbers={"layers": self._layers}, arrays=arrays)


def layers_of(setting: Setting, per: str) -> list[str]:
    """The names of the layers, or of the parameters, in the order of `square_norms`."""
    names = list(setting.examples.params)
    return (
        names
        if per == "parameter"
        else list(dict.fromkeys(name.rpartition(".")[0] or OF_THE_MODEL for name in names))
    )


_QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}


@dataclass
class RelativeNorm(Measure):
    """How far a step of size 1 along this sample's gradient would move the parameters, as a share of their
    norm.

    measures.json has the names of the layers, in the order of `relative_norm_layer`, from 0. A layer whose
    parameters are all zero has no relative norm. The table `parameters` has the samples' distribution for
    each parameter.
    """

    name: ClassVar[str] = "relative_norm"
    title: ClassVar[str] = "Norm relative to the parameters"
    formula: ClassVar[str] = "|g_i|_2 / |theta|_2, and for each layer m: |g_i,m|_2 / |theta_m|_2"
    unit: ClassVar[str] = "{loss} per unit of parameter, per unit of parameter norm"
    source: ClassVar[str] = (
        "You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks (2017), section 4, its inverse"
    )
    cost: ClassVar[str] = "nothing beyond the pass: the norms are computed anyway"
    meanings: ClassVar[dict[str, str]] = {
        "relative_norm": (
            "norm of the gradient over the norm of all parameters ({loss} per squared unit of parameter)"
        ),
        "relative_norm_largest": (
            "the largest of the layers' relative norms ({loss} per squared unit of parameter)"
        ),
        "relative_norm_layer": "the layer that has it (its place in the list of layers, from 0)",
    }

    def prepare(self, setting: Setting) -> None:
        params = setting.examples.params
        squares = {name: float(value.double().square().sum()) for name, value in params.items()}
        self._parameters = {name: square**0.5 for name, square in squares.items()}
        self._whole = sum(squares.values()) ** 0.5
        self._layers = layers_of(setting, "module")
        by_layer = dict.fromkeys((name.rpartition(".")[0] for name in params), 0.0)
        for name, square in squares.items():
            by_layer[name.rpartition(".")[0]] += square
        self._layer_norms = torch.tensor(list(by_layer.values()), dtype=torch.float64).sqrt()
        self._seen = {name: NormDistribution() for name, norm in self._parameters.items() if norm}
        self._chunk: dict[str, torch.Tensor] = {}

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        finite = finite_rows(gradients)
        by_parameter = gradients.square_norms(per="parameter")
        self._chunk = {
            name: by_parameter[name][finite].sqrt() / self._parameters[name] for name in self._seen
        }
        by_layer = torch.stack(
            list(gradients.square_norms(per="module").values()), 1
        ).sqrt() / self._layer_norms.to(finite.device)
        nonzero = (self._layer_norms > 0).to(finite.device)
        largest, layer = by_layer.masked_fill(~nonzero, -torch.inf).max(1)
        finite_layer = finite & nonzero.any()
        return {
            "relative_norm": nan_elsewhere(
                gradients.square_norms().sqrt() / (self._whole or torch.nan), finite
            ),
            "relative_norm_largest": nan_elsewhere(largest, finite_layer),
            "relative_norm_layer": nan_elsewhere(layer, finite_layer),
        }

    def keep(self) -> None:
        for name, values in self._chunk.items():
            self._seen[name].add(values.cpu())
        self._chunk = {}

    def state(self) -> Arrays:
        return {
            f"{place}.{part}": value
            for place, each in enumerate(self._seen.values())
            for part, value in each.state().items()
        }

    def restore(self, state: Arrays) -> None:
        for place, each in enumerate(self._seen.values()):
            each.restore({part: state[f"{place}.{part}"] for part in each.state()})

    def merge(self, state: Arrays) -> None:
        for place, each in enumerate(self._seen.values()):
            other = NormDistribution()
            other.restore({part: state[f"{place}.{part}"] for part in other.state()})
            each.merge(other)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        table: dict[str, list[Any]] = {
            "parameter": [],
            "parameter_norm": [],
            "mean": [],
            **{name: [] for name in _QUANTILES},
        }
        for name, norm in self._parameters.items():
            seen = self._seen.get(name, NormDistribution())
            table["parameter"].append(name)
            table["parameter_norm"].append(norm)
            table["mean"].append(seen.mean if seen.count else torch.nan)
            for quantile, q in _QUANTILES.items():
                table[quantile].append(seen.quantile(q))
        return Gathered(
            numbers={"layers": self._layers, "parameter_norm": self._whole}, tables={"parameters": table}
        )
