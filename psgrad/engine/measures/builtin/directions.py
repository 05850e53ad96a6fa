"""Measures of direction: the angle to the mean gradient and to that of the class, the change of the mean
gradient if a sample is left out, and the signal-to-noise ratio of the gradient in each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psgrad.engine.measures.builtin.dataset import estimates
from psgrad.engine.measures.mean_gradient import CLASS_DOT, DOT, OfMeanGradient
from psgrad.engine.measures.measure import Gathered, Setting


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


# A variance below this many roundings of the mean square may be zero.
_ROUNDINGS = 64


@dataclass
class SignalToNoise(OfMeanGradient):
    """How much of a sample's gradient in a parameter is common to all samples. The table `parameters` has
    a row for each parameter tensor.

    `signal` is |G|^2 and `noise` tr(Sigma) of the tensor, each without bias; `signal_to_noise` is their
    ratio. The estimate of a small signal may be below zero: read it as zero.
    """

    name: ClassVar[str] = "signal_to_noise"
    title: ClassVar[str] = "Signal-to-noise ratio of the gradient"
    formula: ClassVar[str] = (
        "|G|^2 / tr(Sigma), with |G|^2 = (n |gbar|^2 - m) / (n - 1), tr(Sigma) = n (m - |gbar|^2) / (n - 1),"
        " m = mean of |g_i|^2, in one parameter"
    )
    unit: ClassVar[str] = "1 / samples"
    source: ClassVar[str] = (
        "McCandlish, Kaplan, Amodei: An Empirical Model of Large-Batch Training (2018), appendix A.1, of one"
        " parameter"
    )
    cost: ClassVar[str] = "a sum, a tenth of the pass, shared with cosine_to_mean"
    meanings: ClassVar[dict[str, str]] = {}

    def prepare(self, setting: Setting) -> None:
        super().prepare(setting)
        self._rounding = {
            name: float(torch.finfo(value.dtype).eps) for name, value in setting.examples.params.items()
        }

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        n, whole = self._sums.count, self._sums.mean
        table: dict[str, list[Any]] = {
            name: [] for name in ("parameter", "numel", "signal", "noise", "signal_to_noise")
        }
        for (name, columns), squares in zip(self._sums.flat.columns.items(), self._sums.squares, strict=True):
            mean = float(whole[columns].square().sum())
            signal, noise = estimates(n, float(squares) / n, mean) if n > 1 else (torch.nan, torch.nan)
            least = _ROUNDINGS * self._rounding[name] * float(squares) / max(n, 1)
            ratio = signal / noise if noise > least else torch.nan
            row = (name, columns.stop - columns.start, signal, noise, ratio)
            for key, value in zip(table, row, strict=True):
                table[key].append(value)
        return Gathered(numbers={"samples": n}, tables={"parameters": table})
