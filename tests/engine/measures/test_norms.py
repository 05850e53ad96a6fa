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
from psgrad.engine.measures.builtin.norms import GradientNorms, NormDistribution

pytestmark = pytest.mark.usefixtures("on_device")

# Half a bin of the histogram, of which there are 64 a decade.
QUANTILE_ERROR = 10 ** (0.5 / 64) - 1


def distribution(*chunks: Tensor) -> NormDistribution:
    result = NormDistribution()
    for chunk in chunks:
        result.add(chunk)
    return result


def assert_same_statistics(found: NormDistribution, values: np.ndarray) -> None:
    assert found.count == len(values)
    np.testing.assert_allclose(found.mean, values.mean(), rtol=1e-12)
    np.testing.assert_allclose(found.mean_square, np.square(values).mean(), rtol=1e-12)
    np.testing.assert_allclose(found.std, values.std(ddof=1) if len(values) > 1 else math.nan, rtol=1e-9)
    assert found.minimum == values.min()
    assert found.maximum == values.max()


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    spread=st.floats(0.1, 5),
    middle=st.floats(-8, 8),
)
def test_norm_distribution_equals_numpy(sizes: list[int], spread: float, middle: float) -> None:
    values = torch.exp(spread * torch.randn(sum(sizes), dtype=torch.float64) + middle)
    result = distribution(*values.split(sizes))
    if len(values):
        assert_same_statistics(result, values.numpy())
        for q in (0.01, 0.05, 0.5, 0.95, 1.0):
            expected = np.quantile(values.numpy(), q, method="inverted_cdf")
            assert result.quantile(q) == pytest.approx(expected, rel=QUANTILE_ERROR)


def test_norm_distribution_independent_of_chunk_order() -> None:
    values = torch.rand(1000, dtype=torch.float64) * 1e3
    one, other = distribution(*values.split(7)), distribution(*values.flip(0).split(130))
    assert_same_statistics(one, values.numpy())
    assert_same_statistics(other, values.numpy())
    assert [one.quantile(q) for q in (0.1, 0.5, 0.9)] == [other.quantile(q) for q in (0.1, 0.5, 0.9)]


def test_norm_distribution_large_mean_precision() -> None:
    values = 1e8 + torch.rand(3000, dtype=torch.float64)
    assert distribution(*values.split(100)).std == pytest.approx(values.std().item(), rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-24, 1.0, 3e23, 1e30])
def test_norm_distribution_quantiles_of_one_value(value: float) -> None:
    result = distribution(torch.full((5,), value, dtype=torch.float64))
    assert result.quantile(0.05) == result.quantile(0.5) == result.quantile(1) == value
    assert result.std == 0


def test_norm_distribution_zeros() -> None:
    result = distribution(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert result.minimum == result.quantile(0.5) == 0
    assert result.quantile(1) == pytest.approx(5, rel=QUANTILE_ERROR)


def test_norm_distribution_no_values() -> None:
    result = distribution(torch.empty(0))
    assert result.count == 0
    assert math.isnan(result.std)
    assert math.isnan(result.quantile(0.5))


def test_norm_distribution_one_value() -> None:
    assert math.isnan(distribution(torch.tensor([2.0])).std)


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
    assert {name: result.count for name, result in norms.parameters.items()} == {"weight": 4, "bias": 4}
    assert all(
        math.isfinite(result.mean) and math.isfinite(result.std) for result in norms.parameters.values()
    )


def test_norm_distribution_by_parameter_adds_up() -> None:
    norms = GradientNorms()
    columns = norms.columns(gradients_of(torch.randn(6, 3)))
    norms.keep()
    total = sum(result.mean_square for result in norms.parameters.values())
    assert columns["grad_norm"].square().mean().item() == pytest.approx(total, rel=1e-12)
    assert columns["grad_norm"].dtype == columns["loss"].dtype == torch.float64


def test_norm_distribution_counts_stored_chunks() -> None:
    norms, grads = GradientNorms(), gradients_of(torch.randn(6, 3))
    norms.columns(grads)
    norms.columns(grads)  # tried again
    assert norms.parameters == {}
    norms.keep()
    norms.keep()
    assert norms.parameters["weight"].count == 6
