"""The results of `psgrad dp-budget`, which says what all runs on a dataset spent."""

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
