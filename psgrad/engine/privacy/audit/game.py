"""The game of an audit: each canary is in or out at random, private steps are taken, and the auditor guesses
from what is released which ones are in.

The steps are a run's own: its sampling draws the records and canaries, its clipping bounds them, and
`private_sum` adds its noise. Only the update is left out, so that no weight changes. A canary that is in adds
its spike; one that is out adds nothing, or the opposite spike if neighbours replace a record by another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from psgrad.engine.privacy.audit.canaries import Canaries, StoringSource, with_canaries
from psgrad.engine.privacy.audit.noise_check import NoiseCheck, NoiseLog
from psgrad.engine.privacy.batches import GradientSource
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.step import private_sum

Array = np.ndarray[Any, Any]

# Simulated canaries that are out, for thresholds that don't depend on the scores.
_SIMULATED = 20_000


@dataclass(frozen=True)
class AuditedRun:
    """The parts of the private run that is audited. See `PrivateTraining`.

    generator: makes the run's generator; called again in the
        middle, as a resumed run does.
    """

    clipping: Clipping
    noise: Noise
    sampling: Sampling
    relation: Relation
    generator: Callable[[], Generator]


@dataclass(frozen=True)
class Played:
    """A finished game.

    Attributes:
        scores: [m], higher for canaries that seem to be in.
        inside: [m] bool, the coins.
        simulated: scores of canaries that are out, of noise that is as declared.
        noise: whether the noise was as declared.
        reach: the canaries' clipped norm, as a share of a record's.
        steps: how many were taken.
    """

    scores: Array
    inside: Array
    simulated: Array
    noise: NoiseCheck
    reach: float
    steps: int


def play(
    run: AuditedRun,
    canaries: Canaries,
    steps: int,
    random: np.random.Generator,
    *,
    source: Callable[[Array], GradientSource] | None = None,
    records: int = 0,
    tell: Callable[[int], None] = lambda _: None,
) -> Played:
    """Play the game over `steps` steps.

    Args:
        random: tosses the coins.
        source: makes the clipped sum of these records; None plays with canaries alone.
        records: how many records there are to draw from.
        tell: called with the number of steps that are done.

    Fixed batches are accounted as though every record were in every batch, and so the canaries are.
    """
    clipping, multiplier = run.clipping, run.noise.multiplier
    inside = random.random(canaries.count) < 0.5
    reach = canaries.reach(clipping)
    replaced = run.relation == "replace_one"
    # A canary's part in the sum, in units of the sensitivity, when it is drawn: in or out.
    far, near = (reach / 2, -reach / 2) if replaced else (reach, 0.0)
    log = NoiseLog()
    scores = np.zeros(canaries.count)
    simulated = np.zeros(_SIMULATED)
    generator = run.generator()
    known = 0 if source is None else records
    population = known if run.sampling.scheme == "fixed" else known + canaries.count
    rate = 1.0 if run.sampling.sample_rate is None else run.sampling.sample_rate
    for step in range(steps):
        if step == (steps + 1) // 2:
            generator = run.generator()
        rows = run.sampling.draw(population, generator) if population else np.empty(0, dtype=np.int64)
        log.add_batch(rows)
        drawn, others = _apart(rows, run.sampling, canaries.count, known)
        who = drawn if replaced else drawn[inside[drawn]]
        signs = np.where(inside[who], 1.0, -1.0)
        rest = None if source is None else StoringSource(source(others))
        stored = StoringSource(with_canaries(rest, canaries, who, signs))
        noisy = private_sum(stored, clipping, run.noise, run.relation, generator)
        seen = canaries.read(noisy.sums, clipping)
        if rest is not None:
            # The auditor knows the other records, and which of them were drawn: the guarantee holds whatever
            # these are.
            seen = seen - canaries.read(rest.last.sums, clipping)
        scores += evidence(seen / 2 if replaced else seen, rate, multiplier, far, near)
        simulated += evidence(_as_declared(random, rate, multiplier, near), rate, multiplier, far, near)
        if multiplier > 0:
            log.add(noisy.sums, stored.last.sums, multiplier * clipping.sensitivity(run.relation))
        tell(step + 1)
    noise = log.check(run.sampling if population else None, population)
    return Played(scores, inside, simulated, noise, reach, steps)


def _apart(rows: Array, sampling: Sampling, canaries: int, records: int) -> tuple[Array, Array]:
    """(the canaries, the records) of a batch; canaries come last in the population."""
    if sampling.scheme == "fixed":
        return np.arange(canaries), rows
    return rows[rows >= records] - records, rows[rows < records]


def evidence(seen: Array, rate: float, multiplier: float, far: float, near: float) -> Array:
    """[m]: the log likelihood ratio of the scores [m] of canaries in one step, in against out; all in units
    of the sensitivity.

    Without noise it is the score itself.
    """
    if multiplier == 0:
        return seen

    def likelihood(at: float) -> Array:
        missing = math.log1p(-rate) if rate < 1 else -math.inf
        logarithm: Array = np.logaddexp(missing, math.log(rate) + (seen * at - at * at / 2) / multiplier**2)
        return logarithm

    return likelihood(far) - likelihood(near)


def _as_declared(random: np.random.Generator, rate: float, multiplier: float, near: float) -> Array:
    """Simulated scores of canaries that are out."""
    drawn = random.random(_SIMULATED) < rate
    return drawn * near + multiplier * random.standard_normal(_SIMULATED)
