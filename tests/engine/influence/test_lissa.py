"""LiSSA solves the damped system that it is given, and says so when it does not."""

from __future__ import annotations

import time

import pytest
import torch

from psgrad.engine.influence.solvers.lissa import lissa
from psgrad.errors import InfluenceError
from tests.engine.influence.test_conjugate_gradient import relative, solved, symmetric

pytestmark = pytest.mark.usefixtures("on_device")

SPECTRUM = torch.logspace(-1, 1, 40, dtype=torch.float64)


@pytest.mark.parametrize("damping", [0.05, 1.0, 30.0])
def test_lissa_equals_dense_solve(damping: float) -> None:
    matrix = symmetric(SPECTRUM) + damping * torch.eye(40, dtype=torch.float64)
    rhs = torch.randn(5, 40, dtype=torch.float64)
    rhs[2] = 0
    x, facts = lissa(lambda v: v @ matrix, rhs, tolerance=1e-9)
    assert facts["converged"]
    torch.testing.assert_close(x, solved(matrix, rhs), rtol=1e-6, atol=1e-7)
    assert 10 + damping < facts["scale"] < 1.2 * (10 + damping)
    rest = torch.tensor([0, 1, 3, 4])
    assert facts["relative_residual_max"] == pytest.approx(
        float(relative(matrix, x[rest], rhs[rest]).max()), rel=1e-3
    )


def test_lissa_recursion_of_koh_and_liang() -> None:
    """x <- b + (1 - d) x - H x / s, which after as many steps gives s times our x, for lam = s d."""
    matrix, rhs = symmetric(SPECTRUM), torch.randn(2, 40, dtype=torch.float64)
    scale, share = 25.0, 0.04
    theirs = rhs.clone()
    for _ in range(29):
        theirs = rhs + (1 - share) * theirs - theirs @ matrix / scale
    ours, facts = lissa(lambda v: v @ matrix + scale * share * v, rhs, iterations=30, scale=scale)
    assert facts["iterations"] == 30
    torch.testing.assert_close(ours, theirs / scale, rtol=1e-12, atol=1e-13)


def test_lissa_small_scale_diverges() -> None:
    matrix, rhs = symmetric(SPECTRUM), torch.randn(1, 40, dtype=torch.float64)
    with pytest.raises(
        InfluenceError, match=r"LiSSA diverges: after \d+ iterations the relative residual is"
    ) as caught:
        lissa(lambda v: v @ matrix, rhs, scale=4.0)
    assert caught.value.expected == "a scale above half the largest eigenvalue, which is about 10; it is 4"
    _, facts = lissa(lambda v: v @ matrix, rhs, scale=5.5)
    assert facts["converged"]


def test_lissa_too_few_terms() -> None:
    matrix, rhs = symmetric(SPECTRUM), torch.randn(3, 40, dtype=torch.float64)
    heard: list[str] = []
    x, facts = lissa(lambda v: v @ matrix, rhs, iterations=12, say=heard.append)
    assert not facts["converged"]
    assert facts["unconverged"] == 3
    worst = float(relative(matrix, x, rhs).max())
    assert facts["relative_residual_max"] == pytest.approx(worst)
    assert heard == [
        "LiSSA did not converge: after 12 iterations the relative residual of 3 of 3 right-hand sides is"
        f" above 1e-06, of the worst {worst:.2g}; solver: conjugate_gradient takes far fewer products"
    ]


def test_lissa_negative_curvature_is_refused() -> None:
    matrix = symmetric(torch.cat([torch.tensor([-0.5]), SPECTRUM[1:]]))
    with pytest.raises(InfluenceError, match="not positive definite"):
        lissa(lambda v: v @ matrix, torch.randn(1, 40, dtype=torch.float64))


def test_lissa_predicted_time_refused() -> None:
    """Each product takes a fiftieth of a second, and the condition number asks for 1e5 of them."""
    matrix, calls = symmetric(torch.logspace(-4, 0, 40, dtype=torch.float64)), 0

    def slow(block: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        time.sleep(0.002)
        return block @ matrix

    with pytest.raises(
        InfluenceError, match=r"predicted to take 5,000 products with the curvature .* about \d+ seconds"
    ) as caught:
        lissa(slow, torch.randn(3, 40, dtype=torch.float64), seconds=1.0)
    assert calls < 100
    assert caught.value.next_step is not None
    assert caught.value.next_step.startswith("set solver: conjugate_gradient")
    _, facts = lissa(
        slow, torch.randn(3, 40, dtype=torch.float64), iterations=30
    )  # a number that is asked for is taken
    assert facts["iterations"] == 30


def test_lissa_stalled_residual() -> None:
    """Products that are rounded to three digits allow no smaller residual, and no more terms bring one."""
    matrix, heard = symmetric(SPECTRUM), list[str]()
    rhs = torch.randn(2, 40, dtype=torch.float64)

    def rounded(block: torch.Tensor) -> torch.Tensor:
        product = block @ matrix
        scale = product.abs().amax() * 1e-3
        return (product / scale).round() * scale if len(block) == 2 else product

    _, facts = lissa(rounded, rhs, say=heard.append)
    assert facts["iterations"] < 1000
    assert not facts["converged"]
    assert 1e-5 < facts["relative_residual_max"] < 0.1
    assert any("falls no more" in each for each in heard)


def test_lissa_predicted_time_told() -> None:
    """Before the second product, also where the number of iterations is given."""
    matrix, heard, now = symmetric(SPECTRUM), list[str](), [0.0]

    def slow(block: torch.Tensor) -> torch.Tensor:
        now[0] += 6.0
        return block @ matrix

    lissa(
        slow,
        torch.randn(2, 40, dtype=torch.float64),
        tolerance=1e-3,
        iterations=30,
        clock=lambda: now[0],
        say=heard.append,
    )
    assert heard[0] == (
        "LiSSA takes 30 products with the curvature for every query, predicted to take 3 minutes;"
        " influence.method.solver: conjugate_gradient takes far fewer"
    )
