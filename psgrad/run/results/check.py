"""The verdict of `psgrad check` on a run: the outcome of each rule, the exit code, and the plain values of
check.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from psgrad.errors import EXIT_GATE_FAILED, EXIT_GATE_NOT_EVALUABLE, EXIT_OK
from psgrad.run.results.findings import Finding
from psgrad.wording import ShortRepr

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
