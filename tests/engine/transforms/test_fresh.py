"""Tensors made inside a batched function become one for each sample when a batched value is written into
them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from psgrad.engine.transforms import grad, jvp, vjp, vmap
from psgrad.errors import TransformError

Function = Callable[[Tensor], Tensor]
BATCH = torch.linspace(-2, 2, 20, dtype=torch.float64).reshape(5, 4).sin()


def write_through_an_earlier_view(x: Tensor) -> Tensor:
    base = torch.ones(2, 4, dtype=x.dtype)
    row, column, flat = base[0], base[:, 1], base.view(-1)
    row.mul_(x)
    column.add_(x[0])
    return torch.cat([flat, row, column])


def write_through_a_view_of_a_view(x: Tensor) -> Tensor:
    base = torch.zeros(4, 3, dtype=x.dtype).t()
    part = base[1:].view(2, 2, 2)[0]
    part[1].copy_(x[:2])
    return torch.cat([base.reshape(-1), part.reshape(-1)])


def computed_from_fresh(x: Tensor) -> Tensor:
    steps = torch.arange(4, dtype=x.dtype)
    doubled = steps * 2 + 1
    doubled[0] = x.sum()
    return doubled * steps


def a_mask(x: Tensor) -> Tensor:
    mask = torch.zeros(4, dtype=torch.bool)
    mask[1:3] = x[1:3] > 0
    return torch.where(mask, x, -x)


def split_and_unbound(x: Tensor) -> Tensor:
    out = torch.zeros(2, 4, dtype=x.dtype)
    first, second = out.unbind(0)
    left, right = second.split(2)
    right.copy_(x[:2])
    first += 1
    return torch.stack([out[0], out[1]]) + first + torch.cat([left, right])


def two_of_them(x: Tensor) -> Tensor:
    a, b = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    a += b
    b[:2] = x[:2]
    a.add_(b)
    return a


FUNCTIONS: list[Function] = [
    write_through_an_earlier_view,
    write_through_a_view_of_a_view,
    computed_from_fresh,
    a_mask,
    split_and_unbound,
    two_of_them,
]


def rows(function: Function, batch: Tensor) -> Tensor:
    return torch.stack([function(x) for x in batch])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_vmap_fresh_tensor_equals_the_loop(function: Function) -> None:
    torch.testing.assert_close(vmap(function)(BATCH), rows(function, BATCH))
    doubled = torch.stack([BATCH, BATCH.flip(0).contiguous() * 2, BATCH + 1])
    torch.testing.assert_close(
        vmap(vmap(function))(doubled), torch.stack([rows(function, batch) for batch in doubled])
    )
    torch.testing.assert_close(
        vmap(lambda b: vmap(lambda x: function(x * b.sum()))(BATCH))(doubled[:, 0]),
        vmap(lambda b: torch.stack([function(x * b.sum()) for x in BATCH]))(doubled[:, 0]),
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_vmap_fresh_tensor_derivatives(function: Function) -> None:
    def number(x: Tensor) -> Tensor:
        return (function(x) * x.sum()).sum()

    def expected(x: Tensor) -> Tensor:
        """Differences of values: PyTorch's autograd refuses some of these writes through views."""
        steps = 1e-5 * torch.eye(4, dtype=x.dtype)
        return torch.stack([(number(x + step) - number(x - step)) / 2e-5 for step in steps])

    oracle = torch.stack([expected(x) for x in BATCH])
    torch.testing.assert_close(vmap(grad(number))(BATCH), oracle, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad(lambda b: vmap(number)(b).sum())(BATCH), oracle, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        vjp(vmap(number), BATCH)[1](torch.ones(5, dtype=BATCH.dtype))[0], oracle, rtol=1e-6, atol=1e-7
    )
    torch.testing.assert_close(
        jvp(vmap(number), (BATCH,), (BATCH,))[1], (oracle * BATCH).sum(1), rtol=1e-6, atol=1e-7
    )
    torch.testing.assert_close(
        vmap(lambda x: jvp(number, (x,), (x,))[1])(BATCH), (oracle * BATCH).sum(1), rtol=1e-6, atol=1e-7
    )


def test_vmap_fresh_draw_randomness_same_write() -> None:
    def function(x: Tensor) -> Tensor:
        noise = torch.randn(4, dtype=x.dtype)
        noise[0] = x[0]
        return noise

    torch.manual_seed(3)
    result = vmap(function, randomness="same")(BATCH)
    torch.manual_seed(3)
    expected = torch.randn(4, dtype=torch.float64).repeat(5, 1)
    expected[:, 0] = BATCH[:, 0]
    torch.testing.assert_close(result, expected)


def test_vmap_fresh_tensor_returned_without_sample_axis() -> None:
    assert vmap(lambda x: (x, torch.zeros(2)), out_dims=(0, None))(BATCH)[1].shape == (2,)
    assert vmap(lambda x: torch.zeros(2))(BATCH).shape == (5, 2)
    with pytest.raises(TransformError, match="out_dim is None"):
        vmap(two_of_them, out_dims=None)(BATCH)


def test_vmap_write_into_closure_tensor_refused() -> None:
    outside = torch.zeros(4, dtype=torch.float64)

    def writes(x: Tensor) -> Tensor:
        outside[:2] = x[:2]
        return outside

    with pytest.raises(TransformError, match="without a sample axis"):
        vmap(writes)(BATCH)
    assert not outside.any()


def test_vmap_fresh_tensor_no_samples() -> None:
    assert vmap(computed_from_fresh)(BATCH[:0]).shape == (0, 4)
