"""The gate of a run: failed, passed, or not evaluable, which is not a pass; and the caveats of a verdict:
what the reference can't decide, what it rests on, and how the loss compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.config import GateConfig
from psgrad.quality.findings import KNOWN, NEW
from psgrad.quality.references import Reference
from psgrad.results import GateOutcome
from psgrad.results.findings import FINDINGS_OF_A_GATE
from psgrad.results.manifest import GroupFacts, LossAgreement, OutlierFacts, Separability
from psgrad.wording import correlation


def share_of(fraction: float, count: int) -> Fraction:
    """`fraction` of `count`, exactly: 0.07 of 100 are 7, and 0.29 of 100 are 29, which 0.07 * 100 and 0.29 *
    100 in floats are not.
    """
    return Fraction(str(float(fraction))) * count


def evaluate(
    gate: GateConfig,
    ordered: pd.DataFrame,
    counts: Mapping[str, Mapping[str, int]],
    facts: OutlierFacts | None,
    samples: int,
) -> list[GateOutcome]:
    """One outcome for each rule that the gate sets.

    `ordered` are the findings, the most severe first; `counts` counts them by rule and state. `facts` says
    how samples were judged; None if that is not known, and then no verdict was possible. Ignored findings
    don't count; with `new_only` those of the baseline don't either.
    """
    run = _JudgedRun(gate, ordered, counts, facts or OutlierFacts(evaluable=False), samples)
    outcomes = [] if gate.nonfinite == "ignore" else [run.nonfinite()]
    if gate.max_outliers is not None:
        outcomes.append(run.outliers("max_outliers", gate.max_outliers))
    if gate.max_fraction is not None:
        outcomes.append(run.outliers("max_fraction", math.floor(share_of(gate.max_fraction, samples))))
    return outcomes


@dataclass(frozen=True)
class _JudgedRun:
    """What the rules of a gate are evaluated on; see `evaluate`."""

    gate: GateConfig
    ordered: pd.DataFrame
    counts: Mapping[str, Mapping[str, int]]
    facts: OutlierFacts
    samples: int

    def nonfinite(self) -> GateOutcome:
        count = self._count("nonfinite")
        what = self._words(count, "sample", " with a loss or gradient that is not finite")
        counted = self._fingerprints("nonfinite")
        if count and self.gate.nonfinite == "error":
            step = (
                "look at these samples, at the learning rate and at the precision; gate.nonfinite: warning"
                " lets them pass"
            )
            return GateOutcome(
                "nonfinite", "failed", f"{what}, and none may be. Next step: {step}", count, 0, counted
            )
        return GateOutcome(
            "nonfinite", "passed", what, count, 0 if self.gate.nonfinite == "error" else None, counted
        )

    def outliers(self, rule: str, limit: int) -> GateOutcome:
        flagged = sum(self.counts["outlier"].values())
        count = self._count("outlier")
        what = self._words(count, "outlier")
        allowed = f"{limit:,} may be"
        if rule == "max_fraction":
            allowed = f"{limit:,} may be ({self.gate.max_fraction:g} of {self.samples:,} samples)"
        counted = self._fingerprints("outlier")
        if count > limit:
            step = "look at them; what is sound goes into the ignore list or the baseline, with a reason"
            return GateOutcome(
                rule, "failed", f"{what}, and {allowed}. Next step: {step}", count, limit, counted
            )
        if not self.facts.evaluable:
            why = str(
                self.facts.why_not or "without a reference there is a review list, and no verdict"
            ).rstrip(".")
            step = (
                "give analyze.outliers.reference a trusted set, a run or a baseline, and run psgrad analyze"
                " again"
            )
            if self.facts.referenced:
                step = (
                    "give a larger reference, or a larger analyze.outliers.fdr, and run psgrad analyze again"
                )
            return GateOutcome(rule, "not evaluable", f"{why}. Next step: {step}", None, limit, counted)
        # Flagged samples that do not count help to flag the next: the smallest p-value is compared with fdr *
        # flagged / tested.
        smallest, exceeding = self.facts.smallest_flaggable, limit + 1 + flagged - count
        if smallest is not None and smallest > exceeding:
            # So many trusted samples make fdr * exceeding / tested reachable: (1 / (n + 1)) <= fdr *
            # exceeding / tested.
            tested, fdr = self.facts.counts.tested or self.samples, self.facts.fdr or 0.1
            needed = math.ceil(tested / (fdr * exceeding))
            least = smallest - 1 - (flagged - count)
            message = (
                f"{what}, and {allowed}; but fewer than {smallest:,} outliers can't be told from chance with"
                " this reference, so one too many would not have been seen. Next step: a reference of at"
                f" least {needed:,} samples in all"
                + (
                    f", or gate.max_outliers: {least}"
                    if rule == "max_outliers"
                    else f", or gate.max_fraction of at least {least / self.samples:.3g}"
                )
            )
            return GateOutcome(rule, "not evaluable", message, count, limit, counted)
        return GateOutcome(rule, "passed", f"{what}, and {allowed}", count, limit, counted)

    @property
    def _states(self) -> tuple[str, ...]:
        return (NEW,) if self.gate.new_only else (NEW, KNOWN)

    def _count(self, rule: str) -> int:
        return sum(self.counts[rule][state] for state in self._states)

    def _words(self, count: int, noun: str, rest: str = "") -> str:
        return f"{count:,} {'new ' if self.gate.new_only else ''}{noun}{'' if count == 1 else 's'}{rest}"

    def _fingerprints(self, rule: str) -> tuple[str, ...]:
        ordered = self.ordered
        chosen = ordered.loc[(ordered["rule"] == rule) & ordered["state"].isin(self._states), "fingerprint"]
        return tuple(chosen.head(FINDINGS_OF_A_GATE))


Array = npt.NDArray[Any]

EXCHANGEABLE = (
    "p-values hold where trusted samples and sound samples are exchangeable: of one source, and both trained"
    " on or both held out (training shrinks the gradients of what it has seen)"
)
NO_VERDICT = (
    "there is no reference: the review list is a fixed share of the samples, however sound they are, and no"
    " verdict"
)


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
        # Of a baseline this is the good case: nothing is new.
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


def resolution_words(
    smallest: int | None, reference: Reference | None, tested: int, fdr: float, groups: int
) -> str:
    """The resolution limit, in a sentence."""
    if reference is None:
        return "without a reference no sample is flagged"
    if not tested:
        return "no sample was tested"
    if smallest is None:
        return (
            f"{len(reference):,} trusted samples are too few to flag any of {tested:,} samples at a false"
            f" discovery rate of {fdr:g}"
        )
    if smallest == 1:
        return f"{len(reference):,} trusted samples can tell a single outlier among {tested:,} samples"
    return (
        f"{len(reference):,} trusted samples can tell {smallest:,} or more outliers among {tested:,} samples,"
        f" and never fewer; to tell a single one it takes about {math.ceil(tested / fdr):,} trusted"
        f" samples{' in its group' if groups > 1 else ''}"
    )


def loss_agreement(frame: pd.DataFrame, score: str, tail: str, fraction: float) -> LossAgreement:
    """How similarly the score and the loss order samples: Spearman's correlation, and the overlap of their
    first samples.

    `frame` has the ranked samples; a score that is the loss is compared with the gradient norm. None if it is
    undefined.
    """
    from scipy.stats import spearmanr

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
    rho = float(spearmanr(pd.Series(mine).rank(), pd.Series(theirs).rank()).statistic)
    overlap = f"{len(top):,} of the first {count:,} by the one are so by the other"
    words = f"rank correlation of {score} and {other} {correlation(rho)}; {overlap}"
    return LossAgreement(other, rho, count, len(top), len(top) / count, words)


def separability(p: Array, reference: int, flagged: int, smallest: int | None) -> Separability:
    """Whether more samples are unusual than can be flagged.

    `p` [m]: of sound samples a tenth have p <= 0.1. `surplus` is how many more there are; if that is beyond
    chance (3 standard deviations, of the samples and of the reference) and more than twice the number of
    flagged ones, outliers and sound samples overlap, or there are fewer outliers than `smallest`, the least
    that the reference can decide.
    """
    if not len(p):
        return Separability(0, low=False)
    surplus = float((p <= 0.1).sum()) - 0.1 * len(p)
    chance = math.sqrt(0.09 * len(p) * (1 + len(p) / max(reference, 1)))
    low = bool(surplus > 3 * chance and surplus > 2 * flagged)
    why = "outliers and sound samples overlap by this score"
    if smallest is None or surplus < smallest:
        why += ", or the reference is too small to tell so few"
    words = (
        f"low separability: about {surplus:,.0f} samples more than among trusted ones have a suspect score,"
        f" and {flagged:,} can be told apart; {why}"
    )
    return Separability(surplus, low, words if low else None)


def caveats_of(
    reference: Reference | None, p: Array, in_both: int, joined: set[str], review_fraction: float
) -> list[str]:
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
