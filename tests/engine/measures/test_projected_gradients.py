"""Projected gradients, and the spectrum of their covariance, beside dense algebra in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.measures.builtin import projected_gradients
from psgrad.engine.measures.builtin.dataset import CovarianceSpectrum, _effective_rank
from psgrad.engine.measures.builtin.projected_gradients import GradientProjection
from psgrad.engine.measures.measure import Gathered, Setting
from psgrad.errors import MeasureError
from tests.engine.measures.one_run import measured
from tests.engine.measures.own_passes import setting_of
from tests.oracles import one_sample_gradients
from tests.small_models import ARCHITECTURES, Architecture


def gradients_are(rows: Tensor, **facts: Any) -> Setting:
    """Samples whose gradients are these [n, p]."""
    model = nn.Linear(rows.shape[1], 1, bias=False).to(rows.dtype)
    return setting_of(model, lambda output, target: output.sum(), (rows,), None, **facts)


def spectrum_of(setting: Setting, dimension: int = 256, exact_up_to: int = 0, **how: Any) -> Gathered:
    projected, spectrum = (
        GradientProjection(dimension=dimension),
        CovarianceSpectrum(exact_up_to=exact_up_to, top=1000),
    )
    return measured([projected, spectrum], setting, **how)[1]["covariance_spectrum"]


def eigenvalues(rows: Tensor) -> np.ndarray:
    """Of the covariance, descending: by numpy."""
    return np.linalg.eigvalsh(np.cov(rows.double().numpy(), rowvar=False, ddof=1).reshape(rows.shape[1], -1))[
        ::-1
    ]


def decaying(n: int, p: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """[n, p], of variances 1, 1/4, 1/9, ..., around a mean that is not zero."""
    drawn = torch.randn(n, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn / torch.arange(1, p + 1) + 0.5).to(dtype)


def flat_gradients(architecture: Architecture, n: int) -> tuple[Setting, np.ndarray]:
    """Samples in float32, and their gradients [n, p] by loops in float64."""
    inputs, target = architecture.batch(n, dtype=torch.float64)
    result = one_sample_gradients(architecture.build(dtype=torch.float64), architecture.loss, inputs, target)
    narrow = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    setting = setting_of(architecture.build(), architecture.loss, narrow, target)
    return setting, torch.cat([value.flatten(1) for value in result.values()], 1).numpy()


# -- the rows ------------------------------------------------------------------------------------------------


def test_projected_gradients_few_parameters_not_projected() -> None:
    rows = torch.randn(9, 5)
    result, gathered = measured([GradientProjection(dimension=5)], gradients_are(rows))
    assert torch.equal(result["projected_gradients"], rows)
    assert gathered["projected_gradients"].numbers["kind"] == "none"
    assert gathered["projected_gradients"].numbers["square_norm_error"] == pytest.approx(0, abs=1e-6)


def test_projected_gradients_inner_products_error() -> None:
    rows = torch.randn(300, 2000)
    result, gathered = measured(
        [GradientProjection(dimension=64)], gradients_are(rows, seed=3), chunk_size=100
    )
    projected, numbers = result["projected_gradients"].double(), gathered["projected_gradients"].numbers
    squares = projected.square().sum(1) / rows.double().square().sum(1)
    assert numbers["square_norm_error"] == pytest.approx(
        float((squares - 1).square().mean().sqrt()), rel=1e-4
    )
    assert numbers["expected_square_norm_error"] == pytest.approx(math.sqrt(2 / 64))
    assert 0.7 < numbers["square_norm_error"] / numbers["expected_square_norm_error"] < 1.3
    apart = (projected @ projected.t() - rows.double() @ rows.double().t()).fill_diagonal_(0) / 2000
    assert float(apart.square().mean().sqrt()) == pytest.approx(64**-0.5, rel=0.2)


@given(
    n=st.integers(1, 20), p=st.integers(1, 40), chunk_size=st.integers(1, 20), dimension=st.integers(1, 30)
)
@settings(max_examples=15)
def test_projected_gradients_independent_of_chunks(n: int, p: int, chunk_size: int, dimension: int) -> None:
    setting = gradients_are(decaying(n, p), seed=n)
    one = measured([GradientProjection(dimension=dimension)], setting, chunk_size)[0]["projected_gradients"]
    other = measured([GradientProjection(dimension=dimension)], setting, n)[0]["projected_gradients"]
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_projected_gradients_seed_and_save() -> None:
    rows = torch.randn(4, 50)
    one, other = (
        measured([GradientProjection(dimension=8, save=True)], gradients_are(rows, seed=seed))[1][
            "projected_gradients"
        ]
        for seed in (0, 1)
    )
    assert not torch.equal(one.arrays["projected_gradients"], other.arrays["projected_gradients"])
    assert (
        measured([GradientProjection(dimension=8)], gradients_are(rows))[1]["projected_gradients"].arrays
        == {}
    )


def test_projected_gradients_beyond_memory_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(projected_gradients, "free_host_memory", lambda: 16 * 10 * 32)
    setting = gradients_are(torch.randn(10, 300))
    with pytest.raises(MeasureError, match="up to 32 columns") as caught:
        measured([GradientProjection(dimension=64)], setting)
    assert "set dimension: 32 or less" in str(caught.value)
    measured([GradientProjection(dimension=32)], setting)
    monkeypatch.setattr(projected_gradients, "free_host_memory", lambda: 10)
    with pytest.raises(MeasureError, match="fewer samples"):
        measured([GradientProjection(dimension=64)], setting)


# -- the spectrum --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_projected_gradients_eigenvalues_of_few_samples(
    architecture: Architecture,
) -> None:
    setting, gradients = flat_gradients(architecture, 12)
    result = spectrum_of(setting, dimension=8, exact_up_to=12)
    centred = gradients - gradients.mean(0)
    expected = np.linalg.svd(centred, compute_uv=False) ** 2 / 11
    np.testing.assert_allclose(result.tables["spectrum"]["eigenvalue"], expected, atol=1e-5 * expected[0])
    assert result.numbers["trace"] == pytest.approx(expected.sum(), rel=1e-5)
    assert result.numbers["effective_rank"] == pytest.approx(
        expected.sum() ** 2 / (expected**2).sum(), rel=1e-5
    )
    np.testing.assert_allclose(result.tables["spectrum"]["share"], expected / expected.sum(), atol=1e-5)
    assert set(result.tables["spectrum"]["standard_error"].tolist()) == {0.0}


@pytest.mark.long
@given(
    n=st.integers(2, 30),
    p=st.integers(1, 20),
    chunk_size=st.integers(1, 30),
    few=st.booleans(),
    stop=st.integers(1, 30),
)
@settings(max_examples=25)
def test_projected_gradients_covariance_exact_when_small(
    n: int, p: int, chunk_size: int, few: bool, stop: int
) -> None:
    rows = decaying(n, p, n * 31 + p)
    result = spectrum_of(
        gradients_are(rows),
        20,
        30 if few else 0,
        chunk_size=chunk_size,
        interrupted_at=None if stop > n else stop,
    )
    expected, size = eigenvalues(rows), min(n, p)
    np.testing.assert_allclose(
        result.tables["spectrum"]["eigenvalue"][:size], expected[:size], atol=1e-10 * expected[0]
    )
    assert result.numbers["trace"] == pytest.approx(expected.sum(), rel=1e-9)
    assert result.numbers["effective_rank"] == pytest.approx(
        expected.sum() ** 2 / np.square(expected).sum(), rel=1e-8
    )


@pytest.mark.long
def test_projected_gradients_eigenvalue_error() -> None:
    # turned, as a sparse projection keeps the length of whatever lies along one parameter
    rows = decaying(400, 600) @ torch.linalg.qr(torch.randn(600, 600, dtype=torch.float64))[0]
    expected = eigenvalues(rows)[:5]
    result = [spectrum_of(gradients_are(rows, seed=seed), 128, chunk_size=400) for seed in range(24)]
    tables = [each.tables["spectrum"] for each in result]
    values = np.stack([np.asarray(table["eigenvalue"][:5]) for table in tables])
    errors = np.mean([np.asarray(table["standard_error"][:5]) for table in tables], 0)
    spread = (values - expected).std(0, ddof=1)
    assert (spread[:3] < 1.5 * errors[:3]).all()
    assert (spread[:3] > errors[:3] / 1.5).all()
    trace = rows.var(0, correction=1).sum().item()
    for each in result:
        assert each.numbers["trace"] == pytest.approx(trace, rel=1e-9)  # by the norms: no projection is in it
        assert each.numbers["floor"] == pytest.approx(trace / 128, rel=1e-9)
    assert np.mean([each.numbers["trace_by_projection"] for each in result]) == pytest.approx(trace, rel=0.05)


@pytest.mark.long
def test_projected_gradients_isolated_eigenvalue_bias() -> None:
    scales = torch.cat([torch.ones(1), torch.full((399,), 0.15)]).double()
    rows = (torch.randn(400, 400, dtype=torch.float64) * scales) @ torch.linalg.qr(
        torch.randn(400, 400, dtype=torch.float64)
    )[0]
    tables = [
        spectrum_of(gradients_are(rows, seed=seed), 64, chunk_size=400).tables["spectrum"]
        for seed in range(40)
    ]
    result, errors, lifts = (
        np.array([float(table[name][0]) for table in tables])
        for name in ("eigenvalue", "standard_error", "lift")
    )
    rounding = errors.mean() / math.sqrt(len(tables))
    assert lifts.mean() > 3 * rounding  # it can be told from nothing
    assert result.mean() - eigenvalues(rows)[0] == pytest.approx(lifts.mean(), abs=3 * rounding)


@pytest.mark.long
def test_projected_gradients_effective_rank_unbiased_squares() -> None:
    random, k, variances = np.random.default_rng(0), 40, np.array([1.0, 0.4, 0.1])
    squares = []
    for _ in range(4000):
        projected = random.normal(size=(k, 3)) / math.sqrt(k) * np.sqrt(variances)
        values = torch.from_numpy(np.linalg.eigvalsh(projected @ projected.T))
        rank = _effective_rank(values, variances.sum(), k**-0.5)
        assert rank is not None
        squares.append(variances.sum() ** 2 / rank)
    off = np.std(squares, ddof=1) / math.sqrt(len(squares))
    assert np.mean(squares) == pytest.approx(np.square(variances).sum(), abs=3 * off)


@pytest.mark.long
def test_projected_gradients_effective_rank_bias_removed() -> None:
    rows = torch.randn(300, 2000, dtype=torch.float64)  # of rank 299: far more than there are columns
    result = [
        spectrum_of(gradients_are(rows, seed=seed), 32, chunk_size=300).numbers["effective_rank"]
        for seed in range(6)
    ]
    expected = spectrum_of(gradients_are(rows), exact_up_to=300).numbers["effective_rank"]
    plain = 32
    assert all(each is None or each > 3 * plain for each in result)
    assert 1 / np.mean([0 if each is None else 1 / each for each in result]) == pytest.approx(
        expected, rel=0.35
    )


@pytest.mark.parametrize("exact_up_to", [0, 100])
def test_projected_gradients_nonfinite_sample(exact_up_to: int) -> None:
    rows = decaying(30, 6)
    spoilt = torch.cat([rows[:11], torch.full((1, 6), math.nan, dtype=torch.float64), rows[11:]])
    result, expected = (spectrum_of(gradients_are(each), 6, exact_up_to) for each in (spoilt, rows))
    np.testing.assert_allclose(
        result.tables["spectrum"]["eigenvalue"][:6], expected.tables["spectrum"]["eigenvalue"][:6], rtol=1e-9
    )
    assert result.numbers["samples"] == 30
    assert result.numbers["trace"] == pytest.approx(expected.numbers["trace"], rel=1e-9)


@pytest.mark.parametrize("exact_up_to", [0, 100])
def test_projected_gradients_nonfinite_loss(exact_up_to: int) -> None:
    rows, target = decaying(30, 6), torch.zeros(30, dtype=torch.float64)
    target[11] = math.nan
    model = nn.Linear(6, 1, bias=False).double()
    result = spectrum_of(
        setting_of(model, lambda output, target: output.sum() + target, (rows,), target), 6, exact_up_to
    )
    expected = eigenvalues(torch.cat([rows[:11], rows[12:]]))
    np.testing.assert_allclose(result.tables["spectrum"]["eigenvalue"][:6], expected, rtol=1e-9)
    assert result.numbers["samples"] == 29


@pytest.mark.parametrize("exact_up_to", [0, 100])
@pytest.mark.parametrize("rows", [torch.zeros(5, 40), torch.full((5, 40), 0.1)])
def test_projected_gradients_equal_gradients(exact_up_to: int, rows: Tensor) -> None:
    result = spectrum_of(gradients_are(rows), 8, exact_up_to)
    assert result.numbers["trace"] == 0
    assert result.numbers["effective_rank"] is None
    assert not result.tables["spectrum"]["eigenvalue"].any()
    assert result.tables["spectrum"]["share"].isnan().all()


def test_projected_gradients_one_sample() -> None:
    for rows in (torch.randn(1, 4), torch.tensor([[1.0, 2], [math.nan, 1]])):
        result = spectrum_of(gradients_are(rows))
        assert result.numbers["trace"] is None
        assert result.tables == {}


def test_projected_gradients_token_losses() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    tokens, target = torch.randint(7, (10, 5)), torch.randint(7, (10, 5))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    result = spectrum_of(setting_of(model, loss, (tokens,), target, kind="token"), exact_up_to=10)
    gradients = torch.cat(
        [value.flatten(1) for value in one_sample_gradients(model, loss, (tokens,), target).values()], 1
    )
    expected = eigenvalues(gradients)[:10]
    np.testing.assert_allclose(result.tables["spectrum"]["eigenvalue"], expected, atol=1e-5 * expected[0])


@pytest.mark.parametrize("options", [{"top": 0}, {"exact_up_to": -1}])
def test_projected_gradients_options_invalid_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        CovarianceSpectrum(**options)
    with pytest.raises(ValueError, match="got 0 as dimension"):
        GradientProjection(dimension=0)
