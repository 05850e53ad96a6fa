"""Sampling schemes, by which the records of a step are drawn, and schedules of the noise multiplier. Every
scheme here is one that an accountant covers.

    poisson             each record by itself with probability q; the number of records varies, and may be 0
    truncated_poisson   the same; of more than `max_batch_size` records a uniformly random subset of that size
                        (TruncatedSubsampledGaussianDpEvent of dp-accounting; arXiv 2508.15089)
    fixed               `batch_size` records without replacement, each subset with the same probability;
                        accounted without amplification

All of them are exact for uniform bits: comparisons are of 64-bit integers, and a draw among m is rejected
where m does not divide what is left. A schedule follows from the config alone, never from the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from psgrad.engine.privacy.generators import Generator
from psgrad.errors import ConfigError, one_line

Scheme = Literal["poisson", "truncated_poisson", "fixed"]

# The numbers that describe each scheme: all of them are needed, and no others may be given.
FIELDS: dict[Scheme, tuple[str, ...]] = {
    "poisson": ("sample_rate",),
    "truncated_poisson": ("sample_rate", "max_batch_size", "dataset_size"),
    "fixed": ("batch_size",),
}
_NEXT = {
    "sample_rate": "say with which probability a step draws a record, for example `sample_rate: 0.01`",
    "max_batch_size": "say how many records a step has at most, a little above sample_rate * dataset_size",
    "dataset_size": (
        "say how many records the dataset has; the guarantee of truncated Poisson sampling depends on it"
    ),
    "batch_size": "say how many records a step draws, for example `batch_size: 128`",
}
# Records whose random integers are in memory at once.
_LOTS = 1 << 20


@dataclass(frozen=True)
class Sampling:
    """A scheme, and the numbers that it needs.

    Args:
        scheme: see the module.
        sample_rate: poisson, truncated_poisson: the probability q of each record, above 0 and at most 1.
        batch_size: fixed: the records of every step.
        max_batch_size: truncated_poisson: the most records that a step has.
        dataset_size: truncated_poisson: all records, a public number in the relations that go with it.

    Raises:
        ConfigError: a number is missing, is out of range, or belongs to another scheme.
    """

    scheme: Scheme
    sample_rate: float | None = None
    batch_size: int | None = None
    max_batch_size: int | None = None
    dataset_size: int | None = None

    def __post_init__(self) -> None:
        if self.scheme not in get_args(Scheme):
            raise ConfigError(
                f"the sampling scheme is {self.scheme!r}; expected one of {', '.join(get_args(Scheme))}",
                hint=(
                    "a privacy guarantee holds for the scheme that is accounted, and only for it;"
                    " shuffled epochs, weighted and bucketed samplers have no such guarantee: take"
                    " `scheme: poisson`"
                ),
            )
        for name in ("sample_rate", "batch_size", "max_batch_size", "dataset_size"):
            self._check(name, getattr(self, name))
        if (
            self.max_batch_size is not None
            and self.dataset_size is not None
            and self.max_batch_size > self.dataset_size
        ):
            raise ConfigError(
                f"max_batch_size is {self.max_batch_size}, and the dataset has {self.dataset_size}"
                " records; expected a batch that is smaller than the dataset",
                hint="lower max_batch_size, or take `scheme: poisson`, which truncates nothing",
            )

    def _check(self, name: str, value: float | None) -> None:
        """Whether the number is there where the scheme needs it, and is one that can be."""
        needed = name in FIELDS[self.scheme]
        if value is None:
            if needed:
                raise ConfigError(
                    f"{name} is missing for {self.scheme} sampling",
                    hint=_NEXT[name],
                )
            return
        if not needed:
            raise ConfigError(
                f"{name} is given, and {self.scheme} sampling has none; expected for {self.scheme}:"
                f" {', '.join(FIELDS[self.scheme])}",
                hint=(
                    "the numbers of two schemes are mixed, and only one can be accounted; remove"
                    f" {name}, or choose the scheme that it belongs to"
                ),
            )
        if name == "sample_rate":
            if not 0 < value <= 1:
                raise ConfigError(
                    f"sample_rate is {value}; expected a probability above 0 and at most 1",
                    hint=one_line(
                        "the number of records in a batch was given" if value > 1 else None,
                        "divide the batch size that you have in mind by the number of records",
                    ),
                )
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{name} is {value}; expected a whole number of records, at least 1",
                hint=_NEXT[name],
            )

    def draw(self, count: int, generator: Generator) -> np.ndarray:
        """The records [k] int64 of one step, out of 0, ..., count - 1: ascending, each at most once, k = 0
        possible.

        Raises ConfigError where a dataset of `count` records can't be sampled so.
        """
        self.require_drawable(count)
        if self.scheme == "fixed":
            assert self.batch_size is not None
            return random_subset(count, self.batch_size, generator)
        assert self.sample_rate is not None
        if self.scheme == "poisson":
            return _bernoulli(count, self.sample_rate, generator)
        assert self.max_batch_size is not None
        drawn = _bernoulli(count, self.sample_rate, generator)
        if len(drawn) > self.max_batch_size:
            drawn = drawn[random_subset(len(drawn), self.max_batch_size, generator)]
        return drawn

    def require_drawable(self, count: int) -> None:
        """Raises ConfigError where a dataset of `count` records can't be sampled so."""
        if self.batch_size is not None and self.batch_size > count:
            raise ConfigError(
                f"batch_size is {self.batch_size}, and the dataset has {count} records; expected at most"
                " as many records as there are, as they are drawn without replacement",
                hint="lower batch_size",
            )
        if self.dataset_size is not None and count != self.dataset_size:
            raise ConfigError(
                f"the dataset has {count} records, and dataset_size is {self.dataset_size}; expected the"
                " number that truncated Poisson sampling is accounted with",
                hint=(
                    "another dataset, or records counted in rows where a record is several of them;"
                    f" check the data, then set dataset_size to {count}"
                ),
            )

    def describe(self) -> dict[str, Any]:
        """The scheme and its numbers, for the ledger; `Sampling(**described)` gives the same again."""
        return {"scheme": self.scheme, **{name: getattr(self, name) for name in FIELDS[self.scheme]}}


