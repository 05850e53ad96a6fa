"""Influence by the curvature materialised: held against dense algebra in numpy, and loud where there is no
inverse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from psgrad.engine.influence.curvature.operator import Curvature
from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.methods.influence import Influence
from psgrad.engine.influence.solvers.choice import chosen_solver
from psgrad.engine.influence.solvers.dense_solve import Inverse
from psgrad.errors import ConfigError, InfluenceError
from tests.engine.influence import problems
from tests.engine.influence.problems import (
    classified,
    cross_entropy,
    examples,
    gauss_newton,
    gradient_rows,
    mlp,
)
from tests.engine.influence.runs import fit, scores, self_influence

INPUTS, LABELS = classified(40)
QUERIES, QUERY_LABELS = classified(7, seed=5)
MODEL = mlp()
ROWS = gradient_rows(MODEL, cross_entropy, INPUTS, LABELS)
QUERY_ROWS = gradient_rows(MODEL, cross_entropy, QUERIES, QUERY_LABELS)
CURVATURES: dict[str, np.ndarray] = {
    "gauss_newton": gauss_newton(MODEL, cross_entropy, INPUTS, LABELS),
    "fisher": ROWS.T @ ROWS,
    "hessian": problems.loss_hessian(MODEL, cross_entropy, INPUTS, LABELS),
}


def training(**options: Any) -> Any:
    return examples(MODEL, cross_entropy, INPUTS, LABELS, **options)


def queries(**options: Any) -> Any:
    return examples(MODEL, cross_entropy, QUERIES, QUERY_LABELS, **options)


def inverse(curvature: str, damping: float, weight_decay: float) -> np.ndarray:
    return np.linalg.inv(CURVATURES[curvature] + 40 * (damping + weight_decay) * np.eye(ROWS.shape[1]))


@pytest.mark.parametrize("curvature", CURVATURES)
def test_exact_scores_equal_damped_inverse(curvature: Any) -> None:
    fitted = fit(Influence(curvature, "exact", damping=0.4, weight_decay=0.02), training())
    matrix = inverse(curvature, 0.4, 0.02)
    want = ROWS @ matrix @ QUERY_ROWS.T
    np.testing.assert_allclose(scores(fitted, queries()), want, rtol=0, atol=1e-10 * np.abs(want).max())
    own, norms = self_influence(fitted)
    np.testing.assert_allclose(own, np.einsum("np,pq,nq->n", ROWS, matrix, ROWS), rtol=1e-10)
    np.testing.assert_allclose(norms, np.linalg.norm(ROWS @ matrix, axis=1), rtol=1e-10)


def test_exact_extreme_eigenvalues_of_large_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(600, 600, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(-3, 2, 600, dtype=torch.float64)
    values[0] = -0.5
    result = Inverse.of((basis * values) @ basis.t(), 0.6, "Hessian", 10)
    assert result.largest == pytest.approx(100, rel=1e-6)
    assert result.smallest == pytest.approx(-0.5, rel=1e-6)


def test_exact_singular_curvature_refused() -> None:
    with pytest.raises(InfluenceError) as error:
        fit(Influence(damping=0.0), training())
    assert "the Gauss-Newton matrix is singular: its smallest eigenvalue is" in str(error.value)
    assert "and damping and weight decay add 0" in str(error.value)
    enough = float(str(error.value).split("set influence.method.damping: ")[1].split()[0])
    assert np.isfinite(scores(fit(Influence(damping=enough), training()), queries())).all()


@pytest.mark.parametrize("size", [3, 600])
def test_exact_ill_conditioned_matrix_refused(size: int) -> None:
    values = torch.ones(size, dtype=torch.float64)
    values[1] = 1e-16
    with pytest.raises(InfluenceError, match="the empirical Fisher is singular"):
        Inverse.of(values.diag(), 0.0, "empirical Fisher", 1)
    assert Inverse.of(values.diag(), 1e-6, "empirical Fisher", 1).smallest == pytest.approx(0, abs=1e-9)


def test_exact_indefinite_hessian_refused_or_warned() -> None:
    smallest = np.linalg.eigvalsh(CURVATURES["hessian"])[0] / 40
    assert smallest < -1e-3
    with pytest.raises(
        InfluenceError, match=f"the Hessian is indefinite: its smallest eigenvalue is {smallest:.3g}"
    ) as error:
        fit(Influence("hessian", damping=0.5 * abs(smallest)), training())
    assert "or curvature: gauss_newton" in str(error.value)
    enough = float(str(error.value).split("set influence.method.damping: ")[1].split(",")[0])
    messages: list[str] = []
    fit(Influence("hessian", damping=enough), training(), messages)
    assert [line for line in messages if "the Hessian is indefinite" in line] == messages != []


def test_exact_nonfinite_curvature_refused() -> None:
    with pytest.raises(InfluenceError, match="the Hessian has entries that are not finite"):
        Inverse.of(torch.full((2, 2), torch.nan, dtype=torch.float64), 1.0, "Hessian", 1)


def test_exact_negative_damping_refused() -> None:
    with pytest.raises(ConfigError, match=r"damping is -0\.1"):
        Damping(-0.1)
    with pytest.raises(ConfigError, match="relative_damping is nan"):
        Damping(None, float("nan"))
    with pytest.raises(
        InfluenceError, match="no damping can be taken from the curvature's mean eigenvalue, -2"
    ):
        Damping().resolve(-2.0)
    assert (Damping(0.0).resolve(-2.0), Damping(None, 0.5).resolve(3.0), Damping(0.2, 0.5).resolve(3.0)) == (
        0.0,
        1.5,
        0.2,
    )


def test_exact_conflicting_options_refused() -> None:
    for options, words in (
        ({"curvature": "hessian", "solver": "dual"}, "the dual solver has no Hessian"),
        ({"curvature": "fisher", "leverage": True}, "curvature is fisher"),
        ({"solver": "conjugate_gradient", "leverage": True}, "solver conjugate_gradient"),
        ({"solver": "newton"}, "solver is 'newton'"),
        ({"curvature": "kfac"}, "curvature is 'kfac'"),
        ({"change": "loss"}, "change is 'loss'"),
        ({"tolerance": 0.0}, r"tolerance 0\.0"),
        ({"iterations": 0}, "iterations 0"),
        ({"seed": 1 << 64}, "seed 18446744073709551616"),
        ({"damping": -1.0}, r"damping is -1\.0"),
        ({"weight_decay": -1.0}, r"weight_decay is -1\.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            Influence(**options)  # type: ignore[arg-type]


def test_exact_choice_of_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "psgrad.engine.influence.solvers.choice"

    def choice(curvature: Any = "gauss_newton", ratio: float = 1.0) -> tuple[str, str]:
        return chosen_solver(Curvature(training(), curvature), 5, ratio, correct=False)

    assert choice()[0] == "exact"
    monkeypatch.setattr(f"{module}.LARGEST_MATRIX", 52)
    solver, why = choice()
    assert solver == "exact"
    assert "in predicted operations: exact 3e+05" in why
    assert choice("hessian")[0] == "conjugate_gradient"
    assert choice(ratio=0.01)[1] != why  # conjugate gradients take more products
    monkeypatch.setattr(f"{module}.LARGEST", 52)
    assert choice()[0] == "conjugate_gradient"
    assert choice("fisher")[0] == "dual"
    monkeypatch.setattr("psgrad.engine.influence.curvature.operator.LARGEST_OUTPUT", 2)
    assert choice()[1] == "an output of 3 numbers is too large for the other solvers"


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_exact_equals_conjugate_gradients(curvature: Any) -> None:
    damping = 0.6 if curvature == "hessian" else 0.01
    exact = scores(fit(Influence(curvature, "exact", damping=damping), training()), queries())
    fitted = fit(Influence(curvature, "conjugate_gradient", damping=damping, tolerance=1e-9), training())
    np.testing.assert_allclose(scores(fitted, queries()), exact, rtol=0, atol=1e-6 * np.abs(exact).max())
    assert fitted.facts.solved.converged
    assert fitted.facts.solved.relative_residual_max <= 1e-9
