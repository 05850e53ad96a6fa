"""What is kept of a model's output, by the kind of its loss."""

from __future__ import annotations

import pytest
import torch

from psgrad.engine.measures.builtin.outputs import summary_for

pytestmark = pytest.mark.usefixtures("on_device")


def summary_of(kind: str, output: object, target: object, ignore_index: int = -100) -> dict[str, float]:
    summary = summary_for(kind, ignore_index)
    assert summary is not None
    return {name: value.item() for name, value in summary(torch.tensor(output), torch.tensor(target)).items()}


def test_predictions_class_and_confidence() -> None:
    result = summary_of("class", [0.0, 2.0, 1.0], 0)
    assert result["prediction"] == 1
    assert result["confidence"] == pytest.approx(torch.tensor([0.0, 2.0, 1.0]).softmax(0)[1].item())


def test_predictions_ignored_tokens() -> None:
    logits = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    assert summary_of("token", logits, [0, 1, 1, -7], ignore_index=-7)["token_accuracy"] == pytest.approx(
        2 / 3
    )
    assert summary_of("token", logits, [-7] * 4, ignore_index=-7)["token_accuracy"] == 0


def test_predictions_of_numbers_and_binary_logits() -> None:
    assert summary_of("value", [1.5], 0.0) == {"prediction": 1.5}
    assert summary_of("binary", 0.0, 1.0) == {"prediction": 0.5}


@pytest.mark.parametrize("kind", ["value", "binary"])
def test_predictions_of_several_numbers(kind: str) -> None:
    assert summary_of(kind, [1.5, 2.0], [0.0, 0.0]) == {}


def test_predictions_of_classes_at_many_positions() -> None:
    assert summary_of("class", [[1.0, 2.0]], [0, 0]) == {}


def test_predictions_of_user_loss() -> None:
    assert summary_for("custom") is None
