"""`psgrad dp-audit`: a private run's steps, taken with canaries and on neighbouring datasets, to test their
stated guarantee.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np

from psgrad.commands.audit_neighbours import audited_pairs, audited_state, contributions
from psgrad.commands.private_agreement import agree, follow, leading, private_hashes
from psgrad.commands.private_setup import (
    PrivateSetup,
    noise_multiplier,
    require_privacy,
    set_up_privately,
    step_event,
    unit_in_words,
)
from psgrad.commands.run_manifest import describe_run
from psgrad.config import Config, PrivacyConfig
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.privacy.accounting import MECHANISM, tightest_epsilon
from psgrad.engine.privacy.audit import AuditedRun, Canaries, judge, play
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.errors import ConfigError
from psgrad.reports.audit import audit_content
from psgrad.run.private_runs import PREFIX, PrivateRunFolder
from psgrad.run.results import Progress, ShowProgress
from psgrad.run.results.privacy import DPAuditResult, NoiseAudit
from psgrad.run.run import Run
from psgrad.user_code import with_code_beside

FILE = "audit.json"
# More canaries say more, and fewer find a place in small clipping groups.
_MANY, _ENOUGH = 5000, 1000
# An audit of few draws shows little. By default each canary is drawn twice on average, in at most 50 steps
# (500 without records), and in at least two, so that their noise can be compared.
_DRAWS, _FEWEST_STEPS, _MOST_STEPS, _MOST_STEPS_ALONE = 2.0, 2, 50, 500


@with_code_beside
def dp_audit(
    config: Config,
    *,
    canaries: int | None = None,
    steps: int | None = None,
    confidence: float = 0.95,
    canaries_only: bool = False,
    output: Path | None = None,
    overwrite: bool = False,
    progress: ShowProgress = lambda _: None,
    processes: Processes | None = None,
) -> DPAuditResult | None:
    """Audit the steps that a config describes: the whole of `psgrad dp-audit`.

    Args:
        canaries: how many take part, each with gradient coordinates of its own; None for as many as there is
            room for, up to 5,000.
        steps: how many steps; None for enough that each canary is drawn about twice, or without records for
            all that are planned, up to 500.
        confidence: of the lower bound.
        canaries_only: leave the dataset's records out: faster, and the result is then no secret.
        output: a folder of its own; None for the config's, with -audit behind its name. A run in the config's
            folder stays as it is.
        overwrite: replace an earlier audit there.
        processes: those that share the batches of the canaries; None for this one alone.

    Returns None on all ranks but the first, which alone draws, compares neighbours, judges and writes.

    Nothing is trained, published or paid for. Raises PsgradError for everything that can be wrong with the
    config, the model, the data or the disk.
    """
    privacy = require_privacy(config)
    path = output or config.output_of("audit")
    processes = OneProcess() if processes is None else processes
    if not processes.leads:
        follow(config, processes, progress)
        return None
    require_sense(privacy, steps, confidence)
    run = Run.open(path, processes, progress, overwrite=overwrite)
    with run.clock("load"):
        setup = set_up_privately(config, run.say, processes)
        multiplier = noise_multiplier(privacy)
        agree(setup, private_hashes(setup, ""), processes)
    taken = steps if steps is not None else steps_for(privacy, canaries_only)
    random, records, numbers = coins(), 0 if canaries_only else len(setup.records), itertools.count()
    count = canaries if canaries is not None else canaries_for(setup)
    planted = Canaries.plant(setup.parameters, setup.clipping, count, random)
    folder = PrivateRunFolder.create(path, overwrite)
    with run.begin(describe_run("dp-audit", setup.common, None), folder):
        alone = None if canaries_only else contributions(setup)
        with run.clock("canaries"), leading(setup, processes) as summed:
            # The config's seed is for its run; an audit does not use it.
            mechanism = AuditedRun(
                setup.clipping, Noise(multiplier), setup.sampling, privacy.relation, make_generator
            )
            progress(Progress(0, taken, "audit", unit="step"))
            played = play(
                mechanism,
                planted,
                taken,
                random,
                source=None if canaries_only else lambda rows: summed.source(rows, next(numbers)),
                records=records,
                tell=lambda done: progress(Progress(done, taken, "audit", unit="step")),
            )
        with run.clock("bounds"):
            events = [(step_event(privacy, multiplier), taken)]
            accounted = tightest_epsilon(events, privacy.delta)
            verdict = judge(played, events, privacy.delta, confidence)
        with run.clock("neighbours"):
            pairs, notes = ([], []) if alone is None else audited_pairs(setup, multiplier)
            pairs += [] if alone is None else [audited_state(setup, alone)]
        if privacy.noise.seed is not None:
            notes.append(
                "the audit drew its noise from the operating system; that of a run with privacy.noise.seed"
                " can be drawn again"
            )
        # With what may be published only if no record took part.
        file = f"private/{PREFIX}{FILE}" if records else f"public/{FILE}"
        noise = played.noise
        result = DPAuditResult(
            epsilon=verdict.epsilon,
            accounted=accounted.value,
            accountant=accounted.accountant,
            delta=verdict.delta,
            confidence=verdict.confidence,
            steps=played.steps,
            canaries=len(played.scores),
            declared=verdict.declared,
            noise_at_most=verdict.noise,
            evidence=verdict.evidence,
            reach=played.reach,
            noise=NoiseAudit(noise.numbers, noise.spread, noise.p_values, noise.alarms),
            pairs=pairs,
            untested=untested(privacy, played.steps, canaries_only),
            records=records,
            relation=privacy.relation,
            scheme=setup.sampling.scheme,
            unit=unit_in_words(privacy),
            mechanism=MECHANISM,
            file=folder.path / file,
            notes=notes,
        )
        write = folder.write_private_json if records else folder.write_public_json
        write(FILE, audit_content(result))
        return result


def untested(privacy: PrivacyConfig, steps: int, canaries_only: bool) -> list[str]:
    """What an audit of so many steps leaves open, in words."""
    left = [
        "the optimiser's update, and that the files of a run hold nothing else of the records",
        "noise that repeats other noise in another order, or so far apart that it is in no part that is kept",
        "what code keeps of a record outside of the model's attributes; running times; the generator's key",
    ]
    if privacy.sampling.scheme != "poisson":
        left.append("which records a batch has: only how many they are")
    if steps < privacy.steps:
        left.append(f"the steps after the first {steps:,} of {privacy.steps:,}")
    if canaries_only:
        left.append("the dataset: how its records are clipped, and what one of them changes")
    else:
        left.append("neighbours of other batches, and by records that are not in the list above")
    return left


def coins() -> np.random.Generator:
    """What tosses the canaries' coins and finds their places, seeded from the operating system."""
    return np.random.default_rng()


