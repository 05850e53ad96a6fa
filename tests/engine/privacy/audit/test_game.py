"""The whole game: a mechanism that is right passes, each planted mistake is found, and canaries are the
records that they claim to be.

All draws are seeded, so nothing here fails by chance. A level of 5 % allows a correct mechanism to be refuted
in one of twenty seeds.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom

from psgrad.engine.privacy.accounting import tightest_epsilon
from psgrad.engine.privacy.audit import AuditVerdict, Canaries, judge, with_canaries
from psgrad.engine.privacy.audit.game import evidence
from psgrad.engine.privacy.batches import GradientSource, batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.rounding import grid_of
from psgrad.engine.privacy.sampling import Sampling
from psgrad.errors import ConfigError
from tests.engine.privacy.audit.mechanisms import (
    FLAT,
    PARAMETERS,
    Game,
    HalfNoise,
)

DELTA = 1e-5
PER_PARAMETER = Clipping.per_parameter(PARAMETERS, 0.5)


def verdict(game: Game) -> AuditVerdict:
    events = game.events()
    return judge(game.play(), events, DELTA, 0.95)


# -- what is right passes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "game",
    [
        Game(FLAT),
        Game(FLAT, sampling=Sampling("poisson", sample_rate=0.2), steps=10),
        Game(FLAT, sampling=Sampling("poisson", sample_rate=0.5), relation="replace_one", steps=3),
        Game(FLAT, sampling=Sampling("fixed", batch_size=9), relation="replace_one", steps=2),
        Game(FLAT, sampling=Sampling("fixed", batch_size=9), relation="zero_out"),
        Game(PER_PARAMETER),
        Game(FLAT, multiplier=4.0, seed=2),  # of seeds 0 to 5 it is found by half
    ],
    ids=[
        "plain",
        "poisson",
        "replace",
        "fixed",
        "zero out",
        "groups",
        "much noise",
    ],
)
def test_audit_game_correct_mechanism(game: Game) -> None:
    result, played = verdict(game), game.play()
    assert result.declared
    assert played.noise.alarms == []
    accounted = tightest_epsilon(game.events(), DELTA).value
    assert accounted is not None
    assert 0.1 * accounted < result.epsilon < accounted


@pytest.mark.sweep
def test_audit_game_false_alarm_rate() -> None:
    """At a confidence of 80 % up to a fifth of correct runs may be refuted; more than 18 of 40 would be one
    chance in 10^4.
    """
    games = [Game(FLAT, canaries=300, seed=seed) for seed in range(40)]
    refuted = sum(not judge(game.play(), game.events(), DELTA, 0.8).declared for game in games)
    assert refuted <= binom.isf(1e-4, len(games), 0.2)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_audit_game_scores_differ_by_sensitivity(relation: Relation) -> None:
    """In units of the sensitivity, whatever the relation: the log likelihood ratio of N(far, z^2) to N(near,
    z^2) is 1/z^2 apart.
    """
    game = Game(FLAT, multiplier=2.0, relation=relation)
    played = game.play()
    apart = played.scores[played.inside].mean() - played.scores[~played.inside].mean()
    assert apart == pytest.approx(1 / 4, abs=5 * 2 * 0.5 / np.sqrt(2000))
    assert played.scores[~played.inside].std() == pytest.approx(1 / 2, rel=0.1)
    assert played.simulated.mean() == pytest.approx(played.scores[~played.inside].mean(), abs=0.1)


# -- what is wrong is found ----------------------------------------------------------------------------------


def test_audit_game_finds_half_noise() -> None:
    game = Game(FLAT, noise=HalfNoise)
    result, played = verdict(game), game.play()
    assert not result.declared
    assert result.epsilon > (tightest_epsilon(game.events(), DELTA).value or math.inf)
    assert result.noise is not None
    assert 0.5 <= result.noise < 0.7
    assert played.noise.alarms
    assert "spread" in played.noise.alarms
    assert played.noise.spread == pytest.approx(0.5, abs=0.02)


def test_audit_game_no_alarm_without_declared_noise() -> None:
    """A step without noise declares none."""
    game = Game(FLAT, multiplier=0.0)
    played = game.play()
    assert (played.noise.numbers, played.noise.alarms) == (0, [])
    result = judge(played, game.events(), DELTA, 0.95)
    assert (result.declared, result.epsilon, result.noise) == (True, 0.0, None)


# -- records go along ----------------------------------------------------------------------------------------


def records_source(rows: np.ndarray) -> GradientSource:
    """Records whose gradients are large in every coordinate, and of one sign, so that they add up."""
    draws = 1 + torch.rand(50, 1, generator=torch.Generator().manual_seed(5))[torch.from_numpy(rows)]

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return sum((x * value.cos()).sum() + (x * value).sum() for value in params.values())  # type: ignore[return-value]

    return batch_source(loss, PARAMETERS, draws)


def test_audit_game_scores_independent_of_other_records() -> None:
    """The auditor knows their sums: the scores are the same with them and without, up to one step of the grid
    of what is released.
    """
    game = Game(FLAT, canaries=500)
    alone, together = game.play(), game.play(records_source, 50)
    assert np.array_equal(alone.inside, together.inside)
    # in units of the sensitivity
    assert together.scores == pytest.approx(alone.scores, abs=grid_of(game.multiplier * 0.5) / 0.5)
    assert together.noise.alarms == []
    result = judge(together, game.events(), DELTA, 0.95)
    assert result.declared
    assert result.epsilon > 0.3


def test_audit_game_canaries_added_to_records() -> None:
    base = records_source(np.arange(4))
    canaries = Canaries.plant(PARAMETERS, FLAT, 30, np.random.default_rng(0))
    plain, mixed = base(FLAT), with_canaries(base, canaries, np.array([3, 7]))(FLAT)
    alone = with_canaries(None, canaries, np.array([3, 7]))(FLAT)
    for name, value in mixed.sums.items():
        assert torch.allclose(value, plain.sums[name] + alone.sums[name], atol=1e-6)
    assert len(mixed.records.norms) == 6
    assert mixed.records.below.tolist() == [False] * 6


# -- canaries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clipping",
    [FLAT, PER_PARAMETER, replace(FLAT, rule="automatic")],
    ids=["flat", "groups", "auto"],
)
def test_audit_game_norm_of_canary(clipping: Clipping) -> None:
    canaries = Canaries.plant(PARAMETERS, clipping, 60, np.random.default_rng(1))
    assert canaries.reach(clipping) == 1.0
    sums = with_canaries(None, canaries, np.array([11]))(clipping).sums
    norm = torch.cat([value.double().flatten() for value in sums.values()]).norm()
    assert 0.5 * (1 - 3e-5) < norm <= 0.5
    assert sum(int(value.count_nonzero()) for value in sums.values()) == len(clipping.groups)


def test_audit_game_scores_of_single_canaries() -> None:
    canaries = Canaries.plant(PARAMETERS, PER_PARAMETER, 70, np.random.default_rng(2))
    drawn = np.array([0, 5, 69])
    sums = with_canaries(None, canaries, drawn, np.array([1.0, 1.0, -1.0]))(PER_PARAMETER).sums
    expected = np.zeros(70)
    expected[drawn] = [1, 1, -1]
    assert canaries.read(sums, PER_PARAMETER) == pytest.approx(expected, abs=1e-5)


def test_audit_game_small_groups_without_canaries() -> None:
    canaries = Canaries.plant(PARAMETERS, PER_PARAMETER, 81, np.random.default_rng(3))
    assert canaries.reach(PER_PARAMETER) == pytest.approx(np.sqrt(2 / 3))
    sums = with_canaries(None, canaries, np.array([4]))(PER_PARAMETER).sums
    assert not sums["first.bias"].any()
    assert canaries.read(sums, PER_PARAMETER)[4] == pytest.approx(np.sqrt(2 / 3), rel=1e-5)


@pytest.mark.parametrize(
    ("count", "words"), [(0, "an audit with 0 canaries"), (20_000, "at most 9680 canaries")]
)
def test_audit_game_number_of_canaries_refused(count: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Canaries.plant(PARAMETERS, FLAT, count, np.random.default_rng(0))


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_audit_game_score_is_log_likelihood_ratio(rate: float) -> None:
    from scipy.stats import norm

    seen = np.linspace(-6, 6, 13)
    there = (1 - rate) * norm.pdf(seen, 0, 1.5) + rate * norm.pdf(seen, 0.5, 1.5)
    away = (1 - rate) * norm.pdf(seen, 0, 1.5) + rate * norm.pdf(seen, -0.5, 1.5)
    assert evidence(seen, rate, 1.5, 0.5, -0.5) == pytest.approx(np.log(there / away), rel=1e-9, abs=1e-12)
