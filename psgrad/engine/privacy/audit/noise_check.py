"""A check of what steps draw against what is declared: the noise's standard deviation, its shape, parts of it
that are used twice, released numbers off their public grid, and how many records are drawn.

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
from psgrad.engine.privacy.sampling import Sampling

Array = np.ndarray[Any, Any]

# The probability that what is drawn as declared raises an alarm, over all questions together.
FALSE_ALARM = 1e-6
# How many numbers of a step are kept; after how many in all fewer are kept of each step, and how many then;
# and how many of each tensor for the comparison of tensors. Wrong noise is wrong everywhere.
_KEPT, _ENOUGH, _KEPT_LATER, _KEPT_OF_A_TENSOR = 1 << 21, 1 << 22, 1 << 12, 512
# Tensors with fewer numbers are not compared, and at most this number of pieces are compared with one
# another.
_SMALLEST_PIECE, _MOST_PIECES = 32, 2000


@dataclass(frozen=True)
class NoiseCheck:
    """The results of the tests of what some steps drew.

    Attributes:
        numbers: how many numbers of noise were tested. 0: there is no noise.
        spread: their standard deviation over the declared one.
        p_values: question -> the probability of a result as extreme as this, if all is as declared.
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
    """Gathers what steps draw: the noise, in units of the declared standard deviation, and the batches."""

    def __init__(self) -> None:
        self._steps: list[Array] = []
        self._pieces: list[Array] = []
        self._batches: list[Array] = []
        self._off_grid = False

    def add(self, noisy: Mapping[str, Tensor], clean: Mapping[str, Tensor], std: float) -> None:
        """Adds one step: its noisy and its clipped sums, name -> [*shape], and the noise's declared standard
        deviation, above 0.
        """
        grid = grid_of(std)
        step: list[Array] = []
        room = _KEPT if sum(map(len, self._steps)) < _ENOUGH else _KEPT_LATER
        for name, value in noisy.items():
            head = value.detach().flatten()[: max(room, _KEPT_OF_A_TENSOR)].cpu().double()
            self._off_grid |= not torch.equal((head / grid).round() * grid, head)
            before = clean[name].detach().flatten()[: len(head)].cpu().double()
            noise: Array = ((head - before) / std).numpy()
            if len(noise) >= _SMALLEST_PIECE and len(self._pieces) < _MOST_PIECES:
                self._pieces.append(noise[:_KEPT_OF_A_TENSOR])
            step.append(noise[:room])
            room -= len(step[-1])
        self._steps.append(np.concatenate(step))

    def add_batch(self, rows: Array) -> None:
        """Adds the records that one step drew."""
        self._batches.append(rows)

    def check(self, sampling: Sampling | None = None, records: int = 0) -> NoiseCheck:
        """The results for all steps that were added. Steps are not distinguished: their noise should all be
        of one distribution. sampling: what the batches were drawn by, of how many records.
        """
        from scipy.stats import kstest, norm

        p_values = {} if sampling is None else _batch_p_values(self._batches, sampling, records)
        if not self._steps:
            return NoiseCheck(0, math.nan, p_values)
        numbers = np.concatenate(self._steps)
        n, squares = len(numbers), float(np.square(numbers).sum())
        if not math.isfinite(squares):
            return NoiseCheck(n, squares, {**p_values, "spread": 0.0})
        p_values |= {
            "spread": _spread_p_value(numbers),
            "mean": 2 * float(norm.sf(abs(float(numbers.sum())) / math.sqrt(n))),
            "a part that repeats another": _repetition_p_value(numbers),
            "alike in two tensors": _most_alike(self._pieces),
            "off the public grid": 0.0 if self._off_grid else 1.0,  # which no rounded number is
            "shape": float(kstest(numbers, "norm").pvalue),
        }
        return NoiseCheck(n, math.sqrt(squares / n), p_values)


def _spread_p_value(numbers: Array) -> float:
    """The probability of a sum of squares as far out, of independent normal numbers."""
    from scipy.stats import chi2

    squares = float(np.square(numbers).sum())
    return min(1.0, 2 * min(float(chi2.cdf(squares, len(numbers))), float(chi2.sf(squares, len(numbers)))))


def _repetition_p_value(numbers: Array) -> float:
    """A bound on the probability that independent normal numbers are as like themselves, moved by some lag,
    as these are at the worst of all lags.

    The sum of the m products at a lag is a quadratic form of Frobenius norm sqrt(m / 2) and spectral norm 1
    at most, which is beyond sqrt(2 m t) + 2 t with a probability of at most 2 exp(-t) (Laurent and Massart,
    2000, lemma 1); times the number of lags, for the choice.
    """
    from scipy.fft import irfft, next_fast_len, rfft

    n = len(numbers)
    if n < 2:
        return 1.0
    size = next_fast_len(2 * n, real=True)
    products = np.abs(irfft(np.square(np.abs(rfft(numbers, size))), size)[1:n])
    terms = np.arange(n - 1, 0, -1)
    roots = (np.sqrt(2 * terms + 8 * products) - np.sqrt(2 * terms)) / 4  # of t
    return min(1.0, 2 * (n - 1) * math.exp(-(float(roots.max()) ** 2)))


def _batch_p_values(batches: list[Array], sampling: Sampling, records: int) -> dict[str, float]:
    """How many records are drawn in all, and how many in both of two successive steps: exact probabilities,
    of a batch of too many records and of one that comes again; a shuffled epoch has none in both.
    """
    drawn = sum(map(len, batches))
    rate, question = sampling.sample_rate, "how many records are drawn"
    if rate is None:
        return {question: float(all(len(batch) == sampling.batch_size for batch in batches))}
    pairs = list(zip(batches[::2], batches[1::2], strict=False))
    both = sum(len(np.intersect1d(*pair)) for pair in pairs)
    return {
        question: _binomial_p_value(drawn, records * len(batches), rate),
        "records that come again in the next step": _binomial_p_value(both, records * len(pairs), rate**2),
    }


def _binomial_p_value(count: int, trials: int, rate: float) -> float:
    from scipy.stats import binom

    return min(1.0, 2 * min(float(binom.cdf(count, trials, rate)), float(binom.sf(count - 1, trials, rate))))


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
