"""What a training loop of the user's own has spent, from process to process: with the optimiser's state, and
in a ledger where there is one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from psgrad.engine.privacy.accounting import StepEvent
from psgrad.engine.privacy.accounting.events import event_of
from psgrad.errors import ConfigError


class StepLedger(Protocol):
    """What an account needs of a ledger; `psgrad.run.Ledger` is one. A line is on the disk when `append`
    returns.
    """

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]: ...

    def append(self, content: Mapping[str, Any]) -> None: ...


class Account:
    """The steps that were paid for, apart for each process that took some: what is read twice, or read again
    after more steps, counts once, and no step is ever taken off.

    ledger: has the steps of before, and gets a line for each step.
    """

    def __init__(self, ledger: StepLedger | None = None) -> None:
        self._ledger, self._id = ledger, secrets.token_hex(8)
        self._runs: dict[str, list[tuple[StepEvent, int]]] = {}  # by process: events, and how many of each
        for line in () if ledger is None else ledger.steps:
            self._append(str(line.get("account")), event_of(line))

    @property
    def events(self) -> list[StepEvent]:
        """All steps so far."""
        return [event for runs in self._runs.values() for event, count in runs for _ in range(count)]

    def pay(self, event: StepEvent) -> None:
        """Add a step; its line is in the ledger when this returns."""
        process = f"{self._id}-{os.getpid()}"  # a fork is another process
        if self._ledger is not None:
            self._ledger.append({**event.line(), "account": process})
        self._append(process, event)

    def content(self) -> dict[str, Any]:
        """The account as plain values; `add` reads them."""
        return {
            process: [[event.line(), count] for event, count in runs] for process, runs in self._runs.items()
        }

    def add(self, content: Any) -> None:
        """Add what another account contains, as far as it is not here yet. Raises ConfigError for what is no
        account.
        """
        try:
            read = {
                str(process): [(event_of(line), int(count)) for line, count in runs]
                for process, runs in content.items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the privacy account of the optimiser's state can't be read: {error}; expected what the"
                " state_dict() of a private optimiser has",
            ) from error
        for process, runs in read.items():
            if _steps(runs) > _steps(self._runs.get(process, [])):
                self._runs[process] = runs

    def _append(self, process: str, event: StepEvent) -> None:
        runs = self._runs.setdefault(process, [])
        same = bool(runs) and runs[-1][0] == event
        runs[len(runs) - same :] = [(event, runs[-1][1] + 1 if same else 1)]


def _steps(runs: Sequence[tuple[StepEvent, int]]) -> int:
    return sum(count for _, count in runs)
