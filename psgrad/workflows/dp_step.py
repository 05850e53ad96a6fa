"""`psgrad dp-step`: private steps, each paid for in the ledger before anything of it is released."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save

from psgrad.config import Config, PrivacyConfig
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.privacy.accounting import (
    StepEvent,
    curve_accountant,
    epsilon_curve,
    epsilon_rdp,
    event_of,
    merged,
    pld_curve,
)
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.snapshot import Snapshot, tensors_of
from psgrad.engine.privacy.step import NoisySum, PrivateTraining, make_optimizer
from psgrad.errors import ConfigError, DistributedError
from psgrad.inputs.models.adapters import adapter_files
from psgrad.reports.privacy import live_words
from psgrad.reports.privacy_plots import write_plots
from psgrad.reports.words import count
from psgrad.results import STEP_COLUMNS, DPStepResult, Progress, Say
from psgrad.storage import Ledger, PrivateRunFolder
from psgrad.storage.folders import PRIVATE
from psgrad.storage.ledger_lines import require_same
from psgrad.storage.private_runs import PREFIX
from psgrad.user_code import with_code_beside
from psgrad.workflows.dp_plan import curve_points
from psgrad.workflows.private_ranks import agree, facts_of, follow, leading
from psgrad.workflows.private_resume import (
    adapted,
    keep_place,
    last_snapshot,
    opened_ledger,
    private_hashes,
    require_own_folder,
    require_same_code,
    require_same_data,
    weights_note,
)
from psgrad.workflows.private_setup import (
    PrivateSetup,
    base_multiplier,
    require_possible_steps,
    require_privacy,
    set_up_privately,
)
from psgrad.workflows.private_statement import (
    Statement,
    ledger_header,
)
from psgrad.workflows.run_manifest import describe_run, running_manifest
from psgrad.workflows.run_progress import Clock, without_interrupts

MODEL, NOISY_SUM, STATEMENT = "model.safetensors", "noisy_sum.safetensors", "step.json"
ADAPTER = "adapter"  # the folder of the adapters, where the model has some
_STEPS = "steps.parquet"
# Norms of so many of the latest records are kept for their histogram.
_NORMS = 10_000


@with_code_beside
def dp_step(
    config: Config,
    *,
    steps: int | Literal["all"] = 1,
    resume: bool = False,
    overwrite: bool = False,
    moved: bool = False,
    insecure_deterministic: bool = False,
    progress: Say = lambda _: None,
    processes: Processes | None = None,
) -> DPStepResult | None:
    """Take private steps: the whole of `psgrad dp-step`.

    Args:
        steps: how many of the planned ones to take now; all for those that are left.
        resume: continue the run in the config's output folder. Where all planned steps are paid for and the
            process that paid ended before it could publish, that is done now, and no step is taken.
        overwrite: replace what an earlier run left in that folder; one that has a ledger is never replaced.
        moved: with `resume`, that the folder was moved, and that nothing else continues a copy of it: the
            ledger says so from then on.
        insecure_deterministic: whether `privacy.noise.seed` may be set, which makes the noise public.
        processes: those that share each batch; None for this one alone.

    Returns None on all ranks but the first, which alone draws, pays, updates and writes.

    Raises PsgradError for everything that can be wrong with the config, the model, the data or the disk.
    Whatever happens, the ledger has a line for each step of which anything was released.
    """
    processes = OneProcess() if processes is None else processes
    if not processes.leads:
        follow(config, config.output, processes, progress)
        return None
    privacy = require_privacy(config)
    require_honest_seed(privacy, insecure_deterministic)
    if resume:
        folder = PrivateRunFolder.open(config.output)
        before = Ledger.read(folder.ledger)
        moved = require_own_folder(folder, before, moved)
    else:
        PrivateRunFolder.require_free(config.output, overwrite)
        before = None
    taken = 0 if before is None else len(before.steps)
    asked = max(1, privacy.steps - taken) if isinstance(steps, str) else steps  # of none left a check says so
    if before is not None and taken == privacy.steps and not folder.finished:
        asked = 0  # the process that paid for the last step ended before it could publish what came of it
    else:
        require_steps_left(privacy, taken, asked)
    clock = Clock()
    with clock("load"):
        setup = set_up_privately(
            config,
            lambda message: progress(Progress(taken, taken + asked, "steps", message, "step")),
            processes,
        )
        base = base_multiplier(privacy) if before is None else float(before.header["noise_multiplier"])
        if privacy.noise.multiplier is not None:
            base = privacy.noise.multiplier
        require_possible_steps(setup, base)
        header = ledger_header(setup, base)
        hashes = private_hashes(setup, uuid4().hex if before is None else before.header["run"])
        hosts = agree(setup, hashes, processes)
    with clock("self-check"):
        check = setup.run.self_check(setup.run.stream(lambda _: None))
        setup.began.require_unwritten()
    manifest = replace(describe_run("dp-step", setup.run, check), hashes=hashes)
    optimizer = make_optimizer(privacy.optimizer.name, privacy.optimizer.kwargs, setup.parameters.values())
    if before is None:
        folder = PrivateRunFolder.create(config.output, overwrite)
        # Before the ledger: a process that resumes the run must recognise the data.
        folder.write_manifest(replace(manifest, state="running").content())
        snapshot = None
    else:
        was = require_same_data(folder, hashes)
        snapshot = last_snapshot(folder, before)
        if snapshot is not None:
            restore = snapshot.restore
            setup.began.resume(
                lambda: restore(tensors_of(setup.run.model), optimizer, str(folder.checkpoint))
            )
        require_same(before.header, header, f"the ledger {folder.ledger}")
        require_same_code(folder, was, hashes)
        manifest = replace(manifest, hashes=was)
    own = {"run": hashes["run"], "weights_sha256": hashes["weights"]} if before is None else {"moved": moved}
    with (
        opened_ledger(folder, before, header, snapshot, own) as ledger,
        running_manifest(folder, manifest, clock) as running,
        leading(setup, processes) as lead,
    ):
        notes = [keep_place(folder), None if before is None else weights_note(before.header, hashes)]
        folder.remove_leftovers()
        training = PrivateTraining(
            setup.parameters,
            lambda records: (setup if lead is None else lead).source(records, training.taken),
            len(setup.records),
            clipping=setup.clipping,
            noise=setup.noise(base),
            sampling=setup.sampling,
            relation=privacy.relation,
            expected_batch_size=privacy.expected_batch_size,
            optimizer=optimizer,
            generator=make_generator(
                privacy.noise.generator, seed=privacy.noise.seed, position=ledger.position
            ),
            adaptive=setup.adaptive if snapshot is None else adapted(setup, snapshot),
            taken=taken,
        )
        saved = taken if snapshot is None else int(snapshot.metadata["step"])
        run = Run(setup, base, folder, ledger, training, lost=taken - saved)
        with clock("steps"):
            try:
                run.take(asked, progress, processes.hurry)
            finally:
                running.add(ranks=facts_of(lead, hosts, processes))
            if lead is not None:
                lead.end()
        with clock("accounting"):
            return run.finish([note for note in notes if note is not None])


def require_honest_seed(privacy: PrivacyConfig, insecure_deterministic: bool) -> None:
    """Raises ConfigError for a seed without --insecure-deterministic."""
    if privacy.noise.seed is not None and not insecure_deterministic:
        raise ConfigError(
            "privacy.noise.seed is set, and with a seed nothing is private: who knows it can draw the noise"
            " again, and take it off",
            expected="no seed: the noise comes from the operating system's entropy",
            next_step=(
                "remove privacy.noise.seed; or, for a test, add --insecure-deterministic, which is written"
                " into all that comes out"
            ),
        )


def require_steps_left(privacy: PrivacyConfig, taken: int, steps: int) -> None:
    """Raises ConfigError where fewer planned steps are left than asked for."""
    if steps < 1:
        raise ConfigError(f"{steps} steps were asked for", expected="at least 1")
    left = privacy.steps - taken
    if steps > left:
        asked = f"{count(steps, 'step')} {'was' if steps == 1 else 'were'} asked for"
        raise ConfigError(
            f"{asked}, and {max(left, 0)} of the {privacy.steps} planned ones are left",
            expected=f"at most {left} steps" if left > 0 else "a run with steps left",
            cause="the noise was chosen for the planned number of steps, and each one spends its part",
            next_step="plan more steps (privacy.steps) for a run of its own"
            + (f", or take --steps {left}" if left > 0 else ""),
        )


class Run:
    """Steps of one process, and what they leave: ledger lines, checkpoints, and a statement of what was
    spent.

    Args:
        base: the base of the noise schedule.
        lost: steps that were paid for before, and of which no checkpoint has what came of them.
    """

    def __init__(
        self,
        setup: PrivateSetup,
        base: float,
        folder: PrivateRunFolder,
        ledger: Ledger,
        training: PrivateTraining,
        lost: int,
    ) -> None:
        self.setup, self.folder, self.ledger, self.training, self.lost = setup, folder, ledger, training, lost
        self.statement = Statement(setup, base, training.generator)
        self._spent = merged((event_of(line), 1) for line in ledger.steps)
        self._earlier = folder.private_table(_STEPS)  # of the processes before this one
        self._lost_table = self._earlier is None and (folder.path / PRIVATE / f"{PREFIX}{_STEPS}").exists()
        self._rows: list[dict[str, Any]] = []
        self._norms: deque[np.ndarray] = deque()
        self._latest: dict[str, torch.Tensor] = {}  # the last step's noisy sum
        self._clipping = training.clipping  # and what it clipped to
        self._saved_at, self._saved_step = time.monotonic(), training.taken

    def take(self, steps: int, progress: Say, heard: Callable[[], None] = lambda: None) -> None:
        """Take so many steps, and save every now and then; also where Ctrl-C or another rank ends them early.

        heard: called when Ctrl-C arrives in a step, which is finished first.
        """
        first, delta = self.training.taken, self.setup.privacy.delta
        if not self.folder.checkpoint.exists():
            self.save()  # from here on there is one to go on from
        progress(Progress(first, first + steps, "steps", unit="step"))
        try:
            for left in reversed(range(steps)):
                with without_interrupts(heard):
                    noisy = self.training.step(self.pay, keep_sums=not left)
                    self._note(noisy)
                    self._latest, self._clipping = noisy.sums, noisy.clipping
                    if self._due():
                        self.save()
                        self._write_private()
                spent = epsilon_rdp(self._spent.items(), delta).value
                progress(
                    Progress(
                        self.training.taken,
                        first + steps,
                        "steps",
                        unit="step",
                        detail=live_words(spent, delta),
                    )
                )
        except (KeyboardInterrupt, DistributedError):  # the steps that were paid for are whole
            self.save()
            self._write_private()
            self.folder.write_public_bytes(MODEL, self._model_bytes())
            raise

    def pay(self, event: StepEvent) -> None:
        """Write down what the step costs; nothing of it has been released."""
        self.ledger.append(self.statement.ledger_line(event, self.training))
        self._spent[event] = self._spent.get(event, 0) + 1

    def save(self) -> None:
        """Say what was spent, then keep where the training stands: what is released is never ahead of what is
        said.
        """
        training, (tensors, _) = self.training, self.setup.began.tensors()
        self.folder.write_public_json(STATEMENT, self.statement.step(self.ledger, final=False))
        bound = None if training.adaptive is None else training.adaptive.bound
        metadata = {"step": training.taken, "bound": bound, **self.ledger.mark()}
        self.folder.write_checkpoint(Snapshot.take(tensors, training.optimizer, metadata).to_bytes())
        self._saved_at, self._saved_step = time.monotonic(), training.taken

    def finish(self, notes: list[str]) -> DPStepResult:
        """The last words: the final epsilon, the weights, the figures, and what is not private apart from
        them. notes: for people.
        """
        self.save()
        model = self._model_bytes()
        step = self.statement.step(self.ledger, final=True, model_sha256=hashlib.sha256(model).hexdigest())
        self.folder.write_public_json(STATEMENT, step)
        self.folder.write_public_bytes(MODEL, model)
        if self.setup.run.config.model.adapter is not None:
            for name, content in adapter_files(self.setup.run.model, self._state()).items():
                self.folder.write_public_bytes(f"{ADAPTER}/{name}", content)
        if self._latest:
            said = {
                "step": str(self.training.taken),
                "expected_batch_size": str(self.setup.privacy.expected_batch_size),
            }
            self.folder.write_public_bytes(
                NOISY_SUM,
                save({name: value.cpu().contiguous() for name, value in self._latest.items()}, said),
            )
        curve = epsilon_curve(
            self.statement.planned, self.setup.privacy.delta, curve_points(self.setup.privacy.steps)
        )
        accountant = curve_accountant(self.statement.planned)
        groups = self._clipping.groups
        result = DPStepResult(
            step=step,
            folder=self.folder.path,
            curve=curve,
            steps=pd.DataFrame(self._rows, columns=list(STEP_COLUMNS)),
            norms=np.concatenate([*self._norms, np.empty(0)]),
            bound=groups[0].bound if len(groups) == 1 else None,
            curve_accountant=accountant,
            curve_pld=pld_curve(self.statement.planned, self.setup.privacy.delta),
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

    def _model_bytes(self) -> bytes:
        """The whole state dict as safetensors; tensors that share memory are written once for each name."""
        return save(self._state())

    def _state(self) -> dict[str, torch.Tensor]:
        _, state = self.setup.began.tensors()
        return {
            name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, value in state.items()
        }

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
                "bound": noisy.clipping.groups[0].bound if len(noisy.clipping.groups) == 1 else np.nan,
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
        if not self.training.generator.secure:
            notes.append(
                f"the noise comes from {self.training.generator.name}, which is not cryptographic: the ledger"
                " says so"
            )
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