def _bernoulli(count: int, rate: float, generator: Generator) -> np.ndarray:
    """[k] int64, ascending: the records out of `count` that are drawn, each by itself with probability
    `rate`.

    A record is drawn if its 64-bit integer is below rate * 2^64. If that isn't a whole number (rates below
    2^-12 may have more bits) it is rounded down: no record is drawn more often than is accounted.
    """
    threshold = int(rate * 2.0**64)
    if threshold >= 1 << 64:
        return np.arange(count, dtype=np.int64)
    drawn = [
        start + np.flatnonzero(generator.uint64(min(_LOTS, count - start)) < np.uint64(threshold))
        for start in range(0, count, _LOTS)
    ]
    return np.concatenate(drawn).astype(np.int64) if drawn else np.empty(0, dtype=np.int64)


def random_subset(count: int, size: int, generator: Generator) -> np.ndarray:
    """[size] int64, ascending: a subset of 0, ..., count - 1, each with the same probability."""
    if 2 * size > count:
        # The rest is the smaller subset, and is drawn as uniformly.
        candidates = np.ones(count, dtype=bool)
        candidates[_distinct(count, count - size, generator)] = False
        return np.flatnonzero(candidates).astype(np.int64)
    return np.sort(_distinct(count, size, generator))


def _distinct(count: int, size: int, generator: Generator) -> np.ndarray:
    """The first `size` distinct values of a stream of uniform ones from 0, ..., count - 1: a uniformly random
    subset.

    size is at most half of count, so that at least every other draw is new.
    """
    stream = np.empty(0, dtype=np.int64)
    first = np.empty(0, dtype=np.int64)
    while len(first) < size:
        stream = np.concatenate([stream, _below(count, 2 * (size - len(first)) + 8, generator)])
        first = np.sort(np.unique(stream, return_index=True)[1])
    return stream[first[:size]]


def _below(count: int, size: int, generator: Generator) -> np.ndarray:
    """About `size` independent values, uniform on 0, ..., count - 1; integers beyond the last whole multiple
    of count are rejected.
    """
    lots = generator.uint64(size)
    excess = (1 << 64) % count
    if excess:
        lots = lots[lots < np.uint64((1 << 64) - excess)]
    return (lots % np.uint64(count)).astype(np.int64)


