"""The results of `psgrad dp-budget`, which says what all runs on a dataset spent, and of `psgrad dp-report`,
which says what one run guarantees.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psgrad.wording import ShortRepr


@dataclass(frozen=True)
class BudgetRun:
    """What one run spent of a budget.

    Attributes:
        run: the number by which its ledger knows it.
        steps: how many were paid for.
        reserved: how many more are, for a process that goes on or was killed.
        epsilon: of the steps that were paid for, at the budget's delta; None where there is none.
        sampling, noise_multipliers: of these steps.
    """

    run: str
    steps: int
    reserved: int
    epsilon: float | None
    sampling: list[dict[str, Any]]
    noise_multipliers: list[float]


@dataclass(frozen=True, repr=False)
class BudgetResult(ShortRepr):
    """What a budget holds, its chain of hashes verified.

    Attributes:
        epsilon, delta: the most that all runs may cost together.
        epsilon_spent: what the steps that were paid for cost together; `epsilon_reserved`, with those that
            are reserved. None where no accountant covers them.
        relation, unit: of all runs.
        lines, sha256: how many lines there are, and the hash of the last one: by them an older copy of the
            file is recognised later.
    """

    file: Path
    epsilon: float
    delta: float
    epsilon_spent: float | None
    epsilon_reserved: float | None
    relation: str
    unit: str
    runs: list[BudgetRun]
    lines: int
    sha256: str


@dataclass(frozen=True, repr=False)
class DPReport(ShortRepr):
    """What a private run guarantees, of its public files alone. Every number is a bound.

    Attributes:
        step: the content of public/step.json.
        epsilon: of the ledger's steps, at the run's delta; None where there is none.
        epsilons: (delta, epsilon) at others, smallest epsilon first.
        mu: the Gaussian mechanism that is no more private for all deltas from the run's on.
        attacks: (false-positive rate, the largest true-positive rate of any attack on one record).
        groups: (records, epsilon for them together at the run's delta).
        audit: the content of public/audit.json beside the run, None without one.
        assumptions: {"name", "status", "text"}, status 'checked' or 'assumed'.
        problems: contradictions between the files, a sentence each.
    """

    run: Path
    step: dict[str, Any]
    epsilon: float | None
    epsilons: list[tuple[float, float | None]]
    mu: float | None
    attacks: list[tuple[float, float]]
    groups: list[tuple[int, float | None]]
    audit: dict[str, Any] | None
    assumptions: list[dict[str, str]]
    problems: list[str]
    notes: list[str]
    page: Path
