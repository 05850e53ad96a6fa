"""Operators that change a tensor's shape in place: later writes still arrive where the tensor looks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from psgrad.engine.transforms import grad, jvp, vmap
from psgrad.errors import TransformError
from tests.engine.transforms.loops import gradients_by_loop

torch.manual_seed(0)
X, W = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)


def axes_there_and_back(x: Tensor) -> Tensor:
    y = x * 1
    y.unsqueeze_(1)
    y.mul_(W.unsqueeze(1))
    y.squeeze_(1)
    return y**3


def a_view_that_changes(x: Tensor) -> Tensor:
    whole = x * 1
    row = whole[0]
    row.unsqueeze_(0)
    row.mul_(3)
    return whole**3 * W


def several_in_turn(x: Tensor) -> Tensor:
    y = x * 1
    y.transpose_(0, 1)
    y.t_().mul_(W)
    y.swapaxes_(0, 1)
    y.add_(1)
    return y**3 * W


def other_strides(x: Tensor) -> Tensor:
    y = x * 1
    y.as_strided_((3, 3), (1, 3))
    y[0].mul_(2)
    return y**3 * W


def a_fresh_tensor(x: Tensor) -> Tensor:
    y = torch.zeros(3, 1, 3, dtype=torch.float64)
    y.squeeze_()
    y.t_()
    y.copy_(x)
    y.t_()
    return y**3 * W


def a_view_of_a_fresh_tensor(x: Tensor) -> Tensor:
    y = torch.ones(2, 3, dtype=torch.float64)
    row = y[0]
    row.unsqueeze_(0)
    row.mul_(x[0])
    return y**3 * W[:2]


def the_argument_itself(x: Tensor) -> Tensor:
    x.t_()
    x.mul_(2)
    return x**3 * W


PROGRAMS = [
    axes_there_and_back,
    a_view_that_changes,
    several_in_turn,
    other_strides,
    a_fresh_tensor,
    a_view_of_a_fresh_tensor,
    the_argument_itself,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_shape_in_place_then_write(program: Callable[[Tensor], Tensor]) -> None:
    def loss(x: Tensor) -> Tensor:
        return program(x).sum()

    (expected,) = gradients_by_loop(lambda x: program(x.clone()).sum(), X)
    torch.testing.assert_close(vmap(grad(loss))(X.clone()), expected)
    torch.testing.assert_close(torch.stack([grad(loss)(x.clone()) for x in X]), expected)
    torch.testing.assert_close(grad(lambda x: vmap(loss)(x).sum())(X.clone()), expected)
    tangent = torch.ones_like(X[0])
    torch.testing.assert_close(jvp(loss, (X[0].clone(),), (tangent,))[1], expected[0].sum())
    torch.testing.assert_close(vmap(program)(X.clone()), torch.stack([program(x.clone()) for x in X]))


def after_a_view(x: Tensor) -> Tensor:
    y = x * 1
    row = y[0]
    y.t_()
    return (row**2).sum() + y.sum()


def after_a_view_of_a_fresh_tensor(x: Tensor) -> Tensor:
    y = torch.zeros(3, 3, dtype=torch.float64)
    row = y[0]
    y.t_()
    y[1] = x[0]
    return (row**2).sum() + y.sum()


def without_gradient(x: Tensor) -> Tensor:
    y = x * 1
    with torch.no_grad():
        y.t_()
    return (y * W).sum()


@pytest.mark.parametrize("program", [after_a_view, after_a_view_of_a_fresh_tensor, without_gradient])
def test_shape_in_place_refused(
    program: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(TransformError, match="t_ writes in place"):
        vmap(grad(program))(X)
