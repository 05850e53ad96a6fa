"""A check of the noise that a step adds against the declared one: its standard deviation, its shape, no
number used twice, and no released number off its public grid.

The auditor knows the clipped sums, so the noise is the difference, and no canary is needed. Each question is
a test whose probability of a false alarm is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psgrad.engine.privacy.rounding import grid_of

Array = np.ndarray[Any, Any]

# The probability that noise as declared raises an alarm, over all questions together.
FALSE_ALARM = 1e-6
# How many numbers of a step are kept; after how many in all fewer are kept of each step, and how many then;
# and how many of each tensor for the comparison of tensors. Wrong noise is wrong everywhere.
_KEPT, _ENOUGH, _KEPT_LATER, _KEPT_OF_A_TENSOR = 1 << 16, 1 << 23, 1 << 12, 512
# Tensors with fewer numbers are not compared, and at most this number of pieces are compared with one
# another.
_SMALLEST_PIECE, _MOST_PIECES = 32, 2000


@dataclass(frozen=True)
class NoiseCheck:
    """The results of the tests of the noise of some steps.

    Attributes:
        numbers: how many numbers were tested. 0: there is no noise.
        spread: their standard deviation over the declared one.
        p_values: question -> the probability of a result as extreme as this, if the noise is as declared.
    """

    numbers: int
    spread: float
    p_values: dict[str, float]

    @property
    def alarms(self) -> list[str]:
        """The questions whose results are too extreme: one or more with a probability of at most FALSE_ALARM
        if all is well.
        """
        return [question for question, p in self.p_values.items() if p < FALSE_ALARM / len(self.p_values)]


class NoiseLog:
    """Gathers the noise of steps, in units of the declared standard deviation."""

    def __init__(self) -> None:
        self._steps: list[Array] = []
        self._pieces: list[Array] = []
        self._coarsest = 0.0
        self._off_grid = False

    def add(
        self, noisy: Mapping[str, Tensor], clean: Mapping[str, Tensor], std: float, grid: float | None = None
    ) -> None:
        """Adds one step: its noisy and its clipped sums, name -> [*shape] (multiples of the grid, if there is
        one), and the noise's declared standard deviation, above 0.
        """
        released_on = grid_of(std) if grid is None else grid
        step: list[Array] = []
        room = _KEPT if sum(map(len, self._steps)) < _ENOUGH else _KEPT_LATER
        for name, value in noisy.items():
            head = value.detach().flatten()[: max(room, _KEPT_OF_A_TENSOR)].cpu().double()
            self._off_grid |= not torch.equal((head / released_on).round() * released_on, head)
            before = clean[name].detach().flatten()[: len(head)].cpu().double() * (
                1.0 if grid is None else grid
            )
            noise: Array = ((head - before) / std).numpy()
            if len(noise) >= _SMALLEST_PIECE and len(self._pieces) < _MOST_PIECES:
                self._pieces.append(noise[:_KEPT_OF_A_TENSOR])
            step.append(noise[:room])
            room -= len(step[-1])
        self._steps.append(np.concatenate(step))
        if grid is not None:
            self._coarsest = max(self._coarsest, grid / std)

    def check(self) -> NoiseCheck:
        """The results for all steps that were added. Steps are not distinguished: their noise should all be
        of one distribution.
        """
        from scipy.stats import chi2, kstest, norm

        if not self._steps:
            return NoiseCheck(0, math.nan, {})
        numbers = np.concatenate(self._steps)
        n, squares = len(numbers), float(np.square(numbers).sum())
        if not math.isfinite(squares):
            return NoiseCheck(n, squares, {"spread": 0.0})
        p_values = {
            "spread": _two_sided(float(chi2.cdf(squares, n)), float(chi2.sf(squares, n))),
            "mean": 2 * float(norm.sf(abs(float(numbers.sum())) / math.sqrt(n))),
            "alike in two steps": _most_alike(self._steps),
            "alike in two tensors": _most_alike(self._pieces),
            "off the public grid": 0.0 if self._off_grid else 1.0,  # which no rounded number is
        }
        # Noise on a grid has steps in its distribution, which a comparison with a smooth one would find.
        if self._coarsest * math.sqrt(n) < 0.05:
            p_values["shape"] = float(kstest(numbers, "norm").pvalue)
        return NoiseCheck(n, math.sqrt(squares / n), p_values)


def _two_sided(below: float, above: float) -> float:
    return min(1.0, 2 * min(below, above))


def _most_alike(rows: list[Array]) -> float:
    """The probability that two of these vectors of independent normal numbers are as alike as the most alike
    two, over their common length.

    The squared cosine of n such numbers has the distribution Beta(1/2, (n - 1) / 2); times the number of
    pairs, for the choice.
    """
    from scipy.stats import beta

    by_length: dict[int, list[Array]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    lengths = sorted(length for length in by_length if length >= 2)
    least, pairs = 1.0, 0
    for place, length in enumerate(lengths):
        mine = _unit(np.stack(by_length[length]))
        for other in lengths[place:]:
            theirs = mine if other == length else _unit(np.stack([row[:length] for row in by_length[other]]))
            squares = np.square(mine @ theirs.T)
            if other == length:
                squares = squares[np.triu_indices(len(mine), 1)]
            if squares.size:
                pairs += squares.size
                least = min(least, float(beta.sf(min(float(squares.max()), 1.0), 0.5, (length - 1) / 2)))
    return min(1.0, least * pairs) if pairs else 1.0


def _unit(rows: Array) -> Array:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Array = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return unit
