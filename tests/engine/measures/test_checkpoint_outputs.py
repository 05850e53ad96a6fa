"""The passes over checkpoints, against a plain loop over checkpoints and samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psgrad.engine.measures.builtin import over_checkpoints
from psgrad.engine.measures.builtin.over_checkpoints import (
    CheckpointOutputs,
    EL2NOverCheckpoints,
    GraNd,
)
from psgrad.engine.measures.checkpoint_history import History, disagreement, rank_correlation
from psgrad.errors import MeasureError
from tests.engine.measures.checkpoints import (
    WithBuffers,
    gathered,
    of_classes,
    perceptrons,
    plain_norms,
    rows_of,
)

NAMES = ["epoch-0", "epoch-1", "epoch-2"]


def images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 6, 6, dtype=torch.float64), torch.randint(3, (n,))


def vectors(n: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))


def test_checkpoints_columns_equal_the_loop() -> None:
    models = [WithBuffers(seed) for seed in range(3)]
    x, y = images(7)
    history = History.of(NAMES, rows_of(of_classes(models, x, y)))
    losses, norms = plain_norms(models, F.cross_entropy, x, y)
    torch.testing.assert_close(history["loss"], losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(history["grad_norm"], norms, rtol=1e-10, atol=0)
    outputs = torch.stack([model(x) for model in models], 1).detach()
    probabilities = outputs.softmax(-1)
    of_label = probabilities[torch.arange(7), :, y]
    torch.testing.assert_close(history["confidence"], of_label, rtol=1e-10, atol=0)
    assert torch.equal(history["prediction"], outputs.argmax(-1).double())
    assert torch.equal(history["right"], (outputs.argmax(-1) == y[:, None]).double())
    errors = (probabilities - F.one_hot(y, 3)[:, None]).norm(dim=-1)
    torch.testing.assert_close(history["el2n"], errors, rtol=1e-10, atol=0)


@pytest.mark.long
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))
def test_checkpoints_independent_of_chunks_and_resume(n: int, chunk_size: int, start: int) -> None:
    models = perceptrons()
    x, y = vectors(n)
    setting = of_classes(models, x, y)
    start = min(start, n - 1)
    whole, part = rows_of(setting, n), rows_of(setting, chunk_size, start)
    for name, column in whole.items():
        torch.testing.assert_close(part[name], column[start:], rtol=1e-12, atol=1e-14)


def test_checkpoints_nonfinite_at_one_checkpoint() -> None:
    models = perceptrons()
    with torch.no_grad():
        models[1][2].weight.mul_(torch.inf)  # type: ignore[operator,union-attr]
    x, y = vectors()
    setting = of_classes(models, x, y)
    history = History.of(NAMES, rows_of(setting))
    losses, norms = plain_norms([models[0], models[2]], F.cross_entropy, x, y)
    torch.testing.assert_close(history["loss"][:, [0, 2]], losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(history["grad_norm"][:, [0, 2]], norms, rtol=1e-10, atol=0)
    assert not history.finite[:, 1].any()
    assert history.nonfinite() == {"epoch-1": 7}
    assert history["right"][:, 1].isnan().all()
    assert history["prediction"][:, 1].isnan().all()
    result = gathered(GraNd(), setting)
    assert result.columns["grand"].isnan().all()


def test_checkpoints_nonfinite_sample() -> None:
    models = perceptrons()
    x, y = vectors()
    x[3] = torch.nan
    setting = of_classes(models, x, y)
    norms = gathered(GraNd(), setting).columns["grand"]
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(
        norms[others], plain_norms(models, F.cross_entropy, x, y)[1].mean(1)[others], rtol=1e-10, atol=0
    )
    assert norms[3].isnan()


def test_checkpoints_el2n_mean_and_deviation() -> None:
    models = perceptrons()
    x, y = vectors()
    result = gathered(EL2NOverCheckpoints(), of_classes(models, x, y))
    errors = np.stack([(m(x).softmax(-1) - F.one_hot(y, 3)).norm(dim=-1).detach().numpy() for m in models], 1)
    np.testing.assert_allclose(result.columns["el2n_mean"], errors.mean(1), rtol=1e-10)
    np.testing.assert_allclose(result.columns["el2n_std"], errors.std(1, ddof=1), rtol=1e-9)


def test_checkpoints_ignored_positions() -> None:
    output, target = torch.randn(6, 4, 5, dtype=torch.float64), torch.randint(5, (6, 4))
    target[0, :2], target[1] = -100, -100
    summary = over_checkpoints.checkpoint_summary("token")
    for z, y in zip(output, target, strict=True):
        said, counted = summary(z, y), y != -100
        p = z.softmax(-1)[counted]
        of_label = p[torch.arange(len(p)), y[counted]]
        torch.testing.assert_close(said["confidence"], of_label.mean(), equal_nan=True)
        torch.testing.assert_close(
            said["right"], (p.argmax(-1) == y[counted]).double().mean(), equal_nan=True
        )
    assert "prediction" not in said


def test_checkpoints_columns_by_kind_of_target() -> None:
    summary = over_checkpoints.checkpoint_summary
    said = summary("binary")(torch.tensor([0.7], dtype=torch.float64), torch.tensor([0.0]))
    assert said["confidence"] == pytest.approx(1 - 1 / (1 + np.exp(-0.7)), rel=1e-6)
    assert (said["right"], set(said)) == (0, {"confidence", "right", "prediction"})
    assert set(summary("value")(torch.tensor([0.7]), torch.tensor([0.0]))) == {"prediction"}
    assert summary("class")(torch.randn(3), torch.tensor([0.2, 0.3, 0.5])) == {}
    assert summary("custom")(torch.randn(3), torch.tensor(1)) == {}


def test_checkpoints_model_is_loaded_when_its_pass_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = vectors()
    setting = of_classes(perceptrons(), x, y)
    loaded: list[str] = []

    def noted(checkpoint: Any) -> Callable[[], Any]:
        return lambda: (loaded.append(checkpoint.name), checkpoint.objective())[1]

    setting = replace(
        setting,
        checkpoints=[replace(checkpoint, objective=noted(checkpoint)) for checkpoint in setting.checkpoints],
    )
    measure = CheckpointOutputs()
    measure.prepare(setting)
    passes = list(measure.passes())
    assert loaded == []
    for count, own in enumerate(passes, 1):
        list(own.run(range(len(setting)), 4))
        assert len(loaded) == count


def test_checkpoints_ranking_disagreement() -> None:
    values = torch.tensor([[1.0, 1.0, 4.0], [2.0, 2.0, 3.0], [3.0, 3.0, 2.0], [4.0, 5.0, 1.0]])
    correlation = rank_correlation(values)
    np.testing.assert_allclose(correlation, [[1, 1, -1], [1, 1, -1], [-1, -1, 1]])
    assert "checkpoints epoch-0 and epoch-2 rank the samples differently" in str(
        disagreement(correlation, NAMES, "grand")
    )
    assert disagreement(rank_correlation(values[:, :2]), NAMES[:2], "grand") is None
    flat = rank_correlation(torch.ones(4, 2))
    assert np.isnan(flat).all()
    assert disagreement(flat, NAMES[:2], "grand") is None


def test_checkpoints_too_few_checkpoints_are_refused() -> None:
    x, y = vectors()
    setting = of_classes(perceptrons(1), x, y)
    for measure in (GraNd(), EL2NOverCheckpoints()):
        with pytest.raises(MeasureError, match=rf"{measure.name} takes at least 2 checkpoints .* lists 1"):
            measure.prepare(setting)
    with pytest.raises(MeasureError, match=r"analyze\.checkpoints lists none"):
        GraNd().prepare(replace(setting, checkpoints=()))
