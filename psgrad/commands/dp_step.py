"""`psgrad dp-step`: private steps, each paid for in the ledger before anything of it is released."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal
from uuid import uuid4

from psgrad.commands.dp_budget import budget_of, require_same_budget
from psgrad.commands.private_agreement import (
    agree,
    follow,
    last_snapshot,
    leading,
    opened_ledger,
    private_hashes,
    require_known_form,
    require_same_code,
    require_same_data,
    weights_note,
)
from psgrad.commands.private_setup import noise_multiplier, require_privacy, set_up_privately, step_event
from psgrad.commands.private_statement import ledger_header
from psgrad.commands.private_steps import StepFiles
from psgrad.commands.run_manifest import describe_run
from psgrad.config import Config, PrivacyConfig
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.refusals import require_tail
from psgrad.engine.privacy.snapshot import tensors_of
from psgrad.engine.privacy.step import PrivateTraining, make_optimizer
from psgrad.errors import ConfigError
from psgrad.reports.words import count
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import require_same_run
from psgrad.run.private_runs import PrivateRunFolder
from psgrad.run.progress import without_interrupts
from psgrad.run.results import Progress, ShowProgress
from psgrad.run.results.privacy import DPStepResult
from psgrad.run.run import Run
from psgrad.user_code import with_code_beside


@with_code_beside
def dp_step(
    config: Config,
    *,
    steps: int | Literal["all"] = 1,
    resume: bool = False,
    overwrite: bool = False,
    insecure_deterministic: bool = False,
    progress: ShowProgress = lambda _: None,
    processes: Processes | None = None,
) -> DPStepResult | None:
    """Take private steps: the whole of `psgrad dp-step`.

    Args:
        steps: how many of the planned ones to take now; all for those that are left, which may be none.
        resume: continue the run in the config's output folder. Where all planned steps are paid for and the
            process that paid ended before it could publish, that is done now, and no step is taken.
        overwrite: replace what an earlier run left in that folder; one that has a ledger is never replaced.
        insecure_deterministic: whether `privacy.noise.seed` may be set, which makes the noise public.
        processes: those that share each batch; None for this one alone.

    Returns None on all ranks but the first, which alone draws, pays, updates and writes.

    Raises PsgradError for everything that can be wrong with the config, the model, the data or the disk.
    Whatever happens, the ledger has a line for each step of which anything was released.
    """
    processes = OneProcess() if processes is None else processes
    if not processes.leads:
        follow(config, processes, progress)
        return None
    privacy = require_privacy(config)
    require_sense(privacy, processes, insecure_deterministic)
    run, before = Run.open(config.output, processes, progress, overwrite=overwrite, resume=resume), None
    if resume:
        folder = PrivateRunFolder.open(run.path)
        before = Ledger.read(folder.ledger)
        require_known_form(before)
    taken = 0 if before is None else len(before.steps)
    unpublished = before is not None and taken == privacy.steps and not folder.finished
    asked = 0 if unpublished else steps_asked(privacy, taken, steps)
    with run.clock("load"):
        setup = set_up_privately(config, run.say, processes)
        if before is not None and privacy.noise.multiplier is None:
            multiplier = float(before.header["noise_multiplier"])  # solved once
        else:
            multiplier = noise_multiplier(privacy)
        require_tail([(multiplier, privacy.steps)], privacy.delta)
        header = ledger_header(setup, multiplier)
        hashes = private_hashes(setup, uuid4().hex if before is None else before.header["run"])
        agree(setup, hashes, processes)
        budget = budget_of(setup, hashes["data"], hashes["run"])
        ahead = [(step_event(privacy, multiplier), asked)] if asked else []
        if before is not None:
            require_same_budget(before.header, budget)
        if budget is not None:
            budget.require(before, ahead)
    with run.clock("self-check"):
        manifest = describe_run("dp-step", setup.common, setup.common.stream(lambda _: None))
        setup.unchanged.require(by_bits=True)
    manifest = replace(manifest, hashes=hashes)
    optimizer = make_optimizer(privacy.optimizer.name, privacy.optimizer.kwargs, setup.parameters.values())
    if before is None:
        folder = PrivateRunFolder.create(run.path, overwrite)
        # Before the ledger: a process that resumes the run must recognise the data.
        folder.write_manifest(replace(manifest, state="running").content())
        snapshot, notes = None, []
    else:
        was = require_same_data(folder, hashes)
        snapshot = last_snapshot(folder, before)
        if snapshot is not None:
            snapshot.restore(tensors_of(setup.common.model), optimizer, str(folder.checkpoint))
        require_same_run(before.header, header, f"the ledger {folder.ledger}")
        require_same_code(folder, was, hashes)
        manifest, notes = replace(manifest, hashes=was), weights_note(before.header, hashes)
    own = {"run": hashes["run"], "weights_sha256": hashes["weights"], "budget": budget and budget.identity}
    with (
        opened_ledger(folder, before, header, snapshot, own if before is None else {}) as ledger,
        nullcontext() if budget is None else budget.reserved(ledger, ahead),
        run.begin(manifest, folder),
        leading(setup, processes) as summed,
    ):
        folder.remove_leftovers()
        training = PrivateTraining(
            setup.parameters,
            lambda records: summed.source(records, training.taken),
            len(setup.records),
            clipping=setup.clipping,
            noise=Noise(multiplier),
            sampling=setup.sampling,
            relation=privacy.relation,
            expected_batch_size=privacy.expected_batch_size,
            optimizer=optimizer,
            generator=make_generator(seed=privacy.noise.seed, position=ledger.position),
            taken=taken,
        )
        saved = taken if snapshot is None else int(snapshot.metadata["step"])
        pay = ledger.append if budget is None else partial(budget.pay, ledger)
        files = StepFiles(setup, multiplier, folder, ledger, training, taken - saved, pay)
        with run.clock("steps"):
            progress(Progress(taken, taken + asked, "steps", unit="step"))
            try:
                with files.saved_if_ended():
                    for left in reversed(range(asked)):
                        with without_interrupts():  # Ctrl-C waits for the end of a step
                            files.before_step()
                            drawn = training.draw()
                            clipped = training.clipped(drawn)
                            files.pay()  # on the disk, before anything of it is released
                            noisy = training.noised(clipped)
                            if not left:
                                files.keep(noisy)
                            training.update(noisy)
                            files.release(noisy)
                        files.show(progress, taken + asked)
            finally:
                run.add(engine=replace(run.manifest.engine, **setup.common.counts.facts()))
        with run.clock("accounting"):
            return files.finish(notes)


def require_sense(privacy: PrivacyConfig, processes: Processes, insecure_deterministic: bool) -> None:
    """Raises ConfigError for a seed without --insecure-deterministic, and for norms of all records with
    several processes.
    """
    if privacy.noise.seed is not None and not insecure_deterministic:
        raise ConfigError(
            "privacy.noise.seed is set, and with a seed nothing is private: who knows it can draw the noise"
            " again, and take it off",
            hint="remove privacy.noise.seed; or, for a test, add --insecure-deterministic",
        )
    if privacy.individual_every is not None and processes.size > 1:
        raise ConfigError(
            f"privacy.individual_every with {processes.size} processes; expected one process, which has"
            " the norms of all records",
            hint="leave privacy.individual_every out, or run one process",
        )


def steps_asked(privacy: PrivacyConfig, taken: int, steps: int | str) -> int:
    """How many steps to take. Raises ConfigError where fewer planned steps are left than asked for."""
    left = privacy.steps - taken
    if isinstance(steps, str):
        return left
    if steps < 1:
        raise ConfigError(f"{steps} steps were asked for; expected at least 1")
    if steps > left:
        asked = f"{count(steps, 'step')} {'was' if steps == 1 else 'were'} asked for"
        fewer = f", or take --steps {left}" if left > 0 else ""
        raise ConfigError(
            f"{asked}, and {max(left, 0)} of the {privacy.steps} planned ones are left",
            hint=f"the noise is that of the planned steps: plan more for a run of its own{fewer}",
        )
    return steps
