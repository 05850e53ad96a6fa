"""In-place writes under no_grad: the value changes, and derivatives go by as if it had not, at every level,
as in torch.func.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import psgrad.engine.transforms as ours

pytestmark = pytest.mark.usefixtures("float64")


def into_a_value(x: Tensor) -> Tensor:
    y = (2 * x).clone()
    with torch.no_grad():
        y.clamp_(min=0.5)
    return (y**3).sum()


def into_an_entry(x: Tensor) -> Tensor:
    y = 2 * x
    with torch.no_grad():
        y[0] = 5.0
    return (y**3).sum()


def into_a_slice(x: Tensor) -> Tensor:
    y = 2 * x
    with torch.no_grad():
        y[:2].clamp_(min=0.5)
    return (y**3).sum()


def into_a_view_of_a_view(x: Tensor) -> Tensor:
    y = 2 * x
    with torch.no_grad():
        y.view(3, 1)[:, 0].mul_(3)
    return (y**3).sum()


def zeros(x: Tensor) -> Tensor:
    y = 2 * x
    with torch.no_grad():
        y.zero_()
    return (y**3 + y).sum()


def behind_a_view_that_is_read_there(x: Tensor) -> Tensor:
    y = 2 * x
    first = y[:2]
    with torch.no_grad():
        y.mul_(3)
        _ = first + 1
    return (first**3).sum() + y.sum()


def into_a_constant(x: Tensor) -> Tensor:
    buffer = x.detach().clone()
    with torch.no_grad():
        buffer.copy_(x).mul_(0.5)
    return ((x - buffer) ** 2).sum()


class Looping:
    """torch.func, whose vmap can't write batched tangents into what is not batched: a loop in its place."""

    grad, jvp, hessian = (
        staticmethod(torch.func.grad),
        staticmethod(torch.func.jvp),
        staticmethod(torch.func.hessian),
    )

    @staticmethod
    def vmap(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda xs: torch.stack([f(x) for x in xs])


FUNCTIONS = (
    into_a_value,
    into_an_entry,
    into_a_slice,
    into_a_view_of_a_view,
    zeros,
    behind_a_view_that_is_read_there,
    into_a_constant,
)

NESTS: dict[str, Callable[[Any, Any, Tensor, Tensor], Any]] = {
    "grad": lambda tf, f, x, t: tf.grad(f)(x),
    "jvp": lambda tf, f, x, t: tf.jvp(f, (x,), (t,)),
    "grad-of-grad": lambda tf, f, x, t: tf.grad(lambda x: tf.grad(f)(x).sum())(x),
    "grad-of-jvp": lambda tf, f, x, t: tf.grad(lambda x: tf.jvp(f, (x,), (t,))[1])(x),
    "jvp-of-grad": lambda tf, f, x, t: tf.jvp(tf.grad(f), (x,), (t,)),
    "jvp-of-jvp": lambda tf, f, x, t: tf.jvp(lambda x: tf.jvp(f, (x,), (t,))[1], (x,), (t,)),
    "hessian": lambda tf, f, x, t: tf.hessian(f)(x),
    "vmap-of-grad-of-grad": lambda tf, f, x, t: tf.vmap(tf.grad(lambda x: tf.grad(f)(x).sum()))(
        torch.stack([x, 2 * x])
    ),
    "grad-of-vmap-of-grad": lambda tf, f, x, t: tf.grad(lambda xs: tf.vmap(tf.grad(f))(xs).sum())(
        torch.stack([x, 2 * x])
    ),
    "grad-of-vmap-of-jvp": lambda tf, f, x, t: tf.grad(
        lambda xs: tf.vmap(lambda x: tf.jvp(f, (x,), (t,))[1])(xs).sum()
    )(torch.stack([x, 2 * x])),
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_writes_under_no_grad_as_torch_func(function: Callable[[Tensor], Tensor], nest: str) -> None:
    x, t = torch.tensor([0.1, 1.0, 2.0]), torch.tensor([1.0, -0.5, 2.0])
    torch.testing.assert_close(
        NESTS[nest](ours, function, x, t), NESTS[nest](Looping, function, x, t), rtol=1e-12, atol=0
    )
