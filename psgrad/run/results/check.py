"""What `psgrad check` finds in a run, and its verdict, as objects and as plain values for findings.jsonl,
check.json and the CI formats; accepted findings and stored scores (a baseline); and the differences between
two runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd

from psgrad.errors import EXIT_GATE_FAILED, EXIT_GATE_NOT_EVALUABLE, EXIT_OK
from psgrad.wording import ShortRepr

RULES: Mapping[str, str] = {
    "nonfinite": "the loss or the gradient of the sample is NaN or infinite",
    "outlier": "the sample is unlike the reference, at the false discovery rate that was asked for",
    "leak": "the input is, or nearly equals, one of the evaluation data",
    "zero-gradient": "the gradient of the sample is exactly zero: it would not move the model",
    "changed-row": "the row was added or changed, and looks wrong by itself",
    "review": "among the samples to look at first; a list, not a verdict",
}
"""The rules by which samples are named, the most severe first, and what each says."""

Level = Literal["error", "warning", "note"]

FINDINGS_OF_A_RULE = 25_000
"""How many findings of one rule are kept, the most severe: a model that is broken would name each sample of a
dataset.
"""


@dataclass(frozen=True)
class Location:
    """The place of a sample: the data file as the config names it, and its line, from 1, if it has lines."""

    path: str
    line: int | None = None


@dataclass(frozen=True)
class Finding:
    """One rule that names one sample: a line of findings.jsonl.

    Attributes:
        rule: a key of RULES.
        level: how severe.
        id, index: of the sample; index is its row, from 0.
        fingerprint: 32 hexadecimal digits of the rule and the sample's id or content, not of its row or its
            values: the same finding has the same one in every run.
        message: a sentence for people.
        reasons: short texts, from the table.
        group: of the sample, where samples are grouped.
        values: column -> number, those that bear on it (the score that samples are judged by, grad_norm,
            loss, p_value, q_value, outlier_score); None where the number is not finite.
        state: 'new'; 'known', in the baseline; 'ignored', by an entry of the ignore list, whose reason is
            `ignored_because`.
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


def finding_content(finding: Finding) -> dict[str, Any]:
    """A finding as a line of findings.jsonl, as plain values."""
    plain = {"location": dict(vars(finding.location)), "reasons": list(finding.reasons)}
    return {**vars(finding), **plain, "values": dict(finding.values)}


@dataclass(frozen=True)
class Known:
    """A finding in a baseline: fields as in `Finding`."""

    fingerprint: str
    rule: str
    id: str


@dataclass(frozen=True, repr=False)
class Baseline(ShortRepr):
    """Attributes:

    findings: those that were accepted. run: of which run: psgrad's version, the data's fingerprint, how many
    samples. reference: the scores of that run's samples, as psgrad/quality/gates.py has them; None where
    there are none.
    """

    findings: tuple[Known, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] | None = None


@dataclass(frozen=True, repr=False)
class BaselineChange(ShortRepr):
    """The changes of a baseline when it was saved.

    Attributes:
        baseline: as it is now.
        path: of its file.
        dropped: entries that the run no longer has.
        taken: findings that were added.
        refused: findings that were not added, because a baseline only shrinks unless it may grow.
        first: whether there was none before.
        reference_kept: whether the scores are those of an earlier run.
    """

    baseline: Baseline
    path: str
    dropped: int
    taken: int
    refused: int
    first: bool
    reference_kept: bool


CHANGE_COLUMNS = (
    "change",
    "id",
    "row_a",
    "row_b",
    "score_a",
    "score_b",
    "percentile_a",
    "percentile_b",
    "moved",
    "list",
    "fingerprint",
)


