"""Gradient dot, cosine and TracIn against a loop of one-sample gradients by torch.autograd, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from psgrad.engine.influence.index.build import from_index
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.gradient_products import GradientCosine, GradientDot, TracIn
from psgrad.engine.influence.ranking import joined_scores
from psgrad.errors import ConfigError, InfluenceError
from tests.engine.influence.problems import both, cross_entropy, examples, gradient_rows, parts
from tests.engine.influence.runs import matrix_of, self_influence

N, M, CLASSES = 11, 4, 3


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, CLASSES)
    ).double()


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, ...]:
    return parts(N, M, (1, 4, 4))


def loop(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[n, p]: one sample's gradient at a time."""
    return torch.from_numpy(gradient_rows(model, cross_entropy, inputs, labels))


@pytest.mark.parametrize("chunk_size", [1, 3, N, 64])
def test_first_order_dot_products_equal_the_loop(data: Any, chunk_size: int) -> None:
    model = network()
    training, queries = both(model, data, chunk_size=chunk_size)
    expected = loop(model, *data[:2]) @ loop(model, *data[2:]).T
    fitted = GradientDot().fit(training, Checkpoint())
    torch.testing.assert_close(matrix_of(fitted, queries), expected, rtol=1e-10, atol=1e-12)
    own, _ = self_influence(fitted)
    np.testing.assert_allclose(own, loop(model, *data[:2]).square().sum(1), rtol=1e-10, atol=1e-12)


def test_first_order_cosines_equal_the_loop(data: Any) -> None:
    model = network()
    x, y, xq, yq = data

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # the last training example has no gradient
        return cross_entropy(output, target.abs()) * (target >= 0)

    labels = y.clone()
    labels[-1] = -1
    fitted = GradientCosine().fit(examples(model, loss, x, labels, chunk_size=4), Checkpoint())
    result = matrix_of(fitted, examples(model, loss, xq, yq))
    expected = nn.functional.cosine_similarity(loop(model, x, y)[:, None], loop(model, xq, yq)[None], dim=2)
    torch.testing.assert_close(result[:-1], expected[:-1], rtol=1e-10, atol=1e-12)
    assert result[-1].isnan().all()
    with pytest.raises(
        InfluenceError,
        match="gradient_cosine has no self-influence: the cosine of every gradient with itself is 1",
    ):
        list(fitted.self_influence())


def test_first_order_tracin_learning_rates(data: Any) -> None:
    rates, models = (0.5, 0.125), (network(0), network(1))
    expected = sum(
        rate * loop(model, *data[:2]) @ loop(model, *data[2:]).T
        for rate, model in zip(rates, models, strict=True)
    )
    pairs = [both(model, data, chunk_size=size) for size, model in zip((4, 3), models, strict=True)]
    fitted = [
        TracIn().fit(training, Checkpoint(number, rate))
        for number, ((training, _), rate) in enumerate(zip(pairs, rates, strict=True))
    ]
    joined = list(joined_scores(TracIn(), fitted, [queries for _, queries in pairs]))
    torch.testing.assert_close(
        torch.cat([block.scores for block in joined]), torch.as_tensor(expected), rtol=1e-10, atol=1e-12
    )
    alone = torch.stack([torch.cat([block.single[number] for block in joined]) for number in (0, 1)])
    torch.testing.assert_close(alone.sum(0), torch.as_tensor(expected), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([block.spread for block in joined]), alone.std(0))


def scaled_by(model: nn.Module, data: Any, squares: torch.Tensor) -> torch.Tensor:
    """0.5 <D g_q, g_i>, D = 1 / (sqrt(squares) + 1e-8)."""
    return 0.5 * loop(model, *data[:2]) / (squares.sqrt() + 1e-8) @ loop(model, *data[2:]).T


def test_first_order_tracin_of_adam_takes_the_saved_squares(data: Any) -> None:
    model = network()
    training, queries = both(model, data, chunk_size=4)
    squares = {name: torch.rand_like(value) for name, value in training.params.items()}
    flat = training.flat.join({name: value[None] for name, value in squares.items()})[0]
    fitted = TracIn(optimizer="adam", batch_size=3).fit(
        training, Checkpoint(0, 0.5, second_moments=lambda: squares)
    )
    torch.testing.assert_close(
        matrix_of(fitted, queries), scaled_by(model, data, flat), rtol=1e-10, atol=1e-12
    )
    assert fitted.facts.second_moments == "the optimiser's state beside the checkpoint"
    own, _ = self_influence(fitted)
    rows = loop(model, *data[:2])
    torch.testing.assert_close(torch.from_numpy(own), 0.5 * (rows.square() / (flat.sqrt() + 1e-8)).sum(1))


def test_first_order_tracin_of_adam_estimates_the_squares_of_batches(data: Any) -> None:
    """Against all N^2 batches of two, drawn with replacement."""
    model = network()
    training, queries = both(model, data, chunk_size=4)
    rows = loop(model, *data[:2])
    squares = ((rows[:, None] + rows[None]) / 2).square().mean((0, 1))
    fitted = TracIn(optimizer="adam", batch_size=2).fit(training, Checkpoint(0, 0.5))
    torch.testing.assert_close(
        matrix_of(fitted, queries), scaled_by(model, data, squares), rtol=1e-8, atol=1e-12
    )


def test_first_order_tracin_of_adam_refused(data: Any) -> None:
    training, _ = both(network(), data)
    with pytest.raises(InfluenceError, match="and checkpoint 2 has no state") as refusal:
        TracIn(optimizer="adam").fit(training, Checkpoint(2, 0.5))
    assert refusal.value.hint is not None
    assert "set influence.method.batch_size" in refusal.value.hint
    with pytest.raises(
        InfluenceError, match=r"the optimiser's state of checkpoint 0 has nothing of 0.weight"
    ):
        TracIn(optimizer="adam").fit(training, Checkpoint(0, 0.5, second_moments=dict))
    for options in ({"optimizer": "adagrad"}, {"optimizer": "adam", "batch_size": 0}, {"batch_size": 3}):
        with pytest.raises(ConfigError, match="tracin: "):
            TracIn(**options)


def test_first_order_tracin_of_adam_is_not_answered_by_an_index() -> None:
    with pytest.raises(InfluenceError, match="tracin with optimizer: adam scales each number"):
        from_index(TracIn(optimizer="adam"), None)  # type: ignore[arg-type]


def test_first_order_tracin_without_a_learning_rate_is_refused(data: Any) -> None:
    training, _ = both(network(), data)
    with pytest.raises(
        InfluenceError, match=r"tracin weighs each checkpoint by its learning rate, and checkpoint 2 has none"
    ) as refusal:
        TracIn().fit(training, Checkpoint(2))
    assert "influence.checkpoints" in str(refusal.value)


def test_first_order_nonfinite_rows_refused(data: Any) -> None:
    from psgrad.engine.influence.method import row_norms

    x, y, *_ = data
    spoilt = x.clone()
    spoilt[3] = torch.nan
    seen = row_norms(examples(network(), cross_entropy, spoilt, y, chunk_size=4))
    assert seen.finite.tolist() == [row != 3 for row in range(N)]
    norms = loop(network(), x, y).norm(dim=1).numpy()
    assert seen.norms[0] == pytest.approx(norms[0], rel=1e-10)
