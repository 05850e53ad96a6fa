"""The budget of a dataset: a file to which every private run on the data writes each step that it pays for,
so that all of them together, copies and trials included, stay within one epsilon.

The file is a ledger (storage/ledger.py) that several runs write to, and NOT PRIVATE: its header has the
data's fingerprint. A secret number in it keeps the hashes of its lines, which the runs publish, from telling
whether a guess of the data is right. Beside it the header has epsilon, delta, the unit and the relation; then
come two kinds of lines, each with the `run` that it is of:

    note    what is `reserved` for a process of the run, before it draws; a later one replaces it, and an
            empty one gives back what was not taken
    step    a step that the run paid for, with the hash of the line of the run's own ledger

A step's line in the run's ledger is written first, with the state of the budget that it saw, and the budget's
line second; both are on the disk before noise is drawn. So a run's ledger is at most one step ahead of the
budget, where its process was killed in between: nothing of that step was released, and the process that
resumes writes the line that is missing. A run's ledger is never behind, unless it was rolled back or is that
of a copy whose original went on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from psgrad.commands.private_setup import PrivateSetup, unit_in_words
from psgrad.engine.privacy.accounting import Events, event_of, merged
from psgrad.engine.privacy.accounting.budgets import Account, accounts_of, composed
from psgrad.engine.privacy.refusals import require_small_delta
from psgrad.errors import ConfigError, LedgerError
from psgrad.reports.privacy import compact, epsilon
from psgrad.reports.words import count
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import NOTE, LedgerLines
from psgrad.run.results.privacy_report import BudgetResult, BudgetRun

COMMAND = "budget"  # by which the header of a budget differs from that of a run's ledger


def dp_budget(path: Path) -> BudgetResult:
    """What a budget holds: the whole of `psgrad dp-budget`. Raises LedgerError as `read_budget` does."""
    content = read_budget(path)
    header, accounts = content.header, accounts_of(content.lines)
    delta = header["delta"]
    return BudgetResult(
        file=path,
        epsilon=header["epsilon"],
        delta=delta,
        epsilon_spent=composed(accounts, delta, reserved=False).value,
        epsilon_reserved=composed(accounts, delta).value,
        relation=header["relation"],
        unit=header["unit"],
        runs=[
            BudgetRun(
                run=run,
                steps=sum(account.paid.values()),
                reserved=sum(account.ahead.values()),
                epsilon=composed({run: account}, delta, reserved=False).value,
                sampling=[
                    each.describe() for each in dict.fromkeys(event.sampling for event in account.paid)
                ],
                noise_multipliers=sorted({event.noise_multiplier for event in account.paid}),
            )
            for run, account in accounts.items()
        ],
        lines=content.position,
        sha256=content.digests[-1],
    )


def read_budget(path: Path) -> LedgerLines:
    """The lines of a budget, their chain verified. Raises LedgerError for another file, or a damaged one."""
    content = Ledger.read(path)
    _require_budget(content, path)
    return content


class Budget:
    """The budget of the data of one run, for this run.

    Raises ConfigError for a budget of other data, another unit, relation, epsilon or delta, and LedgerError
    for one that is damaged.
    """

    def __init__(self, path: Path, setup: PrivateSetup, data: str, run: str) -> None:
        wanted = setup.privacy.budget
        assert wanted is not None
        require_small_delta(wanted.delta, len(setup.records), "privacy.budget.delta")
        terms = {
            "epsilon": wanted.epsilon,
            "delta": wanted.delta,
            "relation": setup.privacy.relation,
            "unit": unit_in_words(setup.privacy),
        }
        self.path, self.run = path, run
        private = {"data": data, "secret": uuid4().hex}
        self._file = Ledger.shared(path, {"command": COMMAND, "id": uuid4().hex, **terms, **private})
        _require_budget(self._file, path)
        header = self._file.header
        differing = [] if header.get("data") == data else ["the data are others"]
        differing += [
            f"{key} was {header.get(key)} and is {value}"
            for key, value in terms.items()
            if header.get(key) != value
        ]
        if differing:
            raise ConfigError(
                f"the budget {path} is not one of this run: {'; '.join(differing)}",
                hint="go on with what the file was begun with, or name a file of its own for this run",
            )
        self._accounts: dict[str, Account] = {}
        self._entered = 0  # lines that the accounts have

    @property
    def identity(self) -> dict[str, Any]:
        """What the run's own ledger keeps to."""
        return {key: self._file.header[key] for key in ("id", "epsilon", "delta")}

    def require(self, ledger: LedgerLines | None, events: Events) -> None:
        """Raises LedgerError where the run's ledger is not the one that paid, or the budget was rolled back,
        and ConfigError where these steps are more than what is left. Changes nothing.

        ledger: of the run so far, None for one that begins.
        """
        with self._file.held():
            self._enter()
            missing = [] if ledger is None else self._missing(ledger)
            self._require_room([(event_of(line), 1) for line in missing], events)

    @contextmanager
    def reserved(self, ledger: Ledger, events: Events) -> Iterator[None]:
        """The budget with these steps reserved for this process, and what it does not take given back."""
        with self._file.held():
            self._enter()
            for line in self._missing(ledger):
                self._append_step(ledger, line)
            self._require_room([], events)
            self._note(events)
        try:
            yield
        finally:
            self._give_back(ledger)

    def pay(self, ledger: Ledger, line: Mapping[str, Any]) -> None:
        """Write the line of a step to the run's ledger and to the budget; when this returns both are on the
        disk.

        Raises LedgerError where another process went on with a copy of the run, or a file can't be written:
        nothing may be released then.
        """
        with self._file.held():
            self._enter()
            self._missing(ledger, ahead=0)
            if not self._account.ahead.get(event_of(line)):
                raise self._of_another("what was reserved for this process is gone")
            ledger.append({**line, "budget": self._file.mark()})
            self._append_step(ledger, ledger.lines[-1])

    @property
    def _account(self) -> Account:
        return self._accounts.get(self.run, Account())

    def _enter(self) -> None:
        accounts_of(self._file.lines[self._entered :], self._accounts)
        self._entered = self._file.position

    def _append_step(self, ledger: Ledger, line: Mapping[str, Any]) -> None:
        """Enter the step of the last line of the run's ledger."""
        digest = ledger.step_digests[-1]
        self._file.append(
            {"run": self.run, "step": line["step"], "ledger_sha256": digest, **event_of(line).line()}
        )
        self._enter()

    def _note(self, events: Events) -> None:
        reserved = [{**event.line(), "steps": steps} for event, steps in merged(events).items()]
        self._file.append({"run": self.run, "reserved": reserved}, NOTE)
        self._enter()

    def _give_back(self, ledger: Ledger) -> None:
        try:
            with self._file.held():
                self._enter()
                # A step that the ledger has and the budget lacks keeps what is reserved for it.
                if any(self._account.ahead.values()) and not self._missing(ledger):
                    self._note([])
        except LedgerError:
            pass  # what was reserved stays so, until the run is resumed: nothing is counted too little

    def _missing(self, ledger: LedgerLines, ahead: int = 1) -> list[dict[str, Any]]:
        """The lines of the run's ledger whose steps the budget lacks; at most `ahead`, else LedgerError."""
        steps, digests = ledger.steps, ledger.step_digests
        known = self._account.digests
        if len(known) > len(steps):
            raise self._of_another(
                f"the budget has paid for {len(known)} steps of this run, and its ledger has {len(steps)}"
            )
        if known != digests[: len(known)]:
            raise self._of_another("the ledger has other steps than those that the budget has paid for")
        mark = steps[-1]["budget"] if steps else None
        rolled_back = mark is not None and (
            mark["ledger_position"] > self._file.position
            or self._file.digests[mark["ledger_position"] - 1] != mark["ledger_sha256"]
        )
        if rolled_back or len(steps) - len(known) > ahead:
            raise LedgerError(
                f"the budget {self.path} lacks lines that it had when this run took its last step",
                hint="put the whole file back: without it, what all runs spent together is unknown",
            )
        return steps[len(known) :]

    def _of_another(self, what: str) -> LedgerError:
        return LedgerError(
            f"{what} ({self.path}): the folder is a copy, of which another one went on",
            hint="go on in the folder that has all steps, or begin a run with another --output",
        )

    def _require_room(self, missing: Events, events: Events) -> None:
        """Raises ConfigError where these steps, those that are missing and all others cost more than the
        budget.
        """
        if not events:
            return
        delta, most = self._file.header["delta"], self._file.header["epsilon"]
        others = {run: account for run, account in self._accounts.items() if run != self.run}
        mine = Account(dict(merged([*self._account.paid.items(), *missing])), dict(merged(events)))
        found = composed({**others, self.run: mine}, delta)
        if found.value is None:
            raise ConfigError(
                f"the budget {self.path} can't be composed with this run: {found.why_not}",
                hint="choose sampling and noise like those of the earlier runs",
            )
        if found.value > most:
            spent = composed(self._accounts, delta, reserved=False).value
            held = sum(sum(account.ahead.values()) for account in others.values())
            asked = sum(steps for _, steps in events)
            reserved = f"; {count(held, 'step')} reserved for other runs" if held else ""
            raise ConfigError(
                f"{count(asked, 'step')} of this run would bring what is spent of the budget {self.path} to"
                f" epsilon {epsilon(found.value)}, at delta {compact(delta)}; expected at most"
                f" {compact(most)}, of which {epsilon(spent)} is spent{reserved}",
                hint=f"take fewer steps, or more noise; psgrad dp-budget {self.path} shows the runs",
            )


def budget_of(setup: PrivateSetup, data: str, run: str) -> Budget | None:
    """The budget that the config names, None for none. data: the fingerprint of the data."""
    wanted = setup.privacy.budget
    return None if wanted is None else Budget(setup.config.base / wanted.file, setup, data, run)


def require_same_budget(header: Mapping[str, Any], budget: Budget | None) -> None:
    """Raises ConfigError where a run goes on with another budget than it began with, or without it."""
    then, now = header.get("budget"), None if budget is None else budget.identity
    if then != now:
        words = ["none" if each is None else f"epsilon {compact(each['epsilon'])}" for each in (then, now)]
        another = ", in another file" if words[0] == words[1] else ""
        raise ConfigError(
            f"the run began with another budget: it was {words[0]} and is {words[1]}{another}",
            hint="put privacy.budget and its file back, or begin a run of its own with another --output",
        )


def _require_budget(content: LedgerLines, path: Path) -> None:
    if content.lines and content.header.get("command") != COMMAND:
        raise LedgerError(
            f"{path} is the ledger of a run and no budget",
            hint="name another file in privacy.budget.file",
        )
