"""The private steps of one process, and what they leave: lines of the ledger, checkpoints, tables, and the
statement of what was spent.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from psgrad.commands.private_individual import IndividualTable
from psgrad.commands.private_setup import PrivateSetup
from psgrad.commands.private_statement import ledger_line, step_statement
from psgrad.engine.privacy.accounting import curve_accountant, epsilon_curve, epsilon_rdp
from psgrad.engine.privacy.snapshot import Snapshot, published_tensors, tensors_of
from psgrad.engine.privacy.step import NoisySum, PrivateTraining
from psgrad.errors import DistributedError
from psgrad.models.adapters import adapter_files
from psgrad.reports.privacy import live_words
from psgrad.reports.privacy_plots import write_plots
from psgrad.run.folders import PRIVATE, PUBLIC
from psgrad.run.ledger import Ledger
from psgrad.run.private_runs import PREFIX, PrivateRunFolder
from psgrad.run.results import Progress, Say
from psgrad.run.results.privacy import STEP_COLUMNS, DPStepResult

MODEL, NOISY_SUM, STATEMENT = "model.safetensors", "noisy_sum.safetensors", "step.json"
ADAPTER = "adapter"  # the folder of the adapters, where the model has some
_STEPS = "steps.parquet"
# The number of latest records whose norms are kept for their histogram.
_NORMS = 10_000


class PrivateRun:
    """Steps of one process, and the files they write: ledger lines, checkpoints, and a statement of what was
    spent.

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
        every = setup.privacy.individual_every
        self._individual = None if every is None else IndividualTable(setup, folder, ledger, every)
        self._earlier = folder.private_table(_STEPS)  # of the processes before this one
        self._lost_table = self._earlier is None and (folder.path / PRIVATE / f"{PREFIX}{_STEPS}").exists()
        self._rows: list[dict[str, Any]] = []
        self._norms: deque[np.ndarray] = deque()
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
        self.folder.write_public_bytes(MODEL, self._model_bytes())

    def before_step(self) -> None:
        """What is measured of all records before a step is drawn."""
        if self._individual is not None:
            self._individual.before_step(self.training)

    def keep(self, noisy: NoisySum, last: bool) -> None:
        """Keep what is published of the last step: its noisy sums, before the update divides them."""
        self._latest = {name: value.clone() for name, value in noisy.sums.items()} if last else {}

    def release(self, noisy: NoisySum) -> None:
        """Note what the step that was taken was like, and save it where it is time to."""
        self._note(noisy)
        if self._due():
            self.save()
            self._write_private()

    def show(self, progress: Say, first: int, steps: int) -> None:
        """Tell what was spent, of the steps first, ..., first + steps - 1."""
        delta = self.setup.privacy.delta
        detail = live_words(epsilon_rdp([(self.training.event(), self._paid)], delta).value, delta)
        progress(Progress(self.training.taken, first + steps, "steps", unit="step", detail=detail))

    def pay(self) -> None:
        """Write down what the step costs; nothing of it has been released."""
        training = self.training
        self._write(ledger_line(self.setup, self._multiplier, training.generator, training.taken + 1))
        self._paid += 1
        if self._individual is not None:
            self._individual.count(training.event())

    def save(self) -> None:
        """Write the statement of what was spent, then the last noisy sum, then the state of the training. In
        this order the statement counts each step that is released, and a run that goes on from this state
        has the sum: it can't be drawn again.
        """
        training, tensors = self.training, tensors_of(self.setup.run.model)
        self.folder.write_public_json(STATEMENT, self._statement(final=False))
        if self._latest:
            sums = {name: value.cpu().contiguous() for name, value in self._latest.items()}
            expected = str(self.setup.privacy.expected_batch_size)
            metadata = {"step": str(training.taken), "expected_batch_size": expected}
            self.folder.write_public_bytes(NOISY_SUM, save(sums, metadata))
        state = {"step": training.taken, **self.ledger.mark()}
        self.folder.write_checkpoint(Snapshot.take(tensors, training.optimizer, state).to_bytes())
        self._saved_at, self._saved_step = time.monotonic(), training.taken

    def finish(self, notes: list[str]) -> DPStepResult:
        """Write the final epsilon, the weights and the figures, and apart from them the values that are not
        private. notes: sentences for people.
        """
        self.save()
        model = self._model_bytes()
        step = self._statement(final=True, model_sha256=hashlib.sha256(model).hexdigest())
        self.folder.write_public_json(STATEMENT, step)
        self.folder.write_public_bytes(MODEL, model)
        if self.setup.run.config.model.adapter is not None:
            for name, content in adapter_files(self.setup.run.model, self._state()).items():
                self.folder.write_public_bytes(f"{ADAPTER}/{name}", content)
        event, privacy = self.training.event(), self.setup.privacy
        result = DPStepResult(
            step=step,
            folder=self.folder.path,
            curve=epsilon_curve(event, privacy.steps, privacy.delta),
            steps=pd.DataFrame(self._rows, columns=list(STEP_COLUMNS)),
            norms=np.concatenate([*self._norms, np.empty(0)]),
            bound=self._bound,
            curve_accountant=curve_accountant(event),
            notes=[
                *notes,
                *self._notes(),
                *(f"{key}: {note}" for key, note in step["accounting_notes"].items()),
            ],
        )
        steps = self._write_private()
        unit = self.setup.run.criterion.unit or ""
        write_plots(
            replace(result, steps=steps),
            self.folder.write_public_bytes,
            self.folder.write_private_bytes,
            unit,
        )
        return result

    def _statement(self, *, final: bool, model_sha256: str | None = None) -> dict[str, Any]:
        return step_statement(
            self.setup,
            self._multiplier,
            self.ledger,
            self.training.generator,
            final=final,
            model_sha256=model_sha256,
        )

    @property
    def _bound(self) -> float | None:
        """The bound of the only clipping group; None where there are several."""
        groups = self.setup.clipping.groups
        return groups[0].bound if len(groups) == 1 else None

    def _model_bytes(self) -> bytes:
        """The whole state dict as safetensors; tensors that share memory are written once for each name."""
        return save(self._state())

    def _state(self) -> dict[str, torch.Tensor]:
        return {
            name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, value in published_tensors(self.setup.run.model).items()
        }

    def _published_step(self) -> int | None:
        """The step whose noisy sum is in the public folder; None for none."""
        try:
            with safe_open(self.folder.path / PUBLIC / NOISY_SUM, framework="numpy") as file:
                return int((file.metadata() or {})["step"])
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def _due(self) -> bool:
        privacy = self.setup.privacy
        if privacy.checkpoint_steps is not None:
            return self.training.taken - self._saved_step >= privacy.checkpoint_steps
        return (
            privacy.checkpoint_seconds is not None
            and time.monotonic() - self._saved_at >= privacy.checkpoint_seconds
        )

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
        self._norms.append(norms)
        while len(self._norms) > 1 and sum(map(len, self._norms)) - len(self._norms[0]) >= _NORMS:
            self._norms.popleft()

    def _write_private(self) -> pd.DataFrame:
        """Write the table of all steps, those of earlier processes included, and return it."""
        steps = pd.DataFrame(self._rows, columns=list(STEP_COLUMNS))
        if self._earlier is not None:
            steps = pd.concat([self._earlier, steps], ignore_index=True) if len(steps) else self._earlier
        self.folder.write_private_table(_STEPS, steps)
        if self._individual is not None:
            self._individual.write()
        return steps

    def _notes(self) -> list[str]:
        notes = []
        if self._lost_table:
            notes.append(
                f"{PRIVATE}/{PREFIX}{_STEPS} could not be read: the steps of earlier processes are missing in"
                " the new one"
            )
        if self.lost:
            notes.append(
                f"{self.lost} steps of an earlier process were paid for and lost, as it ended before it could"
                " save what came of them"
            )
        published, taken = self._published_step(), self.training.taken
        if published != taken:
            found = "is missing" if published is None else f"is that of step {published}"
            notes.append(
                f"{PUBLIC}/{NOISY_SUM} {found}: the process that paid for step {taken} ended before it could"
                " write that step's, and noise is not drawn twice for a step that was paid for"
            )
        if not self.training.generator.secure:
            notes.append(f"the noise comes from {self.training.generator.name}: the ledger says so")
        broken = [
            name
            for name, parameter in self.setup.parameters.items()
            if not bool(torch.isfinite(parameter).all())
        ]
        if broken:  # no secret: the weights are released
            notes.append(
                f"the weights are NaN or infinite in {len(broken)} of {len(self.setup.parameters)} trained"
                f" parameters, {broken[0]} first: no gradient comes of them, and each further step is spent"
                " for noise alone; lower the learning rate, or look at the weights that training began with"
            )
        return notes
