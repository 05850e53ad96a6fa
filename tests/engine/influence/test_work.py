"""Which solver `auto` takes: the least predicted work of what fits into memory."""

from __future__ import annotations

from dataclasses import replace

from psgrad.engine.influence.solvers.costs import Work

GB = 1 << 30
# A convolutional network on digits: 1,437 rows of 10 numbers.
DIGITS = Work(size=38_282, count=1437, rows=14_370, queries=360, ratio=1.0, memory=16 * GB)


def test_solver_costs_many_rows_take_conjugate_gradients_and_few_the_dual_form() -> None:
    """Measured, in seconds, conjugate gradients against dual: 10.5 and 168; 19.8 and 7.7; 5.4 and 1.4."""
    assert DIGITS.least(correct=False)[0] == "conjugate_gradient"
    assert replace(DIGITS, count=400, rows=4000, queries=100).least(correct=False)[0] == "dual"
    assert (
        Work(size=20_602, count=1500, rows=3000, queries=20, ratio=1.0, memory=16 * GB).least(correct=False)[
            0
        ]
        == "dual"
    )


def test_solver_costs_leverage_takes_a_solver_that_can_correct_for_it() -> None:
    solver, why = DIGITS.least(correct=True)
    assert solver == "dual"
    assert "corrects for leverage" in why
    assert replace(DIGITS, size=7850).least(correct=True)[0] == "exact"


def test_solver_costs_what_does_not_fit_into_memory_is_not_taken() -> None:
    assert set(DIGITS.operations()) == {"conjugate_gradient", "dual"}
    assert set(replace(DIGITS, memory=5 * GB).operations()) == {"conjugate_gradient"}
    assert replace(DIGITS, memory=5 * GB).least(correct=True)[0] == "conjugate_gradient"


def test_solver_costs_small_dampings_take_more_iterations() -> None:
    assert replace(DIGITS, ratio=1e-4).products() > 20 * DIGITS.products()
    assert replace(DIGITS, rows=6000, count=600, ratio=1e-4).least(correct=False)[0] == "dual"
