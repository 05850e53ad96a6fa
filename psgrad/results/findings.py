"""What a run found against single samples, and what its gates said: the records behind every CI format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from psgrad.errors import EXIT_GATE_FAILED, EXIT_GATE_NOT_EVALUABLE, EXIT_OK
from psgrad.results.short_repr import ShortRepr

RULES: Mapping[str, str] = {
    "nonfinite": "the loss or the gradient of the sample is NaN or infinite",
    "outlier": "the sample is unlike the reference, at the false discovery rate that was asked for",
    "zero-gradient": "the gradient of the sample is exactly zero: it would not move the model",
    "review": "among the samples to look at first; a list, not a verdict",
}
"""The rules by which samples are named, the gravest first, and what each says."""

Level = Literal["error", "warning", "note"]

FINDINGS_OF_A_RULE = 25_000
"""How many findings of one rule are kept, the gravest: a model that is broken would name each sample of a dataset."""

FINDINGS_OF_A_GATE = 100


@dataclass(frozen=True)
class Location:
    """Where a sample stands: the data file as the config names it, and its line there, from 1, where the file has lines."""

    path: str
    line: int | None = None


@dataclass(frozen=True)
class Finding:
    """One rule that names one sample: a line of findings.jsonl.

    Attributes:
        rule: a key of RULES. level: how grave.
        id, index: of the sample; index is its row, from 0.
        fingerprint: 32 hexadecimal digits of the rule and the sample's id or content, not of its row or its values: the same finding has
            the same one in every run.
        message: a sentence for people.
        reasons: short texts, from the table. group: of the sample, where samples are grouped.
        values: column -> number, those that bear on it (the score that samples are judged by, grad_norm, loss, p_value, q_value,
            outlier_score); None where it is no finite number.
        state: 'new'; 'known', in the baseline; 'ignored', by an entry of the ignore list, whose reason is `ignored_because`.
    """

    rule: str
    level: Level
    id: str | int
    index: int
    fingerprint: str
    message: str
    location: Location
    reasons: tuple[str, ...] = ()
    group: str | None = None
    values: Mapping[str, float | None] = field(default_factory=dict)
    state: Literal["new", "known", "ignored"] = "new"
    ignored_because: str | None = None


@dataclass(frozen=True)
class GateOutcome:
    """What one rule of the gate says of a run.

    Attributes:
        rule: as in the config: max_outliers, max_fraction, nonfinite, ...
        outcome: 'passed', 'failed', or 'not evaluable'.
        found, limit: what was counted, and what is allowed; None where there is no number.
        message: a sentence for people, with the next step where it did not pass.
        findings: fingerprints of those that were counted, the gravest first, at most FINDINGS_OF_A_GATE.
    """

    rule: str
    outcome: Literal["passed", "failed", "not evaluable"]
    message: str
    found: float | None = None
    limit: float | None = None
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class CheckResult(ShortRepr):
    """The gate's verdict on a run.

    Attributes:
        outcomes: one for each rule that the config sets.
        findings: the gravest rule first; of a rule those that are new first, then by rank, then by row; at most FINDINGS_OF_A_RULE of each.
        warnings: sentences (baseline entries that are gone, ignore entries that expired).
        run: the run folder's path, as given. samples: how many the run has.
        facts: 'counts', rule -> state -> how many, those beyond `findings` included; 'partial', a sentence where the run looked at
            a part of the dataset, else None; 'baseline' and 'ignore', the files, or None; 'score', the column that samples are judged by;
            'exit_code'.
    """

    outcomes: tuple[GateOutcome, ...]
    findings: tuple[Finding, ...]
    run: str
    samples: int
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def count(self, rule: str | None = None, state: str | None = None) -> int:
        """How many findings there are, of a rule and in a state where these are given, those that are not kept included."""
        counts: Mapping[str, Mapping[str, int]] = self.facts.get("counts", {})
        return sum(n for a, states in counts.items() if rule in (None, a) for b, n in states.items() if state in (None, b))

    @property
    def exit_code(self) -> int:
        """1 where a rule failed, else 4 where one could not be evaluated, else 0."""
        outcomes = {outcome.outcome for outcome in self.outcomes}
        if "failed" in outcomes:
            return EXIT_GATE_FAILED
        return EXIT_GATE_NOT_EVALUABLE if "not evaluable" in outcomes else EXIT_OK
