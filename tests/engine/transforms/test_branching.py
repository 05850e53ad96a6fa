"""Branches on data: right where all samples agree, and the batch split by the outcome where they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.gradients.per_sample import per_sample_square_norms
from psgrad.engine.transforms import functional_call, grad, vmap
from psgrad.errors import TransformError

torch.manual_seed(0)
BATCH = torch.randn(6, 4, dtype=torch.float64)


def a_choice(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x * 2
    return x.sin()


def a_loop(x: Tensor) -> Tensor:
    steps = 0
    while x.abs().sum() > 1:
        x, steps = x / 2, steps + 1
    return x * steps


def a_length(x: Tensor) -> Tensor:
    length = int((x > 0).sum())
    return x[:length].square().sum() if length else x.sum() * 3


def agreement(x: Tensor) -> Tensor:
    if (x.abs() < 100).all() and not torch.equal(x, x + 1):
        return x * 2
    return x.cos()


def a_choice_in_an_input_of_its_own(x: Tensor) -> Tensor:
    return a_choice(x) + vmap(a_choice)(torch.stack([x, -x])).sum(0)


def kept(x: Tensor) -> Tensor:
    return x[x > 0].sin().sum()


def kept_columns(x: Tensor) -> Tensor:
    columns = x.outer(x.cos())[:, x > 0.1]
    return (columns.cumsum(0) * columns).sum()


def selected(x: Tensor) -> Tensor:
    return torch.masked_select(x, x < 0.3).prod() + x[(x > 0.5).nonzero(as_tuple=True)].sum() * x.sum()


def many_values_at_a_mask(x: Tensor) -> Tensor:
    mask = x > 0
    values = torch.arange(int(mask.sum()), dtype=x.dtype)
    return (x.index_put((mask,), values) * x).sum()


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave((x > 0).long() + 1).cumsum(0).sum()


def places(x: Tensor) -> Tensor:
    return x[torch.where(x > 0)[0]].square().sum()


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    a_choice,
    a_loop,
    a_length,
    agreement,
    a_choice_in_an_input_of_its_own,
    kept,
    kept_columns,
    selected,
    many_values_at_a_mask,
    repeated,
    places,
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_vmap_branch_equals_the_loop(function: Callable[[Tensor], Tensor]) -> None:
    def number(x: Tensor) -> Tensor:
        return function(x).square().sum()

    def gradient(x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(number(leaf), leaf)[0]

    values, gradients = torch.stack([function(x) for x in BATCH]), torch.stack([gradient(x) for x in BATCH])
    torch.testing.assert_close(vmap(function)(BATCH), values)
    torch.testing.assert_close(
        vmap(function, 1, -1, chunk_size=4)(BATCH.t().contiguous()), values.movedim(0, -1)
    )
    torch.testing.assert_close(vmap(grad(number))(BATCH), gradients)
    torch.testing.assert_close(grad(lambda b: vmap(number)(b).sum())(BATCH), gradients)
    twice = torch.stack([BATCH, BATCH.flip(1) * 2])
    torch.testing.assert_close(
        vmap(vmap(function))(twice), torch.stack([torch.stack([function(x) for x in b]) for b in twice])
    )


class Gated(nn.Module):
    """Takes one of two layers, or both, by what it sees: the gradients of a batch have several structures."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 1)
        self.table = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) if x.sum() > 0 else torch.tanh(self.second(x + self.table(torch.tensor(2))))
        if x[0] > 0:
            hidden = hidden + self.second(hidden.sum() * x)
        return self.head(torch.relu(hidden)).sum()


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_per_sample_gradients_branching_model(randomness: str) -> None:
    model = Gated().double()
    params = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return functional_call(model, params, (x,)), x.sum()

    expected = [torch.autograd.grad(model(x), list(params.values()), materialize_grads=True) for x in BATCH]
    result = per_sample_gradients(loss, params, BATCH, has_aux=True, randomness=randomness)
    for name, gradient in result.materialise().items():
        torch.testing.assert_close(gradient, torch.stack([row[list(params).index(name)] for row in expected]))
    squares = torch.stack([sum((g.square().sum() for g in row), torch.zeros(())) for row in expected])
    torch.testing.assert_close(result.square_norms(), squares)
    torch.testing.assert_close(result.losses, torch.stack([model(x) for x in BATCH]).detach())
    torch.testing.assert_close(result.aux, BATCH.sum(1))
    alone = per_sample_square_norms(loss, params, BATCH, has_aux=True, randomness=randomness)
    torch.testing.assert_close(alone.square_norms(), squares)
    torch.testing.assert_close(alone.losses, result.losses)
    torch.testing.assert_close(alone.aux, result.aux)
    weights = torch.arange(6.0, dtype=torch.float64)
    for name, total in result.weighted_sum(weights).items():
        torch.testing.assert_close(
            total, sum(w * row[list(params).index(name)] for w, row in zip(weights, expected, strict=True))
        )


