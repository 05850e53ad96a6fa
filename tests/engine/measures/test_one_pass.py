"""The measures of the one pass beside definitions in numpy, on gradients of a plain loop over samples in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from psgrad.engine.measures.builtin.dataset import NoiseScale
from psgrad.engine.measures.builtin.directions import (
    CosineToClassMean,
    CosineToMean,
    SignalToNoise,
)
from psgrad.engine.measures.builtin.norms import LayerNorms, RelativeNorm
from psgrad.engine.measures.builtin.outputs import EL2N, Confidence, Margin
from psgrad.engine.measures.mean_gradient import MeanGradient
from psgrad.engine.measures.measure import Measure
from psgrad.errors import MeasureError
from tests.engine.measures.passes import Measured, Rows, classifier, measured, prepared

pytestmark = pytest.mark.usefixtures("on_device")


def every() -> list[Measure]:
    return [
        EL2N(),
        Margin(),
        Confidence(),
        LayerNorms(),
        RelativeNorm(),
        CosineToMean(),
        CosineToClassMean(),
        NoiseScale(resamples=100),
        SignalToNoise(),
    ]


COLUMNS = (
    "el2n",
    "margin",
    "self_confidence",
    "relative_norm",
    "cosine_to_mean",
    "cosine_to_class_mean",
)


@dataclass
class Oracle:
    """All of it from [n, p] gradients, [n, C] logits and labels, of samples that are finite."""

    gradients: np.ndarray
    logits: np.ndarray
    labels: np.ndarray
    theta: np.ndarray

    def columns(self) -> dict[str, np.ndarray]:
        rows = np.arange(len(self.labels))
        exponentials = np.exp(self.logits - self.logits.max(1, keepdims=True))
        p = exponentials / exponentials.sum(1, keepdims=True)
        others = self.logits.copy()
        others[rows, self.labels] = -np.inf
        g, mean = self.gradients, self.gradients.mean(0)
        class_means = np.stack([g[self.labels == label].mean(0) for label in self.labels])
        return {
            "el2n": np.linalg.norm(p - np.eye(self.logits.shape[1])[self.labels], axis=1),
            "margin": self.logits[rows, self.labels] - others.max(1),
            "self_confidence": p[rows, self.labels],
            "relative_norm": np.linalg.norm(g, axis=1) / np.linalg.norm(self.theta),
            "cosine_to_mean": cosine(g, mean),
            "cosine_to_class_mean": cosine(g, class_means),
        }

    def noise(self, part: slice = slice(None)) -> tuple[float, float]:
        """(|G|^2, tr Sigma) as means over all pairs of samples: of products, and of half the squared
        distances.
        """
        g = self.gradients[:, part]
        n = len(g)
        products = g @ g.T
        pairs = n * (n - 1)
        square_mean = (products.sum() - np.trace(products)) / pairs
        distances = ((g[:, None] - g[None]) ** 2).sum(-1)
        return float(square_mean), float(distances.sum() / 2 / pairs)


def cosine(g: np.ndarray, other: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.asarray((g * other).sum(1) / (np.linalg.norm(g, axis=1) * np.linalg.norm(other, axis=-1)))


def oracle(rows: Rows, finite: Sequence[int] | slice = slice(None)) -> Oracle:
    assert rows.targets is not None
    theta = torch.cat([p.detach().flatten() for p in rows.model.parameters()]).double().numpy()
    return Oracle(rows.loop()[finite], rows.logits()[finite], rows.targets.numpy()[finite], theta)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_measures_columns_equal_their_definitions(dtype: torch.dtype, tolerance: float) -> None:
    rows = classifier(40, torch.float64)
    expected = oracle(rows).columns()
    rows = Rows(rows.model.to(dtype), rows.inputs.to(dtype), rows.targets)
    if dtype == torch.float32:  # the definition, of the numbers that float32 holds
        exact = Rows(rows.model.double(), rows.inputs.double(), rows.targets)
        expected = oracle(exact).columns()
        rows.model.float()
    result = measured(rows, every, chunk_size=7).rows
    for name in COLUMNS:
        np.testing.assert_allclose(
            result[name].numpy(), expected[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def places(rows: Rows) -> dict[str, slice]:
    result, start = {}, 0
    for name, parameter in rows.model.named_parameters():
        result[name] = slice(start, start := start + parameter.numel())
    return result


def test_measures_norms_by_layer() -> None:
    rows = classifier(9)
    g, theta, where = rows.loop(), oracle(rows).theta, places(rows)
    layers = {name.rpartition(".")[0]: [] for name in where}
    for name, columns in where.items():
        layers[name.rpartition(".")[0]] += list(range(columns.start, columns.stop))
    by_layer = {layer: np.linalg.norm(g[:, columns], axis=1) for layer, columns in layers.items()}
    result = measured(rows, lambda: [LayerNorms(), RelativeNorm()], 4)
    for layer, norms in by_layer.items():
        np.testing.assert_allclose(result.rows[f"layer_norm.{layer}"], norms, rtol=1e-10)
    relative = np.stack(
        [norms / np.linalg.norm(theta[layers[layer]]) for layer, norms in by_layer.items()], 1
    )
    np.testing.assert_allclose(result.rows["relative_norm_largest"], relative.max(1), rtol=1e-10)
    assert result.rows["relative_norm_layer"].tolist() == relative.argmax(1).tolist()
    assert result.gathered["relative_norm"].numbers["layers"] == list(layers)
    table = result.gathered["relative_norm"].tables["parameters"]
    np.testing.assert_allclose(
        table["parameter_norm"],
        [np.linalg.norm(theta[where[name]]) for name in table["parameter"]],
        rtol=1e-12,
    )
    means = [
        (np.linalg.norm(g[:, where[name]], axis=1) / np.linalg.norm(theta[where[name]])).mean()
        for name in table["parameter"]
    ]
    np.testing.assert_allclose(table["mean"], means, rtol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_measures_signal_and_noise(dtype: torch.dtype, tolerance: float) -> None:
    rows = classifier(30, dtype)
    exact = oracle(Rows(rows.model.double(), rows.inputs.double(), rows.targets))
    rows.model.to(dtype)
    result = measured(rows, lambda: [SignalToNoise(), NoiseScale(resamples=0)], 7).gathered
    table = result["signal_to_noise"].tables["parameters"]
    for place, columns in enumerate(places(rows).values()):
        square_mean, noise = exact.noise(columns)
        assert table["signal"][place] == pytest.approx(square_mean, rel=tolerance, abs=tolerance * noise)
        assert table["noise"][place] == pytest.approx(noise, rel=tolerance)
        assert table["signal_to_noise"][place] == pytest.approx(
            square_mean / noise, rel=tolerance, abs=tolerance
        )
    square_mean, noise = exact.noise()
    numbers = result["noise_scale"].numbers
    assert numbers["square_mean"] == pytest.approx(square_mean, rel=tolerance, abs=tolerance * noise)
    assert numbers["noise"] == pytest.approx(noise, rel=tolerance)


# -- however the samples are cut, and wherever the run is interrupted ----------------------------------------


def same(one: Measured, other: Measured, exactly: bool) -> None:
    check: Callable[..., None] = np.testing.assert_array_equal if exactly else np.testing.assert_allclose
    options: dict[str, Any] = {} if exactly else {"rtol": 1e-8, "atol": 1e-10}
    assert one.rows.keys() == other.rows.keys()
    for name, column in one.rows.items():
        check(column.numpy(), other.rows[name].numpy(), err_msg=name, **options)
    for name, gathered in one.gathered.items():
        again = other.gathered[name]
        assert gathered.tables.keys() == again.tables.keys()
        for key, table in gathered.tables.items():
            for column, values in table.items():
                left, right = (list(x) for x in (values, again.tables[key][column]))
                if left and isinstance(left[0], str):
                    assert left == right
                else:
                    check(
                        np.array(left, float), np.array(right, float), err_msg=f"{name} {column}", **options
                    )
        for key, array in gathered.arrays.items():
            check(array.numpy(), again.arrays[key].numpy(), err_msg=key, **options)
        numbers = {key: value for key, value in gathered.numbers.items() if isinstance(value, (float, list))}
        if exactly:
            assert numbers == {key: again.numbers[key] for key in numbers}


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 19), chunk_size=st.integers(1, 20))
def test_measures_independent_of_chunks(n: int, chunk_size: int) -> None:
    rows = classifier(n)
    same(measured(rows, every, chunk_size), measured(rows, every, n), exactly=False)


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(n=st.integers(2, 17), chunk_size=st.integers(1, 6), at=st.integers(1, 16))
def test_measures_resume_same_bits(n: int, chunk_size: int, at: int) -> None:
    rows = classifier(n, torch.float32)
    same(
        measured(rows, every, chunk_size),
        measured(rows, every, chunk_size, interrupted_at=min(at, n)),
        exactly=True,
    )


# -- samples and models at the edges -------------------------------------------------------------------------


def test_measures_nonfinite_samples() -> None:
    rows = classifier(14)
    rows.inputs[3] = math.nan
    rows.inputs[9, 0, 0, 0] = math.inf
    finite = [i for i in range(14) if i not in (3, 9)]
    expected = oracle(rows, finite).columns()
    result = measured(rows, every, 5)
    for name in COLUMNS:
        assert result.rows[name][[3, 9]].isnan().all(), name
        np.testing.assert_allclose(
            result.rows[name][finite], expected[name], rtol=1e-10, atol=1e-12, err_msg=name
        )
    clean = Rows(rows.model, rows.inputs[finite], rows.targets[finite] if rows.targets is not None else None)
    again = measured(clean, every, 5)
    for name in ("noise_scale", "signal_to_noise", "relative_norm"):
        for key, table in again.gathered[name].tables.items():
            for column, values in table.items():
                if column != "parameter":
                    np.testing.assert_allclose(result.gathered[name].tables[key][column], values, rtol=1e-10)
    assert result.gathered["noise_scale"].numbers["samples"] == 12
    assert result.gathered["noise_scale"].numbers["square_mean"] == pytest.approx(
        again.gathered["noise_scale"].numbers["square_mean"]
    )


def test_measures_one_sample() -> None:
    result = measured(classifier(1), every)
    assert (
        result.rows["cosine_to_mean"].item() == result.rows["cosine_to_class_mean"].item() == pytest.approx(1)
    )
    numbers = result.gathered["noise_scale"].numbers
    assert numbers["noise_scale"] is None
    assert numbers["status"].startswith("undefined: 1 samples")


def test_measures_cosine_with_zero_is_missing() -> None:
    """The loss of a sample is its target times the output: some gradients are zero, and those of the first
    class cancel.
    """
    model = nn.Linear(2, 1, bias=False).double()
    inputs = torch.tensor([[1.0, 2.0], [-1.0, -2.0], [0.0, 0.0], [3.0, 1.0]], dtype=torch.float64)
    rows = Rows(model, inputs, torch.tensor([0, 0, 1, 1]), lambda output, target: output.sum(), classes=2)
    result = measured(rows, lambda: [CosineToMean(), CosineToClassMean()], 3).rows
    assert result["cosine_to_class_mean"].isnan().tolist() == [True, True, True, False]
    assert result["cosine_to_mean"].isnan().tolist() == [False, False, True, False]


def test_measures_all_gradients_zero() -> None:
    rows = classifier(6)
    rows.criterion = lambda output, target: 0 * output.sum()
    result = measured(rows, every, 4)
    for name in ("cosine_to_mean", "cosine_to_class_mean"):
        assert result.rows[name].isnan().all()
    assert (result.rows["relative_norm"] == 0).all()
    assert result.gathered["noise_scale"].numbers["noise_scale"] is None
    assert (
        result.gathered["noise_scale"].numbers["status"].startswith("undefined: the estimate of |G|^2 is 0")
    )
    assert all(
        math.isnan(value)
        for value in result.gathered["signal_to_noise"].tables["parameters"]["signal_to_noise"]
    )


def test_measures_unused_and_zero_parameter() -> None:
    rows = classifier(7)
    nn.init.zeros_(rows.model[5].weight)
    nn.init.zeros_(rows.model[5].bias)
    rows.model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    result = measured(rows, every, 3)
    names = result.gathered["relative_norm"].numbers["layers"]
    assert names == ["(model)", "0", "3", "5"]
    assert (result.rows["layer_norm.(model)"] == 0).all()
    assert (result.rows["relative_norm_layer"] != names.index("5")).all()
    table = result.gathered["relative_norm"].tables["parameters"]
    assert math.isnan(table["mean"][table["parameter"].index("5.weight")])
    assert table["mean"][table["parameter"].index("unused")] == 0


def test_measures_ignored_class() -> None:
    rows = classifier(9)
    assert rows.targets is not None
    rows.targets[4] = -100
    rows.criterion = lambda output, target: nn.functional.cross_entropy(output, target, reduction="sum")
    result = measured(rows, every, 4).rows
    for name in ("el2n", "margin", "self_confidence", "cosine_to_class_mean", "cosine_to_mean"):
        assert result[name].isnan().tolist() == [i == 4 for i in range(9)], name


@pytest.mark.parametrize("measure", [EL2N, Margin, Confidence, CosineToClassMean])
def test_measures_without_classes_refused(measure: Callable[[], Measure]) -> None:
    rows = classifier(4)
    rows.kind, rows.targets = "value", torch.zeros(4)
    with pytest.raises(MeasureError, match="looks at the class of each sample, and this loss has a value"):
        prepared(rows, lambda: [measure()])
    rows.kind, rows.targets = "class", torch.full((4, 3), 1 / 3)
    setting = replace(rows.setting(), targets=None)
    MeanGradient().prepare(setting)
    with pytest.raises(MeasureError, match="the targets are probabilities of classes"):
        measure().prepare(setting)


def test_measures_class_means_beyond_memory_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psgrad.engine.measures.mean_gradient.free_memory", lambda device: 1000)
    with pytest.raises(
        MeasureError, match="cosine_to_class_mean keeps a mean gradient for each of 3 classes"
    ):
        prepared(classifier(4), lambda: [CosineToClassMean()])
    prepared(classifier(4), lambda: [CosineToMean()])
