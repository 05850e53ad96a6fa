"""docs/guides/extending.md: each of its classes is used as the page says, and compared with plain numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from psgrad.config import LossConfig
from psgrad.config.plugin_names import OWN, Group
from psgrad.data.loss import resolve_loss
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective
from psgrad.engine.influence.method import Checkpoint
from psgrad.quality.detector import detect, detector_from
from psgrad.ragged import Block
from tests.docs.pages import DOCS, block
from tests.workplace import Workplace

PAGE = (DOCS / "guides" / "extending.md").read_text(encoding="utf-8")


def register(
    group: Group, name: str, kind: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of this source that can be imported, whose class is one of psgrad's plugins, until the test
    ends.
    """
    module = f"extending_{name}"
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(OWN[group], name, f"{module}:{kind}")


@pytest.mark.long
def test_the_measure_is_computed_as_the_first_command_of_the_page_says(workplace: Workplace) -> None:
    (workplace.folder / "mine.py").write_text(block(PAGE, "python", "LossPerNorm"), encoding="utf-8")
    (option,) = re.findall(r"--set (analyze.measures=\S+)", PAGE)
    workplace.succeeded("--set", option)
    samples = workplace.samples()
    np.testing.assert_allclose(samples["loss_per_norm"], samples["loss"] / samples["grad_norm"], rtol=1e-5)


def test_scores_of_the_method_are_those_of_a_plain_loop() -> None:
    names: dict[str, Any] = {}
    exec(block(PAGE, "python", "DiagonalFisher(Method)"), names)
    model = nn.Linear(4, 3)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output[None], target[None])

    def rows(n: int) -> tuple[Examples, torch.Tensor]:
        """(n examples, their gradients by a loop)."""
        x, y = torch.randn(n, 4), torch.randint(0, 3, (n,))
        losses = [loss(model(each), label) for each, label in zip(x, y, strict=True)]
        grads = [torch.autograd.grad(each, list(model.parameters())) for each in losses]
        flat = torch.stack([torch.cat([part.flatten() for part in each]) for each in grads])
        return Examples(Objective(model, loss), Block((x,), y)), flat.double()

    (training, gradients), (queries, asked) = rows(50), rows(5)
    fitted = names["DiagonalFisher"](damping=0.01).fit(training, Checkpoint())
    scores = torch.cat([each.scores for each in fitted.scores(queries)])
    diagonal = gradients.square().sum(0) + len(gradients) * 0.01
    torch.testing.assert_close(scores, (gradients / diagonal) @ asked.T, rtol=1e-4, atol=1e-6)


def test_the_detector_scores_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = block(PAGE, "python", "DistanceToMean")
    register("detectors", "distance_to_mean", "DistanceToMean", source, tmp_path, monkeypatch)
    rows, reference = np.arange(8.0).reshape(4, 2), np.zeros((3, 2))
    found = detect(detector_from("distance_to_mean", {"power": 2.0}), rows, reference, seed=0)
    np.testing.assert_allclose(found, np.linalg.norm(rows, axis=1) ** 2)


def test_the_loss_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register("losses", "log_cosh", "LogCosh", block(PAGE, "python", "LogCosh"), tmp_path, monkeypatch)
    loss = resolve_loss(LossConfig(name="log_cosh", scale=2.0), Path())
    found = loss.function(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])).item()
    assert found == pytest.approx(np.log(np.cosh(1)) / 2)
