"""The game of an audit: each canary is in or out at random, private steps are taken, and the auditor guesses
from what is released which ones are in.

A canary is a record whose gradient is given, in a clipped sum. It has one coordinate of its own in each
clipping group, far above the bound, so that clipping acts on it. In each group it then adds exactly the
group's bound, and in all the whole sensitivity: the worst record that the guarantee allows for (Nasr et al.,
"Tight Auditing of Differentially Private Machine Learning", 2023, call them Dirac canaries). Groups with
fewer coordinates than canaries have no spikes; `reach` is the share of the sensitivity that remains.

The steps are a run's own: its sampling draws the records and canaries, its clipping bounds them, and
`private_sum` adds its noise. Only the update is left out, so that no weight changes. A canary that is in adds
its spike; one that is out adds nothing, or the opposite spike if neighbours replace a record by another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from psgrad.engine.gradients.terms import accumulating_dtype
from psgrad.engine.privacy.accounting import adaptive_multiplier
from psgrad.engine.privacy.audit.noise_check import NoiseCheck, NoiseLog
from psgrad.engine.privacy.batches import GradientSource
from psgrad.engine.privacy.clipped_sums import ClippedSum, RecordColumns, Total
from psgrad.engine.privacy.clipping import AdaptiveBound, Clipping
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.step import NoisySum, private_sum
from psgrad.errors import ConfigError

# A spike as a multiple of its group's bound.
_FAR_ABOVE = 1e3


@dataclass(frozen=True)
class Spikes:
    """The spikes in one parameter: canaries [k] int64, their places in the flat parameter [k] int64, and the
    spikes' group's number.
    """

    canaries: torch.Tensor
    places: torch.Tensor
    group: int


@dataclass(frozen=True)
class Canaries:
    """`count` canaries. They stay the same when the bounds change: an adaptive bound follows them up to their
    norm, and stays there.

    Attributes:
        spikes: name -> the spikes in that parameter; parameters without are absent.
        params: name -> each parameter of the clipping, for its shape, dtype and device.
        groups: the numbers of the clipping groups that have spikes.
        sizes: name -> how large its spikes are.
    """

    count: int
    spikes: dict[str, Spikes]
    params: dict[str, torch.Tensor]
    groups: tuple[int, ...]
    sizes: dict[str, float]

    @classmethod
    def plant(
        cls, params: Mapping[str, torch.Tensor], clipping: Clipping, count: int, random: np.random.Generator
    ) -> Canaries:
        """`count` canaries at coordinates of params, name -> [*shape], drawn from `random`, no two at one.

        Raises ConfigError where no clipping group has that many coordinates.
        """
        if count < 1:
            raise ConfigError(
                f"an audit with {count} canaries",
                expected="one or more; bounds mean something from some hundreds on",
            )
        totals = [sum(params[name].numel() for name in group.parameters) for group in clipping.groups]
        groups = tuple(place for place, total in enumerate(totals) if total >= count)
        if not groups:
            raise ConfigError(
                f"an audit with {count} canaries, and no clipping group with as many coordinates",
                expected=f"at most {max(totals)} canaries, each with a coordinate of its own",
                next_step=f"--canaries {max(totals)}",
            )
        spikes: dict[str, Spikes] = {}
        sizes: dict[str, float] = {}
        for number in groups:
            group, start = clipping.groups[number], 0
            places = random.choice(totals[number], count, replace=False)
            for name in group.parameters:
                here = np.flatnonzero((places >= start) & (places < start + params[name].numel()))
                if len(here):
                    spikes[name] = Spikes(
                        torch.from_numpy(here), torch.from_numpy(places[here] - start), number
                    )
                    sizes[name] = _FAR_ABOVE * group.bound
                start += params[name].numel()
        return cls(count, spikes, {name: params[name] for name in clipping.parameters}, groups, sizes)

    def reach(self, clipping: Clipping) -> float:
        """The norm that a clipped canary has, as a share of the most that a record can have: 1 where each
        group has spikes.
        """
        whole = math.fsum(group.bound**2 for group in clipping.groups)
        return math.sqrt(math.fsum(clipping.groups[number].bound ** 2 for number in self.groups) / whole)

    def square_norms(self, who: torch.Tensor) -> dict[str, torch.Tensor]:
        """name -> [n] float64: the squared norms of these canaries' gradients, given as places [n]."""
        result = {name: torch.zeros(self.count, dtype=torch.float64) for name in self.params}
        for name, spikes in self.spikes.items():
            result[name][spikes.canaries] = self.sizes[name] ** 2
        return {name: norms[who] for name, norms in result.items()}

    @property
    def precision(self) -> torch.dtype:
        """The type of sums over these parameters."""
        kinds = {accumulating_dtype(value.dtype) for value in self.params.values()}
        return torch.float32 if torch.float32 in kinds else torch.float64

    def nothing(self, clipping: Clipping) -> ClippedSum:
        """The clipped sum of no records."""
        return Total(clipping, self.params).result()

    def read(self, sums: Mapping[str, torch.Tensor], clipping: Clipping) -> np.ndarray:
        """[count] float64: each canary's part in these sums, the unit being the whole norm that a record can
        have.

        A canary that was drawn adds `reach` to its number, and noise of standard deviation s on every
        coordinate adds s / unit: the spikes' places are weighed with their groups' bounds, which is the best
        linear way.
        """
        scores = torch.zeros(self.count, dtype=torch.float64)
        for name, spikes in self.spikes.items():
            values = sums[name].detach().cpu().flatten()[spikes.places].double()
            scores.index_add_(0, spikes.canaries, clipping.groups[spikes.group].bound * values)
        squares = [group.bound**2 for group in clipping.groups]
        used = math.fsum(squares[number] for number in self.groups)
        return (scores / math.sqrt(used * math.fsum(squares))).numpy()


