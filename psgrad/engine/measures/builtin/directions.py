"""Measures of direction: the angle to the mean gradient and to that of the class, the change of the mean
gradient if a sample is left out, and the signal-to-noise ratio of the gradient in each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.square_norms import sum_of_squares
from psgrad.engine.measures.builtin.dataset import estimates
from psgrad.engine.measures.mean_gradient import CLASS_DOT, DISTANCE, DOT, OfMeanGradient
from psgrad.engine.measures.measure import Arrays, Gathered, Setting, finite_rows


@dataclass
class CosineToMean(OfMeanGradient):
    """Whether a sample's gradient points like the mean of all samples. The mean includes the sample
    itself.
    """

    name: ClassVar[str] = "cosine_to_mean"
    title: ClassVar[str] = "Cosine to the mean gradient"
    formula: ClassVar[str] = "<g_i, gbar> / (|g_i| |gbar|), gbar = (1/n) sum_j g_j"
    unit: ClassVar[str] = "cosine, -1 to 1"
    source: ClassVar[str] = (
        "Fort, Nowak, Jastrzebski, Narayanan: Stiffness (2019), section 2, of one sample with the mean of all"
    )
    cost: ClassVar[str] = (
        "a sum and one inner product for each sample, a tenth of the pass each; a second pass, from memory if"
        " the gradients fit"
    )
    meanings: ClassVar[dict[str, str]] = {
        "cosine_to_mean": (
            "cosine between the sample's gradient and the mean gradient; empty if either is zero (-1 to 1)"
        )
    }
    needs_second_pass = True
    asks = (DOT,)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        norm = torch.tensor(self._sums.square_mean() ** 0.5, dtype=torch.float64)
        return Gathered({"cosine_to_mean": self.cosines(rows, rows[DOT][:, 0], norm)})


@dataclass
class CosineToClassMean(OfMeanGradient):
    """Whether a sample's gradient points like those of its label. The mean includes the sample: alone in its
    class it has cosine 1.
    """

    name: ClassVar[str] = "cosine_to_class_mean"
    title: ClassVar[str] = "Cosine to the class's mean gradient"
    formula: ClassVar[str] = (
        "<g_i, gbar_c> / (|g_i| |gbar_c|), gbar_c the mean of g_j over the samples j with label c = y_i"
    )
    unit: ClassVar[str] = "cosine, -1 to 1"
    source: ClassVar[str] = (
        "Fort, Nowak, Jastrzebski, Narayanan: Stiffness (2019), section 2.2, of one sample with the mean of"
        " its class"
    )
    cost: ClassVar[str] = (
        "as cosine_to_mean, whose sums it shares; 16 bytes of memory for each class and parameter"
    )
    meanings: ClassVar[dict[str, str]] = {
        "cosine_to_class_mean": (
            "cosine between the gradient and its label's mean gradient; empty if either is zero (-1 to 1)"
        )
    }
    needs_second_pass = True
    asks = (CLASS_DOT,)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        counts, norms = self._sums.counts[:-1], self._sums.class_norms()[:-1]
        table = {"class": torch.arange(len(counts)), "samples": counts, "mean_gradient_norm": norms}
        cosines = self.cosines(rows, *rows[CLASS_DOT].unbind(1))
        return Gathered({"cosine_to_class_mean": cosines}, tables={"classes": table})


@dataclass
class LooMeanChange(OfMeanGradient):
    """The distance between the mean gradient of all samples and that of all but this one, exact for
    every n.
    """

    name: ClassVar[str] = "loo_mean_change"
    title: ClassVar[str] = "Leave-one-out change of the mean gradient"
    formula: ClassVar[str] = "|gbar - gbar without i| = |g_i - gbar| / (n - 1)"
    unit: ClassVar[str] = "{loss} per unit of parameter"
    source: ClassVar[str] = (
        "the jackknife of a mean: Efron, Tibshirani: An Introduction to the Bootstrap (1993), section 11.5"
    )
    cost: ClassVar[str] = "as cosine_to_mean, whose sum and inner products it shares"
    meanings: ClassVar[dict[str, str]] = {
        "loo_mean_change": (
            "how far the mean gradient moves without this sample; empty if it is the only one ({loss} per"
            " unit of parameter)"
        )
    }
    needs_second_pass = True
    asks = (DISTANCE,)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        others = self._sums.count - 1
        moved = rows[DISTANCE][:, 0].clamp(min=0).sqrt() / (others or torch.nan)
        return Gathered({"loo_mean_change": moved.where(rows["ok"] & torch.tensor(others > 0), torch.nan)})


_QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}
# A variance below this many roundings of the mean square may be zero.
_ROUNDINGS = 64


@dataclass
class SignalToNoise(OfMeanGradient):
    """How much of a sample's gradient in a parameter is common to all samples. The table `parameters` has
    a row for each parameter tensor.

    `signal` is |G|^2 and `noise` tr(Sigma) of the tensor, each without bias; `signal_to_noise` is their
    ratio. The estimate of a small signal may be below zero: read it as zero.

    With `elements` the same ratio is computed for each number in the tensor, mean squared divided by
    variance: its quantiles are in the table, or all of them in measures/signal_to_noise.safetensors. An
    element whose variance cannot be separated from rounding has none.

    Options:
        elements: none, quantiles, or array (quantiles too).
    """

    elements: Literal["none", "quantiles", "array"] = "none"

    name: ClassVar[str] = "signal_to_noise"
    title: ClassVar[str] = "Signal-to-noise ratio of the gradient"
    formula: ClassVar[str] = (
        "|G|^2 / tr(Sigma), with |G|^2 = (n |gbar|^2 - m) / (n - 1), tr(Sigma) = n (m - |gbar|^2) / (n - 1),"
        " m = mean of |g_i|^2, in one parameter; of an element (gbar_j^2 - s_j^2 / n) / s_j^2, s_j^2 its"
        " sample variance"
    )
    unit: ClassVar[str] = "1 / samples"
    needs_factors = True
    source: ClassVar[str] = (
        "McCandlish, Kaplan, Amodei: An Empirical Model of Large-Batch Training (2018), appendix A.1, of one"
        " parameter"
    )
    cost: ClassVar[str] = (
        "a sum, a tenth of the pass, shared with cosine_to_mean; with elements a sum of squares, a fifth of"
        " the pass"
    )
    meanings: ClassVar[dict[str, str]] = {}

    def prepare(self, setting: Setting) -> None:
        super().prepare(setting)
        self._squares: torch.Tensor | None = None  # [p] float64
        self._chunk: torch.Tensor | None = None
        self._rounding = {
            name: float(torch.finfo(value.dtype).eps) for name, value in setting.examples.params.items()
        }

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        if self.elements != "none":
            finite = finite_rows(gradients)
            rows = slice(None) if bool(finite.all()) else torch.nonzero(finite).squeeze(1)
            self._chunk = torch.cat(
                [sum_of_squares(each.at(rows)).flatten() for each in gradients.gradients.values()]
            )
        return {}

    def keep(self) -> None:
        if self._chunk is not None:
            self._squares = self._chunk if self._squares is None else self._squares.add_(self._chunk)
            self._chunk = None

    def state(self) -> Arrays:
        return {} if self._squares is None else {"element_squares": self._squares.cpu()}

    def restore(self, state: Arrays) -> None:
        self._squares = state["element_squares"].clone().to(self._sums.device)

    def merge(self, state: Arrays) -> None:
        squares = state["element_squares"].to(self._sums.device)
        self._squares = squares.clone() if self._squares is None else self._squares + squares

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        n, flat = self._sums.count, self._sums.flat
        table: dict[str, list[Any]] = {
            name: [] for name in ("parameter", "numel", "signal", "noise", "signal_to_noise")
        }
        whole = self._sums.mean
        for (name, columns), squares in zip(flat.columns.items(), self._sums.squares, strict=True):
            mean = float(whole[columns].square().sum())
            signal, noise = estimates(n, float(squares) / n, mean) if n > 1 else (torch.nan, torch.nan)
            ratio = (
                signal / noise
                if noise > _ROUNDINGS * self._rounding[name] * float(squares) / max(n, 1)
                else torch.nan
            )
            for key, value in zip(
                table, (name, columns.stop - columns.start, signal, noise, ratio), strict=True
            ):
                table[key].append(value)
        if self._squares is None or n < 2:
            return Gathered(numbers={"samples": n}, tables={"parameters": table})
        ratios = self._by_element(n)
        for key, q in _QUANTILES.items():
            table[f"element_{key}"] = [_quantile(each, q) for each in ratios.values()]
        arrays = (
            {name: ratios[name].reshape(shape) for name, shape in flat.shapes.items()}
            if self.elements == "array"
            else {}
        )
        return Gathered(numbers={"samples": n}, tables={"parameters": table}, arrays=arrays)

    def _by_element(self, n: int) -> dict[str, torch.Tensor]:
        """name -> [numel] float64, on the CPU."""
        assert self._squares is not None
        result, whole = {}, self._sums.mean
        for name, columns in self._sums.flat.columns.items():
            squares, mean = self._squares[columns], whole[columns]
            variance = (squares - n * mean.square()) / (n - 1)
            significant = variance > _ROUNDINGS * self._rounding[name] * squares / n
            result[name] = ((mean.square() - variance / n) / variance).where(significant, torch.nan).cpu()
        return result


def _quantile(values: torch.Tensor, q: float) -> float:
    """The value under which a share q of those that are numbers lies; torch.quantile takes 16 million at
    most.
    """
    ordered = values[~values.isnan()].sort().values
    return float(ordered[max(0, math.ceil(q * len(ordered)) - 1)]) if len(ordered) else math.nan
