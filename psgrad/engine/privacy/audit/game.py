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
import torch

from psgrad.engine.privacy.accounting import adaptive_multiplier
from psgrad.engine.privacy.audit.canaries import Canaries, StoringSource, with_canaries
from psgrad.engine.privacy.audit.noise_check import NoiseCheck, NoiseLog
from psgrad.engine.privacy.batches import GradientSource
from psgrad.engine.privacy.clipping import AdaptiveBound, Clipping
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.step import NoisySum, private_sum

Array = np.ndarray[Any, Any]

# Simulated canaries that are out, for thresholds that don't depend on the scores.
_SIMULATED = 20_000


@dataclass(frozen=True)
class AuditedRun:
    """The parts of the private run that is audited. See `PrivateTraining`.

    noise: step number t = 0, 1, ... to its noise. generator: makes the run's generator; called again in the
        middle, as a resumed run does.
    """

    clipping: Clipping
    noise: Callable[[int], Noise]
    sampling: Sampling
    relation: Relation
    generator: Callable[[], Generator]
    adaptive: AdaptiveBound | None = None
    expected_batch_size: float | None = None

    def sum_multiplier(self, step: int) -> float:
        """The noise multiplier of the step's sum, which is a little more than the event's if a count is
        released beside it.
        """
        declared = self.noise(step).multiplier
        return (
            declared
            if self.adaptive is None
            else adaptive_multiplier(declared, self.adaptive.count_multiplier)
        )


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

    Fixed batches are accounted as though every record were in every batch, and so the canaries are. Under
    truncated Poisson sampling they take the places of as many records, so that the dataset keeps its size.
    """
    clipping, adaptive = run.clipping, run.adaptive
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
    population = _population(run.sampling, canaries.count, known)
    for step in range(steps):
        if step == (steps + 1) // 2:
            generator = run.generator()
        rows = run.sampling.draw(population, generator) if population else np.empty(0, dtype=np.int64)
        log.add_batch(rows)
        drawn, others = _apart(rows, run.sampling, population, canaries.count, known)
        who = drawn if replaced else drawn[inside[drawn]]
        signs = np.where(inside[who], 1.0, -1.0)
        rest = None if source is None else StoringSource(source(others))
        stored = StoringSource(with_canaries(rest, canaries, who, signs))
        now = clipping if adaptive is None else clipping.with_bound(adaptive.bound)
        noisy = private_sum(
            stored,
            clipping,
            run.noise(step),
            run.relation,
            generator,
            adaptive=adaptive,
            expected_batch_size=run.expected_batch_size,
        )
        multiplier, sensitivity = run.sum_multiplier(step), now.sensitivity(run.relation)
        seen = canaries.read(noisy.sums, now)
        if rest is not None and run.sampling.scheme != "truncated_poisson":
            # The auditor knows the other records, and which of them were drawn: the guarantee holds whatever
            # these are. Where batches are truncated, the draws depend on one another, and are left unknown.
            seen = seen - canaries.read(rest.last.sums, now)
        rate = 1.0 if run.sampling.sample_rate is None else run.sampling.sample_rate
        scores += evidence(seen / 2 if replaced else seen, rate, multiplier, far, near)
        simulated += evidence(_as_declared(random, rate, multiplier, near), rate, multiplier, far, near)
        if multiplier > 0:
            log.add(noisy.sums, stored.last.sums, multiplier * sensitivity)
            if adaptive is not None:
                log.add_count(_count_noise(adaptive, noisy, run, stored.last.records.counted))
        adaptive = noisy.following
        tell(step + 1)
    noise = log.check(run.sampling if population else None, population)
    return Played(scores, inside, simulated, noise, reach, steps)


def _count_noise(
    adaptive: AdaptiveBound, noisy: NoisySum, run: AuditedRun, counted: torch.Tensor
) -> float | None:
    """The noise of a step's count in units of its declared deviation, by what is public: the bound before and
    after the step. None where the bound is at the end of its range.
    """
    assert run.expected_batch_size is not None
    assert noisy.following is not None
    count = adaptive.noisy_count(noisy.following.bound, run.expected_batch_size)
    if count is None:
        return None
    return (count - adaptive.count(counted)) / adaptive.standard_deviation(run.relation)


def _population(sampling: Sampling, canaries: int, records: int) -> int:
    """How many records and canaries batches are drawn from. Fixed batches have all canaries beside what is
    drawn.
    """
    if sampling.scheme == "fixed":
        return records
    return records + canaries if sampling.dataset_size is None else sampling.dataset_size


def _apart(
    rows: Array, sampling: Sampling, population: int, canaries: int, records: int
) -> tuple[Array, Array]:
    """(the canaries, the records) of a batch; canaries come last in the population."""
    if sampling.scheme == "fixed":
        return np.arange(canaries), rows
    first = population - canaries
    return rows[rows >= first] - first, rows[rows < min(first, records)]


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
