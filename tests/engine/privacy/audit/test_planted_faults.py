"""Faults of every class that are planted in what a private step draws, clips and counts: an audit finds each,
and what is as declared raises no alarm in any of many runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from psgrad.engine.privacy import sampling as sampling_module
from psgrad.engine.privacy.audit import FALSE_ALARM, judge
from psgrad.engine.privacy.audit.noise_check import NoiseLog
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.rounding import grid_of
from psgrad.engine.privacy.sampling import Sampling
from tests.engine.privacy.audit.mechanisms import FLAT, Game
from tests.engine.privacy.planted import normals

Patch = pytest.MonkeyPatch
TENTH = Sampling("poisson", sample_rate=0.1)


def noise_that(change: Callable[[dict[str, Tensor], float], dict[str, Tensor]]) -> Callable[[Patch], None]:
    """Noise that is changed after it was drawn, and put on the public grid again."""

    def plant(patch: Patch) -> None:
        plain = Noise.add

        def add(
            self: Noise, sums: Mapping[str, Tensor], clipping: Clipping, relation: Relation, *rest: Any
        ) -> dict[str, Tensor]:
            noisy = plain(self, sums, clipping, relation, *rest)
            std = self.standard_deviation(clipping.sensitivity(relation))
            noise = change({name: value.double() - sums[name] for name, value in noisy.items()}, std)
            grid = grid_of(std)
            return {name: ((sums[name] + noise[name]) / grid).round() * grid for name in sums}

        patch.setattr(Noise, "add", add)

    return plant


def each(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], float], dict[str, Tensor]]:
    return lambda noise, _: {name: change(value.flatten()).view(value.shape) for name, value in noise.items()}


def half_repeats_half(noise: Tensor) -> Tensor:
    half = len(noise) // 2
    return torch.cat([noise[:half], noise[:half], noise[2 * half :]])


def half_repeats_half_negated(noise: Tensor) -> Tensor:
    half = len(noise) // 2
    return torch.cat([noise[:half], -noise[:half], noise[2 * half :]])


def half_of_all_repeats(noise: dict[str, Tensor], _: float) -> dict[str, Tensor]:
    """Over tensors: a buffer of noise that is half as long as it must be."""
    flat = torch.cat([value.flatten() for value in noise.values()])
    parts = half_repeats_half(flat).split([value.numel() for value in noise.values()])
    return {name: part.view(noise[name].shape) for name, part in zip(noise, parts, strict=True)}


def later_steps_repeat_the_first() -> Callable[[dict[str, Tensor], float], dict[str, Tensor]]:
    """Over steps, each time at another place."""
    kept: list[Tensor] = []

    def change(noise: dict[str, Tensor], _: float) -> dict[str, Tensor]:
        flat = torch.cat([value.flatten() for value in noise.values()])
        kept.append(flat)
        moved = kept[0].roll(37 * (len(kept) - 1))
        parts = moved.split([value.numel() for value in noise.values()])
        return {name: part.view(noise[name].shape) for name, part in zip(noise, parts, strict=True)}

    return change


def rate_is(factor: float) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        plain = sampling_module._bernoulli
        patch.setattr(
            sampling_module,
            "_bernoulli",
            lambda count, rate, generator: plain(count, factor * rate, generator),
        )

    return plant


def batches_by(draw: Callable[[int, int], np.ndarray]) -> Callable[[Patch], None]:
    """Batches by the number of the step and the number of records."""

    def plant(patch: Patch) -> None:
        step = iter(range(1000))
        patch.setattr(Sampling, "draw", lambda self, count, generator: draw(next(step), count))

    return plant


def shuffled_epochs(step: int, count: int) -> np.ndarray:
    order = np.random.default_rng(step // 10).permutation(count)
    return np.sort(np.array_split(order, 10)[step % 10])


def unclipped(patch: Patch) -> None:
    patch.setattr(Clipping, "factors", lambda self, norms, *_, **__: torch.ones_like(norms))


def bound_and_a_half(patch: Patch) -> None:
    plain = Clipping.factors
    patch.setattr(Clipping, "factors", lambda self, *rest, **more: 1.5 * plain(self, *rest, **more))


def sensitivity_of_removal(patch: Patch) -> None:
    """The factor 2 of replaced records is forgotten by the noise."""
    plain = Noise.add
    patch.setattr(
        Noise,
        "add",
        lambda self, sums, clipping, relation, *rest: plain(self, sums, clipping, "zero_out", *rest),
    )


def unrounded(patch: Patch) -> None:
    def noisy(values: Tensor, deviation: float, generator: Generator) -> Tensor:
        return values + deviation * normals(generator, *values.shape)

    patch.setattr("psgrad.engine.privacy.noise.noisy", noisy)


PLAIN = Game(FLAT, steps=4, canaries=500)
DRAWN = Game(FLAT, sampling=TENTH, steps=20, canaries=4000)
REPEATS = "a part that repeats another"
DRAWS = "how many records are drawn"
AGAIN = "records that come again in the next step"
FAULTS: dict[str, tuple[Callable[[Patch], None], Game, str]] = {
    "no noise": (noise_that(each(torch.zeros_like)), PLAIN, "spread"),
    "half the noise": (noise_that(each(lambda noise: noise / 2)), PLAIN, "spread"),
    "5 % less noise": (noise_that(each(lambda noise: 0.95 * noise)), PLAIN, "spread"),
    "noise that is not finite": (noise_that(each(lambda noise: noise * math.nan)), PLAIN, "spread"),
    "noise on some numbers alone": (
        noise_that(each(lambda noise: torch.where(torch.arange(len(noise)) % 3 > 0, noise, 0))),
        PLAIN,
        "spread",
    ),
    "uniform noise": (
        noise_that(
            lambda noise, std: {n: std * (12**0.5) * (torch.rand(v.shape) - 0.5) for n, v in noise.items()}
        ),
        PLAIN,
        "shape",
    ),
    "noise of another mean": (
        noise_that(lambda noise, std: {n: v + std / 10 for n, v in noise.items()}),
        PLAIN,
        "mean",
    ),
    "half a tensor's noise repeats the other": (noise_that(each(half_repeats_half)), PLAIN, REPEATS),
    "half a tensor's noise repeats the other, negated": (
        noise_that(each(half_repeats_half_negated)),
        PLAIN,
        REPEATS,
    ),
    "half of all noise repeats the other": (noise_that(half_of_all_repeats), PLAIN, REPEATS),
    "noise of an earlier step, moved": (noise_that(later_steps_repeat_the_first()), PLAIN, REPEATS),
    "noise of one tensor in all": (
        noise_that(
            lambda noise, _: {
                n: next(iter(noise.values())).flatten()[: v.numel()].view(v.shape) for n, v in noise.items()
            }
        ),
        PLAIN,
        "alike in two tensors",
    ),
    "numbers that are not rounded": (unrounded, PLAIN, "off the public grid"),
    "a rate 1.1 times too high": (rate_is(1.1), DRAWN, DRAWS),
    "a rate of half": (rate_is(0.5), DRAWN, DRAWS),
    "the same batch each step": (
        batches_by(lambda _, count: np.flatnonzero(np.random.default_rng(0).random(count) < 0.1)),
        DRAWN,
        AGAIN,
    ),
    "shuffled epochs": (batches_by(shuffled_epochs), DRAWN, AGAIN),
    "no clipping": (unclipped, Game(FLAT, canaries=500), "told apart"),
    "one and a half times the bound": (
        bound_and_a_half,
        Game(FLAT, multiplier=0.5, canaries=2000),
        "told apart",
    ),
    "noise for removal where records are replaced": (
        sensitivity_of_removal,
        Game(FLAT, relation="replace_one", canaries=500),
        "spread",
    ),
}


def alarms_of(game: Game, alarm: str) -> list[str]:
    """All alarms; whether canaries are told apart only where that is asked for."""
    played = game.play()
    declared = alarm != "told apart" or judge(played, game.events(), 1e-5, 0.95).declared
    return played.noise.alarms + ([] if declared else ["told apart"])


@pytest.mark.parametrize("name", FAULTS)
def test_audit_finds_planted_fault(monkeypatch: Patch, name: str) -> None:
    plant, game, alarm = FAULTS[name]
    assert alarms_of(game, alarm) == [], "without the fault"
    torch.manual_seed(0)
    plant(monkeypatch)
    assert alarm in alarms_of(game, alarm)


def test_audit_counts_a_rate_that_is_too_high_in_digits_sized_runs(monkeypatch: Patch) -> None:
    """Steps of 1,437 records at a rate of 0.1, of which 1.1 times as many are drawn: 5 deviations in 20."""
    rows = np.random.default_rng(0).random((20, 1437)) < 0.11
    log = NoiseLog()
    for drawn in rows:
        log.add_batch(np.flatnonzero(drawn))
    assert log.check(TENTH, 1437).p_values[DRAWS] < 1e-6


def test_audit_draw_questions_have_no_false_alarms() -> None:
    """The p-values of what is as declared: half of them below a half, or fewer, and none near an alarm."""
    found: dict[str, list[float]] = {}
    for seed in range(200):
        random, log = np.random.default_rng(seed), NoiseLog()
        for _ in range(10):
            log.add_batch(np.flatnonzero(random.random(300) < 0.1))
        log.add(
            {"w": torch.from_numpy(np.round(random.normal(size=400) * 4096) / 4096)},
            {"w": torch.zeros(400)},
            1.0,
        )
        for question, p in log.check(TENTH, 300).p_values.items():
            found.setdefault(question, []).append(p)
    assert len(found) == 8
    for question, values in found.items():
        assert min(values) > 1e-5, question
        assert np.mean(np.array(values) < 0.5) < 0.65, question


def test_audit_fixed_batches_have_one_size() -> None:
    for sizes, p in (([8, 8], 1.0), ([8, 9], 0.0)):
        log = NoiseLog()
        for size in sizes:
            log.add_batch(np.arange(size))
        assert log.check(Sampling("fixed", batch_size=8), 100).p_values == {DRAWS: p}
    assert FALSE_ALARM < 1e-3
