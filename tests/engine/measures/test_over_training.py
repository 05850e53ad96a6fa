"""Forgetting and trajectories: histories written by hand, and a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.measures.builtin.over_checkpoints import Forgetting, Trajectory
from psgrad.engine.measures.checkpoint_history import column
from psgrad.engine.measures.measure import Gathered
from psgrad.errors import MeasureError
from tests.engine.measures.checkpoints import (
    gathered,
    of_checkpoints,
    of_classes,
    perceptron,
    perceptrons,
    plain_norms,
)

NAN = float("nan")


def history(*, loss: Any = None, **said: Any) -> dict[str, Tensor]:
    """Columns as the passes at all checkpoints leave them."""
    result = {name: torch.tensor(values, dtype=torch.float64) for name, values in said.items()}
    any_of = next(iter(result.values()))
    result["loss"] = torch.ones_like(any_of) if loss is None else torch.tensor(loss, dtype=torch.float64)
    result.setdefault("grad_norm", torch.ones_like(any_of))
    return {
        column(name, t): each for name, values in result.items() for t, each in enumerate(values.split(1, 1))
    }


def measured(measure: Any, rows: dict[str, Tensor], count: int, kind: str = "class") -> Gathered:
    x, y = torch.randn(2, 4).double(), torch.randint(3, (2,))
    return gathered(measure, of_classes([perceptron(0)] * count, x, y, kind=kind), rows)


def test_history_forgetting_of_histories_by_hand() -> None:
    right = [
        [0, 1, 1, 1, 1],  # learnt once
        [1, 1, 1, 1, 1],  # known from the beginning
        [0, 1, 0, 1, 0],  # forgotten twice
        [0, 0, 0, 0, 0],  # never learnt
        [1, 0, 0, 0, 0],  # forgotten at once
        [0, 1, NAN, 1, 0],  # not finite in between
    ]
    result = measured(Forgetting(), history(right=right), 5)
    np.testing.assert_array_equal(result.columns["forgetting_events"], [0, 0, 2, 5, 1, NAN])
    np.testing.assert_array_equal(result.columns["never_learnt"], [0, 0, 0, 1, 0, NAN])
    np.testing.assert_array_equal(result.columns["unforgettable"], [1, 1, 0, 0, 0, NAN])
    np.testing.assert_array_equal(result.columns["first_learnt"], [2, 1, 2, NAN, 1, NAN])
    expected = {"counts": {"0": 2, "1": 1, "2": 1}, "never_learnt": 1, "unforgettable": 2, "not_finite": 1}
    assert {key: result.numbers[key] for key in expected} == expected


def test_history_forgetting_of_positions() -> None:
    result = measured(Forgetting(), history(right=[[0.25, 0.75, 0.5, 1.0], [0.0, 0.5, 0.5, 0.5]]), 4, "token")
    np.testing.assert_array_equal(result.columns["forgetting_events"], [0.25, 0])
    np.testing.assert_array_equal(result.columns["unforgettable"], [0, 1])
    assert result.numbers["counts"] == {"0": 1, "1": 1}


@pytest.mark.parametrize(
    ("kind", "words"), [("value", "a value to come near to"), ("custom", "a form of its own")]
)
def test_history_forgetting_needs_labels(kind: str, words: str) -> None:
    x = torch.randn(4, 4).double()
    setting = of_checkpoints(perceptrons(2), F.mse_loss, (x,), x[:, :3], kind=kind)
    with pytest.raises(
        MeasureError, match=f"forgetting asks whether a prediction is right, and this loss has {words}"
    ) as caught:
        Forgetting().prepare(setting)
    assert "trajectory follows any loss" in str(caught.value)


def test_history_cartography_of_histories_by_hand() -> None:
    confidence = [[0.2, 0.4, 0.6], [0.9, 0.9, 0.9], [0.1, NAN, 0.1]]
    result = measured(
        Trajectory(), history(confidence=confidence, right=[[0, 0, 1], [1, 1, 1], [0, 0, 0]]), 3
    ).columns
    np.testing.assert_allclose(result["mean_confidence"], [0.4, 0.9, NAN])
    np.testing.assert_allclose(result["variability"], [np.sqrt(0.08 / 3), 0, NAN], atol=1e-15)
    np.testing.assert_allclose(result["correctness"], [1 / 3, 1, 0])


def test_history_trajectories_equal_the_loop() -> None:
    x, y = torch.randn(7, 4).double(), torch.randint(3, (7,))
    models = perceptrons(4)
    result = gathered(Trajectory(), of_classes(models, x, y))
    losses, norms = (each.numpy() for each in plain_norms(models, F.cross_entropy, x, y))
    steps = np.arange(4)
    np.testing.assert_allclose(
        result.columns["loss_slope"], [np.polyfit(steps, row, 1)[0] for row in losses], rtol=1e-8
    )
    np.testing.assert_allclose(
        result.columns["norm_slope"], [np.polyfit(steps, row, 1)[0] for row in norms], rtol=1e-8
    )
    of_label = np.stack([m(x).softmax(-1)[torch.arange(7), y].detach().numpy() for m in models], 1)
    right = np.stack([(m(x).argmax(-1) == y).numpy() for m in models], 1)
    np.testing.assert_allclose(result.columns["mean_confidence"], of_label.mean(1), rtol=1e-10)
    np.testing.assert_allclose(result.columns["variability"], of_label.std(1), rtol=1e-8)
    np.testing.assert_allclose(result.columns["correctness"], right.mean(1))
    np.testing.assert_allclose(result.arrays["loss"], losses, rtol=1e-6)
    np.testing.assert_allclose(result.arrays["grad_norm"], norms, rtol=1e-6)
    table = result.tables["checkpoints"]
    assert table["checkpoint"] == [f"epoch-{number}" for number in range(4)]
    np.testing.assert_allclose(table["mean_loss"], losses.mean(0), rtol=1e-10)
    np.testing.assert_allclose(table["q95_norm"], np.quantile(norms, 0.95, axis=0), rtol=1e-10)
    np.testing.assert_allclose(table["accuracy"], right.mean(0))
    assert table["nonfinite"] == [0, 0, 0, 0]


def test_history_regression() -> None:
    x = torch.randn(5, 4).double()
    models = [perceptron(seed, out=1) for seed in range(3)]
    result = gathered(Trajectory(), of_checkpoints(models, F.mse_loss, (x,), x[:, :1], kind="value"))
    assert set(result.columns) == {"loss_slope", "norm_slope"}
    assert set(result.arrays) == {"loss", "grad_norm", "prediction"}
    np.testing.assert_allclose(
        result.arrays["prediction"], torch.cat([m(x) for m in models], 1).detach(), rtol=1e-6
    )


def test_history_nonfinite_samples() -> None:
    rows = history(loss=[[1.0, NAN, 2.0], [3.0, 5.0, 4.0]], grad_norm=[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    result = measured(Trajectory(), rows, 3, "custom")
    assert result.tables["checkpoints"]["mean_loss"] == [2.0, 5.0, 3.0]
    assert result.tables["checkpoints"]["nonfinite"] == [0, 1, 0]
    np.testing.assert_array_equal(result.columns["loss_slope"], [NAN, 0.5])