@dataclass(frozen=True, repr=False)
class Comparison(ShortRepr):
    """Two runs of `psgrad analyze`, A and B.

    Attributes:
        a, b: the run folders.
        score: the column that is compared; `tail`, its suspect end.
        counts: 'samples_a', 'samples_b'; 'common', in both; 'came', in B alone; 'went', in A alone; of the
            common 'rose' and 'fell', whose percentile is higher or lower in B; 'entered' and 'left', that B
            lists and A does not, and the other way round.
        spearman: rank correlation of the score over the common samples that have one in both; None for fewer
            than two, or equal scores.
        changes: one row for each sample, with CHANGE_COLUMNS, of each `change` (came, went, rose, fell) the
            first few: those that moved furthest, and those that rank first in their run. Percentiles are
            among the common samples, 100 the most suspect; `moved` is their difference, in percentage points;
            `list` says whether the sample entered or left the review list, or the outliers.
        warnings: what makes the two hard to compare.
    """

    a: str
    b: str
    score: str
    tail: str
    counts: Mapping[str, int]
    spearman: float | None
    changes: pd.DataFrame
    warnings: tuple[str, ...] = ()


# -- the verdict ---------------------------------------------------------------------------------------------

FINDINGS_OF_A_GATE = 100


@dataclass(frozen=True)
class GateOutcome:
    """The outcome of one rule of the gate for a run.

    Attributes:
        rule: as in the config: max_outliers, max_fraction, nonfinite, ...
        outcome: 'passed', 'failed', or 'not evaluable'.
        found, limit: the count, and the allowed one; None if there is no number.
        message: a sentence, with the next step if it did not pass.
        findings: fingerprints of those that were counted, the most severe first, at most FINDINGS_OF_A_GATE.
    """

    rule: str
    outcome: Literal["passed", "failed", "not evaluable"]
    message: str
    found: float | None = None
    limit: float | None = None
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckFacts:
    """What a verdict rests on: `facts` in check.json.

    Attributes:
        counts: rule -> state -> how many, those beyond FINDINGS_OF_A_RULE included.
        partial: a sentence where the run looked at a part of the dataset, else None.
        score: the column that samples are judged by.
        baseline, ignore: the files; None where there is none.
        psgrad: the version that made the run.
    """

    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    partial: str | None = None
    score: str = "grad_norm"
    baseline: str | None = None
    ignore: str | None = None
    psgrad: str | None = None


@dataclass(frozen=True, repr=False)
class CheckResult(ShortRepr):
    """The gate's verdict on a run.

    Attributes:
        outcomes: one for each rule that the config sets. findings: the most severe rule first; within a rule
            the new ones first, then by rank, then by row; at most FINDINGS_OF_A_RULE of each rule.
        warnings: sentences (baseline entries that are gone, ignore entries that expired).
        run: the run folder's path, as given.
        samples: how many the run has.
        facts: what the verdict rests on.
    """

    outcomes: tuple[GateOutcome, ...]
    findings: tuple[Finding, ...]
    run: str
    samples: int
    warnings: tuple[str, ...] = ()
    facts: CheckFacts = CheckFacts()

    def count(self, rule: str | None = None, state: str | None = None) -> int:
        """How many findings there are, of a rule and in a state; also those that are not kept."""
        chosen = [states for name, states in self.facts.counts.items() if rule in (None, name)]
        return sum(n for states in chosen for name, n in states.items() if state in (None, name))

    @property
    def exit_code(self) -> int:
        """1 where a rule failed, else 4 where one could not be evaluated, else 0."""
        outcomes = {outcome.outcome for outcome in self.outcomes}
        if "failed" in outcomes:
            return EXIT_GATE_FAILED
        return EXIT_GATE_NOT_EVALUABLE if "not evaluable" in outcomes else EXIT_OK


def check_content(result: CheckResult) -> dict[str, Any]:
    """A verdict without its findings, as plain values."""
    return {
        "version": 1,
        "run": result.run,
        "samples": result.samples,
        "exit_code": result.exit_code,
        "outcomes": [dataclasses.asdict(outcome) for outcome in result.outcomes],
        "warnings": list(result.warnings),
        "facts": dataclasses.asdict(result.facts),
    }
