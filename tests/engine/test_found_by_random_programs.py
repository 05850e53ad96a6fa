"""Faults that random programs have found (tests/random_programs), a test for each class: infinite numbers,
look-ups, normalisations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import grad, jvp, vmap
from psgrad.errors import TransformError


def by_loop(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradients of a function of samples, one sample after the other."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad([f(one) for one in leaf], leaf)[0]


INFINITE_COTANGENTS = {
    "as_strided": lambda w, x: F.linear(x, w.as_strided((3, 2), (2, 1))),
    "index of rows": lambda w, x: F.linear(x, w[torch.tensor([0, 2])][:, :2]),
    "slice, reshaped": lambda w, x: F.linear(x, w[:2].reshape(3, 2)),
    "masked_fill": lambda w, x: x @ w.masked_fill(torch.eye(4, 3).bool(), 0)[:2],
    "where": lambda w, x: x @ torch.where(torch.eye(4, 3).bool(), w, 0)[:2],
    "tril": lambda w, x: x @ w.tril()[1:3],
    "relu": lambda w, x: x @ w.relu()[:2],
    "times infinity": lambda w, x: F.linear(
        x.nan_to_num(1, 1, 1), (w * torch.eye(4, 3).masked_fill(torch.eye(4, 3).bool(), torch.inf))[:2, :2]
    ),
    "sum": lambda w, x: F.linear(x, (w - w.sum(1, keepdim=True))[:, :2]),
}


@pytest.mark.parametrize("name", INFINITE_COTANGENTS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_per_sample_gradients_of_parts_beside_infinite_numbers(name: str, number: float) -> None:
    """Zeros outside of the part that is used stay zeros, and infinities that cancel are NaN."""
    f = lambda w, x: INFINITE_COTANGENTS[name](w, x).sum()
    w = torch.linspace(-1.0, 1.5, 12, dtype=torch.float64).reshape(4, 3)
    x = (
        torch.linspace(-1.0, 2.0, 20, dtype=torch.float64)
        .reshape(2, 5, 2)
        .masked_fill(torch.eye(5, 2).bool(), number)
    )
    found = per_sample_gradients(lambda p, x: f(p["w"], x), {"w": w}, x).materialise()["w"]
    loop = torch.stack([by_loop(lambda w, one=one: f(w, one), w.unsqueeze(0))[0] for one in x])
    torch.testing.assert_close(found, loop, equal_nan=True)


def test_vmap_outer_autograd_write_after_lookup() -> None:
    """Look-ups need no value of the table for their derivative: a write to it afterwards is no error."""
    places = torch.tensor([[0, 2], [1, 1]])
    for look_up in (lambda t, i: t.index_select(-1, i), lambda t, i: F.embedding(i, t)):

        def f(x: Tensor, i: Tensor, look_up: Any = look_up) -> Tensor:
            t = x * 1
            found = look_up(t, i)
            t.mul_(2)
            return found.sin().sum() + t.sum()

        x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(2, 3, 3).requires_grad_()
        loop = torch.stack([f(one, i) for one, i in zip(x, places, strict=True)])
        torch.testing.assert_close(
            *(torch.autograd.grad(out.sum(), x)[0] for out in (vmap(f)(x, places), loop))
        )
        with pytest.raises((IndexError, RuntimeError, TransformError)):
            vmap(f)(x, places - 1)


def test_padding_row_of_mapped_table_has_tangent_and_no_gradient() -> None:
    table, tangent = torch.linspace(-1, 1, 12).reshape(2, 3, 2), torch.linspace(1, 2, 12).reshape(2, 3, 2)
    f = lambda w: F.embedding(torch.tensor([0, 1]), w, padding_idx=0)
    torch.testing.assert_close(jvp(vmap(f), (table,), (tangent,))[1], tangent[:, :2])
    gradient = grad(lambda w: vmap(f)(w).sum())(table)
    assert gradient.sum(2).tolist() == [[0.0, 2.0, 0.0]] * 2


def test_logsumexp_of_nothing_but_minus_infinity() -> None:
    x = torch.tensor([[-torch.inf, -torch.inf], [1.0, -torch.inf]])
    f = lambda x: x.logsumexp(0)
    torch.testing.assert_close(vmap(grad(f))(x), by_loop(f, x), equal_nan=True)


def test_instance_norm_of_halves() -> None:
    """The statistics of values that lie close together are not rounded to halves before they are
    taken off.
    """
    x = torch.tensor([[[[2.0, 2.125, 2.25]]], [[[-3.0, -3.0625, -3.25]]]], dtype=torch.bfloat16)
    f = lambda x: (F.instance_norm(x) * torch.tensor([0.5, 0.75, 1.5], dtype=x.dtype)).sum()
    exact = vmap(grad(f))(x.double())
    torch.testing.assert_close(
        vmap(grad(f))(x).double(), exact, rtol=0.02, atol=float(exact.abs().max()) * 0.02
    )


def test_instance_norm_leaves_statistics_of_another_level_alone() -> None:
    x, mean = (
        torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(2, 1, 3, 4).sin(),
        torch.zeros(2, 3, dtype=torch.float64),
    )
    f = lambda x, mean: F.instance_norm(x, mean, mean + 1, use_input_stats=True).square().sin().sum()
    found = vmap(lambda x, mean: grad(lambda x: f(x, mean))(x))(x, mean)
    torch.testing.assert_close(found, by_loop(lambda x: f(x, torch.zeros(3, dtype=torch.float64)), x))


def test_second_derivative_of_group_norm_then_transpose() -> None:
    w = torch.linspace(-1, 1, 4, dtype=torch.float64).reshape(2, 2)
    x = torch.linspace(0.3, 2, 8, dtype=torch.float64).reshape(2, 2, 2)
    f = lambda w, x: (
        F.group_norm((x @ w).sin().mT.reshape(1, 1, 2, 2), 1).mT.cos() * torch.tensor([0.5, 2.0])
    ).sum()
    found = vmap(grad(lambda w, x: grad(f)(w, x).sin().sum()), in_dims=(None, 0))(w, x)

    def loop(one: Tensor) -> Tensor:
        v = w.clone().requires_grad_()
        return torch.autograd.grad(torch.autograd.grad(f(v, one), v, create_graph=True)[0].sin().sum(), v)[0]

    torch.testing.assert_close(found, torch.stack([loop(one) for one in x]))
