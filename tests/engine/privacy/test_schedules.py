"""Noise schedules: the multiplier of each step, in runs, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgrad.engine.privacy.sampling import Schedule
from psgrad.errors import ConfigError

SCHEDULES = [
    Schedule(),
    Schedule("step", every=3, factor=0.5),
    Schedule("exponential", factor=0.9),
    Schedule("list", multipliers=(2.0, 2.0, 1.0, 3.0, 3.0, 3.0, 1.0)),
]


def test_schedule_multipliers_of_each_kind() -> None:
    assert [Schedule().multiplier(1.5, step) for step in range(3)] == [1.5, 1.5, 1.5]
    assert [SCHEDULES[1].multiplier(2.0, step) for step in (0, 2, 3, 5, 6)] == [2.0, 2.0, 1.0, 1.0, 0.5]
    assert [SCHEDULES[2].multiplier(2.0, step) for step in (0, 1, 2)] == pytest.approx([2.0, 1.8, 1.62])
    assert [SCHEDULES[3].multiplier(1.0, step) for step in range(7)] == [2.0, 2.0, 1.0, 3.0, 3.0, 3.0, 1.0]
    assert SCHEDULES[3].multiplier(1.5, 3) == 4.5


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
@given(steps=st.integers(0, 7))
def test_schedule_runs(schedule: Schedule, steps: int) -> None:
    runs = schedule.runs(1.25, steps)
    assert [multiplier for multiplier, count in runs for _ in range(count)] == [
        schedule.multiplier(1.25, step) for step in range(steps)
    ]
    assert all(one[0] != other[0] for one, other in itertools.pairwise(runs))
    assert all(count > 0 for _, count in runs)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_schedule_description_round_trip(schedule: Schedule) -> None:
    assert Schedule(**json.loads(json.dumps(schedule.describe()))) == schedule
    assert hash(Schedule(**schedule.describe())) == hash(schedule)


@pytest.mark.parametrize(
    ("fields", "wording"),
    [
        (
            {"kind": "cosine"},
            "the schedule's kind is 'cosine'; expected one of constant, step, exponential, list",
        ),
        ({"kind": "step", "every": 3}, "a schedule of kind step needs factor"),
        ({"kind": "exponential", "factor": 0.9, "every": 2}, "a schedule of kind exponential takes no every"),
        ({"kind": "constant", "factor": 0.9}, "a schedule of kind constant takes no factor"),
        ({"kind": "list"}, "a schedule of kind list needs multipliers"),
        ({"kind": "step", "every": 0, "factor": 0.5}, "the schedule's `every` is 0"),
        ({"kind": "step", "every": 1.5, "factor": 0.5}, "the schedule's `every` is 1.5"),
        ({"kind": "exponential", "factor": 0.0}, "the schedule's factor is 0.0"),
        ({"kind": "exponential", "factor": math.nan}, "the schedule's factor is nan"),
        ({"kind": "list", "multipliers": (1.0, -1.0)}, "the schedule lists the multiplier -1.0"),
    ],
)
def test_schedule_arguments_refused(fields: dict[str, Any], wording: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Schedule(**fields)
    assert str(caught.value).startswith(wording)


def test_schedule_step_beyond_list_refused() -> None:
    with pytest.raises(ConfigError, match="lists 7 multipliers, and step number 8 was asked for"):
        SCHEDULES[3].runs(1.0, 8)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_schedule_multiplier_positive(factor: float) -> None:
    # Noise that fades to nothing would be a step without noise, against the config.
    with pytest.raises(ConfigError, match="makes the noise multiplier of step number 401"):
        Schedule("exponential", factor=factor).multiplier(1.0, 400)
