"""The optimiser of a private training loop, and its account: what the loop has spent, from process to
process, with the optimiser's state and in a ledger where there is one.
"""

from __future__ import annotations

import math
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import nn

from psgrad.engine.privacy.accounting import StepEvent, epsilon_pld
from psgrad.engine.privacy.accounting.events import event_of
from psgrad.engine.privacy.loop_loader import DrawnBatch, LoopSampling
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.refusals import require_tail
from psgrad.engine.privacy.step import PrivateTraining
from psgrad.errors import ConfigError

# The key of an optimiser's first group that has the account: it goes where the optimiser's state goes.
_ACCOUNT = "privacy"
_TRAINED: WeakSet[nn.Module] = WeakSet()  # modules that a private step has changed
_NEIGHBOURS: dict[Relation, str] = {
    "add_or_remove_one": "differ by one record that is added or removed",
    "zero_out": "have the same number of records, one of which has no gradient in one of them",
    "replace_one": "have the same number of records, one of which is another",
}


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


def account_of(module: nn.Module, optimizer: torch.optim.Optimizer, ledger: StepLedger | None) -> Account:
    """The account of earlier steps. Warns of parts that were trained without an account."""
    account = Account(ledger)
    account.add(optimizer.param_groups[0].get(_ACCOUNT, {}))
    if (optimizer.state or module in _TRAINED) and not account.events:
        _warn_of_no_account("the model and the optimiser")
    return account


def _warn_of_no_account(what: str) -> None:
    warnings.warn(
        f"{what} come from steps of which no account is here: epsilon will be that of the steps from here on."
        " If the steps before were on the same private data, load the state_dict() of the private optimiser"
        " that took them, or give make_private their ledger",
        stacklevel=4,
    )


class PrivateOptimizer(torch.optim.Optimizer):
    """The optimiser: a step clips each record's gradient, adds noise, and updates. Its state_dict has the
    account of the steps, and loading one adds its account to what was spent here.
    """

    def __init__(  # no super(): all is the inner one's
        self,
        training: PrivateTraining,
        model: nn.Module,
        account: Account,
        drawn: LoopSampling,
        batch: DrawnBatch,
    ) -> None:
        self._training, self._model, self._account = training, model, account
        self._drawn, self._batch = drawn, batch
        self.original_optimizer = training.optimizer

    param_groups = property(lambda self: self.original_optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.original_optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.original_optimizer.defaults)  # type: ignore[assignment]

    @property
    def events(self) -> list[StepEvent]:
        """The steps that were taken, those of earlier processes too, as accountants read them."""
        return self._account.events

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ConfigError("step was given a closure; expected one gradient a step: no closure")
        self._training.step(self._pay, np.arange(0))  # of the batch that the loop has

    def _pay(self, event: StepEvent) -> None:
        self._account.pay(event)
        self._batch.size = None
        self.param_groups[0][_ACCOUNT] = self._account.content()
        _TRAINED.add(self._model)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        account = state_dict["param_groups"][0].get(_ACCOUNT)
        self._account.add(account or {})
        self.original_optimizer.load_state_dict(state_dict)
        self.param_groups[0][_ACCOUNT] = self._account.content()
        if account is None:
            _warn_of_no_account("the loaded state")

    def __repr__(self) -> str:
        return (
            f"PrivateOptimizer({type(self.original_optimizer).__name__}, {len(self.events):,} private steps)"
        )

    def statement(self, delta: float) -> str:
        """The guarantee of the steps so far, in words."""
        epsilon, told_by = self.epsilon(delta), self._drawn.told_by
        spent = f"({_rounded_up(epsilon)}, {delta:g})" if math.isfinite(epsilon) else ""
        promised = (
            f"the result of {len(self.events):,} steps is {spent}-differentially private"
            if spent
            else "there is no guarantee, as a step had no noise"
        )
        public = (
            f" The number of records is public: the {told_by} of each step follows from it. sample_rate and"
            " expected_batch_size, chosen without looking at the data, protect it."
        )
        return (
            f"{promised}, where neighbouring datasets {_NEIGHBOURS[self._training.relation]}."
            f"{public if told_by else ''}"
        )

    def epsilon(self, delta: float) -> float:
        """What the steps so far have spent, an upper bound by privacy loss distributions; infinite without
        noise. It holds against those who do not know the generator's seed, if it has one.

        Raises ConfigError for a noise multiplier that is too small for the generator's tail at this delta,
        and for a delta that loss distributions are not exact to.
        """
        multipliers = [(event.noise_multiplier, 1) for event in self.events]
        require_tail(multipliers, delta)
        found = epsilon_pld([(event, 1) for event in self.events], delta)
        if found.value is None:
            raise ConfigError(f"there is no epsilon for these steps: {found.why_not}")
        return found.value


def _rounded_up(epsilon: float) -> str:
    """Epsilon with four digits, never less than it is."""
    nearest = float(f"{epsilon:.4g}")
    return f"{nearest if nearest >= epsilon else nearest + 10.0 ** (math.floor(math.log10(nearest)) - 3):.4g}"
