"""What the order of the scores says: whether the loss puts the same samples first, and whether a few samples
stand out from all others. docs/explanation/outliers.md has both rules.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.quality.gates import share_of
from psgrad.run.results.manifest import LossAgreement, ScoreGap
from psgrad.wording import correlation

_LEVEL = 1e-3  # the largest probability of a gap in scores without one, over all places looked at
_LEAST_FACTOR = 2.0
_BELOW = 30  # scores below a gap that it is compared with
_MOST = 50  # samples that can stand out, and no more than a tenth of all


def loss_agreement(frame: pd.DataFrame, score: str, tail: str, fraction: float) -> LossAgreement:
    """How similarly the score and the loss order samples: Spearman's correlation, and the overlap of their
    first samples.

    `frame` has the ranked samples; a score that is the loss is compared with the gradient norm. None if it is
    undefined.
    """
    other = "grad_norm" if score == "loss" else "loss"
    mine = frame[score].to_numpy("float64", na_value=np.nan) * (1 if tail == "upper" else -1)
    theirs = frame[other].to_numpy("float64")
    if len(frame) < 3 or np.ptp(mine) == 0 or np.ptp(theirs) == 0:
        return LossAgreement(other, words="they can't be compared here")
    count = math.ceil(share_of(fraction, len(frame)))
    top = set(np.argsort(-mine, kind="stable")[:count].tolist()) & set(
        np.argsort(-theirs, kind="stable")[:count].tolist()
    )
    # A score of -inf is the logarithm of a gradient of zero, and has a rank like any other.
    rho = float(np.corrcoef(pd.Series(mine).rank(), pd.Series(theirs).rank())[0, 1])
    overlap = f"{len(top):,} of the first {count:,} by the one are so by the other"
    words = f"rank correlation of {score} and {other} {correlation(rho)}; {overlap}"
    expected = expected_overlap(rho, count, len(frame))
    return LossAgreement(other, rho, count, len(top), len(top) / count, words, expected)


def expected_overlap(rho: float, top: int, samples: int) -> float:
    """How many of the first `top` by one column are expected among the first `top` by another, where the two
    have the rank correlation `rho` and are, up to their scales, normal together.

    Of independent columns top² / samples. P(X > h, Y > h) by Owen's T (Owen 1956), an integral over an
    angle.
    """
    h = NormalDist().inv_cdf(top / samples) if top < samples else math.inf
    angle = math.acos(2 * math.sin(math.pi * min(max(rho, -1.0), 1.0) / 6)) / 2
    places, weights = np.polynomial.legendre.leggauss(128)
    integrand = np.exp(-(h**2) / 2 / np.cos(angle * (places + 1) / 2) ** 2)
    return max(0.0, top - samples * angle / (2 * math.pi) * float(weights @ integrand))


def score_gap(scores: npt.NDArray[np.float64]) -> ScoreGap:
    """How many samples stand out, and how many times smaller the next score is; nothing where none do.

    `scores` [n]: large is suspect; only positive ones count. Of scores whose tail falls like a power, k
    log(s_k / s_k+1) are independent and exponential with one mean, for all k (Rényi). So this of a place,
    over the mean of the 30 places below it, has an F distribution. A gap is a place where its p-value, times
    the number of places looked at, is at most 0.001, and the factor is at least 2. Tails that fall faster
    than a power have smaller gaps at their end, and a smaller probability of one here.
    """
    ordered = np.sort(scores[np.isfinite(scores) & (scores > 0)])[::-1]
    places = min(_MOST, len(ordered) // 10, len(ordered) - 1 - _BELOW)
    if places < 1:
        return ScoreGap()
    logs = np.log(ordered)
    factors = logs[:-1] - logs[1:]
    spacings = np.arange(1, len(ordered)) * factors
    below = np.array([spacings[place : place + _BELOW].mean() for place in range(1, places + 1)])
    with np.errstate(divide="ignore", invalid="ignore"):
        p = places * (1 + spacings[:places] / below / _BELOW) ** -float(_BELOW)
    found = (factors[:places] >= math.log(_LEAST_FACTOR)) & (p <= _LEVEL)
    if not found.any():
        return ScoreGap()
    place = int(np.argmin(np.where(found, p, np.inf)))
    return ScoreGap(place + 1, float(np.exp(factors[place])))
