"""The gradient noise scale of the whole dataset, with bootstrap intervals: the batch size at which a step is
half signal and half noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psgrad.engine.measures.mean_gradient import DOT, OfMeanGradient
from psgrad.engine.measures.measure import Gathered, Setting


@dataclass
class NoiseScale(OfMeanGradient):
    """tr(Sigma) / |G|^2, each estimated without bias, then divided. Undefined if the estimate of |G|^2 is
    not above zero.

    measures.json has `noise_scale`, `square_mean` (|G|^2) and `noise` (tr Sigma) with their intervals,
    `samples` (n) and `status`. An unbounded end of an interval is null.

    The interval is of bootstrap resamples of the samples' exact jackknife values n T - (n - 1)
    T_without_i, with a normal draw for the term of second order, of variance 2 tr(Sigma^2) / n^2. In
    simulations of 200 samples an interval of 95 % holds the true value 90 to 100 times in a hundred.

    Options:
        resamples: number of bootstrap resamples; 0 for no interval and no second pass.
        level: the probability that the interval contains the true value.
    """

    resamples: int = 1000
    level: float = 0.95

    name: ClassVar[str] = "noise_scale"
    title: ClassVar[str] = "Gradient noise scale"
    formula: ClassVar[str] = (
        "B_simple = tr(Sigma) / |G|^2, with |G|^2 = (n |gbar|^2 - m) / (n - 1), tr(Sigma) = n (m - |gbar|^2)"
        " / (n - 1), m = mean of |g_i|^2"
    )
    unit: ClassVar[str] = "samples"
    source: ClassVar[str] = (
        "McCandlish, Kaplan, Amodei: An Empirical Model of Large-Batch Training (2018), section 2.2 and"
        " appendix A.1"
    )
    cost: ClassVar[str] = (
        "a sum, a tenth of the pass; with an interval as cosine_to_mean, whose sum and inner products it"
        " shares"
    )
    meanings: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        if self.resamples != 0 and self.resamples < 100:
            raise ValueError(
                "resamples is 0, or at least 100: fewer tell nothing about the ends of an interval"
            )
        if not 0 < self.level < 1:
            raise ValueError("level is a probability between 0 and 1, such as 0.95")
        self.needs_second_pass = self.resamples > 0
        self.asks = (DOT,) if self.resamples else ()

    def prepare(self, setting: Setting) -> None:
        super().prepare(setting)
        self._seed = setting.seed

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        n = self._sums.count
        if n < 2:
            why = f"undefined: {n} samples with finite numbers, and a variance takes two"
            return Gathered(numbers={"noise_scale": None, "status": why, "samples": n})
        squares = rows["grad_norm"][rows["ok"]].double().square()
        square_mean, noise = estimates(n, float(squares.mean()), self._sums.square_mean())
        numbers: dict[str, Any] = {
            "noise_scale": noise / square_mean if square_mean > 0 else None,
            "status": "defined",
        }
        numbers |= {"samples": n, "square_mean": square_mean, "noise": noise}
        words = ""
        if self.needs_second_pass and n > 2:
            intervals = self._intervals(squares, rows[DOT][rows["ok"], 0])
            numbers |= {f"{name}_interval": each for name, each in intervals.items()}
            numbers |= {"level": self.level, "resamples": self.resamples}
            ends = [f"{end:.3g}" for end in intervals["square_mean"] if end is not None]
            words = f" (at {self.level:.0%} between {' and '.join(ends)})"
        if square_mean <= 0:
            numbers["status"] = (
                f"undefined: the estimate of |G|^2 is {square_mean:.3g}{words}, not above zero"
            )
        return Gathered(numbers=numbers)

    def _intervals(self, squares: torch.Tensor, along: torch.Tensor) -> dict[str, list[float | None]]:
        """The intervals of noise_scale, square_mean and noise."""
        square_mean, noise = resampled_estimates(
            squares, along, self._sums.square_mean(), self.resamples, self._seed
        )
        scale = (noise / square_mean).where(square_mean > 0, torch.inf)
        return {
            "noise_scale": interval(scale, self.level),
            "square_mean": interval(square_mean, self.level),
            "noise": interval(noise, self.level),
        }


def estimates(n: int, mean_square: float, square_mean: float) -> tuple[float, float]:
    """(|G|^2, tr Sigma) without bias, of n samples with this mean of |g_i|^2 and this |gbar|^2."""
    return (n * square_mean - mean_square) / (n - 1), n * max(mean_square - square_mean, 0.0) / (n - 1)


def jackknife_values(squares: torch.Tensor, along: torch.Tensor, square_mean: float) -> torch.Tensor:
    """[n]: n T - (n - 1) T_without_i of the estimate T of |G|^2, from |g_i|^2 and <g_i, gbar> [n], for n > 2.
    Their mean is T.

    Of T, a mean over all pairs of samples, T_without_i is (n^2 |gbar|^2 - 2 n <g_i, gbar> + 2 |g_i|^2 - sum_j
    |g_j|^2) / (n - 1) / (n - 2).
    """
    n, total = len(squares), squares.sum()
    whole = (n * square_mean - total / n) / (n - 1)
    without = (n * n * square_mean - 2 * n * along + 2 * squares - total) / ((n - 1) * (n - 2))
    return n * whole - (n - 1) * without


def resampled_estimates(
    squares: torch.Tensor, along: torch.Tensor, square_mean: float, resamples: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(|G|^2, tr Sigma) of each resample, [resamples] each, from |g_i|^2 and <g_i, gbar> [n] and |gbar|^2."""
    n = len(squares)
    values = jackknife_values(squares, along, square_mean)
    sums = block_sums(torch.stack([values, squares, torch.ones_like(values)], 1), seed)
    sums_of_squares, mean_squares = resampled(sums, resamples, seed).unbind(1)
    # The variance along gbar, which is most like Sigma's own directions if gbar is mostly noise, and only
    # then the term matters.
    along_mean = float(along.var()) / square_mean if square_mean > 0 else 0.0
    second_order = (2 * along_mean * max(float((squares - values).mean()), 0.0)) ** 0.5 / n
    generator = torch.Generator().manual_seed(seed + 1)
    sums_of_squares = sums_of_squares + second_order * torch.randn(
        resamples, dtype=torch.float64, generator=generator
    )
    return sums_of_squares, mean_squares - sums_of_squares


