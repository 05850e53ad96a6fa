"""The distribution of norms that pass by once, beside numpy on all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.measures.builtin.norms import Distributions, GradientNorms, NormDistributions

pytestmark = pytest.mark.usefixtures("on_device")

# Half a bin of the histogram, of which there are 64 a decade.
QUANTILE_ERROR = 10 ** (0.5 / 64) - 1


def distributions(*chunks: Tensor) -> Distributions:
    """Of chunks [streams, n] or [n]."""
    rows = [torch.atleast_2d(chunk).double() for chunk in chunks]
    result = NormDistributions(len(rows[0]))
    result._MOST_WAITING = 50
    for chunk in rows:
        result.add(chunk.square(), torch.zeros(chunk.shape[1]))
    return result.found()


def assert_same_statistics(found: Distributions, values: np.ndarray) -> None:
    """values: [streams, n]."""
    assert found.count == values.shape[1]
    np.testing.assert_allclose(found.mean, values.mean(1), rtol=1e-12)
    np.testing.assert_allclose(found.mean_square, np.square(values).mean(1), rtol=1e-12)
    expected = values.std(1, ddof=1) if found.count > 1 else np.full(len(values), math.nan)
    np.testing.assert_allclose(found.std, expected, rtol=1e-9)
    np.testing.assert_allclose(found.minimum, values.min(1), rtol=1e-15)
    np.testing.assert_allclose(found.maximum, values.max(1), rtol=1e-15)


@given(
    streams=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    spread=st.floats(0.1, 5),
    middle=st.floats(-8, 8),
)
def test_norm_distributions_equal_numpy(streams: int, sizes: list[int], spread: float, middle: float) -> None:
    values = torch.exp(spread * torch.randn(streams, sum(sizes), dtype=torch.float64) + middle)
    result = distributions(*values.split(sizes, 1))
    if values.shape[1]:
        assert_same_statistics(result, values.numpy())
        for q in (0.01, 0.05, 0.5, 0.95, 1.0):
            expected = np.quantile(values.numpy(), q, axis=1, method="inverted_cdf")
            np.testing.assert_allclose(result.quantile(q), expected, rtol=QUANTILE_ERROR)


def test_norm_distributions_merged_and_restored() -> None:
    values = torch.rand(3, 50, dtype=torch.float64)
    one, other, third = (NormDistributions(3) for _ in range(3))
    one._MOST_WAITING = 20
    for chunk in values[:, :20].split(3, 1):
        one.add(chunk.square(), torch.zeros(chunk.shape[1]))
    other.add(values[:, 20:].square(), torch.zeros(30))
    third.restore(one.state())
    third.merge(other)
    assert_same_statistics(third.found(), values.numpy())
    assert third.found().quantile(0.3).tolist() == distributions(values).quantile(0.3).tolist()
    third.merge(NormDistributions(3))
    assert third.found().count == 50


def test_norm_distribution_large_mean_precision() -> None:
    values = 1e8 + torch.rand(3000, dtype=torch.float64)
    assert distributions(*values.split(100)).std.item() == pytest.approx(values.std().item(), rel=1e-6)


def test_norm_distribution_zeros() -> None:
    result = distributions(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert result.minimum == result.quantile(0.5) == 0
    assert result.quantile(1).item() == pytest.approx(5, rel=QUANTILE_ERROR)


def test_norm_distribution_no_values() -> None:
    result = distributions(torch.empty(0))
    assert result.count == 0
    assert np.isnan(result.std).all()
    assert np.isnan(result.quantile(0.5)).all()


def test_norm_distribution_one_value() -> None:
    assert np.isnan(distributions(torch.tensor([2.0])).std).all()


def gradients_of(inputs: Tensor) -> object:
    objective = Objective(nn.Linear(3, 1), lambda output, target: output.square().sum())
    return per_sample_gradients(
        objective.loss, objective.params, (inputs,), None, in_dims=(0, None), has_aux=True
    )


def test_norm_distribution_nonfinite_rows() -> None:
    inputs = torch.randn(6, 3)
    inputs[2, 0], inputs[4, 1] = math.nan, math.inf
    norms = GradientNorms()
    columns = norms.columns(gradients_of(inputs))
    norms.keep()
    assert torch.isfinite(columns["grad_norm"]).tolist() == [True, True, False, True, False, True]
    assert (norms.names, norms.distributions.found().count) == (["weight", "bias"], 4)
    assert np.isfinite(norms.distributions.found().mean).all()
    assert np.isfinite(norms.distributions.found().std).all()


def test_norm_distribution_by_parameter_adds_up() -> None:
    norms = GradientNorms()
    columns = norms.columns(gradients_of(torch.randn(6, 3)))
    norms.keep()
    total = norms.distributions.found().mean_square.sum()
    assert columns["grad_norm"].square().mean().item() == pytest.approx(total, rel=1e-12)
    assert columns["grad_norm"].dtype == columns["loss"].dtype == torch.float64
