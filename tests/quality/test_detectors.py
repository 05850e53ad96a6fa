"""Detectors beside scikit-learn's own calls and distances by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import IsolationForest

from psgrad.errors import ConfigError
from psgrad.plugins import DETECTORS, own_classes
from psgrad.quality.detector import detect as detect_with
from psgrad.quality.detector import detector_from
from psgrad.quality.detectors import nearest_neighbours

NAMES = list(own_classes(DETECTORS))
FEW: dict[str, dict[str, Any]] = {"isolation_forest": {"trees": 25}, "nearest_neighbours": {}}


def detect(
    name: str, options: dict[str, Any], rows: np.ndarray, reference: np.ndarray | None, seed: int
) -> np.ndarray:
    """The scores [n] of rows [n, k] by the detector of this name with these options."""
    return detect_with(detector_from(name, options), rows, reference, seed)


def drawn(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, k)).astype(np.float32)


def mean_distances(rows: np.ndarray, usual: np.ndarray, neighbours: int, own: bool) -> np.ndarray:
    """[n]: by all distances in float64; `own`: rows are `usual` themselves, and no row is its own
    neighbour.
    """
    rows, usual = rows.astype(np.float64), usual.astype(np.float64)
    table = np.linalg.norm(rows[:, None] - usual[None], axis=2)
    if own:
        np.fill_diagonal(table, np.inf)
    result = np.sort(table, 1)[:, :neighbours]
    return np.array([row[np.isfinite(row)].mean() if np.isfinite(row).any() else np.nan for row in result])


@given(
    n=st.integers(1, 30),
    m=st.integers(0, 20),
    k=st.integers(1, 6),
    neighbours=st.integers(1, 35),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_nearest_neighbours_equal_all_distances(n: int, m: int, k: int, neighbours: int, seed: int) -> None:
    rows, reference = drawn(n, k, seed), drawn(m, k, seed + 1) if m else None
    result = detect("nearest_neighbours", {"neighbours": neighbours}, rows, reference, 0)
    expected = mean_distances(rows, rows if reference is None else reference, neighbours, reference is None)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_reference", [False, True])
def test_isolation_forest_equals_scikit_learn(with_reference: bool) -> None:
    rows, reference = drawn(300, 5), drawn(400, 5, 1) if with_reference else None
    result = detect("isolation_forest", {"trees": 20, "samples_per_tree": 64}, rows, reference, 7)
    forest = IsolationForest(n_estimators=20, max_samples=64, random_state=7).fit(
        rows if reference is None else reference
    )
    np.testing.assert_array_equal(result, -forest.score_samples(rows))


@pytest.mark.parametrize("name", NAMES)
def test_detector_scores_far_row_highest(name: str) -> None:
    rows = drawn(200, 8)
    rows[17] += 30
    assert detect(name, FEW[name], rows, None, 0).argmax() == 17
    assert detect(name, FEW[name], rows, drawn(200, 8, 5), 0).argmax() == 17


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_reference", [False, True])
def test_detector_nonfinite_rows(name: str, with_reference: bool) -> None:
    rows = drawn(40, 3)
    spoilt = np.insert(rows, [5, 20], [[np.nan, 1, 1], [1, np.inf, 1]], axis=0)
    reference = drawn(50, 3, 1) if with_reference else None
    torn = np.insert(reference, [0], [[1, -np.inf, 1]], axis=0) if reference is not None else None
    result = detect(name, FEW[name], spoilt, torn, 0)
    assert np.flatnonzero(np.isnan(result)).tolist() == [5, 21]
    np.testing.assert_allclose(
        result[~np.isnan(result)], detect(name, FEW[name], rows, reference, 0), rtol=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1e30])
def test_detector_magnitude_of_rows(name: str, scale: float) -> None:
    rows = drawn(60, 4).astype(np.float64)
    assert (
        np.argsort(detect(name, FEW[name], rows * scale, None, 0))
        == np.argsort(detect(name, FEW[name], rows, None, 0))
    ).all()


def test_detector_one_row_and_no_rows() -> None:
    assert np.isnan(detect("nearest_neighbours", {}, drawn(1, 3), None, 0)).all()
    assert np.isfinite(detect("isolation_forest", {}, drawn(1, 3), None, 0)).all()
    for name in NAMES:
        assert detect(name, FEW[name], np.zeros((0, 3)), drawn(4, 3), 0).shape == (0,)
        assert np.isnan(detect(name, FEW[name], np.full((2, 3), np.nan), None, 0)).all()


@pytest.mark.parametrize("name", NAMES)
def test_detector_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_neighbours, "LARGEST_REFERENCE", 30)
    rows = drawn(100, 3)
    one = detect(name, FEW[name], rows, None, 1)
    np.testing.assert_array_equal(one, detect(name, FEW[name], rows, None, 1))
    assert (one != detect(name, FEW[name], rows, None, 2)).any()


def test_nearest_neighbours_large_reference_subsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_neighbours, "LARGEST_REFERENCE", 30)
    rows = drawn(100, 3)
    result = detect("nearest_neighbours", {"neighbours": 3}, rows, None, 5)
    chosen = np.random.default_rng(5).choice(100, 30, replace=False)
    table = np.linalg.norm(rows[:, None].astype(np.float64) - rows[None, chosen], axis=2)
    table[chosen, np.arange(30)] = np.inf
    np.testing.assert_allclose(result, np.sort(table, 1)[:, :3].mean(1), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("isolation_forrest", {}, "did you mean isolation_forest?"),
        ("lof", {}, "some of isolation_forest, nearest_neighbours"),
        ("isolation_forest", {"tree": 5}, "did you mean trees? it takes trees, samples_per_tree"),
        ("isolation_forest", {"trees": 0}, "got 0 trees, expected at least 1"),
        ("isolation_forest", {"trees": 1.5}, "trees: got 1.5, expected a whole number"),
        ("isolation_forest", {"samples_per_tree": 1}, "got 1 samples_per_tree, expected at least 2"),
        ("nearest_neighbours", {"neighbours": 0}, "got 0 neighbours, expected at least 1"),
        ("nearest_neighbours", {"neighbours": "ten"}, "expected a whole number"),
    ],
)
def test_detector_options_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="detector") as caught:
        detector_from(name, options)
    assert words in str(caught.value)


def test_detector_reference_of_other_width_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[n, 4\], those in question \[n, 3\]"):
        detect("isolation_forest", {}, drawn(5, 3), drawn(5, 4), 0)
    with pytest.raises(ConfigError, match="no row of the reference"):
        detect("nearest_neighbours", {}, drawn(5, 3), np.full((2, 3), np.nan), 0)
