"""What the private steps of one process leave: lines of the ledger, checkpoints, tables, and the statement of
what was spent.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from psgrad.commands.private_setup import PrivateSetup
from psgrad.commands.private_statement import ledger_line, step_statement
from psgrad.engine.privacy.accounting import epsilon_curve, epsilon_rdp, event_of
from psgrad.engine.privacy.individual import IndividualAccount, restored, shares_of
from psgrad.engine.privacy.snapshot import Snapshot, published_tensors, tensors_of
from psgrad.engine.privacy.step import NoisySum, PrivateTraining
from psgrad.errors import DistributedError
from psgrad.models.adapters import adapter_files
from psgrad.reports.privacy import live_words
from psgrad.reports.privacy_plots import epsilon_against_steps
from psgrad.run.folders import PRIVATE, PUBLIC
from psgrad.run.ledger import Ledger
from psgrad.run.private_runs import PREFIX, PrivateRunFolder
from psgrad.run.results import Progress, ShowProgress
from psgrad.run.results.privacy import STEP_COLUMNS, DPStepResult

MODEL, NOISY_SUM, STATEMENT = "model.safetensors", "noisy_sum.safetensors", "step.json"
_STEPS, _INDIVIDUAL, _MOMENTS = "steps.parquet", "individual_epsilon.parquet", "individual_moments.npz"


class StepFiles:
    """The files of the steps of one process: ledger lines, checkpoints, and a statement of what was spent.

    Args:
        multiplier: of the noise.
        lost: steps that were paid for before, and of which no checkpoint has what came of them.
        write: puts the line of a step into the ledger and whatever else it is paid from, on the disk.
    """

    def __init__(
        self,
        setup: PrivateSetup,
        multiplier: float,
        folder: PrivateRunFolder,
        ledger: Ledger,
        training: PrivateTraining,
        lost: int,
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.setup, self.folder, self.ledger, self.training, self.lost = setup, folder, ledger, training, lost
        self._multiplier, self._write, self._paid = multiplier, write, len(ledger.steps)
        groups = setup.clipping.groups
        self._bound = groups[0].bound if len(groups) == 1 else None
        every = setup.privacy.individual_every
        self._individual = None if every is None else IndividualTable(setup, folder, ledger, every)
        self._earlier = folder.private_table(_STEPS)  # of the processes before this one
        self._lost_table = self._earlier is None and (folder.path / PRIVATE / f"{PREFIX}{_STEPS}").exists()
        self._rows: list[dict[str, Any]] = []
        self._latest: dict[str, torch.Tensor] = {}  # the last step's noisy sum
        self._saved_at, self._saved_step = time.monotonic(), training.taken

    @contextmanager
    def saved_if_ended(self) -> Iterator[None]:
        """A context, around the steps, that begins with a checkpoint, and saves the steps that were taken
        also where they end early.

        After another error than Ctrl-C or that of a rank, a step may have stopped anywhere. They are saved
        then if the model is, to the bit, as it was before the step: nothing of a record is in it.
        """
        if not self.folder.checkpoint.exists():
            self.save()  # from here on there is one to go on from
        try:
            yield
        except (KeyboardInterrupt, DistributedError):  # the steps that were paid for are whole
            self._save_all()
            raise
        except Exception:
            with suppress(Exception):  # the error itself says more
                if not self.setup.unchanged.changes(by_bits=True):
                    self._save_all()
            raise

    def _save_all(self) -> None:
        self.save()
        self._write_private()
        self.folder.write_public_bytes(MODEL, save(self._state()))

    def before_step(self) -> None:
        """Measure the norms of all records before a step is drawn, where they are to be accounted."""
        if self._individual is not None:
            self._individual.before_step(self.training)

    def pay(self) -> None:
        """Write down what the step costs; nothing of it has been released."""
        training = self.training
        self._write(ledger_line(self.setup, self._multiplier, training.generator, training.taken + 1))
        self._paid += 1
        if self._individual is not None:
            self._individual.account.count(training.event())

    def keep(self, noisy: NoisySum) -> None:
        """Keep what is published of the last step: its noisy sums, before the update divides them."""
        whole = torch.contiguous_format
        self._latest = {name: value.cpu().clone(memory_format=whole) for name, value in noisy.sums.items()}

    def release(self, noisy: NoisySum) -> None:
        """Note what the step that was taken was like, and save it where it is time to."""
        self._note(noisy)
        privacy, training = self.setup.privacy, self.training
        seconds = privacy.checkpoint_seconds
        if (
            training.taken - self._saved_step >= privacy.checkpoint_steps
            if privacy.checkpoint_steps is not None
            else seconds is not None and time.monotonic() - self._saved_at >= seconds
        ):
            self.save()
            self._write_private()

    def show(self, progress: ShowProgress, last: int) -> None:
        """Tell what was spent, of the steps up to the last of this process."""
        delta = self.setup.privacy.delta
        detail = live_words(epsilon_rdp([(self.training.event(), self._paid)], delta).value, delta)
        progress(Progress(self.training.taken, last, "steps", unit="step", detail=detail))

    def save(self) -> None:
        """Write the statement of what was spent, then the last noisy sum, then the state of the training. In
        this order the statement counts each step that is released, and a run that goes on from this state
        has the sum: it can't be drawn again.
        """
        training, tensors = self.training, tensors_of(self.setup.common.model)
        self.folder.write_public_json(STATEMENT, self._statement())
        if self._latest:
            expected = str(self.setup.privacy.expected_batch_size)
            metadata = {"step": str(training.taken), "expected_batch_size": expected}
            self.folder.write_public_bytes(NOISY_SUM, save(self._latest, metadata))
        state = {"step": training.taken, **self.ledger.mark()}
        self.folder.write_checkpoint(Snapshot.take(tensors, training.optimizer, state).to_bytes())
        self._saved_at, self._saved_step = time.monotonic(), training.taken

    def finish(self, notes: list[str]) -> DPStepResult:
        """Write the final epsilon, its figure and the weights, and apart from them the values that are not
        private. notes: sentences for people.
        """
        self.save()
        state, common, privacy = self._state(), self.setup.common, self.setup.privacy
        model = save(state)
        step = self._statement(hashlib.sha256(model).hexdigest())
        self.folder.write_public_json(STATEMENT, step)
        self.folder.write_public_bytes(MODEL, model)
        if common.config.model.adapter is not None:
            for name, content in adapter_files(common.model, state).items():
                self.folder.write_public_bytes(f"adapter/{name}", content)
        result = DPStepResult(
            step=step,
            folder=self.folder.path,
            curve=epsilon_curve(self.training.event(), privacy.steps, privacy.delta),
            steps=pd.DataFrame(self._rows, columns=list(STEP_COLUMNS)),
            notes=[
                *notes,
                *self._notes(),
                *(f"{key}: {note}" for key, note in step["accounting_notes"].items()),
            ],
        )
        self._write_private()
        figure = epsilon_against_steps(result)
        self.folder.write_public_bytes(f"{figure.name}.png", figure.png())
        return result

    def _statement(self, model_sha256: str | None = None) -> dict[str, Any]:
        generator = self.training.generator
        return step_statement(self.setup, self._multiplier, self.ledger, generator, model_sha256=model_sha256)

    def _state(self) -> dict[str, torch.Tensor]:
        """The whole state dict; tensors that share memory are there once for each name."""
        return {
            name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, value in published_tensors(self.setup.common.model).items()
        }

    def _note(self, noisy: NoisySum) -> None:
        """What the step's batch was like: NOT PRIVATE."""
        records = noisy.records
        norms, losses = records.norms.numpy(), records.losses.double().numpy()
        finite = np.isfinite(norms)
        some = bool(finite.any())
        self._rows.append(
            {
                "step": self.training.taken,
                "batch_size": len(norms),
                "clip_fraction": float((~records.below).double().mean()) if len(norms) else np.nan,
                "mean_loss": float(losses[finite].mean()) if some else np.nan,
                "median_norm": float(np.median(norms[finite])) if some else np.nan,
                "max_norm": float(norms[finite].max()) if some else np.nan,
                "nonfinite": int((~finite).sum()),
                "bound": np.nan if self._bound is None else self._bound,
            }
        )

    def _write_private(self) -> None:
        """Write the table of all steps, those of earlier processes included."""
        steps = pd.DataFrame(self._rows, columns=list(STEP_COLUMNS))
        if self._earlier is not None:
            steps = pd.concat([self._earlier, steps], ignore_index=True) if len(steps) else self._earlier
        self.folder.write_private_table(_STEPS, steps)
        if self._individual is not None:
            self._individual.write()

    def _notes(self) -> list[str]:
        """What a person should know of the run, a sentence each."""
        notes, taken = [], self.training.taken
        if self._lost_table:
            table = f"{PRIVATE}/{PREFIX}{_STEPS}"
            notes.append(f"{table} could not be read: the new one lacks the steps of earlier processes")
        if self.lost:
            notes.append(
                f"{self.lost} steps of an earlier process were paid for and lost, as it ended before it could"
                " save what came of them"
            )
        published = _step_of(self.folder.path / PUBLIC / NOISY_SUM)
        if published != taken:
            found = "is missing" if published is None else f"is that of step {published}"
            notes.append(
                f"{PUBLIC}/{NOISY_SUM} {found}: the process that paid for step {taken} ended before it could"
                " write that step's, and noise is not drawn twice for a step that was paid for"
            )
        if not self.training.generator.secure:
            notes.append(f"the noise comes from {self.training.generator.name}: the ledger says so")
        parameters = self.setup.parameters
        broken = [name for name, each in parameters.items() if not bool(torch.isfinite(each).all())]
        if broken:  # no secret: the weights are released
            notes.append(
                f"the weights are NaN or infinite in {len(broken)} of {len(parameters)} trained parameters,"
                f" {broken[0]} first: each further step is spent for noise alone; lower the learning rate"
            )
        return notes


