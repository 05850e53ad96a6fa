"""The noise on a sum: its standard deviation is multiplier * sensitivity and nothing else, and each draw is
by itself.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from psgrad.engine.privacy.clipping import Clipping, Group
from psgrad.engine.privacy.generators import Generator, make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Relation
from psgrad.errors import ConfigError

pytestmark = pytest.mark.usefixtures("on_device")

ALPHA = 1e-4
# Two groups: the sensitivity is the root of the sum of squares, 0.5.
GROUPS = (Group("one", ("w",), 0.3), Group("two", ("v", "u"), 0.4))
CLIPPING = Clipping(GROUPS)
SIZE = 300_000


def zeros(size: int = SIZE) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(size, dtype=torch.float64) for name in ("w", "v", "u")}


def drawn(
    multiplier: float, relation: Relation, generator: Generator, size: int = SIZE
) -> dict[str, torch.Tensor]:
    return Noise(multiplier).add(zeros(size), CLIPPING, relation, generator)


# -- how much ------------------------------------------------------------------------------------------------


def deviates(values: np.ndarray, deviation: float) -> float:
    """The p-value of Kolmogorov and Smirnov's test against N(0, deviation^2)."""
    return float(stats.kstest(values, stats.norm(0, deviation).cdf).pvalue)


@pytest.mark.long
@pytest.mark.parametrize(
    ("relation", "sensitivity"), [("add_or_remove_one", 0.5), ("zero_out", 0.5), ("replace_one", 1.0)]
)
def test_noise_standard_deviation(relation: Relation, sensitivity: float) -> None:
    values = drawn(1.3, relation, make_generator(seed=1))["v"].double().numpy()
    assert deviates(values, 1.3 * sensitivity) > ALPHA
    # The same test has the power to see 5 % too much or too little.
    assert deviates(values, 1.3 * sensitivity * 1.05) < 1e-6
    assert deviates(values, 1.3 * sensitivity / 1.05) < 1e-6


def test_noise_of_every_tensor() -> None:
    noisy = drawn(2.0, "add_or_remove_one", make_generator(seed=2))
    for value in noisy.values():
        assert deviates(value.double().numpy(), 1.0) > ALPHA
    # The released vector as a whole: its norm is that of so many coordinates.
    square = sum(float(value.double().square().sum()) for value in noisy.values())
    assert ALPHA < stats.chi2(3 * SIZE).cdf(square) < 1 - ALPHA


# -- by itself -----------------------------------------------------------------------------------------------


def uncorrelated(one: torch.Tensor, other: torch.Tensor) -> bool:
    correlations = [
        np.corrcoef(way(one.double().numpy().ravel()), way(other.double().numpy().ravel()))[0, 1]
        for way in (np.asarray, np.abs)
    ]
    return all(abs(value) * math.sqrt(one.numel()) < stats.norm.isf(ALPHA / 2) for value in correlations)


def test_noise_independent_between_tensors_steps_and_generators() -> None:
    def add(generator: Generator) -> dict[str, torch.Tensor]:
        return drawn(1.0, "add_or_remove_one", generator, size=20_000)

    generator = make_generator(seed=3)
    first, second = add(generator), add(generator)
    resumed = add(make_generator(seed=3, position=2))
    draws = [run[name] for run in (first, second, resumed) for name in run]
    for place, one in enumerate(draws):
        for other in draws[:place]:
            assert uncorrelated(one, other)
            assert not torch.equal(one, other)


def test_noise_after_resume_differs() -> None:
    """Without a seed: what a generator made anew gives has nothing in common with what was there before."""
    runs = [drawn(1.0, "add_or_remove_one", make_generator(), size=1000)["w"] for _ in range(4)]
    for place, one in enumerate(runs):
        for other in runs[:place]:
            assert not set(one.tolist()) >= set(other.tolist())
            assert (one == other).float().mean() < 0.01


# -- what it is added to -------------------------------------------------------------------------------------


def test_noise_leaves_sums() -> None:
    dtype = torch.float64
    clipping = Clipping.flat(["w", "b"], 1.0)
    sums = {"w": torch.full((4, 3), 1000.0, dtype=dtype).t(), "b": torch.tensor(5.0, dtype=dtype)}
    before = {name: value.clone() for name, value in sums.items()}
    noisy = Noise(1.0).add(sums, clipping, "add_or_remove_one", make_generator(seed=4))
    alone = Noise(1.0).add(
        {name: value * 0 for name, value in sums.items()},
        clipping,
        "add_or_remove_one",
        make_generator(seed=4),
    )
    for name, value in sums.items():
        assert torch.equal(value, before[name])
        assert noisy[name].dtype == dtype
        assert noisy[name].shape == value.shape
        torch.testing.assert_close(noisy[name] - alone[name], value, rtol=1e-6, atol=0)
        assert not torch.equal(noisy[name], value)


def test_noise_multiplier_zero() -> None:
    sums = {name: value + 3 for name, value in zeros(5).items()}
    noisy = Noise(0.0).add(sums, CLIPPING, "add_or_remove_one", make_generator())
    for name, value in noisy.items():
        assert value.tolist() == [3.0] * 5
        assert value.data_ptr() != sums[name].data_ptr()


def test_noise_empty_tensor() -> None:
    noisy = drawn(1.0, "add_or_remove_one", make_generator(), size=0)
    assert {name: value.shape for name, value in noisy.items()} == dict.fromkeys(("w", "v", "u"), (0,))


def test_noise_device_of_released_tensors(device: torch.device) -> None:
    sums = {name: value.to(device) for name, value in zeros(10).items()}
    noisy = Noise(1.0).add(sums, CLIPPING, "add_or_remove_one", make_generator())
    assert all(value.device == sums[name].device for name, value in noisy.items())


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplier", [-0.1, math.inf, math.nan])
def test_noise_multiplier_refused(multiplier: float) -> None:
    with pytest.raises(ConfigError, match=f"the noise multiplier is {multiplier};"):
        Noise(multiplier)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_noise_half_precision_sums_refused(dtype: torch.dtype) -> None:
    sums = {**zeros(3), "u": torch.zeros(3, dtype=dtype)}
    with pytest.raises(ConfigError) as caught:
        Noise(1.0).add(sums, CLIPPING, "add_or_remove_one", make_generator())
    error = caught.value
    assert error.message == f"the sum of u is {dtype}"
    assert "sum in float64" in str(error.hint)
