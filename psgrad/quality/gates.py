"""The gate of a run: each rule failed, passed, or not evaluable, which is not a pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import pandas as pd

from psgrad.config import GateConfig
from psgrad.config.analysis import OutlierConfig
from psgrad.quality.conformal import resolution, resolution_words
from psgrad.quality.findings import KNOWN, NEW
from psgrad.quality.references import ALL
from psgrad.run.results import GateOutcome
from psgrad.run.results.check import FINDINGS_OF_A_GATE
from psgrad.run.results.manifest import OutlierCounts, OutlierFacts


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
    *,
    leaks: bool = True,
) -> list[GateOutcome]:
    """One outcome for each rule that the gate sets.

    `ordered` are the findings, the most severe first; `counts` counts them by rule and state. `facts` says
    how samples were judged; None if that is not known, and then no verdict was possible. `leaks` is whether
    the run has looked for leaks of evaluation data. Ignored findings
    don't count; with `new_only` those of the baseline don't either.
    """
    outcomes = []
    if gate.nonfinite != "ignore":
        outcomes.append(_nonfinite(gate, _counted("nonfinite", gate, ordered, counts)))
    if gate.max_leaks is not None:
        outcomes.append(_leaks(gate.max_leaks, _counted("leak", gate, ordered, counts), leaks))
    limits: list[tuple[str, int, str]] = []
    if gate.max_outliers is not None:
        limits.append(("max_outliers", gate.max_outliers, ""))
    if gate.max_fraction is not None:
        of_all = f" ({gate.max_fraction:g} of {samples:,} samples)"
        limits.append(("max_fraction", math.floor(share_of(gate.max_fraction, samples)), of_all))
    found, facts = _counted("outlier", gate, ordered, counts), facts or OutlierFacts(evaluable=False)
    for rule, limit, of_all in limits:
        words = f"{found.words('outlier')}, and {limit:,} may be{of_all}"
        outcomes.append(_outliers(rule, limit, words, found, facts))
    return outcomes


@dataclass(frozen=True)
class _Counted:
    """The findings of one rule that a gate counts, and how many others there are. prints: of the first."""

    count: int
    others: int
    new_only: bool
    prints: tuple[str, ...]

    def words(self, noun: str) -> str:
        """1 outlier, 3 new outliers."""
        return f"{self.count:,} {'new ' if self.new_only else ''}{noun}{'' if self.count == 1 else 's'}"


def _counted(
    rule: str, gate: GateConfig, ordered: pd.DataFrame, counts: Mapping[str, Mapping[str, int]]
) -> _Counted:
    states = (NEW,) if gate.new_only else (NEW, KNOWN)
    chosen = ordered.loc[(ordered["rule"] == rule) & ordered["state"].isin(states), "fingerprint"]
    count = sum(counts[rule][state] for state in states)
    others = sum(counts[rule].values()) - count
    return _Counted(count, others, gate.new_only, tuple(chosen.head(FINDINGS_OF_A_GATE)))


def _nonfinite(gate: GateConfig, found: _Counted) -> GateOutcome:
    words = f"{found.words('sample')} with a loss or gradient that is not finite"
    if gate.nonfinite == "warning":
        return GateOutcome("nonfinite", "passed", words, found.count, None, found.prints)
    if not found.count:
        return GateOutcome("nonfinite", "passed", words, found.count, 0, found.prints)
    step = (
        "look at these samples, at the learning rate and at the precision; gate.nonfinite: warning lets them"
        " pass"
    )
    message = f"{words}, and none may be. Next step: {step}"
    return GateOutcome("nonfinite", "failed", message, found.count, 0, found.prints)


def _leaks(limit: int, found: _Counted, searched: bool) -> GateOutcome:
    if not searched:
        step = "name the evaluation data as influence.queries, and run psgrad analyze again"
        message = f"the run has looked for no leaks. Next step: {step}"
        return GateOutcome("max_leaks", "not evaluable", message, None, limit, found.prints)
    words = f"{found.words('leak')} of evaluation data, and {limit:,} may be"
    if found.count <= limit:
        return GateOutcome("max_leaks", "passed", words, found.count, limit, found.prints)
    message = f"{words}. Next step: take these rows out of the training data"
    return GateOutcome("max_leaks", "failed", message, found.count, limit, found.prints)


def _outliers(rule: str, limit: int, words: str, found: _Counted, facts: OutlierFacts) -> GateOutcome:
    if found.count > limit:
        step = "look at them; what is sound goes into the ignore list or the baseline, with a reason"
        message = f"{words}. Next step: {step}"
        return GateOutcome(rule, "failed", message, found.count, limit, found.prints)
    if not facts.evaluable:
        why = facts.why_not or "without a reference there is a review list, and no verdict"
        step = "give analyze.outliers.reference a trusted set, a run or a baseline"
        if facts.referenced:
            step = "give a larger reference, or a larger analyze.outliers.fdr"
        message = f"{why.rstrip('.')}. Next step: {step}, and run psgrad analyze again"
        return GateOutcome(rule, "not evaluable", message, None, limit, found.prints)
    # Flagged samples that do not count help to flag the next: the smallest p-value is compared with fdr *
    # flagged / tested.
    smallest, exceeding = facts.smallest_flaggable, limit + 1 + found.others
    if smallest is not None and smallest > exceeding:
        # The number of trusted samples that makes fdr * exceeding / tested reachable: (1 / (n + 1)) <= fdr *
        # exceeding / tested.
        needed = math.ceil((facts.counts.tested or 1) / ((facts.fdr or 0.1) * exceeding))
        message = (
            f"{words}; but fewer than {smallest:,} outliers can't be told from chance with this reference, so"
            f" one too many would not have been seen. Next step: a reference of at least {needed:,} samples"
            f" in all, or a gate that lets {smallest - 1 - found.others:,} outliers pass"
        )
        return GateOutcome(rule, "not evaluable", message, found.count, limit, found.prints)
    return GateOutcome(rule, "passed", words, found.count, limit, found.prints)


def undecided_rules(
    gate: GateConfig, outliers: OutlierConfig, samples: int, trusted: int | None
) -> Iterator[str]:
    """A sentence for each rule that can't be passed, by the sizes of the data and of the reference alone:
    without a single outlier it would not be evaluable.

    trusted: the size of the reference, None without one. Samples in groups, and those that are in the
    reference themselves, are not known here, and then nothing is said.
    """
    if trusted is not None and outliers.group_by is not None:
        return
    smallest = resolution({ALL: samples}, {ALL: trusted or 0}, outliers.fdr).smallest
    judged = trusted is not None
    facts = OutlierFacts(
        fdr=outliers.fdr,
        decided_by="reference" if judged else "review list",
        evaluable=judged and smallest is not None,
        why_not=resolution_words(smallest, trusted, samples, outliers.fdr, 1) if judged else None,
        smallest_flaggable=smallest,
        counts=OutlierCounts(samples=samples, tested=samples),
    )
    nothing = pd.DataFrame({name: pd.Series([], dtype=str) for name in ("rule", "state", "fingerprint")})
    none = {rule: {NEW: 0, KNOWN: 0} for rule in ("nonfinite", "outlier", "leak")}
    for outcome in evaluate(gate, nothing, none, facts, samples):
        if outcome.outcome == "not evaluable":
            yield f"gate.{outcome.rule} can't be passed (exit code 4): {outcome.message}"
