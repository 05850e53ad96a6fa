"""What several runs on the same data spent together, of the lines of their budget: `step` lines, each with an
event that was paid for, and `note` lines with those that are reserved for a process before it draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psgrad.engine.privacy.accounting.composition import tightest_epsilon
from psgrad.engine.privacy.accounting.epsilon import Epsilon
from psgrad.engine.privacy.accounting.events import StepEvent, event_of


@dataclass
class Account:
    """What one run has spent of a budget.

    Attributes:
        paid: event -> how many such steps were paid for.
        ahead: event -> how many more are reserved.
        digests: of each step, the SHA-256 of its line in the run's ledger.
    """

    paid: dict[StepEvent, int] = field(default_factory=dict)
    ahead: dict[StepEvent, int] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)

    def take(self, line: Mapping[str, Any]) -> None:
        """Enter a line of the budget."""
        if line["kind"] == "note":
            self.ahead = {event_of(each): int(each["steps"]) for each in line["reserved"]}
            return
        event = event_of(line)
        self.paid[event] = self.paid.get(event, 0) + 1
        self.ahead[event] = max(self.ahead.get(event, 0) - 1, 0)
        self.digests.append(line["ledger_sha256"])

    def events(self, reserved: bool = True) -> list[tuple[StepEvent, int]]:
        """All steps; reserved: those that are only reserved, too."""
        return [*self.paid.items(), *(self.ahead.items() if reserved else ())]


def accounts_of(
    lines: Sequence[Mapping[str, Any]], into: dict[str, Account] | None = None
) -> dict[str, Account]:
    """Run -> its account, of the lines of a budget, in order of first appearance. into: those of the lines
    before.

    Raises ConfigError for a line that holds no step.
    """
    accounts = {} if into is None else into
    for line in lines:
        if "run" in line and line["kind"] in ("step", "note"):
            accounts.setdefault(line["run"], Account()).take(line)
    return accounts


def composed(accounts: Mapping[str, Account], delta: float, *, reserved: bool = True) -> Epsilon:
    """What all these runs cost together at delta."""
    return tightest_epsilon(
        [each for account in accounts.values() for each in account.events(reserved)], delta
    )