class StoringSource:
    """A source that stores the last clipped sum that it returned, in `last`."""

    def __init__(self, source: GradientSource) -> None:
        self._source = source
        self._last: ClippedSum | None = None

    def __call__(self, clipping: Clipping) -> ClippedSum:
        self._last = self._source(clipping)
        return self._last

    @property
    def last(self) -> ClippedSum:
        assert self._last is not None
        return self._last


def with_canaries(
    source: GradientSource | None, canaries: Canaries, who: np.ndarray, signs: np.ndarray | None = None
) -> GradientSource:
    """The source's clipped sum with canaries `who` ([n] places) as further records; None for canaries alone.

    They go through the clipping's norms and factors, as records do. signs: [n] of +1 and -1, what each
    gradient is multiplied by.
    """
    chosen = torch.from_numpy(np.asarray(who, dtype=np.int64))
    turned = (
        torch.ones(len(chosen), dtype=torch.float64)
        if signs is None
        else torch.from_numpy(np.asarray(signs, dtype=np.float64))
    )

    def found(clipping: Clipping) -> ClippedSum:
        norms = clipping.group_norms(canaries.square_norms(chosen))
        factors = clipping.factors(norms, canaries.precision)
        weights = clipping.by_parameter(factors)
        base = canaries.nothing(clipping) if source is None else source(clipping)
        sums = dict(base.sums)
        position = torch.full((canaries.count,), -1, dtype=torch.int64)
        position[chosen] = torch.arange(len(chosen))
        for name, spikes in canaries.spikes.items():
            here = position[spikes.canaries]
            mine, places = here[here >= 0], spikes.places[here >= 0]
            values = weights[name][mine] * turned[mine] * canaries.sizes[name]
            total = sums[name].clone(memory_format=torch.contiguous_format)
            total.view(-1).index_add_(0, places.to(total.device), values.to(total.device, total.dtype))
            sums[name] = total
        bounds = norms.new_tensor([group.bound for group in clipping.groups]).unsqueeze(1)
        columns = RecordColumns(
            torch.linalg.vector_norm(norms, dim=0),
            torch.zeros(len(chosen), dtype=torch.float64),
            factors.t(),
            (norms <= bounds).all(0),
        )
        return ClippedSum(sums, RecordColumns.joined([base.records, columns]))

    return found


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
