"""What trusted samples can decide: conformal p-values, the false discovery rate, the resolution limit, and
the caveats of a verdict.

Bates et al., Testing for outliers with conformal p-values, Annals of Statistics 2023 (arXiv 2104.08279). A
p-value here is valid where the sample, if it is not an outlier, and the reference are exchangeable: drawn
from the same source, measured by the same model, and both trained on or both held out. Nothing is assumed
about how scores are distributed. P-values that share one reference depend on each other, in the way (PRDS)
under which Benjamini and Hochberg's procedure still holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from psgrad.quality.references import Reference
from psgrad.run.results.manifest import GroupFacts

Array = npt.NDArray[Any]

EXCHANGEABLE = (
    "p-values hold where trusted samples and sound samples are exchangeable: of one source, and both trained"
    " on or both held out (training shrinks the gradients of what it has seen)"
)
NO_VERDICT = (
    "there is no reference: the review list is a fixed share of the samples, however sound they are, and no"
    " verdict"
)


def p_values(scores: Array, reference: Array, tail: str = "upper") -> Array:
    """For each score the share of the reference, and itself, that is at least as suspect: (1 + #{reference >=
    score}) / (n + 1).

    `scores` [m], `reference` [n]; `tail` is the suspect end. Ties count as at least as suspect, and so does
    what is NaN in the reference: a p-value can only become larger by them. A score that is NaN has no
    p-value: NaN.
    """
    sign = 1.0 if tail == "upper" else -1.0
    suspect, trusted = sign * np.asarray(scores, "float64"), sign * np.asarray(reference, "float64")
    missing = np.isnan(trusted)
    ordered = np.sort(trusted[~missing])
    at_least = len(trusted) - np.searchsorted(ordered, suspect, side="left")
    return np.where(np.isnan(suspect), np.nan, (1 + at_least) / (len(trusted) + 1))


def grouped_p_values(
    scores: Array, labels: Array, reference: Array, reference_labels: Array, tail: str = "upper"
) -> Array:
    """`p_values` of each score against the reference rows with its own label alone (Mondrian): valid within
    every group, too.

    A label that the reference does not have gives the p-value 1.
    """
    result = np.full(len(scores), np.nan)
    for label in np.unique(labels):
        mine = labels == label
        result[mine] = p_values(scores[mine], reference[reference_labels == label], tail)
    return result


def q_values(p: Array) -> Array:
    """The smallest false discovery rate at which each p-value is flagged, by Benjamini and Hochberg; NaN
    stays NaN, and is not a test.
    """
    order = np.argsort(p)[: np.count_nonzero(~np.isnan(p))]  # NaN comes last
    result = np.full(len(p), np.nan)
    rates = p[order] * len(order) / np.arange(1, len(order) + 1)
    result[order] = np.minimum(np.minimum.accumulate(rates[::-1])[::-1], 1.0)
    return result


@dataclass(frozen=True)
class Resolution:
    """What a reference of this size can decide.

    Attributes:
        smallest: how many samples must be flagged at once at the least; fewer outliers than that can't be
            flagged. None: none can ever be.
        smallest_p: group -> its smallest possible p-value, 1 / (n + 1).
        smallest_of: group -> how many samples, of all groups together, must be flagged for one of this group
            to be among them; None: never.
    """

    smallest: int | None
    smallest_p: Mapping[str, float]
    smallest_of: Mapping[str, int | None]


def resolution(tested: Mapping[str, int], reference: Mapping[str, int], fdr: float) -> Resolution:
    """The limit that follows from sizes alone, before any score is seen.

    `tested` and `reference` are group -> how many; groups without tests don't matter. Of N tests k are
    flagged when their p-values are at most q k / N, and none is below 1 / (n + 1): so k >= N / (q (n + 1)).
    """
    count = sum(tested.values())
    floor = {group: 1 / (reference.get(group, 0) + 1) for group, tests in tested.items() if tests}
    # (smallest p-value, how many must be flagged) where the groups with such p-values have that many samples
    possible = []
    for p in sorted(set(floor.values())):
        needed = max(1, math.ceil(count * p / fdr * (1 - 1e-12)))
        if needed <= sum(tests for group, tests in tested.items() if tests and floor[group] <= p):
            possible.append((p, needed))
    smallest_of = {
        group: min((needed for other, needed in possible if other >= p), default=None)
        for group, p in floor.items()
    }
    return Resolution(min((needed for _, needed in possible), default=None), floor, smallest_of)


def why_not_evaluable(
    reference: Reference | None,
    groups: Mapping[str, GroupFacts],
    tested: int,
    fdr: float,
    in_both: int,
) -> str | None:
    """Why the absence of outliers would mean nothing; None if it means something. `in_both`: samples that are
    in the reference themselves.
    """
    if reference is None:
        return NO_VERDICT
    if not tested:
        if not in_both:
            return "no sample was tested: none has a finite score"
        # With a baseline this is the good case: nothing is new.
        return (
            None if reference.kind == "baseline" else "no sample was tested: all of them are in the reference"
        )
    blind = {name: each for name, each in groups.items() if not each.evaluable}
    if not blind:
        return None
    count = sum(each.tested for each in blind.values())
    most = max(each.reference or 0 for each in blind.values())
    where = "" if len(groups) == 1 else f" of the groups {', '.join(blind)}"
    return (
        f"{count:,} samples{where} can't be flagged, whatever their scores: the reference has"
        f" {'at most ' if len(blind) > 1 else ''}{most:,} samples to hold them against; it takes"
        f" {math.ceil(1 / fdr) - 1:,} or more at a false discovery rate of {fdr:g}"
    )


def resolution_words(smallest: int | None, trusted: int | None, tested: int, fdr: float, groups: int) -> str:
    """The resolution limit, in a sentence. trusted: the size of the reference, None without one."""
    if trusted is None:
        return "without a reference no sample is flagged"
    if not tested:
        return "no sample was tested"
    if smallest is None:
        return (
            f"{trusted:,} trusted samples are too few to flag any of {tested:,} samples at a false"
            f" discovery rate of {fdr:g}"
        )
    if smallest == 1:
        return f"{trusted:,} trusted samples can tell a single outlier among {tested:,} samples"
    return (
        f"{trusted:,} trusted samples can tell {smallest:,} or more outliers among {tested:,} samples,"
        f" and never fewer; to tell a single one it takes about {math.ceil(tested / fdr):,} trusted"
        f" samples{' in its group' if groups > 1 else ''}"
    )


def caveats_of(reference: Reference | None, p: Array, in_both: int, joined: set[str]) -> list[str]:
    """Sentences that belong to the verdict."""
    if reference is None:
        return [NO_VERDICT]
    caveats = [EXCHANGEABLE, *reference.caveats]
    missing = int(np.isnan(reference.scores).sum())
    if missing:
        caveats.append(
            f"{missing:,} of the trusted samples have no finite score; they count as more suspect than any"
            " sample"
        )
    if in_both:
        caveats.append(
            f"{in_both:,} samples are in the reference themselves; they are taken as trusted and not tested"
        )
    if joined:
        caveats.append(f"the groups {', '.join(sorted(joined)[:10])} are small, and judged together")
    if len(p):
        share = float((p <= 0.5).mean())
        chance = math.sqrt(0.25 / len(p) + 0.25 / max(len(reference), 1))
        if abs(share - 0.5) > 0.1 + 4 * chance:
            side = "more" if share > 0.5 else "less"
            caveats.append(
                f"{share:.0%} of the samples are more suspect than the middle of the reference, where of"
                f" sound ones half would be: most are {side} suspect than trusted ones, and the two don't"
                " look exchangeable (was one trained on, and the other not?)"
            )
    return caveats
