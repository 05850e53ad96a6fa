"""Sampling schemes, by which the records of a step are drawn. Each of them is one that an accountant covers.

    poisson   each record by itself with probability q; the number of records varies, and may be 0
    fixed     `batch_size` records without replacement, each subset with the same probability; accounted
              without amplification

Poisson sampling is exact for uniform bits: comparisons are of 64-bit integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from psgrad.engine.privacy.generators import Generator
from psgrad.errors import ConfigError

Scheme = Literal["poisson", "fixed"]

FIELDS: dict[Scheme, str] = {"poisson": "sample_rate", "fixed": "batch_size"}
"""The number that each scheme needs; it takes no other."""
# Records whose random integers are in memory at once.
_LOTS = 1 << 20


@dataclass(frozen=True)
class Sampling:
    """A scheme, and the number that it needs.

    Args:
        scheme: see the module.
        sample_rate: poisson: the probability q of each record, above 0 and at most 1.
        batch_size: fixed: the records of every step.

    Raises:
        ConfigError: the number is missing, is out of range, or belongs to another scheme.
    """

    scheme: Scheme
    sample_rate: float | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.scheme not in get_args(Scheme):
            raise ConfigError(
                f"the sampling scheme is {self.scheme!r}; expected one of {', '.join(get_args(Scheme))}",
                hint="a guarantee holds only for the scheme that is accounted: take `scheme: poisson`",
            )
        for scheme, name in FIELDS.items():
            if (getattr(self, name) is not None) != (scheme == self.scheme):
                fault = "missing for" if scheme == self.scheme else "given, and is none of"
                raise ConfigError(f"{name} is {fault} {self.scheme} sampling; expected {FIELDS[self.scheme]}")
        rate, size = self.sample_rate, self.batch_size
        if rate is not None and not 0 < rate <= 1:
            raise ConfigError(
                f"sample_rate is {rate}; expected a probability above 0 and at most 1",
                hint="divide the batch size that you have in mind by the number of records",
            )
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"batch_size is {size}; expected a whole number of records, at least 1")

    def draw(self, count: int, generator: Generator) -> np.ndarray:
        """The records [k] int64 of one step, out of 0, ..., count - 1: ascending, each at most once, k = 0
        possible.

        Raises ConfigError where a dataset of `count` records can't be sampled so.
        """
        self.require_drawable(count)
        if self.batch_size is not None:
            # Those with the smallest of random integers. Where two are the same, one is preferred, which no
            # guarantee rests on: every record is accounted as drawn.
            lots = generator.uint64(count)
            return np.sort(np.argsort(lots, kind="stable")[: self.batch_size]).astype(np.int64)
        assert self.sample_rate is not None
        return _bernoulli(count, self.sample_rate, generator)

    def require_drawable(self, count: int) -> None:
        """Raises ConfigError where a dataset of `count` records can't be sampled so."""
        if self.batch_size is not None and self.batch_size > count:
            raise ConfigError(
                f"batch_size is {self.batch_size}, and the dataset has {count} records, which are drawn"
                " without replacement",
                hint="lower batch_size",
            )

    def describe(self) -> dict[str, Any]:
        """The scheme and its number, for the ledger; `Sampling(**described)` gives the same again."""
        return {"scheme": self.scheme, FIELDS[self.scheme]: getattr(self, FIELDS[self.scheme])}


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
