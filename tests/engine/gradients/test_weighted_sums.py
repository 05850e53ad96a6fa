"""Sums whose weights follow from the norms: kept factors and a second pass beside the one-sample loop."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import (
    SquareNorms,
    WeightedSum,
    per_sample_gradients,
    per_sample_weighted_sum,
)
from psgrad.errors import TransformError
from tests.oracles import one_sample_gradients
from tests.small_models import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("on_device")

BOUND = 0.7


def clipping(norms: SquareNorms) -> Tensor:
    return (BOUND / norms.square_norms().sqrt()).clamp(max=1)


def objective_of(name: str) -> tuple[Objective, tuple[Tensor, ...], Tensor]:
    """Its objective, inputs and target in float64, of five samples."""
    (architecture,) = (each for each in ARCHITECTURES if each.name == name)
    model = architecture.build(dtype=torch.float64)
    return Objective(model, architecture.loss), *architecture.batch(5, dtype=torch.float64)


def clipped(
    objective: Objective, inputs: tuple[Tensor, ...], target: Tensor, **options: object
) -> WeightedSum:
    given = {"weights": clipping, **options}
    return per_sample_weighted_sum(objective.loss, objective.params, inputs, target, has_aux=True, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("per", ["total", "parameter"])
@pytest.mark.parametrize("name", [each.name for each in ARCHITECTURES])
def test_weighted_sum_clipped_equals_the_loop(name: str, per: str) -> None:
    objective, inputs, target = objective_of(name)

    def each(norms: SquareNorms) -> dict[str, Tensor]:
        squares = norms.square_norms(per="parameter")
        return {key: (BOUND / value.sqrt()).clamp(max=1) for key, value in squares.items()}

    result = clipped(objective, inputs, target, weights=clipping if per == "total" else each)
    gradients = one_sample_gradients(objective.model, F.cross_entropy, inputs, target)
    norms = {key: value.flatten(1).norm(dim=1) for key, value in gradients.items()}
    whole = torch.stack(list(norms.values())).norm(dim=0)
    assert (whole > BOUND).any()
    torch.testing.assert_close(result.norms.square_norms().sqrt(), whole, rtol=1e-10, atol=0)
    for key, value in gradients.items():
        weights = (BOUND / (whole if per == "total" else norms[key])).clamp(max=1)
        found = result.weights if per == "total" else result.weights[key]
        torch.testing.assert_close(found, weights, rtol=1e-10, atol=0)
        expected = torch.einsum("n,n...->...", weights, value)
        atol = 1e-10 * expected.abs().max().item()
        torch.testing.assert_close(result.sums[key], expected, rtol=1e-10, atol=atol)


def test_weighted_sum_weight_zero_of_nonfinite_sample() -> None:
    objective, (inputs,), target = objective_of("cnn")
    spoilt = inputs.clone()
    spoilt[1] = math.inf

    def finite_only(norms: SquareNorms) -> Tensor:
        weights = clipping(norms)
        return torch.where(torch.isfinite(norms.square_norms()), weights, 0.0)

    result = clipped(objective, (spoilt,), target, weights=finite_only)
    rest = [0, 2, 3, 4]
    expected = clipped(objective, (inputs[rest],), target[rest])
    assert result.weights[1] == 0
    for key, value in expected.sums.items():
        torch.testing.assert_close(result.sums[key], value, rtol=1e-10, atol=1e-12)


def test_weighted_sum_all_samples_nonfinite() -> None:
    objective, (inputs,), target = objective_of("mlp")
    result = clipped(objective, (inputs * math.nan,), target, weights=lambda norms: torch.zeros(len(norms)))
    assert all(not value.any() for value in result.sums.values())


@pytest.mark.parametrize("by", ["nonzero", "mask", "repeats"])
def test_weighted_sum_of_samples_that_count_beside_others_with_other_lengths(by: str) -> None:
    weight = {"w": torch.arange(1.0, 6.0, dtype=torch.float64)}
    rows = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        chosen = {
            "nonzero": lambda: row.nonzero().flatten(),
            "mask": lambda: row > 0,
            "repeats": lambda: torch.repeat_interleave(row),
        }[by]()
        return params["w"][chosen].square().sum()

    counted = torch.tensor([False, True, False, True])
    found = per_sample_weighted_sum(loss, weight, rows, weights=lambda _: counted.double(), counted=counted)
    expected = per_sample_weighted_sum(loss, weight, rows[counted], weights=lambda _: torch.ones(2))
    torch.testing.assert_close(found.sums, expected.sums)


def test_weighted_sum_two_branches_and_nonfinite_sample() -> None:
    """Two branches, so that samples are split twice, and one sample that is no number."""
    params = {"w": torch.randn(3, dtype=torch.float64), "v": torch.randn((), dtype=torch.float64)}
    rows = torch.randn(9, 3, dtype=torch.float64)
    rows[4] = math.nan

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        value = params["w"] @ row
        value = value.square() if bool(value > 0) else -3 * value
        return value * params["v"] if bool(row[0] > 0) else value + params["v"]

    def own(norms: SquareNorms) -> dict[str, Tensor]:
        place = torch.arange(1.0, 10.0, dtype=torch.float64)
        place[4] = 0
        return {"w": place, "v": 10 * place}

    result = per_sample_weighted_sum(loss, params, rows, weights=own).sums
    expected = {"w": torch.zeros(3, dtype=torch.float64), "v": torch.zeros((), dtype=torch.float64)}
    for sample in [0, 1, 2, 3, 5, 6, 7, 8]:
        gradient = grad(loss)(params, rows[sample])
        expected = {
            "w": expected["w"] + (sample + 1) * gradient["w"],
            "v": expected["v"] + 10 * (sample + 1) * gradient["v"],
        }
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def test_weighted_sum_wrong_shape_of_weights_refused() -> None:
    objective, inputs, target = objective_of("mlp")
    with pytest.raises(TransformError, match=r"weights\(norms\) has shape \(5, 1\) for 5 samples") as caught:
        clipped(objective, inputs, target, weights=lambda norms: clipping(norms)[:, None])
    assert "shape (5,)" in str(caught.value)


def test_weighted_sum_weights_of_unknown_parameters_refused() -> None:
    objective, inputs, target = objective_of("mlp")
    name = next(iter(objective.params))
    with pytest.raises(
        TransformError, match=r"only one of the parameters and weights\(norms\) has .*'stranger'"
    ):
        clipped(
            objective, inputs, target, weights=lambda norms: {name: torch.ones(5), "stranger": torch.ones(5)}
        )
    with pytest.raises(TransformError, match=r"weights\(norms\) has shape \(4,\) for 5 samples"):
        clipped(
            objective, inputs, target, weights=lambda norms: dict.fromkeys(objective.params, torch.ones(4))
        )


def test_weighted_sum_materialises_gradients_smaller_than_factors() -> None:
    """A convolution on large images, a layer over many positions; not a wide layer, nor a masked weight,
    whose mask all samples share.
    """
    torch.manual_seed(0)
    mask = (torch.rand(40, 30, dtype=torch.float64) > 0.5).double()
    params = {
        "conv": torch.randn(4, 3, 3, 3),
        "narrow": torch.randn(2, 3),
        "wide": torch.randn(64, 48),
        "masked": torch.randn(40, 30),
    }
    params = {name: value.double() for name, value in params.items()}
    batch = (torch.randn(3, 3, 16, 16), torch.randn(3, 50, 3), torch.randn(3, 4, 48), torch.randn(3, 2, 30))

    def loss(params: dict[str, Tensor], image: Tensor, many: Tensor, few: Tensor, masked: Tensor) -> Tensor:
        parts = [
            F.conv2d(image[None], params["conv"]),
            many @ params["narrow"].t(),
            few @ params["wide"].t(),
            masked @ (params["masked"] * mask).t(),
        ]
        return sum((part.sin().sum() for part in parts), start=torch.zeros((), dtype=torch.float64))

    grads = per_sample_gradients(loss, params, *(value.double() for value in batch))
    kinds = {
        name: [type(placed.term).__name__ for placed in gradient.terms]
        for name, gradient in grads.parts[0].gradients.items()
    }
    assert kinds == {"conv": ["Dense"], "narrow": ["Dense"], "wide": ["Product"], "masked": ["Image"]}
    assert grads.describe()["conv"] == grads.describe()["narrow"] == "materialise"
    assert not grads.unfactored
    expected = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0))(params, *(value.double() for value in batch))
    torch.testing.assert_close(grads.materialise(), expected, rtol=1e-10, atol=1e-10)
