"""The discrete Gaussian: its probabilities, its comparisons where 64 bits don't settle them, and the grid
that keeps the bound.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import stats

from psgrad.config import PrivacyConfig
from psgrad.engine.privacy import discrete
from psgrad.engine.privacy.discrete import (
    LARGEST_BOUND,
    default_grid,
    discrete_gaussian,
    exact_exceeds,
    exact_floor,
    round_to_grid,
    tightened,
)
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.errors import ConfigError
from psgrad.workflows.private_setup import clipping_of
from tests.engine.privacy.planted import PlantedGenerator

pytestmark = pytest.mark.usefixtures("on_device")

ALPHA = 1e-4
SIGMAS = (0.3, 0.5, 1.0, 2.5, 7.0, 1e3, 2.0**31 + 0.7, 1e12, 2.0**44)


# -- the distribution ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.25, 0.5, 0.999, 1.0, 1.7, 3.0, 6.2])
def test_discrete_gaussian_small_deviation_probabilities(sigma: float) -> None:
    n = 100_000
    drawn = discrete_gaussian(n, sigma, make_generator("aes", seed=1))
    assert drawn.dtype == np.int64
    wide = np.arange(-math.ceil(40 * sigma) - 5, math.ceil(40 * sigma) + 6)
    probabilities = np.exp(-(wide**2) / (2 * sigma**2))
    probabilities /= probabilities.sum()
    # Values that are expected ten times at least, by themselves; the tails on both sides together.
    common = probabilities * n >= 10
    seen = [int((drawn == value).sum()) for value in wide[common]]
    expected = list(probabilities[common] * n)
    seen.append(n - sum(seen))
    expected.append(n - sum(expected))
    if expected[-1] < 5:
        seen[-2:], expected[-2:] = [sum(seen[-2:])], [sum(expected[-2:])]
    assert stats.chisquare(seen, expected).pvalue > ALPHA


@pytest.mark.parametrize("sigma", [1e3, 123456.789, 2.0**31, 2.0**44])
def test_discrete_gaussian_large_deviation_is_normal(sigma: float) -> None:
    # Steps of 1 / sigma are far below what this many values can show.
    n = 40_000
    drawn = discrete_gaussian(n, sigma, make_generator("aes", seed=2)).astype(np.float64)
    assert stats.kstest(drawn, stats.norm(0, sigma).cdf).pvalue > ALPHA
    assert stats.kstest(drawn, stats.norm(0, sigma * 1.05).cdf).pvalue < ALPHA
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) * math.sqrt(n) < stats.norm.isf(ALPHA / 2)
    # The last digits, where the floor is, are uniform.
    if sigma > 1e5:
        assert stats.chisquare(np.bincount(drawn.astype(np.int64) % 16, minlength=16)).pvalue > ALPHA


def test_discrete_gaussian_reaches_every_integer() -> None:
    drawn = discrete_gaussian(20_000, 3.0, make_generator("aes", seed=3))
    assert set(range(-9, 10)) <= set(drawn.tolist())


@pytest.mark.parametrize("count", [0, 1, 5, 70_000])
def test_discrete_gaussian_number_of_draws(count: int) -> None:
    assert discrete_gaussian(count, 4.0, make_generator("aes", seed=4)).shape == (count,)


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, 2.0**44 * 1.001, 1e-12])
def test_discrete_gaussian_deviation_refused(sigma: float) -> None:
    with pytest.raises(ConfigError) as caught:
        discrete_gaussian(3, sigma, make_generator("aes"))
    assert f"discrete noise of standard deviation {sigma:g}" in caught.value.arrived
    assert "1.8e+13 steps" in str(caught.value.expected)
    assert "grid" in str(caught.value.next_step)


# -- exact comparisons ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", SIGMAS)
def test_discrete_gaussian_float_equals_exact_comparison(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 1500
    quick = discrete._kept(tried, sigma, make_generator("aes", seed=5))
    for name in ("_SHORT_SIZE", "_SHORT_KEEP"):
        monkeypatch.setattr(
            discrete, name, np.uint64(2**64 - 1)
        )  # no prefix is long enough for floating point
    assert discrete._kept(tried, sigma, make_generator("aes", seed=5)).tolist() == quick.tolist()
    assert len(quick) > tried / 8


def word_at(value: mpmath.mpf, words: int) -> list[int]:
    """The first bits of a number in (0, 1), 64 a word."""
    whole = int(mpmath.floor(value * mpmath.mpf(2) ** (64 * words)))
    return [(whole >> (64 * place)) & (2**64 - 1) for place in range(words - 1, -1, -1)]


@pytest.mark.parametrize(
    ("scale", "size"),
    [(1, 1), (1, 3), (7, 2), (1000, 123), (2**31, 2**30 + 1), (2**40, 2**41 + 12345), (2**44, 3)],
)
@pytest.mark.parametrize("agreeing", [1, 2, 3])
def test_discrete_gaussian_further_bits_of_size(scale: int, size: int, agreeing: int) -> None:
    """U agrees with exp(-size / scale), where floor(scale * E) jumps, in one word, in two, in three; the next
    word decides.
    """
    with mpmath.workdps(120):
        words = word_at(mpmath.exp(-mpmath.mpf(size) / scale), agreeing + 1)
    above, below = [*words[:agreeing], 2**64 - 1], [*words[:agreeing], 0]
    assert words[agreeing] not in (0, 2**64 - 1)
    for bits, expected in ((above, size - 1), (below, size)):
        generator = PlantedGenerator(bits[1:])
        assert exact_floor(bits[0], 64, scale, generator) == expected
        assert generator.words == []  # no bit more was taken than was needed, and none less


@pytest.mark.parametrize(
    "bound", [Fraction(1, 3), Fraction(1, 10**9), Fraction(7), Fraction(355, 113), Fraction(0.1) ** 2]
)
@pytest.mark.parametrize("agreeing", [1, 2, 3])
def test_discrete_gaussian_further_bits_of_acceptance(bound: Fraction, agreeing: int) -> None:
    with mpmath.workdps(120):
        words = word_at(mpmath.exp(-mpmath.mpf(bound.numerator) / bound.denominator), agreeing + 1)
    for last, expected in ((2**64 - 1, False), (0, True)):
        generator = PlantedGenerator([*words[1:agreeing], last])
        assert exact_exceeds(words[0], 64, bound, generator) is expected
        assert generator.words == []


@given(
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**44),
    st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4),
)
@example(0, 2**40, [0, 0, 5, 5])
@example(2**64 - 1, 2**40, [2**64 - 1, 7, 7, 7])
@example(2**63, 3, [0, 0, 0, 1])
def test_discrete_gaussian_floor_precision(prefix: int, scale: int, more: list[int]) -> None:
    more = [*more, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9]  # bits that settle what zeros leave open
    whole = prefix
    for word in more:
        whole = (whole << 64) | word
    with mpmath.workdps(160):
        expected = int(mpmath.floor(-mpmath.log((mpmath.mpf(whole) + 0.5) / mpmath.mpf(2) ** 448) * scale))
    assert exact_floor(prefix, 64, scale, PlantedGenerator(more)) == expected


def test_discrete_rounding_bound_met_exactly() -> None:
    """E > 0 always: no further bit may be needed for that."""
    for prefix in (0, 2**63, 2**64 - 2):
        assert exact_exceeds(prefix, 64, Fraction(0), PlantedGenerator([]))


@pytest.mark.parametrize("scale", [1, 50, 2**31, 2**44])
def test_discrete_gaussian_planted_prefixes_near_edges(scale: int) -> None:
    """The vectorised computation on prefixes around the jumps of floor(t E), where floating point errs: all
    sizes are the exact ones.
    """
    sigma = scale - 0.5
    sizes = []
    with mpmath.workdps(60):
        for size in (1, 2, scale // 2 + 1, scale, 2 * scale + 1, 5 * scale, 9 * scale):
            edge = word_at(mpmath.exp(-mpmath.mpf(size) / scale), 1)[0]
            sizes += [min(edge + off, 2**64 - 1) for off in (-3000, -2, -1, 0, 1, 2, 3000)]
    # Everything is kept: E is as large as it gets but in no need of a decision of its own; the sign is plus.
    n = len(sizes)
    settled = [2 << 40] * n
    further = [2**63] * 400

    def kept() -> list[int]:
        return discrete._kept(n, sigma, PlantedGenerator([*sizes, *settled, *further])).tolist()

    def exactly() -> list[int]:
        generator = PlantedGenerator(further)
        absolutes = [exact_floor(word, 64, scale, generator) for word in sizes]
        return [
            size
            for size in absolutes
            if exact_exceeds(settled[0] >> 1, 63, discrete._exponent(size, sigma), generator)
        ]

    result = kept()
    assert result == exactly()
    assert len(result) > n / 2


def test_discrete_gaussian_short_prefixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [0, 1, 5, 2**20 + 1, 2**49 + 12345, 2**60 + 12345]
    settled = [1 << 62, 3 << 61, 5, 2**40, 2**63 + 7, 2**62 + 9]
    asked: dict[str, list[int]] = {"exact_floor": [], "exact_exceeds": []}
    for name, prefixes in asked.items():
        exact = getattr(discrete, name)

        def noted(prefix: int, *rest: Any, exact: Any = exact, prefixes: list[int] = prefixes) -> Any:
            prefixes.append(prefix)
            return exact(prefix, *rest)

        monkeypatch.setattr(discrete, name, noted)
    discrete._kept(6, 1e6 + 0.3, PlantedGenerator([*sizes, *settled, *[2**63 + 1] * 100]))
    assert asked == {"exact_floor": sizes[:5], "exact_exceeds": [2, 2**39]}


# -- the grid ------------------------------------------------------------------------------------------------


def norm_on(grid: float, steps: torch.Tensor) -> float:
    """The norm of a rounded record, with integers up to the root."""
    return math.sqrt(sum(int(step) ** 2 for step in steps.tolist())) * grid


@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=60),
    st.floats(1e-6, 1e6),
    st.floats(2.0**-31, 0.5),
    st.sampled_from([torch.float32, torch.float64]),
)
@example([0.5] * 4, 1.0, 0.25, torch.float64)
def test_discrete_rounding_keeps_bound(
    values: list[float], bound: float, relative: float, dtype: torch.dtype
) -> None:
    grid = relative * bound / math.sqrt(len(values))
    assume(bound <= LARGEST_BOUND * grid)  # finer grids are refused
    gradient = torch.tensor(values, dtype=torch.float64)
    limit = tightened(bound, len(values), grid)
    norm = float(gradient.norm())
    # As long as it may be, or shorter; in float32 rounded towards zero.
    clipped = gradient * min(1.0, limit / norm) * (1 - 2.0**-50) if norm else gradient
    if dtype == torch.float32:
        clipped = (clipped * (1 - 2.0**-23)).to(dtype)
    assert norm_on(grid, round_to_grid(clipped, grid)) <= bound


@given(st.integers(1, 200), st.floats(2.0**-20, 1.9), st.integers(0, 2**31))
def test_discrete_rounding_ties_and_corners(dimensions: int, relative: float, seed: int) -> None:
    """Every coordinate half a step off, all to the same side: the worst that rounding can do."""
    bound = 1.0
    grid = relative * bound / math.sqrt(dimensions)
    limit = tightened(bound, dimensions, grid)
    generator = torch.Generator().manual_seed(seed)
    steps = (
        torch.rand(dimensions, generator=generator, dtype=torch.float64)
        * 2
        * limit
        / grid
        / math.sqrt(dimensions)
    )
    for half in (0.5, 0.5 + 1e-9, 0.5 - 1e-9):
        corner = (steps.floor() + half) * grid
        corner *= min(1.0, limit / float(corner.norm())) * (1 - 2.0**-50)
        assert norm_on(grid, round_to_grid(corner, grid)) <= bound


@given(st.integers(1, 10**9), st.floats(1e-10, 1e10), st.floats(2.0**-31, 1e-3))
def test_discrete_rounding_tightened_bound(dimensions: int, bound: float, relative: float) -> None:
    grid = relative * bound / math.sqrt(dimensions)
    if bound > discrete.LARGEST_BOUND * grid:
        return
    exact = bound - math.sqrt(dimensions) * grid / 2
    assert exact * (1 - 1e-6) < tightened(bound, dimensions, grid) < exact


def test_discrete_rounding_to_nearest() -> None:
    gradient = torch.tensor([0.0, 0.24, 0.25, 0.26, 0.75, -0.25, -0.75, -1.1, 1e9])
    assert round_to_grid(gradient, 0.5).tolist() == [0, 0, 0, 1, 2, 0, -2, -2, 2 * 10**9]
    assert round_to_grid(gradient, 0.5).dtype == torch.int64
    assert round_to_grid(gradient.bfloat16(), 0.5).dtype == torch.int64


def test_discrete_rounding_nonfinite_record() -> None:
    gradient = torch.tensor([math.nan, math.inf, -math.inf, 1.0]) * torch.tensor([0.0, 0.0, 0.0, 0.0])
    assert round_to_grid(gradient, 0.5).tolist() == [0, 0, 0, 0]
    assert round_to_grid(torch.tensor([math.inf, -math.inf]), 0.5).tolist() == [0, 0]


@given(st.floats(1e-19, 1e19), st.integers(1, 10**11))
def test_discrete_default_grid(bound: float, dimensions: int) -> None:
    grid = default_grid(bound, dimensions)
    assert math.frexp(grid)[0] == 0.5  # a power of two
    assert tightened(bound, dimensions, grid) > bound * (1 - 1e-3)
    # 2^31 records at their bound, and the largest noise there is.
    assert Fraction(bound) / Fraction(grid) * 2**31 + 2**51 < 2**63


def test_discrete_grid_refused() -> None:
    with pytest.raises(ConfigError) as coarse:
        tightened(1.0, 100, 0.25)
    assert "too coarse for the clipping norm 1 in 100 coordinates" in coarse.value.arrived
    largest = float(str(coarse.value.expected).removeprefix("a grid below "))
    assert largest == pytest.approx(0.2, rel=1e-5)
    assert tightened(1.0, 100, largest * 0.99) > 0
    with pytest.raises(ConfigError) as fine:
        tightened(1.0, 100, 2.0**-32)
    assert "too fine for the clipping norm 1" in fine.value.arrived
    assert tightened(1.0, 100, 2.0**-31) > 0
    with pytest.raises(ConfigError) as many:
        default_grid(1.0, 10**14)
    assert "100000000000000 coordinates on a grid cost more than a thousandth" in many.value.arrived


def test_discrete_grid_of_groups() -> None:
    privacy = PrivacyConfig.model_validate(
        {
            "steps": 10,
            "delta": 1e-5,
            "expected_batch_size": 10,
            "sampling": {"scheme": "poisson", "sample_rate": 0.1},
            "clipping": {"groups": {"w": 1e-3, "*": 2.0}},
            "noise": {"multiplier": 1.0, "mechanism": "discrete_gaussian"},
            "optimizer": {"name": "SGD", "kwargs": {"lr": 0.1}},
        }
    )
    parameters = {name: torch.nn.Parameter(torch.zeros(1000)) for name in ("w", "v")}
    clipping = clipping_of(privacy, parameters)
    assert clipping.grid is not None
    for group in clipping.groups:
        assert tightened(group.bound, 1000, clipping.grid) == pytest.approx(group.bound, rel=1e-3)
    sums = {name: torch.zeros(1000, dtype=torch.int64) for name in parameters}
    noisy = Noise(1.0, "discrete_gaussian").add(
        sums, clipping, "add_or_remove_one", make_generator("aes", seed=6)
    )
    assert (
        ALPHA
        < stats.chi2(2000).cdf(sum(float(value.square().sum()) for value in noisy.values()) / (4 + 1e-6))
        < 1 - ALPHA
    )
