"""The variance of input gradients over checkpoints, against torch's autograd in float64, checkpoint by
checkpoint and sample by sample.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import zscore
from torch import Tensor, nn

from psgrad.engine.execution.objective import Forward
from psgrad.engine.measures.builtin import vog
from psgrad.engine.measures.builtin.vog import VoG
from psgrad.errors import MeasureError
from tests.engine.measures.checkpoints import WithBuffers, of_classes, perceptrons
from tests.engine.measures.own_passes import columns_of

pytestmark = pytest.mark.usefixtures("on_device")


def plain(models: list[nn.Module], x: Tensor, classes: Tensor) -> np.ndarray:
    """[n]: VoG by its definition; classes [T, n] or [n], the outputs that are differentiated."""
    result = []
    for row, sample in enumerate(x):
        steps = []
        for t, model in enumerate(models):
            leaf = sample[None].clone().requires_grad_()
            of = classes[t, row] if classes.dim() == 2 else classes[row]
            steps.append(torch.autograd.grad(model(leaf)[0, of], leaf)[0].flatten().numpy())
        result.append(np.std(steps, axis=0).mean())
    return np.array(result)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("of", ["target", "prediction"])
def test_vog_equals_definition(of: str, weighted: bool) -> None:
    models: list[nn.Module] = [WithBuffers(seed) for seed in range(4)]
    x, y = torch.randn(7, 1, 6, 6).double(), torch.tensor([0, 1, 0, 1, 0, 1, 2])
    weights = (torch.rand(7).double(),) if weighted else ()  # the output does not depend on them
    setting = of_classes(models, x, y, *weights, forward=Forward(weighted=weighted))
    measure = VoG(of)  # type: ignore[arg-type]
    result = measure.gather(columns_of(measure, setting, 3)).columns
    classes = y if of == "target" else torch.stack([model(x).argmax(-1) for model in models])
    expected = plain(models, x, classes)
    np.testing.assert_allclose(result["vog"], expected, rtol=1e-10)
    for label in (0, 1):
        own = (y == label).cpu()
        np.testing.assert_allclose(result["vog_z"][own], zscore(expected[own]), rtol=1e-8)
    assert result["vog_z"][6].isnan()  # alone in its class


@pytest.mark.long
@given(st.integers(1, 7), st.integers(0, 6))
def test_vog_independent_of_chunks_and_resume(chunk_size: int, start: int) -> None:
    models = perceptrons()
    x, y = torch.randn(7, 4).double(), torch.randint(3, (7,))
    setting = of_classes(models, x, y)
    whole = columns_of(VoG(), setting, 7)["vog.spread_and_label"]
    part = columns_of(VoG(), setting, chunk_size, start)["vog.spread_and_label"]
    torch.testing.assert_close(part, whole[start:], rtol=1e-12, atol=0)


def test_vog_of_token_ids() -> None:
    class Bag(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.table, self.head = nn.Embedding(9, 4).double(), nn.Linear(4, 3).double()

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.table(ids)).mean(1))  # type: ignore[no-any-return]

    models = [Bag(seed).eval() for seed in range(3)]
    ids, y = torch.randint(9, (5, 6)), torch.randint(3, (5,))
    setting = of_classes(models, ids, y)
    result = columns_of(VoG(), setting)["vog.spread_and_label"][:, 0]
    expected = []
    for sample, label in zip(ids, y, strict=True):
        steps = []
        for model in models:
            leaf = model.table(sample[None]).detach().requires_grad_()
            steps.append(
                torch.autograd.grad(model.head(torch.tanh(leaf).mean(1))[0, label], leaf)[0].flatten().numpy()
            )
        expected.append(np.std(steps, axis=0).mean())
    np.testing.assert_allclose(result, expected, rtol=1e-10)


def test_vog_nonfinite_at_one_checkpoint() -> None:
    models = perceptrons()
    x, y = torch.randn(6, 4).double(), torch.tensor([0, 0, 0, 1, 1, 1])
    x[1] = torch.inf
    setting = of_classes(models, x, y)
    measure = VoG()
    result = measure.gather(columns_of(measure, setting)).columns
    kept = [0, 2, 3, 4, 5]
    expected = plain(models, x[kept], y[kept])
    np.testing.assert_allclose(result["vog"][kept], expected, rtol=1e-10)
    np.testing.assert_allclose(result["vog_z"][[0, 2]], zscore(expected[:2]), rtol=1e-8)
    assert result["vog_z"][1].isnan()


def test_vog_ignored_labels() -> None:
    models = perceptrons()
    x, y = torch.randn(4, 4).double(), torch.tensor([0, -100, 2, 2])
    setting = of_classes(models, x, y)
    result = columns_of(VoG(), setting)["vog.spread_and_label"][:, 0]
    assert result.isnan().tolist() == [False, True, False, False]


def test_vog_refuses_fewer_than_three_checkpoints_and_losses_without_classes() -> None:
    x, y = torch.randn(4, 4).double(), torch.randint(3, (4,))
    setting = of_classes(perceptrons(2), x, y)
    with pytest.raises(MeasureError, match=r"vog takes at least 3 checkpoints .* lists 2"):
        VoG().prepare(setting)
    with pytest.raises(
        MeasureError, match="vog looks at the class of each sample, and this loss has a value"
    ):
        VoG().prepare(replace(setting, kind="value"))


def test_vog_refuses_a_model_without_an_input_to_differentiate_in(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(4, 4).double(), torch.randint(3, (4,))
    models = perceptrons()
    setting = of_classes(models, x, y)
    monkeypatch.setattr(vog, "places_of", lambda model, inputs: [])
    with pytest.raises(MeasureError, match="found no input of this model to differentiate in"):
        VoG().prepare(setting)
