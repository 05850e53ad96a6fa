"""The table of what each record's own norms cost it, in the private folder of a run that asks for it."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd

from psgrad.commands.private_setup import PrivateSetup
from psgrad.engine.privacy.accounting import StepEvent, event_of
from psgrad.engine.privacy.individual import IndividualAccount, restored, shares_of
from psgrad.engine.privacy.step import PrivateTraining
from psgrad.run.folders import PRIVATE
from psgrad.run.ledger import Ledger
from psgrad.run.private_runs import PREFIX, PrivateRunFolder

TABLE, _STATE = "individual_epsilon.parquet", "individual_moments.npz"


class IndividualTable:
    """The account of each record, measured before every few steps. NOT PRIVATE.

    Steps of earlier processes that the stored moments lack count with the bound.
    """

    def __init__(self, setup: PrivateSetup, folder: PrivateRunFolder, ledger: Ledger, every: int) -> None:
        self._setup, self._folder, self._every, self._measured = setup, folder, every, False
        self._account = IndividualAccount(len(setup.records))
        try:
            with np.load(io.BytesIO((folder.path / PRIVATE / f"{PREFIX}{_STATE}").read_bytes())) as state:
                self._account = restored(state, self._account)
        except (OSError, ValueError, KeyError):
            pass  # none, or one that can't be read
        for line in ledger.steps[self._account.steps :]:
            self._account.count(event_of(line))

    def before_step(self, training: PrivateTraining) -> None:
        """Compute the norms of all records at the present weights, where it is their turn."""
        if self._measured and training.taken % self._every:
            return
        source, clipping = training.source(np.arange(training.records)), training.clipping
        shares = np.empty(training.records)
        shares[self._setup.streams.drawn] = shares_of(source(clipping).records, clipping)
        self._account.measure(shares)
        self._measured = True

    def count(self, event: StepEvent) -> None:
        """Count a step that was paid for."""
        self._account.count(event)

    def write(self) -> None:
        """Write the table, and the moments with which a later process goes on."""
        setup, samples = self._setup, self._setup.run.samples
        names = samples.ids if setup.privacy.unit is None else pd.unique(pd.Series(samples.units))
        table = pd.DataFrame({"record": names, "epsilon": self._account.epsilons(setup.privacy.delta)})
        exact = self._every == 1 and not setup.run.model.training
        table.attrs = {
            "delta": setup.privacy.delta,
            "steps": self._account.steps,
            "kind": "by the norms of every step" if exact else "an estimate: norms of some steps or draws",
        }
        self._folder.write_private_table(TABLE, table)
        state = io.BytesIO()
        np.savez(state, moments=self._account.moments, steps=self._account.steps)
        self._folder.write_private_bytes(_STATE, state.getvalue())