# More samples are put together at random before they are resampled: the spread of a sum is known to 1 /
# sqrt(2 * 512), three percent.
_BLOCKS = 512


def block_sums(values: torch.Tensor, seed: int) -> torch.Tensor:
    """[blocks, k]: the sums of the rows [n, k] in random blocks of nearly one size; the rows themselves if
    they are few.
    """
    n = len(values)
    if n <= _BLOCKS:
        return values
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    sums = torch.zeros(_BLOCKS, values.shape[1], dtype=values.dtype)
    return sums.index_add_(0, torch.arange(n) % _BLOCKS, values[order])


def resampled(sums: torch.Tensor, resamples: int, seed: int) -> torch.Tensor:
    """[resamples, k]: for each resample the means, where the last column of the rows [blocks, k + 1] counts
    samples.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for start in range(0, resamples, 64):
        drawn = torch.randint(len(sums), (min(64, resamples - start), len(sums)), generator=generator)
        parts.append(sums[drawn].sum(1))
    total = torch.cat(parts)
    return total[:, :-1] / total[:, -1:]


def interval(values: torch.Tensor, level: float) -> list[float | None]:
    """[lower, upper]: the ends of the middle part of values [n] that has the share `level` of them; None for
    an end that is infinite.
    """
    ordered = values.sort().values
    tail = (1 - level) / 2
    places = math.floor(tail * (len(ordered) - 1)), math.ceil((1 - tail) * (len(ordered) - 1))
    return [float(ordered[place]) if math.isfinite(ordered[place]) else None for place in places]
