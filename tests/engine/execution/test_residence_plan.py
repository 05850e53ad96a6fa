"""Where weights live, by the planner: the choice, and the bytes that it moves, by closed forms."""

from __future__ import annotations

import pytest

from psgrad.engine.execution.placement import WeightsPlan, weights_plan


@pytest.mark.parametrize(
    ("weights", "ranks", "largest", "expected"),
    [
        (50, 1, 5, WeightsPlan("resident", 50, 0)),
        (50, 8, 5, WeightsPlan("resident", 50, 0)),
        (51, 1, 5, WeightsPlan("offloaded", 25, 2 * 26)),
        (300, 1, 5, WeightsPlan("offloaded", 25, 2 * 275)),
        (80, 2, 5, WeightsPlan("sharded", 25, 2 * 55, 2)),  # parts of 40, of which as many stay as fit
        (80, 4, 5, WeightsPlan("sharded", 20, 2 * 60, 4)),
        (80, 4, 11, WeightsPlan("sharded", 22, 2 * 58, 4)),  # two of the largest
        (80, 64, 5, WeightsPlan("sharded", 20, 2 * 60, 4)),  # of one host
        (400, 8, 5, WeightsPlan("sharded", 25, 2 * 375, 8)),  # of two hosts
        (80, 6, 5, WeightsPlan("sharded", 13, 2 * 67, 6)),  # hosts with other numbers of ranks
        (800, 8, 5, WeightsPlan("offloaded", 25, 2 * 775)),
    ],
)
def test_weights_plan_of_ranks_with_100_bytes_and_hosts_of_four(
    weights: int, ranks: int, largest: int, expected: WeightsPlan
) -> None:
    assert weights_plan(weights, 100, ranks, min(4, ranks), largest) == expected
