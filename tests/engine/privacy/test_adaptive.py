"""The bound that follows a quantile of the norms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psgrad.engine.privacy.batches import batch_source
from psgrad.engine.privacy.clipping import AdaptiveBound, Clipping
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.step import private_sum
from psgrad.errors import ConfigError

pytestmark = pytest.mark.usefixtures("on_device")


def test_adaptive_bound_update_formula() -> None:
    """C exp(-eta (b - gamma)), where b is the share of norms at most C: of ten, seven are, and of three
    expected.
    """
    bound = AdaptiveBound(2.0, quantile=0.5, learning_rate=0.2, count_multiplier=10)
    below = torch.tensor([True] * 7 + [False] * 3)
    assert bound.updated(bound.count(below), 10).bound == pytest.approx(
        2.0 * math.exp(-0.2 * (0.7 - 0.5)), rel=1e-14
    )
    assert bound.updated(bound.count(below), 3).bound == pytest.approx(
        2.0 * math.exp(-0.2 * ((7 - 5) / 3 + 0.5 - 0.5)), rel=1e-14
    )


def test_adaptive_bound_empty_batch() -> None:
    bound = AdaptiveBound(2.0, quantile=0.9)
    assert bound.count(torch.zeros(0, dtype=torch.bool)) == 0
    assert bound.updated(0.0, 64).bound == pytest.approx(2.0 * math.exp(-0.2 * (0.5 - 0.9)), rel=1e-14)


@given(st.lists(st.booleans(), max_size=20), st.booleans(), st.booleans())
def test_adaptive_bound_count_sensitivity(others: list[bool], one: bool, another: bool) -> None:
    bound = AdaptiveBound(1.0)
    without, with_one, replaced = (
        bound.count(torch.tensor(below, dtype=torch.bool))
        for below in (others, [*others, one], [*others, another])
    )
    assert (
        abs(with_one - without)
        == bound.sensitivity("add_or_remove_one")
        == bound.sensitivity("zero_out")
        == 0.5
    )
    assert abs(with_one - replaced) <= bound.sensitivity("replace_one") == 1.0


def test_adaptive_bound_count_sensitivity_record_without_gradient() -> None:
    """zero_out: D' has a record without a gradient where D has any other. With the same noise, the logarithm
    of the next bound moves by the count's move over the divisor.
    """
    bound, params = AdaptiveBound(1.0, learning_rate=1.0, count_multiplier=3.0), {"weight": torch.zeros(2)}

    def following(row: list[float] | None) -> float:
        rows = torch.tensor([[0.3, 0.4], [3.0, 4.0], *([] if row is None else [row])])
        source = batch_source(lambda params, row: params["weight"] @ row, params, rows)
        generator, clipping = make_generator(seed=1), Clipping.flat(params, 1.0)
        noisy = private_sum(
            source, clipping, Noise(1.0), "zero_out", generator, adaptive=bound, expected_batch_size=8
        )
        assert noisy.following is not None
        return math.log(noisy.following.bound) * 8

    nothing = following([0.0, 0.0])
    for row in ([30.0, 40.0], [0.03, 0.04], [math.nan, 0.0], [math.inf, 0.0], None):
        assert abs(following(row) - nothing) <= bound.sensitivity("zero_out") + 1e-12, row


def test_adaptive_bound_noise_cost_formula() -> None:
    """sigma_b of the paper is the count's standard deviation where a record comes or goes; its multiplier is
    twice that.
    """
    bound = AdaptiveBound(1.0, count_multiplier=7.0)
    assert bound.standard_deviation("add_or_remove_one") == 7.0
    for relation in ("add_or_remove_one", "replace_one", "zero_out"):
        assert bound.standard_deviation(relation) / bound.sensitivity(relation) == 14.0  # type: ignore[arg-type]


def test_adaptive_bound_noise_deviation() -> None:
    bound = AdaptiveBound(1.0, learning_rate=1.0, count_multiplier=3.0)
    below = torch.tensor([True, False, True])
    generator = make_generator(seed=1)
    for relation, deviation in (("add_or_remove_one", 3.0), ("replace_one", 6.0)):
        moved = [math.log(bound.next(below, 100.0, relation, generator).bound) for _ in range(2000)]  # type: ignore[arg-type]
        noise = -torch.tensor(moved, dtype=torch.float64) * 100 - 0.5
        assert noise.mean().item() == pytest.approx(0, abs=5 * deviation / math.sqrt(2000))
        assert noise.std().item() == pytest.approx(deviation, rel=0.1)


def test_adaptive_bound_converges_to_quantile() -> None:
    torch.manual_seed(0)
    norms = torch.rand(1000, dtype=torch.float64) * 10
    bound = AdaptiveBound(0.01, quantile=0.3, learning_rate=0.3, count_multiplier=1.0)
    for _ in range(200):
        bound = bound.updated(bound.count(norms <= bound.bound), 1000)
    assert bound.bound == pytest.approx(norms.quantile(0.3).item(), rel=0.02)


@pytest.mark.parametrize("count", [1e300, -1e300])
def test_adaptive_bound_stays_finite_and_positive(count: float) -> None:
    bound = AdaptiveBound(1.0).updated(count, 1.0)
    assert bound.bound in (1e-20, 1e20)
    assert bound.updated(count, 1.0) == bound


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bound": 0.0}, "the clipping bound to start from is 0.0"),
        ({"bound": math.nan}, "the clipping bound to start from is nan"),
        ({"bound": 1.0, "quantile": 1.5}, "the quantile of the adaptive bound is 1.5"),
        ({"bound": 1.0, "learning_rate": 0.0}, "the learning rate of the adaptive bound is 0.0"),
        (
            {"bound": 1.0, "count_multiplier": -1.0},
            "the count_noise_multiplier of the adaptive bound is -1.0",
        ),
    ],
)
def test_adaptive_bound_arguments_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AdaptiveBound(**options)
