"""What is kept of a model's output, by the kind of its loss."""

from __future__ import annotations

import pytest
import torch

from psgrad.engine.measures.builtin.outputs import summary_for

pytestmark = pytest.mark.usefixtures("on_device")


LOGITS = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
CONFIDENCE = torch.tensor([0.0, 2.0, 1.0]).softmax(0)[1].item()


@pytest.mark.parametrize(
    ("kind", "output", "target", "expected"),
    [
        ("class", [0.0, 2.0, 1.0], 0, {"prediction": 1, "confidence": CONFIDENCE}),
        ("class", [[1.0, 2.0]], [0, 0], {}),  # classes at many positions
        ("token", LOGITS, [0, 1, 1, -7], {"token_accuracy": 2 / 3}),  # one is ignored
        ("token", LOGITS, [-7] * 4, {"token_accuracy": 0}),
        ("value", [1.5], 0.0, {"prediction": 1.5}),
        ("binary", 0.0, 1.0, {"prediction": 0.5}),
        ("value", [1.5, 2.0], [0.0, 0.0], {}),
        ("binary", [1.5, 2.0], [0.0, 0.0], {}),
    ],
)
def test_predictions_by_kind(kind: str, output: object, target: object, expected: dict[str, float]) -> None:
    summary = summary_for(kind, -7 if kind == "token" else -100)
    assert summary is not None
    found = summary(torch.tensor(output), torch.tensor(target))
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected)


def test_predictions_of_user_loss() -> None:
    assert summary_for("custom") is None
