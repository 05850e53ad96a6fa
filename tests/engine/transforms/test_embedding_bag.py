"""EmbeddingBag in all its modes, against torch.autograd sample by sample, and its gradient as a term that is
never built.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import grad, vmap
from psgrad.errors import TransformError
from tests.engine.transforms.loops import gradients_by_loop

SAMPLES, TOKENS, POSITIONS, FEATURES = 4, 7, 9, 3
WEIGHT = torch.linspace(-1, 1, TOKENS * FEATURES, dtype=torch.float64).sin().reshape(TOKENS, FEATURES)
INDEX = torch.arange(SAMPLES * POSITIONS).mul(5).remainder(TOKENS).reshape(SAMPLES, POSITIONS)
# An empty bag in the middle, one at the end, and (for the last sample) one at the beginning.
OFFSETS = torch.tensor([[0, 4, 4, 9], [0, 1, 1, 5], [0, 3, 6, 9], [0, 0, 2, 3]])
SCALE = torch.linspace(0.5, 2, 4 * FEATURES, dtype=torch.float64).reshape(4, FEATURES)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag_of_each_sample(mode: str, padding_idx: int | None) -> None:
    def loss(weight: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
        return (embedding_bag(index, weight, offsets, mode=mode, padding_idx=padding_idx) ** 3 * SCALE).sum()

    tables = torch.stack([WEIGHT, -WEIGHT, 2 * WEIGHT, WEIGHT.flip(0)])
    (expected,) = gradients_by_loop(loss, tables, INDEX, OFFSETS)
    torch.testing.assert_close(vmap(grad(loss))(tables, INDEX, OFFSETS), expected)
    (expected,) = gradients_by_loop(loss, WEIGHT.expand(SAMPLES, -1, -1), INDEX, OFFSETS)
    torch.testing.assert_close(vmap(grad(loss), in_dims=(None, 0, 0))(WEIGHT, INDEX, OFFSETS), expected)
    (expected,) = gradients_by_loop(loss, tables, INDEX, OFFSETS[:1].expand(SAMPLES, -1))
    torch.testing.assert_close(vmap(grad(loss), in_dims=(0, 0, None))(tables, INDEX, OFFSETS[0]), expected)


def test_embedding_bag_per_sample_weights() -> None:
    def loss(weight: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        out = embedding_bag(
            index, weight, torch.tensor([0, 3, 5, 5]), mode="sum", per_sample_weights=shares, padding_idx=2
        )
        return (out**3 * SCALE).sum()

    shares = torch.linspace(-1, 2, SAMPLES * POSITIONS, dtype=torch.float64).reshape(SAMPLES, POSITIONS)
    expected = gradients_by_loop(loss, WEIGHT.expand(SAMPLES, -1, -1), INDEX, shares, argnums=(0, 2))
    result = vmap(grad(loss, argnums=(0, 2)), in_dims=(None, 0, 0))(WEIGHT, INDEX, shares)
    torch.testing.assert_close(result, expected)


def test_embedding_bag_empty_index() -> None:
    index = torch.zeros(SAMPLES, 0, dtype=torch.long)
    for mode in ("sum", "mean", "max"):
        out = vmap(lambda index, mode=mode: embedding_bag(index, WEIGHT, torch.tensor([0, 0]), mode=mode))(
            index
        )
        torch.testing.assert_close(out, torch.zeros(SAMPLES, 2, FEATURES, dtype=torch.float64))


def test_embedding_bag_scale_grad_by_freq_refused() -> None:
    with pytest.raises(TransformError, match="scale_grad_by_freq"):
        grad(lambda w: embedding_bag(INDEX, w, scale_grad_by_freq=True).sum())(WEIGHT)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_weight_gradient_stays_rows(mode: str) -> None:
    model = nn.EmbeddingBag(
        10 * TOKENS, FEATURES, mode=mode, dtype=torch.float64
    )  # larger than what a sample looks up
    target = torch.linspace(-1, 1, SAMPLES * FEATURES, dtype=torch.float64).reshape(SAMPLES, FEATURES)

    def loss(parameters: dict[str, Tensor], index: Tensor, target: Tensor) -> Tensor:
        out = torch.func.functional_call(model, parameters, (index[None],))
        return ((out[0] - target) ** 2).sum()

    parameters = {"weight": model.weight.detach()}
    gradients = per_sample_gradients(loss, parameters, INDEX, target)
    alone = lambda weight, index, target: loss({"weight": weight}, index, target)
    (expected,) = gradients_by_loop(alone, parameters["weight"].expand(SAMPLES, -1, -1), INDEX, target)
    torch.testing.assert_close(gradients.square_norms(), expected.square().sum((1, 2)))
    assert gradients.describe() == {"weight": "index"}


@pytest.mark.parametrize("index", [TOKENS, -1])
def test_embedding_index_out_of_range_of_own_table(index: int) -> None:
    tables, tokens = WEIGHT.expand(SAMPLES, -1, -1) * 1, torch.tensor([0, 1, index, 2])
    with pytest.raises((RuntimeError, IndexError), match=r"out of (bounds|range)"):
        vmap(lambda table, token: torch.nn.functional.embedding(token, table))(tables, tokens)
