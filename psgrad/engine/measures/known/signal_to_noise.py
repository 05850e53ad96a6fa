"""The signal-to-noise ratio of the gradient, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.second_moments import sum_of_squares
from psgrad.engine.measures.finite import finite_rows
from psgrad.engine.measures.known.noise_scale import estimates
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, Setting
from psgrad.engine.measures.sums import shared_sums

_QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}
# A variance under this many roundings of the mean square can't be told from none.
_ROUNDINGS = 64


@dataclass
class SignalToNoise(Measure):
    """How much of a sample's gradient in a parameter is common to all samples. The table `parameters` has a row for each parameter tensor.

    `signal` is |G|^2 and `noise` tr(Sigma) of the tensor, each without bias; `signal_to_noise` is their ratio, one over the noise scale
    in this tensor alone. The estimate of a small signal may be below zero: read it as zero.

    With `elements` the same ratio is computed for each number in the tensor, mean squared divided by variance. Its quantiles over the
    tensor are in the table, or all of them in measures/signal_to_noise.safetensors, in the shape of the parameters. An element whose
    variance cannot be separated from rounding (one that no sample moves) has none.

    Options:
        elements: none, quantiles, or array (quantiles too).
    """

    elements: Literal["none", "quantiles", "array"] = "none"

    name: ClassVar[str] = "signal_to_noise"
    title: ClassVar[str] = "Signal-to-noise ratio of the gradient"
    formula: ClassVar[str] = (
        "|G|^2 / tr(Sigma), with |G|^2 = (n |gbar|^2 - m) / (n - 1), tr(Sigma) = n (m - |gbar|^2) / (n - 1), m = mean of |g_i|^2, in one "
        "parameter; of an element (gbar_j^2 - s_j^2 / n) / s_j^2, s_j^2 its sample variance"
    )
    unit: ClassVar[str] = "1 / samples"
    source: ClassVar[str] = "McCandlish, Kaplan, Amodei: An Empirical Model of Large-Batch Training (2018), appendix A.1, of one parameter"
    cost: ClassVar[str] = "a sum, a tenth of the pass, shared with cosine_to_mean; with elements a sum of squares, a fifth of the pass"
    meanings: ClassVar[dict[str, str]] = {}
    needs_factors = True

    def prepare(self, setting: Setting) -> None:
        self._sums = shared_sums(setting, self)
        self._squares: torch.Tensor | None = None  # [p] float64
        self._chunk: torch.Tensor | None = None
        self._rounding = {name: float(torch.finfo(value.dtype).eps) for name, value in setting.examples.params.items()}

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        self._sums.add(gradients)
        if self.elements != "none":
            finite = finite_rows(gradients)
            rows = slice(None) if bool(finite.all()) else torch.nonzero(finite).squeeze(1)
            self._chunk = torch.cat([sum_of_squares(each.at(rows)).flatten() for each in gradients.gradients.values()])
        return {}

    def keep(self) -> None:
        self._sums.keep()
        if self._chunk is not None:
            self._squares = self._chunk if self._squares is None else self._squares.add_(self._chunk)
            self._chunk = None

    def state(self) -> Arrays:
        own = {} if self._squares is None else {"element_squares": self._squares.cpu()}
        return {**self._sums.state(self), **own}

    def restore(self, state: Arrays) -> None:
        self._sums.restore(self, state)
        if "element_squares" in state:
            self._squares = state["element_squares"].clone().to(self._sums.device)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        n, flat = self._sums.count, self._sums.flat
        table: dict[str, list[Any]] = {name: [] for name in ("parameter", "numel", "signal", "noise", "signal_to_noise")}
        for name, columns, squares, mean in zip(
            flat.shapes, flat.columns.values(), self._sums.squares, self._sums.square_means, strict=True
        ):
            signal, noise = estimates(n, float(squares) / n, float(mean)) if n > 1 else (torch.nan, torch.nan)
            ratio = signal / noise if noise > _ROUNDINGS * self._rounding[name] * float(squares) / max(n, 1) else torch.nan
            for key, value in zip(table, (name, columns.stop - columns.start, signal, noise, ratio), strict=True):
                table[key].append(value)
        if self._squares is None or n < 2:
            return Gathered(numbers={"samples": n}, tables={"parameters": table})
        ratios = self._by_element(n)
        for key, q in _QUANTILES.items():
            table[f"element_{key}"] = [_quantile(each, q) for each in ratios.values()]
        arrays = {name: ratios[name].reshape(shape) for name, shape in flat.shapes.items()} if self.elements == "array" else {}
        return Gathered(numbers={"samples": n}, tables={"parameters": table}, arrays=arrays)

    def _by_element(self, n: int) -> dict[str, torch.Tensor]:
        """name -> [numel] float64, on the CPU."""
        assert self._squares is not None
        found = {}
        for name, columns in self._sums.flat.columns.items():
            squares, mean = self._squares[columns], self._sums.mean[columns]
            variance = (squares - n * mean.square()) / (n - 1)
            told = variance > _ROUNDINGS * self._rounding[name] * squares / n
            found[name] = ((mean.square() - variance / n) / variance).where(told, torch.nan).cpu()
        return found


def _quantile(values: torch.Tensor, q: float) -> float:
    """The value under which a share q of those that are numbers lies; torch.quantile takes 16 million at most."""
    known = values[~values.isnan()].sort().values
    return float(known[max(0, math.ceil(q * len(known)) - 1)]) if len(known) else math.nan
