"""The norm of each sample's gradient: in all parameters, parameter by parameter, layer by layer, and relative
to the norm of the parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from psgrad.engine.gradients import PerSampleGradients, SquareNorms
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, Setting, finite_rows, nan_elsewhere

Numbers = npt.NDArray[np.float64]


class GradientNorms(Measure):
    """Columns `loss` and `grad_norm`, the L2 norm of the gradient of a sample's loss in all parameters, in
    units of loss per unit of parameter.

    Besides, it keeps the distribution of the norm in each parameter, over all samples with finite numbers, in
    bounded memory, how the norms were computed, and which parameters' gradients had to be materialised.
    """

    def __init__(self) -> None:
        self.names: list[str] = []  # of the parameters
        self.distributions = NormDistributions(0)
        self.computed_as: dict[str, str] = {}
        self.unfactored: list[str] = []
        self._chunk: tuple[torch.Tensor, torch.Tensor] | None = None

    def columns(self, gradients: PerSampleGradients | SquareNorms) -> dict[str, torch.Tensor]:
        squares = gradients.square_norms(per="parameter")
        stacked = torch.stack(list(squares.values()))  # [parameters, n]
        self._chunk = stacked, gradients.losses
        if not self.names:
            self.names, self.distributions = list(squares), NormDistributions(len(squares))
        self.computed_as = gradients.describe()
        if gradients.unfactored:
            self.unfactored = list(dict.fromkeys([*self.unfactored, *gradients.unfactored]))
        return {"loss": gradients.losses.double(), "grad_norm": stacked.sum(0).sqrt_()}

    def keep(self) -> None:
        if self._chunk is not None:
            self.distributions.add(*self._chunk)
        self._chunk = None

    def state(self) -> Arrays:
        words = {"computed_as": self.computed_as, "unfactored": self.unfactored, "names": self.names}
        return {"words": text_tensor(words), **self.distributions.state()}

    def restore(self, state: Arrays) -> None:
        words = from_text_tensor(state["words"])
        self.computed_as, self.unfactored, self.names = (
            words["computed_as"],
            words["unfactored"],
            words["names"],
        )
        self.distributions = NormDistributions(len(self.names))
        self.distributions.restore(state)

    def merge(self, state: Arrays) -> None:
        others = GradientNorms()
        others.restore(state)
        if not self.names:
            self.names, self.distributions = others.names, others.distributions
        elif others.names:
            self.distributions.merge(others.distributions)
        self.computed_as = self.computed_as or others.computed_as
        self.unfactored = list(dict.fromkeys([*self.unfactored, *others.unfactored]))


def text_tensor(content: Any) -> torch.Tensor:
    """Plain values as a tensor of bytes [length] uint8, for a state."""
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def from_text_tensor(tensor: torch.Tensor) -> Any:
    """The plain values of a tensor of bytes [length], from `text_tensor`."""
    return json.loads(bytes(tensor.tolist()))


@dataclass(frozen=True)
class Distributions:
    """What is known of several streams of non-negative numbers, which are all as long.

    Quantiles come from a histogram with 64 bins a decade, so they are right to 2 %.

    Attributes:
        count: of the numbers in each stream.
        mean, mean_square, minimum, maximum: [streams] float64; NaN without numbers.
        deviations: [streams], the sums of squared deviations from the mean.
        bins: [streams, BINS], how many numbers lie in each.
    """

    PER_DECADE: ClassVar[int] = 64
    LOWEST: ClassVar[int] = -24  # decades; smaller numbers, zero among them, are counted in the first bin
    BINS: ClassVar[int] = 48 * PER_DECADE + 1

    count: int
    mean: Numbers
    mean_square: Numbers
    minimum: Numbers
    maximum: Numbers
    deviations: Numbers
    bins: npt.NDArray[np.int64]

    @classmethod
    def of(cls, values: Numbers) -> Distributions:
        """Those of [streams, n] finite numbers."""
        bins = np.zeros((len(values), cls.BINS), np.int64)
        if not values.shape[1]:
            nothing = np.full(len(values), math.nan)
            return cls(0, nothing, nothing, nothing, nothing, np.zeros(len(values)), bins)
        with np.errstate(divide="ignore"):
            places = np.floor((np.log10(values) - cls.LOWEST) * cls.PER_DECADE)
        places = np.clip(places, -1, cls.BINS - 2).astype(np.int64) + 1
        np.add.at(bins, (np.arange(len(values))[:, None], places), 1)
        mean = values.mean(1)
        deviations = np.square(values - mean[:, None]).sum(1)
        square = np.square(values).mean(1)
        return cls(values.shape[1], mean, square, values.min(1), values.max(1), deviations, bins)

    def merged(self, other: Distributions) -> Distributions:
        """Those of both numbers together, each stream with its own. Mean and variance as in Chan, Golub and
        LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
        """
        if not self.count or not other.count:
            return other if other.count else self
        difference, total = other.mean - self.mean, self.count + other.count
        share = other.count / total
        return Distributions(
            total,
            self.mean + difference * share,
            self.mean_square + (other.mean_square - self.mean_square) * share,
            np.minimum(self.minimum, other.minimum),
            np.maximum(self.maximum, other.maximum),
            self.deviations + other.deviations + difference**2 * (self.count * share),
            self.bins + other.bins,
        )

    @property
    def std(self) -> Numbers:
        """[streams]: the sample standard deviations; NaN for fewer than two numbers."""
        if self.count < 2:
            return np.full(len(self.mean), math.nan)
        return np.sqrt(self.deviations / (self.count - 1))

    def quantile(self, q: float) -> Numbers:
        """[streams]: the number under which a share q lies; the middle of its bin, inside the extremes."""
        place = (self.bins.cumsum(1) >= max(1, math.ceil(q * self.count))).argmax(1)
        middle = np.where(place == 0, 0.0, 10 ** (self.LOWEST + (place - 0.5) / self.PER_DECADE))
        return np.minimum(np.maximum(middle, self.minimum), self.maximum)


class NormDistributions:
    """The distributions of several norms over samples that come chunk by chunk.

    Some chunks wait, so that arithmetic is done once for many rows.
    """

    _MOST_WAITING = 1 << 16  # numbers

    def __init__(self, streams: int) -> None:
        self._known = Distributions.of(np.empty((streams, 0)))
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._count = 0  # of the numbers that wait

    def add(self, squares: torch.Tensor, losses: torch.Tensor) -> None:
        """squares: [streams, n], the norms' squares. losses: [n]. Samples whose squares or loss are not all
        finite are left out.
        """
        self._waiting.append((squares, losses))
        self._count += squares.numel()
        if self._count >= self._MOST_WAITING:
            self._known, self._waiting, self._count = self.found(), [], 0

    def found(self) -> Distributions:
        """The distributions of all that was added."""
        values = self._values()
        return self._known.merged(Distributions.of(values)) if values.size else self._known

    def merge(self, other: NormDistributions) -> None:
        """Add what another one has seen."""
        self._known, self._waiting, self._count = self.found().merged(other.found()), [], 0

    def state(self) -> Arrays:
        """All of it: `count`, `numbers` [5, streams] float64, `bins` [2, filled bins] int64, the places and
        counts of the few that are filled, and `waiting` [streams, m] float64.
        """
        known = self._known
        numbers = np.stack([known.mean, known.mean_square, known.minimum, known.maximum, known.deviations])
        filled = np.flatnonzero(known.bins)
        return {
            "count": torch.tensor(known.count),
            "numbers": torch.from_numpy(numbers),
            "bins": torch.from_numpy(np.stack([filled, known.bins.reshape(-1)[filled]])),
            "waiting": torch.from_numpy(np.square(self._values())),
        }

    def restore(self, state: Arrays) -> None:
        """Continue from a result of `state`."""
        numbers, waiting = state["numbers"].numpy(), state["waiting"].double()
        bins = np.zeros((numbers.shape[1], Distributions.BINS), np.int64)
        places, counts = state["bins"].numpy()
        bins.reshape(-1)[places] = counts
        mean, square, least, most, deviations = numbers
        self._known = Distributions(int(state["count"]), mean, square, least, most, deviations, bins)
        self._waiting, self._count = [(waiting, waiting.new_zeros(waiting.shape[1]))], waiting.numel()

    def _values(self) -> Numbers:
        """[streams, m]: the norms that wait, without those of samples that are left out."""
        if not self._waiting:
            return np.empty((len(self._known.mean), 0))
        device = self._waiting[-1][0].device  # restored ones are on the CPU
        squares = torch.cat([squares.to(device) for squares, _ in self._waiting], 1).cpu()
        losses = torch.cat([losses.to(device) for _, losses in self._waiting]).cpu()
        counted = torch.isfinite(losses) & torch.isfinite(squares).all(0)
        return squares[:, counted].double().sqrt().numpy()


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
    cost: ClassVar[str] = "nothing: the norms are computed anyway"
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

    measures.json has the names of the layers. A layer whose parameters are all zero has no relative
    norm. The table `parameters` has the samples' distribution for each parameter.
    """

    name: ClassVar[str] = "relative_norm"
    title: ClassVar[str] = "Norm relative to the parameters"
    formula: ClassVar[str] = "|g_i|_2 / |theta|_2, and for each layer m: |g_i,m|_2 / |theta_m|_2"
    unit: ClassVar[str] = "{loss} per unit of parameter, per unit of parameter norm"
    source: ClassVar[str] = (
        "You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks (2017), section 4, its inverse"
    )
    cost: ClassVar[str] = "nothing: the norms are computed anyway"
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
        self._seen = [name for name, norm in self._parameters.items() if norm]
        self._distributions = NormDistributions(len(self._seen))
        self._chunk: tuple[torch.Tensor, torch.Tensor] | None = None

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        finite = finite_rows(gradients)
        by_parameter = gradients.square_norms(per="parameter")
        if self._seen:
            squares = torch.stack([by_parameter[name] / self._parameters[name] ** 2 for name in self._seen])
            self._chunk = squares, gradients.losses
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
        if self._chunk is not None:
            self._distributions.add(*self._chunk)
        self._chunk = None

    def state(self) -> Arrays:
        return self._distributions.state()

    def restore(self, state: Arrays) -> None:
        self._distributions.restore(state)

    def merge(self, state: Arrays) -> None:
        other = NormDistributions(len(self._seen))
        other.restore(state)
        self._distributions.merge(other)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        known = self._distributions.found()
        columns = {"mean": known.mean}
        columns |= {quantile: known.quantile(q) for quantile, q in _QUANTILES.items()}
        table: dict[str, list[Any]] = {
            "parameter": list(self._parameters),
            "parameter_norm": list(self._parameters.values()),
        }
        for column, values in columns.items():
            found = dict(zip(self._seen, values.tolist(), strict=True))
            table[column] = [found.get(name, math.nan) for name in self._parameters]
        return Gathered(
            numbers={"layers": self._layers, "parameter_norm": self._whole}, tables={"parameters": table}
        )