def _step_of(path: Any) -> int | None:
    """The step whose noisy sum is in a file; None for none."""
    try:
        with safe_open(path, framework="numpy") as file:
            return int((file.metadata() or {})["step"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


class IndividualTable:
    """What each record's own norms cost it, measured before every few steps. NOT PRIVATE.

    Steps of earlier processes that the stored moments lack count with the bound.
    """

    def __init__(self, setup: PrivateSetup, folder: PrivateRunFolder, ledger: Ledger, every: int) -> None:
        self._setup, self._folder, self._every, self._measured = setup, folder, every, False
        self.account = IndividualAccount(len(setup.records))
        try:
            with np.load(io.BytesIO((folder.path / PRIVATE / f"{PREFIX}{_MOMENTS}").read_bytes())) as state:
                self.account = restored(state, self.account)
        except (OSError, ValueError, KeyError):
            pass  # none, or one that can't be read
        for line in ledger.steps[self.account.steps :]:
            self.account.count(event_of(line))

    def before_step(self, training: PrivateTraining) -> None:
        """Compute the norms of all records at the present weights, where it is their turn."""
        if self._measured and training.taken % self._every:
            return
        source, clipping = training.source(np.arange(training.records)), training.clipping
        shares = np.empty(training.records)
        shares[self._setup.streams.drawn] = shares_of(source(clipping).records, clipping)
        self.account.measure(shares)
        self._measured = True

    def write(self) -> None:
        """Write the table, and the moments with which a later process goes on."""
        setup, samples = self._setup, self._setup.common.samples
        names = samples.ids if setup.privacy.unit is None else pd.unique(pd.Series(samples.units))
        table = pd.DataFrame({"record": names, "epsilon": self.account.epsilons(setup.privacy.delta)})
        exact = self._every == 1 and not setup.common.model.training
        table.attrs = {
            "delta": setup.privacy.delta,
            "steps": self.account.steps,
            "kind": "by the norms of every step" if exact else "an estimate: norms of some steps or draws",
        }
        self._folder.write_private_table(_INDIVIDUAL, table)
        state = io.BytesIO()
        np.savez(state, moments=self.account.moments, steps=self.account.steps)
        self._folder.write_private_bytes(_MOMENTS, state.getvalue())
