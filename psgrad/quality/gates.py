"""The gate of a run: failed, passed, or not evaluable, which is not a pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import pandas as pd

from psgrad.config import GateConfig
from psgrad.quality.findings import KNOWN, NEW
from psgrad.run.results import GateOutcome
from psgrad.run.results.check import FINDINGS_OF_A_GATE
from psgrad.run.results.manifest import OutlierFacts


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
            # The number of trusted samples that makes fdr * exceeding / tested reachable: (1 / (n + 1)) <=
            # fdr * exceeding / tested.
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
