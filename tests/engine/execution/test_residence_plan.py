"""Where weights live, by the planner: the choice, and the bytes that it moves, by closed forms."""

from __future__ import annotations

import pytest

from psgrad.engine.execution.residence_plan import WeightsPlan, weights_plan


@pytest.mark.parametrize(
    ("weights", "devices", "block", "expected"),
    [
        (50, 1, 5, WeightsPlan("resident", 50, 0)),
        (50, 8, 5, WeightsPlan("resident", 50, 0)),
        (51, 1, 5, WeightsPlan("offloaded", 50, 2 * 1)),
        (300, 1, 5, WeightsPlan("offloaded", 50, 2 * 250)),
        (80, 2, 5, WeightsPlan("sharded", 40 + 2 * 5, 2 * 40, 2)),
        (80, 2, 6, WeightsPlan("offloaded", 50, 2 * 30)),
        (80, 4, 6, WeightsPlan("sharded", 20 + 2 * 6, 2 * 60, 4)),
        (80, 64, 6, WeightsPlan("sharded", 20 + 2 * 6, 2 * 60, 4)),
        (400, 8, 30, WeightsPlan("offloaded", 50, 2 * 350)),
    ],
)
def test_weights_plan_of_a_device_with_100_bytes(
    weights: int, devices: int, block: int, expected: WeightsPlan
) -> None:
    assert weights_plan(weights, 100, devices, block) == expected
