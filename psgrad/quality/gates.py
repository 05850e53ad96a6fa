"""What the gate says of a run: failed, passed, or not evaluable, which is no pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from psgrad.config import GateConfig
from psgrad.quality.findings import KNOWN, NEW
from psgrad.quality.shares import share_of
from psgrad.results import GateOutcome
from psgrad.results.findings import FINDINGS_OF_A_GATE


def evaluate(
    gate: GateConfig, ordered: pd.DataFrame, counts: Mapping[str, Mapping[str, int]], facts: Any, samples: int
) -> list[GateOutcome]:
    """One outcome for each rule that the gate sets.

    `ordered` are the findings, the gravest first; `counts` counts them by rule and state. `facts` are what judging left in the manifest
    under "outliers": whether a verdict was possible (`evaluable`, `why_not`), and how few outliers can't be flagged at all
    (`smallest_flaggable`). Ignored findings don't count; with `new_only` those of the baseline don't either.
    """
    states = (NEW,) if gate.new_only else (NEW, KNOWN)
    outcomes = [] if gate.nonfinite == "ignore" else [_nonfinite(gate, ordered, counts, states)]
    limits = {"max_outliers": gate.max_outliers, "max_fraction": None}
    if gate.max_fraction is not None:
        limits["max_fraction"] = math.floor(share_of(gate.max_fraction, samples))
    for rule, limit in limits.items():
        if limit is not None:
            outcomes.append(_outliers(rule, limit, gate, ordered, counts, states, facts or {}, samples))
    return outcomes


def _nonfinite(gate: GateConfig, ordered: pd.DataFrame, counts: Mapping[str, Mapping[str, int]], states: tuple[str, ...]) -> GateOutcome:
    found = sum(counts["nonfinite"][state] for state in states)
    what = _counted(found, "sample", "with a loss or gradient that is not finite", gate)
    counted = _fingerprints(ordered, "nonfinite", states)
    if found and gate.nonfinite == "error":
        step = "look at these samples, at the learning rate and at the precision; gate.nonfinite: warning lets them pass"
        return GateOutcome("nonfinite", "failed", f"{what}, and none may be. Next step: {step}", found, 0, counted)
    return GateOutcome("nonfinite", "passed", what, found, 0 if gate.nonfinite == "error" else None, counted)


def _outliers(
    rule: str,
    limit: int,
    gate: GateConfig,
    ordered: pd.DataFrame,
    counts: Mapping[str, Mapping[str, int]],
    states: tuple[str, ...],
    facts: Mapping[str, Any],
    samples: int,
) -> GateOutcome:
    flagged = sum(counts["outlier"].values())
    found = sum(counts["outlier"][state] for state in states)
    what = _counted(found, "outlier", "", gate)
    allowed = f"{limit:,} may be"
    if rule == "max_fraction":
        allowed = f"{limit:,} may be ({gate.max_fraction:g} of {samples:,} samples)"
    counted = _fingerprints(ordered, "outlier", states)
    if found > limit:
        step = "look at them; what is sound goes into the ignore list or the baseline, with a reason"
        return GateOutcome(rule, "failed", f"{what}, and {allowed}. Next step: {step}", found, limit, counted)
    if not facts.get("evaluable", False):
        why = str(facts.get("why_not") or "without a reference there is a review list, and no verdict").rstrip(".")
        step = "give analyze.outliers.reference a trusted set, a run or a baseline, and run psgrad analyze again"
        if facts.get("decided_by") == "reference":
            step = "give a larger reference, or a larger analyze.outliers.fdr, and run psgrad analyze again"
        return GateOutcome(rule, "not evaluable", f"{why}. Next step: {step}", None, limit, counted)
    # What is flagged and does not count helps to flag the next: the smallest p-value is held against fdr * flagged / tested.
    smallest, exceeding = facts.get("smallest_flaggable"), limit + 1 + flagged - found
    if smallest is not None and smallest > exceeding:
        # So many trusted samples make fdr * exceeding / tested reachable: (1 / (n + 1)) <= fdr * exceeding / tested.
        tested, fdr = facts.get("counts", {}).get("tested", samples), facts.get("fdr", 0.1)
        needed = math.ceil(tested / (fdr * exceeding))
        least = smallest - 1 - (flagged - found)
        message = (
            f"{what}, and {allowed}; but fewer than {smallest:,} outliers can't be told from chance with this reference, "
            f"so one too many would not have been seen. Next step: a reference of at least {needed:,} samples in all"
            + (
                f", or gate.max_outliers: {least}"
                if rule == "max_outliers"
                else f", or gate.max_fraction of at least {least / samples:.3g}"
            )
        )
        return GateOutcome(rule, "not evaluable", message, found, limit, counted)
    return GateOutcome(rule, "passed", f"{what}, and {allowed}", found, limit, counted)


def _counted(found: int, noun: str, rest: str, gate: GateConfig) -> str:
    adjective = "new " if gate.new_only else ""
    return f"{found:,} {adjective}{noun}{'' if found == 1 else 's'}{f' {rest}' if rest else ''}"


def _fingerprints(ordered: pd.DataFrame, rule: str, states: tuple[str, ...]) -> tuple[str, ...]:
    found = ordered.loc[(ordered["rule"] == rule) & ordered["state"].isin(states), "fingerprint"]
    return tuple(found.head(FINDINGS_OF_A_GATE))
