"""The gate of a run: failed, passed, or not evaluable, which is not a pass; the caveats of a verdict: what
the reference can't decide, and what it rests on; and the baseline, the findings of a run that are accepted.
Baselines only shrink, unless `grow` is set.

The file of a baseline is JSON: {"tool": "psgrad", "kind": "baseline", "version": 1, "run": {...}, "findings":
[{fingerprint, rule, id}], "reference": {...}}. The reference is the scores by which later samples can be
judged: see psgrad/quality/references.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.config import GateConfig
from psgrad.config.values import require_regular
from psgrad.errors import ConfigError, DataError
from psgrad.quality.findings import KNOWN, NEW
from psgrad.quality.references import Reference
from psgrad.run.results import RULES, GateOutcome
from psgrad.run.results.check import FINDINGS_OF_A_GATE
from psgrad.run.results.findings import Baseline, BaselineChange, Known
from psgrad.run.results.manifest import GroupFacts, OutlierFacts, Separability


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


VERSION = 1

# Every run has a review list, and no gate counts it: none of its entries is accepted or refused.
ACCEPTABLE = tuple(rule for rule in RULES if rule != "review")


def read_baseline(path: Path) -> Baseline:
    """The baseline in a file. Raises ConfigError if there is none, DataError for a file that is not one."""
    require_regular(path, "baseline")
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"there is no baseline {path}",
            next_step=f"check the path; psgrad baseline save RUN --output {path} makes one of a finished run",
        ) from None
    except (OSError, ValueError) as error:
        raise _not_a_baseline(path, str(error)) from error
    if not isinstance(content, dict) or content.get("tool") != "psgrad" or content.get("kind") != "baseline":
        raise _not_a_baseline(path, "it has no mark of a baseline of psgrad")
    if content.get("version") != VERSION:
        raise DataError(
            f"the baseline {path} has the format version {content.get('version')!r}",
            expected=f"version {VERSION}, the only one that this psgrad reads",
            next_step="use the psgrad that wrote it, or save the baseline again",
        )
    try:
        listed = content["findings"]
        findings = tuple(Known(*(str(each[key]) for key in ("fingerprint", "rule", "id"))) for each in listed)
    except (KeyError, TypeError) as error:
        raise _not_a_baseline(path, f"its findings are damaged: {error}") from error
    return Baseline(findings, content.get("run") or {}, content.get("reference"))


def written(baseline: Baseline) -> dict[str, Any]:
    """The baseline as its file has it, findings by rule and fingerprint, so that changes are few lines."""
    places = {rule: place for place, rule in enumerate(RULES)}
    last = len(places)
    findings = sorted(baseline.findings, key=lambda each: (places.get(each.rule, last), each.fingerprint))
    return {
        "tool": "psgrad",
        "kind": "baseline",
        "version": VERSION,
        "run": dict(baseline.run),
        "findings": [dict(vars(each)) for each in findings],
        "reference": None if baseline.reference is None else dict(baseline.reference),
    }


def mark_known(named: pd.DataFrame, baseline: Baseline) -> pd.DataFrame:
    """The named samples, with those that the baseline holds marked as known."""
    is_known = named["fingerprint"].isin({each.fingerprint for each in baseline.findings})
    return named.assign(state=named["state"].mask(is_known & (named["state"] == NEW), KNOWN))


def gone(named: pd.DataFrame, baseline: Baseline) -> int:
    """How many entries of the baseline a run no longer has."""
    present = set(named["fingerprint"])
    return sum(each.fingerprint not in present for each in baseline.findings)


def changed(
    before: Baseline | None,
    named: pd.DataFrame,
    run: Mapping[str, Any],
    reference: Mapping[str, Any] | None,
    path: Path,
    grow: bool,
) -> BaselineChange:
    """The new baseline of a run; `before` is the previous one.

    Without one, or with `grow`, it holds all findings of the run that are not ignored, and the run's scores.
    Else it holds those of its entries that the run has still, and its scores stay: with scores that are
    renewed by every run, the reference would follow any drift.
    """
    acceptable = named[named["rule"].isin(ACCEPTABLE) & (named["state"].isin((NEW, KNOWN)))]
    columns = (acceptable["fingerprint"], acceptable["rule"], acceptable["id"].map(str))
    present = {each[0]: Known(*each) for each in zip(*columns, strict=True)}
    had = {each.fingerprint: each for each in before.findings} if before is not None else {}
    new = {fingerprint: each for fingerprint, each in present.items() if fingerprint not in had}
    remaining = {fingerprint: each for fingerprint, each in had.items() if fingerprint in present}
    takes = before is None or grow
    scores = reference if takes or before is None or before.reference is None else before.reference
    return BaselineChange(
        Baseline(tuple({**remaining, **(new if takes else {})}.values()), run, scores),
        str(path),
        dropped=len(had) - len(remaining),
        taken=len(new) if takes else 0,
        refused=0 if takes else len(new),
        first=before is None,
        reference_kept=not takes and before is not None and before.reference is not None,
    )


def _not_a_baseline(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} can't be read as a baseline: {why[:200]}",
        expected="a file as psgrad baseline save writes it",
        next_step="save the baseline again, or take it back from version control",
    )