def require_sense(privacy: PrivacyConfig, steps: int | None, confidence: float) -> None:
    """Raises ConfigError for numbers of steps that are not planned, and for a confidence that is not a
    probability.
    """
    if steps is not None and not 1 <= steps <= privacy.steps:
        raise ConfigError(
            f"an audit of {steps} steps was asked for, and {privacy.steps} are planned; expected from 1 to"
            f" {privacy.steps} steps",
        )
    if not 0.5 <= confidence < 1:
        raise ConfigError(
            f"the confidence of the audit is {confidence!r}; expected a number from 0.5 to below 1, such"
            " as 0.95",
        )


def steps_for(privacy: PrivacyConfig, canaries_only: bool) -> int:
    """How many of the planned steps are audited by default."""
    if canaries_only:
        return min(privacy.steps, _MOST_STEPS_ALONE)
    rate = privacy.sampling.sample_rate
    wanted = _FEWEST_STEPS if rate is None else max(math.ceil(_DRAWS / rate), _FEWEST_STEPS)
    return min(wanted, _MOST_STEPS, privacy.steps)


def canaries_for(setup: PrivateSetup) -> int:
    """How many canaries by default: many if each clipping group has coordinates for them."""
    sizes = [
        sum(setup.parameters[name].numel() for name in group.parameters) for group in setup.clipping.groups
    ]
    return min(_MANY, max(_ENOUGH, min(sizes)), max(sizes))
