"""Under PyTorch's autograd: results of our transforms can be differentiated from outside, as those of
torch.func can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psgrad.engine import transforms

Program = Callable[[Tensor, Tensor], Tensor]
POINTS = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3).sin()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1)).double()


def programs(tf: Any, model: nn.Module) -> dict[str, Program]:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(w @ x).square().sum()

    def partly_constant(x: Tensor) -> Tensor:
        with torch.no_grad():
            square = x**2
        return (x - square).sum()

    def gradient_as_number(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            gradient = tf.grad(loss)(w, x)
        return (gradient * w).sum()

    def written(y: Tensor, w: Tensor) -> Tensor:
        z = y * 2
        z[0] = y[1]
        return z.mul_(w[0]).sum()

    return {
        "grad": lambda w, x: tf.grad(loss)(w, x).square().sum(),
        "grad in the second": lambda w, x: tf.grad(loss, 1)(w, x).square().sum(),
        "value": lambda w, x: tf.grad_and_value(loss)(w, x)[1],
        "captured": lambda w, x: tf.grad(lambda x: loss(w, x))(x).square().sum(),
        "captured, without tracers": lambda w, x: tf.grad(lambda x: loss((w * 2).exp(), x))(x).square().sum(),
        "grad(grad)": lambda w, x: tf.grad(lambda x: tf.grad(loss)(w, x).sum())(x).square().sum(),
        "vmap": lambda w, x: tf.vmap(loss, (None, 0))(w, POINTS * x).square().sum(),
        "vmap, captured": lambda w, x: tf.vmap(lambda y: loss(w.sin(), y * x))(POINTS).sum(),
        "vmap, unmapped result": lambda w, x: tf.vmap(lambda y: w.sum() * 2)(POINTS * x).square().sum(),
        "vmap over the last axis": lambda w, x: tf.vmap(lambda a: a.prod(), 1)(w * 2).square().sum(),
        "vmap(vmap)": lambda w, x: (
            tf.vmap(tf.vmap(lambda a, b: (a * w[0] * b).sum(), (None, 0)), (0, None))(POINTS, POINTS * x)
            .square()
            .sum()
        ),
        "vmap(grad)": lambda w, x: tf.vmap(tf.grad(loss), (None, 0))(w, POINTS * x).square().sum(),
        "grad(vmap)": (
            lambda w, x: tf.grad(lambda w: tf.vmap(loss, (None, 0))(w, POINTS * x).sum())(w).square().sum()
        ),
        "vjp": (
            lambda w, x: tf.vjp(lambda w: w @ x, w)[1](torch.ones_like(w[:, 0]) * x.sum())[0].square().sum()
        ),
        "vjp, through the cotangent alone": lambda w, x: (
            tf.vjp(lambda w: w @ x.detach(), w.detach())[1](torch.ones_like(w[:, 0]) * x.sum())[0]
            .square()
            .sum()
        ),
        "jvp": lambda w, x: tf.jvp(lambda w: torch.tanh(w @ x), (w,), (w.sin(),))[1].square().sum(),
        "jacrev": lambda w, x: tf.jacrev(lambda w: torch.tanh(w @ x))(w).square().sum(),
        "jacfwd": lambda w, x: tf.jacfwd(lambda w: torch.tanh(w @ x))(w).square().sum(),
        "hessian": lambda w, x: tf.hessian(lambda x: loss(w, x))(x).square().sum(),
        "a module's own parameters": (
            lambda w, x: tf.vmap(lambda y: model(y * x).sum())(POINTS).square().sum()
        ),
        "a module's own parameters under vmap(grad)": lambda w, x: (
            tf.vmap(tf.grad(lambda y: model(y * x).sum()))(POINTS).square().sum() * w.sum()
        ),
        "no_grad inside": (
            lambda w, x: tf.grad_and_value(partly_constant)(x)[1] + (tf.grad(partly_constant)(x) * x).sum()
        ),
        "no_grad inside two": (
            lambda w, x: (
                tf.grad(lambda y: tf.grad_and_value(partly_constant)(y)[1])(x).square().sum() + x.sum()
            )
        ),
        "no_grad outside": gradient_as_number,
        "detach": (
            lambda w, x: (
                tf.grad(lambda w: (w.detach() * w).sum())(w).sum()
                + tf.vmap(lambda a: (a.detach() * a).sum())(w).sum()
            )
        ),
        "in place": (
            lambda w, x: (
                tf.grad(lambda y: written(y, w))(x).square().sum()
                + tf.vmap(lambda y: written(y, w))(POINTS * x).sum()
            )
        ),
    }


def outer_gradients(program: Program, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    w, x = (
        torch.randn(4, 3, dtype=torch.float64).requires_grad_(),
        torch.randn(3, dtype=torch.float64).requires_grad_(),
    )
    leaves = [w, x, *model.parameters()]
    value = program(w, x)
    result = torch.autograd.grad(value, leaves, allow_unused=True)
    return [
        value.detach(),
        *[torch.zeros_like(leaf) if g is None else g for g, leaf in zip(result, leaves, strict=True)],
    ]


@pytest.mark.parametrize("name", programs(transforms, network()))
def test_outer_autograd_of_transforms(name: str) -> None:
    model = network()
    ours = outer_gradients(programs(transforms, model)[name], model)
    theirs = outer_gradients(programs(torch.func, model)[name], model)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_outer_autograd_under_no_grad() -> None:
    w = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert not transforms.vmap(lambda x: x * w)(torch.randn(2, 3)).requires_grad
    assert not transforms.vmap(lambda x: x * w.detach())(torch.randn(2, 3)).requires_grad


def test_outer_autograd_training_step_through_vmap() -> None:
    """What a user does: a per-sample forward under vmap, then .backward()."""
    model, reference = network(), network()
    transforms.vmap(lambda x: model(x).square().sum())(POINTS).mean().backward()
    reference(POINTS).square().sum(-1).mean().backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)
