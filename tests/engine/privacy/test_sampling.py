"""How records are drawn: exactly as accounted, each by itself, over the whole dataset, and refused where it
can't be.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from psgrad.engine.privacy import sampling
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.sampling import Sampling
from psgrad.errors import ConfigError
from tests.engine.privacy.planted import PlantedGenerator

ALPHA = 1e-4


def draws(scheme: Sampling, count: int, steps: int, seed: int = 1) -> np.ndarray:
    """Whether each record is in each step: bool [steps, count]."""
    generator = make_generator(seed=seed)
    drawn = np.zeros((steps, count), dtype=bool)
    for step in drawn:
        step[scheme.draw(count, generator)] = True
    return drawn


def of(scheme: str, count: int) -> Sampling:
    """One of each scheme, for a dataset of so many records."""
    return {
        "poisson": Sampling("poisson", sample_rate=0.3),
        "fixed": Sampling("fixed", batch_size=max(1, count // 3)),
    }[scheme]


# -- what comes out ------------------------------------------------------------------------------------------


@given(st.sampled_from(["poisson", "fixed"]), st.integers(1, 300), st.integers(0, 10**6))
def test_sampling_records_unique_and_ordered(scheme: str, count: int, seed: int) -> None:
    drawn = of(scheme, count).draw(count, make_generator(seed=seed))
    assert drawn.dtype == np.int64
    assert (np.diff(drawn) > 0).all()
    assert len(drawn) == 0 or (drawn[0] >= 0 and drawn[-1] < count)
    if scheme == "fixed":
        assert len(drawn) == max(1, count // 3)


def test_sampling_poisson_rate() -> None:
    rate, count, steps = 0.07, 500, 2000
    drawn = draws(Sampling("poisson", sample_rate=rate), count, steps)
    # All records together, the spread over the records, and that of the sizes of the batches.
    assert stats.binomtest(int(drawn.sum()), drawn.size, rate).pvalue > ALPHA
    by_record = ((drawn.sum(0) - steps * rate) ** 2 / (steps * rate * (1 - rate))).sum()
    by_step = ((drawn.sum(1) - count * rate) ** 2 / (count * rate * (1 - rate))).sum()
    assert ALPHA < stats.chi2(count).cdf(by_record) < 1 - ALPHA
    assert ALPHA < stats.chi2(steps).cdf(by_step) < 1 - ALPHA


@pytest.mark.parametrize("scheme", ["poisson", "fixed"])
def test_sampling_independent_steps(scheme: str) -> None:
    drawn = draws(of(scheme, 40), 40, 4000)
    for lag in (1, 2):
        table = np.array([[(~drawn[:-lag] & ~drawn[lag:]).sum(), (~drawn[:-lag] & drawn[lag:]).sum()]])
        table = np.vstack(
            [table, [[(drawn[:-lag] & ~drawn[lag:]).sum(), (drawn[:-lag] & drawn[lag:]).sum()]]]
        )
        assert stats.chi2_contingency(table, correction=False).pvalue > ALPHA


def test_sampling_poisson_independent_records() -> None:
    drawn = draws(Sampling("poisson", sample_rate=0.4), 6, 20_000)
    # Every one of the 64 batches, with its own probability.
    seen = Counter((drawn * 2 ** np.arange(6)).sum(1).tolist())
    expected = [20_000 * 0.4 ** batch.bit_count() * 0.6 ** (6 - batch.bit_count()) for batch in range(64)]
    assert stats.chisquare([seen[batch] for batch in range(64)], expected).pvalue > ALPHA


@pytest.mark.long
def test_sampling_fixed_uniform_over_batches() -> None:
    for size in (2, 5):
        drawn = draws(Sampling("fixed", batch_size=size), 7, 8000)
        seen = Counter(tuple(np.flatnonzero(step).tolist()) for step in drawn)
        assert stats.chisquare([seen[batch] for batch in combinations(range(7), size)]).pvalue > ALPHA


@pytest.mark.parametrize(
    "scheme", [Sampling("poisson", sample_rate=0.5), Sampling("poisson", sample_rate=1.0)]
)
def test_sampling_empty_batch(scheme: Sampling) -> None:
    drawn = scheme.draw(0, make_generator())
    assert (drawn.shape, drawn.dtype) == ((0,), np.int64)


def test_sampling_extreme_rates() -> None:
    generator = make_generator(seed=4)
    assert Sampling("poisson", sample_rate=1.0).draw(50, generator).tolist() == list(range(50))
    assert len(Sampling("poisson", sample_rate=1e-30).draw(5000, generator)) == 0
    assert len(Sampling("poisson", sample_rate=1e-4).draw(5000, generator)) < 10


def test_sampling_large_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Sampling("poisson", sample_rate=0.5).draw(96, make_generator(seed=5))
    monkeypatch.setattr(sampling, "_LOTS", 32)  # pieces of whole cipher blocks, so that the bits are the same
    assert Sampling("poisson", sample_rate=0.5).draw(96, make_generator(seed=5)).tolist() == whole.tolist()
    assert whole.max() > 90


# -- exact bits ----------------------------------------------------------------------------------------------


def test_sampling_threshold_of_rate() -> None:
    lots = [0, 2**62 - 1, 2**62, 2**64 - 1]
    assert Sampling("poisson", sample_rate=0.25).draw(4, PlantedGenerator(lots)).tolist() == [0, 1]


@given(st.floats(1e-18, 1.0))
def test_sampling_rate_rounded_down(rate: float) -> None:
    """The probability in integers: the smallest lot that is out, over 2^64, is at most the rate, and less
    than one lot below it.
    """
    limit = int(rate * 2.0**64)
    lots = [lot for lot in (limit - 1, limit) if 0 <= lot < 2**64]
    drawn = (
        Sampling("poisson", sample_rate=rate).draw(len(lots), PlantedGenerator(lots))
        if rate < 1
        else np.array([0])
    )
    numerator, denominator = rate.as_integer_ratio()
    expected = [place for place, lot in enumerate(lots) if (lot + 1) * denominator <= numerator << 64]
    assert drawn.tolist() == expected


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scheme": "shuffled"}, "the sampling scheme is 'shuffled'"),
        ({"scheme": "poisson"}, "sample_rate is missing for poisson sampling"),
        ({"scheme": "fixed"}, "batch_size is missing for fixed sampling"),
        ({"scheme": "poisson", "sample_rate": 0.1, "batch_size": 5}, "batch_size is given"),
        ({"scheme": "fixed", "sample_rate": 0.1, "batch_size": 5}, "sample_rate is given"),
        ({"scheme": "poisson", "sample_rate": 0.0}, "sample_rate is 0.0"),
        ({"scheme": "poisson", "sample_rate": 128}, "sample_rate is 128"),
        ({"scheme": "poisson", "sample_rate": float("nan")}, "sample_rate is nan"),
        ({"scheme": "fixed", "batch_size": 0}, "batch_size is 0"),
        ({"scheme": "fixed", "batch_size": 2.5}, "batch_size is 2.5"),
        ({"scheme": "fixed", "batch_size": True}, "batch_size is True"),
    ],
)
def test_sampling_arguments_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(**fields)
    assert caught.value.message.startswith(says)


def test_sampling_small_dataset_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size is 5, and the dataset has 4 records"):
        Sampling("fixed", batch_size=5).draw(4, make_generator())
