"""P-values against a reference, by counting; Benjamini and Hochberg by their definition; the resolution limit
by trying.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import false_discovery_control

from psgrad.quality.conformal import grouped_p_values, p_values, q_values, resolution

SCORES = st.lists(st.one_of(st.integers(-3, 3).map(float), st.just(float("nan"))), max_size=8)


def counted(score: float, reference: list[float], tail: str) -> float:
    if np.isnan(score):
        return float("nan")
    worse = [
        known
        for known in reference
        if np.isnan(known) or (known >= score if tail == "upper" else known <= score)
    ]
    return (1 + len(worse)) / (1 + len(reference))


def step_up(p: list[float], q: float) -> list[bool]:
    """Benjamini and Hochberg (1995): the largest k with p_(k) <= q k / m, and all with p-values up to it."""
    tested = sorted(each for each in p if not np.isnan(each))
    limit = max(
        (each for k, each in enumerate(tested, 1) if each <= q * k / len(tested) * (1 + 1e-12)), default=-1.0
    )
    return [each <= limit for each in p]


@given(SCORES, SCORES, st.sampled_from(["upper", "lower"]))
def test_p_values_equal_the_count(scores: list[float], reference: list[float], tail: str) -> None:
    result = p_values(np.array(scores), np.array(reference), tail)
    np.testing.assert_array_equal(result, [counted(score, reference, tail) for score in scores])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_p_values_valid_for_exchangeable_samples(together: list[int]) -> None:
    """Exchangeable: each of n + 1 values is the sample as likely as any other. P(p <= t) <= t for every t,
    ties or none.
    """
    values = np.array(together, "float64")
    p = [p_values(values[[place]], np.delete(values, place))[0] for place in range(len(values))]
    for t in p:
        assert np.mean(np.array(p) <= t) <= t * (1 + 1e-12)


def test_p_values_by_group() -> None:
    scores, labels = np.array([3.0, 3.0, 3.0, np.nan]), np.array(["a", "b", "c", "a"], dtype=object)
    reference, known = np.array([1.0, 2.0, 9.0, 8.0, 7.0]), np.array(["a", "a", "b", "b", "b"], dtype=object)
    np.testing.assert_array_equal(
        grouped_p_values(scores, labels, reference, known), [1 / 3, 1.0, 1.0, np.nan]
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(0, 3))
def test_q_values_equal_those_of_scipy(p: list[float], missing: int) -> None:
    result = q_values(np.array([float("nan")] * missing + p))
    np.testing.assert_allclose(result[missing:], false_discovery_control(p), rtol=1e-14)
    assert np.isnan(result[:missing]).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=3),
    st.sampled_from([0.05, 0.1, 0.25]),
)
def test_resolution_limit_of_reference(sizes: list[tuple[int, int]], q: float) -> None:
    tested = {str(group): tests for group, (tests, _) in enumerate(sizes)}
    reference = {str(group): known for group, (_, known) in enumerate(sizes)}
    possible: dict[str, list[int]] = {group: [] for group in tested if tested[group]}
    for extreme in itertools.product(
        *(range(tests + 1) for tests in tested.values())
    ):  # so many of each group beyond its reference
        p: list[Any] = []
        for count, (group, tests) in zip(extreme, tested.items(), strict=True):
            p += [(1 / (reference[group] + 1), group)] * count + [(1.0, group)] * (tests - count)
        if not p:
            continue
        flagged = [
            group for (_, group), out in zip(p, step_up([each for each, _ in p], q), strict=True) if out
        ]
        for group in set(flagged):
            possible[group].append(len(flagged))
    result = resolution(tested, reference, q)
    assert dict(result.smallest_of) == {
        group: min(counts, default=None) for group, counts in possible.items()
    }
    assert result.smallest == min((min(counts) for counts in possible.values() if counts), default=None)
