"""Which solver `auto` takes: the least predicted work of what fits into memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from psgrad.engine.execution.output_rows import gauss_newton_rows
from psgrad.engine.execution.row_grams import inner_product_operations
from psgrad.engine.influence.solvers.choice import Work
from tests.engine.influence.problems import cross_entropy, examples

GB = 1 << 30
# A convolutional network on digits: 1,437 rows of 10 numbers.
DIGITS = Work(size=38_282, count=1437, rows=14_370, inner=5700.0, queries=360, ratio=1.0, memory=16 * GB)


def test_solver_costs_by_number_of_rows() -> None:
    """Measured, in seconds, conjugate gradients against dual: 10.5 and 168; 19.8 and 7.7; 5.4 and 1.4."""
    assert DIGITS.least(correct=False)[0] == "conjugate_gradient"
    assert replace(DIGITS, count=400, rows=4000, queries=100).least(correct=False)[0] == "dual"
    assert (
        Work(size=20_602, count=1500, rows=3000, inner=3100.0, queries=20, ratio=1.0, memory=16 * GB).least(
            correct=False
        )[0]
        == "dual"
    )


def test_solver_costs_by_factors_of_real_rows() -> None:
    """Measured on 1,437 digits with 360 queries: conjugate gradients 65 s and dual 145 s (predicted), for
    convolutions; more than four minutes and 62 s, for a wide network.
    """
    convolutions = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    wide = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 950), nn.ReLU(), nn.Linear(950, 950), nn.ReLU(), nn.Linear(950, 10)
    )
    chosen = []
    for model in (convolutions, wide):
        rows = gauss_newton_rows(
            examples(model, cross_entropy, torch.randn(2, 1, 8, 8), torch.tensor([3, 7]))
        )
        work = replace(DIGITS, size=rows.flat.size, inner=inner_product_operations(rows))
        chosen.append(work.least(correct=False)[0])
    assert chosen == ["conjugate_gradient", "dual"]


def test_solver_costs_leverage() -> None:
    solver, why = DIGITS.least(correct=True)
    assert solver == "dual"
    assert "corrects for leverage" in why
    assert replace(DIGITS, size=7850).least(correct=True)[0] == "exact"


def test_solver_costs_memory() -> None:
    assert set(DIGITS.operations()) == {"conjugate_gradient", "dual"}
    assert set(replace(DIGITS, memory=5 * GB).operations()) == {"conjugate_gradient"}
    assert replace(DIGITS, memory=5 * GB).least(correct=True)[0] == "conjugate_gradient"
