"""The tangent kernel beside Jacobians by torch.func in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.measures.builtin.ntk import NTK
from psgrad.engine.measures.builtin.projected_gradients import chosen_rows
from psgrad.engine.measures.measure import Gathered, Setting
from psgrad.errors import MeasureError
from tests.engine.influence.problems import output_jacobians
from tests.engine.measures.own_passes import measured, setting_of
from tests.small_models import ARCHITECTURES, Architecture


def found_of(setting: Setting, options: dict[str, Any] | None = None, chunk_size: int = 7) -> Gathered:
    return measured([NTK(**(options or {}))], setting, chunk_size)[1]["ntk"]


def mlp(outputs: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


def alignment(kernel: np.ndarray, labels: np.ndarray) -> float:
    """As Cortes et al. define it, by the centring matrix."""
    n = len(kernel)
    centre = np.eye(n) - np.ones((n, n)) / n
    one, other = centre @ kernel @ centre, centre @ labels @ labels.T @ centre
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize(
    "architecture", [each for each in ARCHITECTURES if each.name != "gpt"], ids=lambda each: each.name
)
def test_ntk_kernel_equals_jacobians(architecture: Architecture) -> None:
    inputs, target = architecture.batch(6, dtype=torch.float64)
    rows = output_jacobians(architecture.build(dtype=torch.float64), *inputs)
    n, outputs, size = rows.shape
    flat = rows.reshape(n * outputs, size)
    expected = (flat @ flat.T).reshape(n, outputs, n, outputs)
    narrow = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    setting = setting_of(
        architecture.build(), architecture.loss, narrow, target, kind="class", classes=outputs, targets=target
    )
    result = found_of(setting, {"save": True})
    np.testing.assert_allclose(result.arrays["kernel"], expected, atol=1e-5 * np.abs(expected).max())
    trace_kernel = np.einsum("icjc->ij", expected) / outputs
    np.testing.assert_allclose(
        result.arrays["trace_kernel"], trace_kernel, atol=1e-5 * np.abs(trace_kernel).max()
    )
    assert result.arrays["rows"].tolist() == list(range(6))
    values = np.linalg.eigvalsh(trace_kernel)[::-1]
    np.testing.assert_allclose(result.tables["spectrum"]["eigenvalue"], values, atol=1e-5 * values[0])
    np.testing.assert_allclose(result.tables["spectrum"]["share"], values / values.sum(), atol=1e-5)
    assert result.numbers["trace"] == pytest.approx(np.einsum("icic->", expected), rel=1e-5)
    assert result.numbers["alignment"] == pytest.approx(
        alignment(trace_kernel, np.eye(outputs)[target.numpy()]), rel=1e-4
    )


@pytest.mark.long
@given(n=st.integers(1, 12), outputs=st.integers(1, 4), chunk_size=st.integers(1, 12))
@settings(max_examples=15)
def test_ntk_each_output_and_chunks(n: int, outputs: int, chunk_size: int) -> None:
    model = mlp(outputs)
    inputs = torch.randn(n, 3, dtype=torch.float64)
    targets = torch.randint(outputs, (n,))
    setting = setting_of(
        model,
        lambda output, target: F.cross_entropy(output, target),
        (inputs,),
        targets,
        kind="class",
        targets=targets,
        classes=outputs,
    )
    result = found_of(setting, chunk_size=chunk_size)
    rows = output_jacobians(model, inputs)
    for output in range(outputs):
        kernel = rows[:, output] @ rows[:, output].T
        values = np.linalg.eigvalsh(kernel)[::-1]
        table = {name: column[output] for name, column in result.tables["outputs"].items()}
        assert table["output"] == output
        assert table["trace"] == pytest.approx(np.trace(kernel), rel=1e-9)
        assert table["largest_eigenvalue"] == pytest.approx(values[0], rel=1e-9)
        assert table["rank"] == np.linalg.matrix_rank(kernel, hermitian=True)
        if table["condition_number"] is not None:
            assert table["condition_number"] == pytest.approx(np.linalg.cond(kernel), rel=1e-3)
        labels = (
            (targets == output).numpy().astype(float)[:, None] if outputs > 1 else targets.numpy()[:, None]
        )
        if labels.std() and n > 1:
            assert table["alignment"] == pytest.approx(alignment(kernel, labels), rel=1e-9)
        else:
            assert table["alignment"] is None
    assert result.numbers["condition_number"] is None or n <= sum(p.numel() for p in model.parameters())


def of_classes(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, **further: Any) -> Setting:
    about = {"kind": "class", "targets": targets, "classes": 3, **further}
    return setting_of(model, F.cross_entropy, (inputs,), targets, **about)


def test_ntk_class_blocks_are_means_over_pairs() -> None:
    model = mlp(3)
    inputs = torch.randn(9, 3, dtype=torch.float64)
    targets = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 1])
    setting = of_classes(model, inputs, targets)
    table = found_of(setting).tables["classes"]
    rows = output_jacobians(model, inputs)
    kernel = np.einsum("icp,jcp->ij", rows, rows) / 3
    cosine = kernel / np.sqrt(np.outer(np.diag(kernel), np.diag(kernel)))
    seen = []
    for place, (one, other) in enumerate(zip(table["class"], table["other_class"], strict=True)):
        pairs = [
            (i, j) for i in range(9) for j in range(9) if i != j and targets[i] == one and targets[j] == other
        ]
        seen.append((one, other))
        assert table["pairs"][place] == len(pairs)
        if pairs:
            assert table["mean"][place] == pytest.approx(np.mean([kernel[pair] for pair in pairs]), rel=1e-9)
            assert table["mean_cosine"][place] == pytest.approx(
                np.mean([cosine[pair] for pair in pairs]), rel=1e-9
            )
        else:
            assert math.isnan(table["mean"][place])
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]


def test_ntk_single_logit_is_aligned_with_class_one() -> None:
    model, inputs = mlp(1), torch.randn(8, 3, dtype=torch.float64)
    target = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1], dtype=torch.float64)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output.squeeze(), target)

    result = found_of(setting_of(model, loss, (inputs,), target, kind="binary"))
    rows = output_jacobians(model, inputs)[:, 0]
    expected = alignment(rows @ rows.T, target.numpy()[:, None])
    # two one-hot columns say the same twice
    assert result.numbers["alignment"] == pytest.approx(expected, rel=1e-9)
    assert result.tables["outputs"]["alignment"] == [pytest.approx(expected, rel=1e-9)]
    assert result.numbers["condition_number"] == result.numbers["condition_number_of_all_outputs"]


def test_ntk_positions_of_a_sequence_are_outputs() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
    tokens, target = torch.randint(5, (4, 2)), torch.randint(5, (4, 2))
    setting = setting_of(
        model, lambda output, target: F.cross_entropy(output, target), (tokens,), target, kind="token"
    )
    result = found_of(setting)
    rows = output_jacobians(model, tokens)
    assert result.numbers["outputs"] == 10
    np.testing.assert_allclose(
        result.arrays["trace_kernel"], np.einsum("icp,jcp->ij", rows, rows) / 10, rtol=1e-9
    )
    assert result.numbers["alignment"] is None


def test_ntk_nonfinite_and_equal_samples() -> None:
    inputs = torch.ones(6, 3, dtype=torch.float64)
    inputs[2] = math.nan
    setting = setting_of(mlp(1), lambda output, target: output.sum(), (inputs,), None)
    result = found_of(setting)
    assert result.arrays["rows"].tolist() == [0, 1, 3, 4, 5]
    assert result.numbers["rank"] == 1
    assert result.numbers["condition_number"] is None


def test_ntk_without_finite_sample() -> None:
    setting = setting_of(
        mlp(1), lambda output, target: output.sum(), (torch.full((2, 3), math.nan).double(),), None
    )
    assert found_of(setting).numbers == {"samples": 0, "outputs": 1}


def test_ntk_too_large_refused() -> None:
    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.width = nn.Parameter(torch.ones(())), width

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x.sum(1, keepdim=True)).expand(-1, self.width)

    def setting(width: int) -> Setting:
        return setting_of(Wide(width), lambda output, target: output.sum(), (torch.ones(10, 2),), None)

    with pytest.raises(
        MeasureError, match="10 samples of 2,000 outputs make a kernel of 20,000 rows"
    ) as caught:
        NTK().prepare(setting(2000))
    assert "set samples: 4 or less" in str(caught.value)
    with pytest.raises(MeasureError, match="leave ntk out"):
        NTK().prepare(setting(9000))
    NTK().prepare(setting(100))


def test_ntk_subsample_balanced_by_class() -> None:
    model, said = mlp(3), []
    targets = torch.tensor([0] * 30 + [1] * 5 + [2] * 2)
    inputs = torch.randn(37, 3, dtype=torch.float64)
    setting = of_classes(model, inputs, targets, seed=4, say=said.append)
    result = found_of(setting, {"samples": 12})
    chosen = result.arrays["rows"]
    assert torch.bincount(targets[chosen]).tolist() == [5, 5, 2]
    assert said == ["ntk: of 12 of 37 samples, drawn at random, as many of each class as there are"]
    rows = output_jacobians(model, inputs[chosen])
    np.testing.assert_allclose(
        result.arrays["trace_kernel"], np.einsum("icp,jcp->ij", rows, rows) / 3, rtol=1e-9
    )


def test_ntk_subsample_without_labels() -> None:
    counts = torch.zeros(8)
    for seed in range(400):
        counts[chosen_rows(torch.ones(8, dtype=torch.bool), 2, seed)] += 1
    assert (counts - 100).abs().max() < 4 * math.sqrt(75)