ScheduleKind = Literal["constant", "step", "exponential", "list"]

# The numbers of each kind: all of them are needed, and no other may be given.
SCHEDULE_FIELDS: dict[ScheduleKind, tuple[str, ...]] = {
    "constant": (),
    "step": ("every", "factor"),
    "exponential": ("factor",),
    "list": ("multipliers",),
}


@dataclass(frozen=True)
class Schedule:
    """The noise multiplier of step t = 0, 1, ..., as a multiple of a base.

        constant     1
        step         factor ^ (t // every)
        exponential  factor ^ t
        list         multipliers[t]: the multipliers themselves, with a base of 1

    Raises ConfigError where a number is missing, is out of range, or belongs to another kind.
    """

    kind: ScheduleKind = "constant"
    every: int | None = None
    factor: float | None = None
    multipliers: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ConfigError(
                f"the schedule's kind is {self.kind!r}; expected one of {', '.join(get_args(ScheduleKind))}",
            )
        for name in ("every", "factor", "multipliers"):
            needed = name in SCHEDULE_FIELDS[self.kind]
            if (getattr(self, name) is not None) != needed:
                requirement = f"needs {name}" if needed else f"takes no {name}"
                raise ConfigError(
                    one_line(
                        f"a schedule of kind {self.kind} {requirement}",
                        "expected " + (", ".join(SCHEDULE_FIELDS[self.kind]) or "no number"),
                    )
                )
        if self.every is not None and (
            isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1
        ):
            raise ConfigError(
                f"the schedule's `every` is {self.every!r}; expected a whole number of steps, at least 1"
            )
        if self.factor is not None and not 0 < self.factor < math.inf:
            raise ConfigError(f"the schedule's factor is {self.factor!r}; expected a positive number")
        if self.multipliers is not None:
            object.__setattr__(self, "multipliers", tuple(self.multipliers))
            for multiplier in self.multipliers:
                if not 0 < multiplier < math.inf:
                    raise ConfigError(
                        f"the schedule lists the multiplier {multiplier!r}; expected positive numbers"
                    )

    def multiplier(self, base: float, step: int) -> float:
        """The noise multiplier of a step, counted from 0. Raises ConfigError for a step that a list does not
        reach.
        """
        if self.kind == "list":
            assert self.multipliers is not None
            if step >= len(self.multipliers):
                raise ConfigError(
                    f"the schedule lists {len(self.multipliers)} multipliers, and step number {step + 1}"
                    " was asked for; expected one multiplier for each planned step",
                )
            return base * self.multipliers[step]
        if self.kind == "constant":
            return base
        assert self.factor is not None
        exponent = step if self.every is None else step // self.every
        try:
            scaled = base * self.factor**exponent
        except OverflowError:
            scaled = math.inf
        if base > 0 and not 0 < scaled < math.inf:
            raise ConfigError(
                f"the schedule's factor {self.factor!r} makes the noise multiplier of step number"
                f" {step + 1} {scaled!r}; expected a factor near 1: it is raised to a power that grows"
                " with the steps",
            )
        return scaled

    def runs(self, base: float, steps: int) -> list[tuple[float, int]]:
        """(noise multiplier, for how many steps), in order, for the first `steps` steps."""
        if self.kind == "constant":
            return [(base, steps)] if steps else []
        runs: list[tuple[float, int]] = []
        for step in range(steps):
            multiplier = self.multiplier(base, step)
            if runs and runs[-1][0] == multiplier:
                runs[-1] = (multiplier, runs[-1][1] + 1)
            else:
                runs.append((multiplier, 1))
        return runs

    def describe(self) -> dict[str, Any]:
        """The kind and its numbers as plain JSON; `Schedule(**described)` gives the same again."""
        numbers = {name: getattr(self, name) for name in SCHEDULE_FIELDS[self.kind]}
        if self.multipliers is not None:
            numbers["multipliers"] = list(self.multipliers)
        return {"kind": self.kind, **numbers}
