"""What of a query is explained: signs, units, and what a loss has no measurement for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logit, softmax

from psgrad.config import LossConfig, MeasurementConfig
from psgrad.data.loss import resolve_loss
from psgrad.data.measurements import Measurement, resolve_measurement
from psgrad.engine.transforms import vmap
from psgrad.errors import ConfigError, LossError


def measurement(
    name: str, loss: str = "cross_entropy", base: Path = Path(), larger_is: str | None = None
) -> Measurement:
    return resolve_measurement(
        MeasurementConfig(name=name, larger_is=larger_is), resolve_loss(LossConfig(name=loss), base), base
    )


def test_the_margin_is_the_log_odds_of_the_right_class() -> None:
    random = np.random.default_rng(0)
    outputs, labels = random.normal(size=(6, 4)), random.integers(0, 4, 6)
    found = measurement("margin")
    values = vmap(found.criterion.function)(torch.tensor(outputs), torch.tensor(labels)).numpy()
    np.testing.assert_allclose(
        found.sign * values, logit(softmax(outputs, axis=1)[np.arange(6), labels]), rtol=1e-10
    )
    assert found.change == "fall of the query's margin, in nats"


@pytest.mark.parametrize(
    ("name", "loss", "output", "target", "value"),
    [
        pytest.param("margin", "cross_entropy", [1.0, 2.0, 0.5], -100, 0.0, id="to be ignored"),
        pytest.param("logit", "cross_entropy", [1.0, 5.0, -2.0], 2, 2.0, id="logit of the target"),
        pytest.param("margin", "bce_with_logits", [3.0], [1.0], -3.0, id="of two classes"),
        pytest.param("margin", "bce_with_logits", [3.0], [0.0], 3.0, id="sign of the label"),
        pytest.param("margin", "bce_with_logits", [[1.0], [2.0]], [1.0, 0.0], 1.0, id="several labels"),
        pytest.param(
            *("margin", "cross_entropy", [100.0, 0.0, 0.0], 0),
            pytest.approx(np.log(2) - 100, rel=1e-6),
            id="finite where the probability rounds to one",
        ),
    ],
)
def test_margins_and_logits_of_one_row(name: str, loss: str, output: Any, target: Any, value: Any) -> None:
    found = measurement(name, loss).criterion.function(torch.tensor(output), torch.tensor(target))
    assert float(found) == value


def test_the_logit_falls() -> None:
    found = measurement("logit")
    assert (found.sign, found.change) == (-1, "fall of the logit of the query's class")


def test_the_log_probability_of_tokens_is_a_sum_over_those_that_count() -> None:
    random = np.random.default_rng(0)
    outputs, labels = random.normal(size=(5, 4)), np.array([1, -100, 3, 0, 2])
    found = measurement("log_probability", "token_cross_entropy")
    value = found.criterion.function(torch.tensor(outputs), torch.tensor(labels))
    counted = labels >= 0
    truth = np.log(softmax(outputs[counted], axis=1)[np.arange(4), labels[counted]]).sum()
    assert found.sign * float(value) == pytest.approx(truth, rel=1e-12)
    assert found.change == "fall of the query's log-probability, in nats"


def test_the_log_probability_of_a_class_is_minus_its_loss() -> None:
    output, label = torch.tensor([1.0, 5.0, -2.0]), torch.tensor(2)
    lost = measurement("loss").criterion.function(output, label)
    assert float(measurement("log_probability").criterion.function(output, label)) == pytest.approx(
        float(lost)
    )


@pytest.mark.parametrize(
    ("loss", "output", "target"),
    [
        ("cross_entropy", torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64)),
        ("cross_entropy", torch.zeros(3), torch.full((3,), 1 / 3)),
        ("token_cross_entropy", torch.zeros(3), torch.tensor(1)),
    ],
)
def test_the_log_probability_of_another_shape(loss: str, output: torch.Tensor, target: torch.Tensor) -> None:
    with pytest.raises(LossError, match="the output of one query has shape"):
        measurement("log_probability", loss).criterion.function(output, target)


@pytest.mark.parametrize(
    ("loss", "change"),
    [("cross_entropy", "rise of the query's loss, in nats"), ("mse", "rise of the query's loss")],
)
def test_only_logarithms_of_probabilities_are_in_nats(loss: str, change: str) -> None:
    assert measurement("loss", loss).change == change


@pytest.mark.parametrize(("larger_is", "sign", "way"), [("worse", 1, "rise"), ("better", -1, "fall")])
def test_a_measurement_of_ones_own_has_the_sign_that_is_said(
    tmp_path: Path, larger_is: str, sign: int, way: str
) -> None:
    (tmp_path / "own.py").write_text("def first(output, target):\n    return output[0]\n")
    found = measurement("own.py:first", base=tmp_path, larger_is=larger_is)
    assert float(found.criterion.function(torch.tensor([2.0, 3.0]), None)) == sign * 2.0
    assert (found.sign, found.change) == (sign, f"{way} of the query's own.py:first")


@pytest.mark.parametrize(
    ("name", "loss"),
    [("margin", "mse"), ("logit", "bce_with_logits"), ("margin", "nll"), ("logit", "token_cross_entropy")],
)
def test_a_loss_without_classes_has_no_margin(name: str, loss: str) -> None:
    with pytest.raises(ConfigError, match=f"influence.measurement: the loss {loss} has no {name}") as refusal:
        measurement(name, loss)
    assert "measure the loss, or name a callable" in str(refusal.value)


def test_a_measurement_that_is_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def whole(output, target):\n    return output\n")
    with pytest.raises(
        LossError, match=r"the measurement own.py:whole returned a tensor of shape \(2,\) for one query"
    ):
        measurement("own.py:whole", base=tmp_path, larger_is="worse").criterion.function(torch.zeros(2), None)
