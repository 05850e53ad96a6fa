"""What must be said beside a verdict: what the reference can't tell, what it rests on, and what loss says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.quality.references import Reference
from psgrad.quality.shares import share_of
from psgrad.wording import correlation

Array = npt.NDArray[Any]

EXCHANGEABLE = (
    "p-values hold where trusted samples and sound samples are exchangeable: of one source, and both trained on or both held out "
    "(training shrinks the gradients of what it has seen)"
)
NO_VERDICT = "there is no reference: the review list is a fixed share of the samples, however sound they are, and no verdict"


def why_not_evaluable(
    reference: Reference | None, groups: Mapping[str, Mapping[str, Any]], tested: int, fdr: float, in_both: int
) -> str | None:
    """Why finding no outliers would say nothing; None where it says something. `in_both`: samples that are in the reference themselves."""
    if reference is None:
        return NO_VERDICT
    if not tested:
        if not in_both:
            return "no sample was tested: none has a finite score"
        # Of a baseline this is the good case: nothing is new.
        return None if reference.kind == "baseline" else "no sample was tested: all of them are in the reference"
    blind = {name: each for name, each in groups.items() if not each["evaluable"]}
    if not blind:
        return None
    count = sum(each["tested"] for each in blind.values())
    most = max(each["reference"] for each in blind.values())
    where = "" if len(groups) == 1 else f" of the groups {', '.join(blind)}"
    return (
        f"{count:,} samples{where} can't be flagged, whatever their scores: the reference has {'at most ' if len(blind) > 1 else ''}"
        f"{most:,} samples to hold them against; it takes {math.ceil(1 / fdr) - 1:,} or more at a false discovery rate of {fdr:g}"
    )


def resolution_words(smallest: int | None, reference: Reference | None, tested: int, fdr: float, groups: int) -> str:
    """The resolution limit, in a sentence."""
    if reference is None:
        return "without a reference nobody is flagged"
    if not tested:
        return "no sample was tested"
    if smallest is None:
        return f"{len(reference):,} trusted samples are too few to flag any of {tested:,} samples at a false discovery rate of {fdr:g}"
    if smallest == 1:
        return f"{len(reference):,} trusted samples can tell a single outlier among {tested:,} samples"
    return (
        f"{len(reference):,} trusted samples can tell {smallest:,} or more outliers among {tested:,} samples, and never fewer; "
        f"to tell a single one it takes about {math.ceil(tested / fdr):,} trusted samples{' in its group' if groups > 1 else ''}"
    )


def loss_agreement(frame: pd.DataFrame, score: str, tail: str, fraction: float) -> dict[str, Any]:
    """How far the score and the loss put samples into the same order: Spearman's correlation, and how many their tops have in common.

    `frame` has the samples that are ranked; a score that is the loss is compared with the gradient norm. None where it can't be said.
    """
    from scipy.stats import spearmanr

    other = "grad_norm" if score == "loss" else "loss"
    mine = frame[score].to_numpy("float64", na_value=np.nan) * (1 if tail == "upper" else -1)
    theirs = frame[other].to_numpy("float64")
    if len(frame) < 3 or np.ptp(mine) == 0 or np.ptp(theirs) == 0:
        return {"other": other, "spearman": None, "top": None, "shared": None, "top_overlap": None, "words": "they can't be compared here"}
    count = math.ceil(share_of(fraction, len(frame)))
    top = set(np.argsort(-mine, kind="stable")[:count].tolist()) & set(np.argsort(-theirs, kind="stable")[:count].tolist())
    # A score of -inf is the logarithm of a gradient of zero, and has a rank like any other.
    rho = float(spearmanr(pd.Series(mine).rank(), pd.Series(theirs).rank()).statistic)
    overlap = f"{len(top):,} of the first {count:,} by the one are so by the other"
    return {
        "other": other,
        "spearman": rho,
        "top": count,
        "shared": len(top),
        "top_overlap": len(top) / count,
        "words": f"rank correlation of {score} and {other} {correlation(rho)}; {overlap}",
    }


def separability(p: Array, reference: int, flagged: int, smallest: int | None) -> dict[str, Any]:
    """Whether more samples are strange than can be told apart.

    `p` [m]: of sound samples a tenth have p <= 0.1. `surplus` is how many more there are; where that is beyond chance (3 standard
    deviations, of the samples and of the reference) and more than twice of what was flagged, outliers and sound samples overlap, or there
    are fewer outliers than the reference can tell, `smallest`.
    """
    if not len(p):
        return {"surplus": 0, "low": False, "words": None}
    surplus = float((p <= 0.1).sum()) - 0.1 * len(p)
    chance = math.sqrt(0.09 * len(p) * (1 + len(p) / max(reference, 1)))
    low = bool(surplus > 3 * chance and surplus > 2 * flagged)
    why = "outliers and sound samples overlap by this score"
    if smallest is None or surplus < smallest:
        why += ", or the reference is too small to tell so few"
    words = (
        f"low separability: about {surplus:,.0f} samples more than among trusted ones have a suspect score, and {flagged:,} can be told "
        f"apart; {why}"
    )
    return {"surplus": surplus, "low": low, "words": words if low else None}


def caveats_of(reference: Reference | None, p: Array, in_both: int, joined: set[str], review_fraction: float) -> list[str]:
    """Sentences that belong to the verdict."""
    if reference is None:
        return [NO_VERDICT]
    found = [EXCHANGEABLE, *reference.caveats]
    missing = int(np.isnan(reference.scores).sum())
    if missing:
        found.append(f"{missing:,} of the trusted samples have no finite score; they count as more suspect than any sample")
    if in_both:
        found.append(f"{in_both:,} samples are in the reference themselves; they are taken as trusted and not tested")
    if joined:
        found.append(f"the groups {', '.join(sorted(joined)[:10])} are small, and judged together")
    if len(p):
        share = float((p <= 0.5).mean())
        chance = math.sqrt(0.25 / len(p) + 0.25 / max(len(reference), 1))
        if abs(share - 0.5) > 0.1 + 4 * chance:
            side = "more" if share > 0.5 else "less"
            found.append(
                f"{share:.0%} of the samples are more suspect than the middle of the reference, where of sound ones half would be: most "
                f"are {side} suspect than trusted ones, and the two don't look exchangeable (was one trained on, and the other not?)"
            )
    return found