@pytest.mark.parametrize("use", ["behind a function", "times a constant"])
def test_per_sample_gradients_branch_infinite_on_one_side(use: str) -> None:
    """What samples of one outcome share may be infinite; the others have nothing to do with it."""
    weight = torch.tensor([[0.0, 2.0, 0.5, 1.5], [1.0, 0.3, 0.7, 0.0]], dtype=torch.float64)
    constant = torch.where(weight == 0, torch.inf, weight)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        w = params["w"]
        if x.sum() > 0:
            return (
                (w.sqrt() @ x).sum()
                if use == "behind a function"
                else x.square().sum() * (w * constant).sum()
            )
        return (w @ x).sin().sum()

    loop = [
        torch.autograd.grad(loss({"w": leaf}, x), leaf)[0]
        for x in BATCH
        for leaf in [weight.clone().requires_grad_()]
    ]
    finite = [bool(g.isfinite().all()) for g in loop]
    assert 0 < sum(finite) < len(finite)
    result = per_sample_gradients(loss, {"w": weight}, BATCH)
    torch.testing.assert_close(result.materialise()["w"], torch.stack(loop))
    assert result.square_norms().isfinite().tolist() == finite


def test_vmap_branch_randomness_same() -> None:
    def noisy(x: Tensor) -> Tensor:
        noise = torch.randn(4, dtype=x.dtype)
        return x + noise if x.sum() > 0 else x - noise

    torch.manual_seed(5)
    noise = torch.randn(4, dtype=torch.float64)
    torch.manual_seed(5)
    expected = torch.stack([x + noise if x.sum() > 0 else x - noise for x in BATCH])
    assert torch.equal(vmap(noisy, randomness="same")(BATCH), expected)


def test_vmap_item_of_real_number_refused() -> None:
    with pytest.raises(
        TransformError, match="item is not possible on a value that differs between samples"
    ) as caught:
        vmap(lambda x: x * x.sum().item())(BATCH)
    assert "test_branching.py" in str(caught.value)
    assert torch.equal(
        vmap(lambda x: x * x.sum().item())(BATCH[:1].repeat(3, 1)), (BATCH[:1] * BATCH[0].sum()).repeat(3, 1)
    )


def test_vmap_branch_different_shapes_refused() -> None:
    with pytest.raises(TransformError, match="returns tensors of shapes"):
        vmap(lambda x: x[: int((x > 0).sum())])(BATCH)
    with pytest.raises(TransformError, match="returns tensors of shapes"):
        vmap(lambda x: x[x > 0])(BATCH)
    with pytest.raises(TransformError, match="several structures"):
        vmap(lambda x: (x,) if x.sum() > 0 else (x, x))(BATCH)
    with pytest.raises(TransformError, match="out_dims is None"):
        vmap(lambda x: (x, 1 if x.sum() > 0 else 2), out_dims=(0, None))(BATCH)


def test_vmap_branch_after_write_refused() -> None:
    def writes(x: Tensor) -> Tensor:
        x.mul_(2)
        return a_choice(x)

    with pytest.raises(TransformError, match="written to in place"):
        vmap(writes)(BATCH.clone())


def test_vmap_boolean_mask_equal_counts() -> None:
    rows = torch.tensor([[1.0, -1, 2, -2], [-3, 4, 5, -1]])
    assert torch.equal(vmap(lambda x: x[x > 0])(rows), torch.tensor([[1.0, 2], [4, 5]]))
    assert torch.equal(vmap(lambda x: x.relu().nonzero())(rows), torch.tensor([[[0], [2]], [[1], [2]]]))


def test_vmap_branch_no_samples() -> None:
    assert vmap(lambda x: x * 2 if x.sum() > 0 else x * 3)(BATCH[:0]).shape == (0, 4)
