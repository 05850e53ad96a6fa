"""Released numbers on a public grid: which values can come out does not depend on a record, and their
probabilities are the Gaussian's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from psgrad.engine.privacy import rounding
from psgrad.engine.privacy.batches import GradientSource, batch_source
from psgrad.engine.privacy.box_muller import Use
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import Generator, make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.rounding import grid_of, noisy, residual_epsilon, to_nearest
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.step import PrivateTraining, private_sum
from psgrad.errors import ConfigError
from tests.engine.privacy.planted import normals

pytestmark = pytest.mark.usefixtures("on_device")

ALPHA = 1e-4
EVERY = Sampling("poisson", sample_rate=1.0)
Released = Callable[[torch.dtype, int, bool, Generator], Tensor]


class Draws(Generator):
    """Gives these normals, one after another."""

    name, secure = "chosen", False

    def __init__(self, values: Sequence[float]) -> None:
        self.values = np.array(values)

    def uint64(self, n: int) -> np.ndarray:
        raise AssertionError("normals alone are drawn")

    def normal_blocks(self, total: int, deviation: float, use: Use) -> None:
        taken, self.values = self.values[:total], self.values[total:]
        use(0, deviation * taken)


# -- the attack ----------------------------------------------------------------------------------------------


OUTPUTS, MULTIPLIER = 12_000, 2.0


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(params["w"] @ x).sum()


def columns_source(params: dict[str, Tensor], target: bool, seed: int) -> GradientSource:
    """20 records whose last feature is zero, and one, the target, that alone has something there."""
    rows = torch.randn(21, 4, generator=torch.Generator().manual_seed(seed), dtype=params["w"].dtype)
    rows[:20, -1], rows[20, -1] = 0, 3
    return batch_source(loss, params, rows if target else rows[:20])


def finest(values: Tensor) -> int:
    """The smallest place of a bit that is set in any of these numbers, as an exponent of 2."""
    fractions, exponents = np.frexp(values.double().numpy()[values.numpy() != 0])
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    return int((exponents - 53 + np.log2((mantissas & -mantissas).astype(np.float64)).astype(np.int64)).min())


def memberships_guessed(released: Released, dtype: torch.dtype, games: int = 40) -> int:
    """How many of so many coins the best rule of this kind gets right: a column whose finest bit is above a
    threshold is the target's.
    """
    coins = np.random.default_rng(5).random(games) < 0.5
    places = [
        finest(released(dtype, seed, bool(coin), make_generator(seed=seed)))
        for seed, coin in enumerate(coins)
    ]
    return max(int(np.count_nonzero((np.array(places) > threshold) == coins)) for threshold in range(-90, 10))


def noisy_column(dtype: torch.dtype, seed: int, target: bool, generator: Generator) -> Tensor:
    """The last column of a released noisy sum."""
    params = {"w": torch.zeros(OUTPUTS, 4, dtype=dtype)}
    source = columns_source(params, target, seed)
    return private_sum(
        source, Clipping.flat(params, 1.0), Noise(MULTIPLIER), "add_or_remove_one", generator
    ).sums["w"][:, -1]


def weights_column(dtype: torch.dtype, seed: int, target: bool, generator: Generator) -> Tensor:
    """What plain SGD added to the column, from the weights before and after it."""
    # a difference of weights then has all bits that the update had
    weights = nn.Parameter(torch.zeros(OUTPUTS, 4, dtype=dtype))
    training = PrivateTraining(
        {"w": weights},
        lambda drawn: columns_source({"w": weights.detach()}, target, seed),
        21,
        clipping=Clipping.flat(["w"], 1.0),
        noise=Noise(MULTIPLIER),
        sampling=EVERY,
        relation="add_or_remove_one",
        expected_batch_size=16.0,
        optimizer=torch.optim.SGD([weights], lr=0.5),
        generator=generator,
    )
    training.step()
    return -weights.detach()[:, -1]


def unrounded(values: Tensor, deviation: float, generator: Generator) -> Tensor:
    """Noise in the sum's own type, and no grid: what releases must not be."""
    return values + deviation * normals(generator, *values.shape).to(values)


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("released", "dtype"),
    [(noisy_column, torch.float32), (noisy_column, torch.float64), (weights_column, torch.float64)],
)
def test_noisy_bits_do_not_reveal_membership(
    released: Released, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column that one record alone fills: without the rounding, its finest bits tell in nearly every game
    whether the record is there.
    """
    assert memberships_guessed(released, dtype) < 31  # 40 coins come out so, or better, once in 3,000 times
    monkeypatch.setattr("psgrad.engine.privacy.noise.noisy", unrounded)
    assert memberships_guessed(released, dtype) >= 39


@given(st.floats(-3, 3), st.sampled_from([0.4, 1.0, 1.94, 37.0]), st.integers(-3000, 3000))
def test_noisy_reaches_every_step(value: float, deviation: float, wanted: int) -> None:
    """The values that can come out are those of the grid, whatever is summed: some draw leads from any value
    to any step.
    """
    grid = grid_of(deviation)
    drawn = (wanted * grid - value) / deviation
    released = noisy(torch.tensor([value], dtype=torch.float64), deviation, Draws([drawn]))
    assert released.item() == wanted * grid
    assert math.copysign(1, released.item()) == (1 if wanted >= 0 else -1)


@pytest.mark.parametrize("value", [0.0, -0.0, -1e-5, 1e-5, -1e-300])
def test_noisy_zero_has_no_sign(value: float) -> None:
    for drawn in (0.0, -0.0, -1e-6, 1e-6):
        released = noisy(torch.tensor([value], dtype=torch.float64), 1.0, Draws([drawn]))
        assert (released.item(), math.copysign(1, released.item())) == (0.0, 1.0)


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**32),
)
def test_noisy_rounds_to_nearest_step(values: list[float], deviation: float, seed: int) -> None:
    """Beside exact arithmetic, where the sum is nearer to one step than rounding can have moved it."""
    drawn = normals(make_generator(seed=seed), len(values))
    grid = grid_of(deviation)
    released = noisy(torch.tensor(values, dtype=torch.float64), deviation, make_generator(seed=seed))
    for value, normal, result in zip(values, drawn.tolist(), released.tolist(), strict=True):
        exact = (Fraction(value) + Fraction(deviation) * Fraction(normal)) / Fraction(grid)
        assert abs(Fraction(result) / Fraction(grid) - exact) <= Fraction(1, 2) + Fraction(1, 2**33)
        assert (result / grid).is_integer()


def test_noisy_step_probabilities() -> None:
    """Sums between two steps move no probability: the share of each step is that of the Gaussian around the
    sum itself.
    """
    deviation, n = 1.0, 400_000
    for place, value in enumerate((0.0, grid_of(1.0) * 0.3, 12345.678)):
        released = noisy(torch.full((n,), value, dtype=torch.float64), deviation, make_generator(seed=place))
        steps = ((released - math.floor(value)) / grid_of(1.0)).numpy()
        rest = value - math.floor(value)
        edges = np.array([-np.inf, *np.arange(-3, 3.01, 0.25), np.inf])
        within = np.floor(edges[1:-1] / grid_of(1.0)) + 0.5  # between two steps
        probabilities = np.diff([0.0, *stats.norm.cdf(within * grid_of(1.0) - rest), 1.0])
        counts = np.histogram(steps, [-np.inf, *within, np.inf])[0]
        assert stats.chisquare(counts, n * probabilities).pvalue > ALPHA


def test_to_nearest_large_sum_precision() -> None:
    """A sum of 2^40 steps is set aside before the noise is rounded."""
    for grid in (1.0, 2.0**-900, 2.0**880):
        for off, expected in ((-(2.0**-50), 2.0**40), (2.0**-50, 2.0**40 + 1)):
            value, drawn = (np.array([number]) * grid for number in (2.0**40 + 0.25, 0.25 + off))
            to_nearest(value, drawn, grid)
            assert drawn.item() == expected * grid


@given(
    st.lists(st.tuples(st.floats(-(2.0**18), 2.0**18), st.floats(-1e5, 1e5)), min_size=1, max_size=20),
    st.sampled_from([2.0**-880, 2.0**-13, 1.0, 2.0**880]),
)
def test_to_nearest_small_and_large_sums(numbers: list[tuple[float, float]], grid: float) -> None:
    """A sum below 2^18 steps is not taken apart, one above it is: the same step comes out, but where two are
    as near.
    """
    values, drawn = np.array(numbers).T * grid
    small, large = drawn.copy(), np.append(drawn, 0.0)
    to_nearest(values, small, grid)
    to_nearest(np.append(values, 2.0**40 * grid), large, grid)
    whole = (values / grid + drawn / grid) % 1
    assert (small == large[:-1])[abs(whole - 0.5) > 2.0**-33].all()
    assert (abs(small - large[:-1]) <= grid).all()


@pytest.mark.parametrize(
    ("deviation", "grid"),
    [(1.0, 2.0**-12), (1.999, 2.0**-12), (2.0, 2.0**-11), (0.7, 2.0**-13), (2.0**-800, 2.0**-812)],
)
def test_grid_of_is_a_power_of_two_near_a_4096th(deviation: float, grid: float) -> None:
    assert grid_of(deviation) == grid


@pytest.mark.parametrize("deviation", [0.0, -1.0, 1e-320, math.inf, math.nan])
def test_grid_of_refused(deviation: float) -> None:
    with pytest.raises(ConfigError) as caught:
        grid_of(deviation)
    assert "standard deviation" in caught.value.message
    assert caught.value.hint


def test_residual_epsilon_grows_as_square_root() -> None:
    digits = residual_epsilon(29_914 * 150, 1e-5)
    assert 1e-6 < digits < 4e-5
    assert residual_epsilon(4 * 29_914 * 150, 1e-5) == pytest.approx(2 * digits, rel=1e-6)
    assert residual_epsilon(10**7 * 1000, 1e-9) < 2e-3
    assert residual_epsilon(0, 1e-5) == 0


def test_residual_epsilon_bounds_relative_error() -> None:
    """Probabilities of steps that are all off by a factor 1 +- eta, alternately: the ratio of 4,000 of them
    keeps to the bound.
    """
    random, eta, numbers, delta = np.random.default_rng(0), rounding._OFF, 4000, 1e-3
    signs = random.integers(0, 2, (2000, numbers)) * 2 - 1  # of which one comes out as often as the other
    ratios = eta * signs.sum(1)
    assert np.abs(ratios).max() < residual_epsilon(numbers, delta) / 2
