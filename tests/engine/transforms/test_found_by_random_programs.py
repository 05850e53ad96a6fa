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
from torch.nn.attention import SDPBackend, sdpa_kernel

from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import capture, grad, jacrev, jvp, vjp, vmap
from psgrad.errors import TransformError
from tests.engine.transforms.loops import gradients_by_loop

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
def test_per_sample_gradients_slice_beside_infinite_numbers(name: str, number: float) -> None:
    """Zeros outside of the part that is used stay zeros, and infinities that cancel are NaN."""
    f = lambda w, x: INFINITE_COTANGENTS[name](w, x).sum()
    w = torch.linspace(-1.0, 1.5, 12, dtype=torch.float64).reshape(4, 3)
    x = (
        torch.linspace(-1.0, 2.0, 20, dtype=torch.float64)
        .reshape(2, 5, 2)
        .masked_fill(torch.eye(5, 2).bool(), number)
    )
    result = per_sample_gradients(lambda p, x: f(p["w"], x), {"w": w}, x).materialise()["w"]
    (loop,) = gradients_by_loop(f, w.expand(len(x), *w.shape), x)
    torch.testing.assert_close(result, loop, equal_nan=True)


def test_vmap_outer_autograd_write_after_lookup() -> None:
    """Look-ups need no value of the table for their derivative: a write to it afterwards is no error."""
    places = torch.tensor([[0, 2], [1, 1]])
    for look_up in (lambda t, i: t.index_select(-1, i), lambda t, i: F.embedding(i, t)):

        def f(x: Tensor, i: Tensor, look_up: Any = look_up) -> Tensor:
            t = x * 1
            result = look_up(t, i)
            t.mul_(2)
            return result.sin().sum() + t.sum()

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


def test_logsumexp_all_minus_infinity() -> None:
    x = torch.tensor([[-torch.inf, -torch.inf], [1.0, -torch.inf]])
    f = lambda x: x.logsumexp(0)
    torch.testing.assert_close(vmap(grad(f))(x), gradients_by_loop(f, x)[0], equal_nan=True)


def test_instance_norm_half_precision() -> None:
    """The statistics of values that lie close together are not rounded to halves before they are
    taken off.
    """
    x = torch.tensor([[[[2.0, 2.125, 2.25]]], [[[-3.0, -3.0625, -3.25]]]], dtype=torch.bfloat16)
    f = lambda x: (F.instance_norm(x) * torch.tensor([0.5, 0.75, 1.5], dtype=x.dtype)).sum()
    exact = vmap(grad(f))(x.double())
    torch.testing.assert_close(
        vmap(grad(f))(x).double(), exact, rtol=0.02, atol=float(exact.abs().max()) * 0.02
    )


def test_instance_norm_statistics_of_another_level() -> None:
    x, mean = (
        torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(2, 1, 3, 4).sin(),
        torch.zeros(2, 3, dtype=torch.float64),
    )
    f = lambda x, mean: F.instance_norm(x, mean, mean + 1, use_input_stats=True).square().sin().sum()
    result = vmap(lambda x, mean: grad(lambda x: f(x, mean))(x))(x, mean)
    torch.testing.assert_close(
        result, gradients_by_loop(lambda x: f(x, torch.zeros(3, dtype=torch.float64)), x)[0]
    )


def test_second_derivative_of_group_norm_then_transpose() -> None:
    w = torch.linspace(-1, 1, 4, dtype=torch.float64).reshape(2, 2)
    x = torch.linspace(0.3, 2, 8, dtype=torch.float64).reshape(2, 2, 2)
    f = lambda w, x: (
        F.group_norm((x @ w).sin().mT.reshape(1, 1, 2, 2), 1).mT.cos() * torch.tensor([0.5, 2.0])
    ).sum()
    result = vmap(grad(lambda w, x: grad(f)(w, x).sin().sum()), in_dims=(None, 0))(w, x)

    def loop(one: Tensor) -> Tensor:
        v = w.clone().requires_grad_()
        return torch.autograd.grad(torch.autograd.grad(f(v, one), v, create_graph=True)[0].sin().sum(), v)[0]

    torch.testing.assert_close(result, torch.stack([loop(one) for one in x]))


def twice_by_loop(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradients of the sum of a function's gradients, one sample after the other."""
    result = []
    for one in x:
        leaf = one.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        result += torch.autograd.grad(first.sin().sum(), leaf)
    return torch.stack(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("masked", ["", "lowest number", "large number"])
def test_attention_gradient_of_large_equal_scores(dtype: torch.dtype, masked: str) -> None:
    """Scores that are equal and large have equal weights that add up to one, also beside ordinary samples."""
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(3, 2, 2, 4).sin()
    x[1] = x[1, :1, :1] if masked else 1e6 * x[1, :1, :1]
    low = torch.finfo(dtype).min if masked == "lowest number" else -1e9
    mask = torch.tensor([0.0, low if masked else 0.0, 0.0]).reshape(3, 1, 1, 1).expand(3, 1, 2, 2)

    def f(x: Tensor, mask: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(x[None], x[None], x[None] * 0.5, mask[None].to(x.dtype))
        return (out * torch.linspace(0.5, 1.5, 4, dtype=x.dtype)).sum()

    result = vmap(grad(f))(x.to(dtype), mask)
    with sdpa_kernel(SDPBackend.MATH):
        (exact,) = gradients_by_loop(f, x, mask.double())
    units = 100 * torch.finfo(dtype).eps
    for one, expected in zip(result, exact, strict=True):
        torch.testing.assert_close(
            one.double(), expected, rtol=units, atol=units * float(expected.abs().max())
        )


def test_attention_gradient_of_large_scores_is_replayed() -> None:
    x = torch.linspace(-1, 1, 48).reshape(3, 2, 2, 4)
    gradients = vmap(grad(lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]).sin().sum()))
    replayed = capture(gradients)
    for scale in (1, 1, 1e6, 1):
        assert torch.equal(replayed(x * scale), gradients(x * scale))
    assert [entry.replays for entry in replayed.entries.values()] == [3]


@pytest.mark.parametrize("name", ["contracted", "scaled"])
def test_per_sample_gradients_overflow_beside_zero(name: str) -> None:
    """A factor that overflows beside one that is zero does not make NaN of the product."""
    big = torch.tensor([[0.3, 1e30], [1.0, 1e25]])
    ways = {
        "contracted": lambda w, x: F.linear(x, w @ big / torch.full((3, 1), torch.inf)),
        "scaled": lambda w, x: F.linear(x, w * torch.tensor([1e30, 1.0]) / torch.full((3, 1), torch.inf)),
    }
    f = lambda w, x: ways[name](w, x).sum()
    w, x = torch.linspace(-1, 1, 6).reshape(3, 2), torch.linspace(-1e15, 1e15, 8).reshape(1, 4, 2)
    result = per_sample_gradients(lambda p, x: f(p["w"], x), {"w": w}, x).materialise()["w"]
    assert torch.equal(result, gradients_by_loop(f, w[None], x)[0])


@pytest.mark.parametrize("norm", ["layer_norm", "group_norm"])
def test_second_derivative_of_norm_half_precision(norm: str) -> None:
    """Of two numbers: what is left of the derivative is small beside what cancels."""
    f = {
        "layer_norm": lambda x: (F.layer_norm(x, (2,)) * torch.tensor([0.5, 1.5], dtype=x.dtype)).sum(),
        "group_norm": lambda x: (F.group_norm(x[None], 1)[0] * torch.tensor([0.5, 1.5], dtype=x.dtype)).sum(),
    }[norm]
    x = torch.tensor([[0.5, 2.0], [-1.5, 0.25], [3.0, -2.0]])
    exact = twice_by_loop(f, x.double())
    result = vmap(grad(lambda x: grad(f)(x).sin().sum()))(x.to(torch.bfloat16))
    torch.testing.assert_close(result.double(), exact, rtol=0.02, atol=1e-8)


WRITES_AFTER_USE = {
    "factor": lambda a, t: (t * a, t.mul_(3))[0],
    "factor, in a view": lambda a, t: (t * a, t[:2].zero_())[0],
    "factor, with what is differentiated": lambda a, t: (u := t * a, u + t.mul_(a))[1],
    "unused": lambda a, t: (torch.logaddexp2(t, a), t.mul_(2) + a)[1],
    "random": lambda a, t: (t * a, t.clamp_(-0.1, 0.1))[0] + t,
}


@pytest.mark.parametrize("outer", ["grad", "vjp", "jacrev"])
@pytest.mark.parametrize("name", WRITES_AFTER_USE)
def test_grad_of_vmap_write_after_use(name: str, outer: str) -> None:
    """The samples are not an argument of the gradient; what is made of them and written to is needed as it
    was.
    """
    x, a = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3), torch.tensor(0.3, dtype=torch.float64)
    one = lambda a, x: WRITES_AFTER_USE[name](a, x * 1).sum()
    both = lambda a: vmap(one, (None, 0))(a, x).sum()
    result = {
        "grad": lambda: grad(both)(a),
        "vjp": lambda: vjp(both, a)[1](torch.ones((), dtype=torch.float64))[0],
        "jacrev": lambda: jacrev(both)(a),
    }[outer]()
    step = 1e-6
    torch.testing.assert_close(result, (both(a + step) - both(a - step)) / (2 * step), rtol=1e-7, atol=1e-8)


def test_grad_of_vmap_write_to_argument() -> None:
    """Into the argument itself: written where no gradient needs it, else refused."""
    a = torch.tensor(0.3)
    counts, x = torch.zeros(2), torch.ones(2, 3)

    def f(a: Tensor, count: Tensor, x: Tensor) -> Tensor:
        count.add_(1)
        return (a * x).sum()

    grad(lambda a: vmap(lambda count, x: f(a, count, x))(counts, x).sum())(a)
    assert counts.tolist() == [1.0, 1.0]
    with pytest.raises(TransformError, match="writes in place into a tensor from outside"):
        grad(lambda a: vmap(lambda x: ((a * x).sum(), x[:2].mul_(2))[0])(x).sum())(a)
    assert x.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("outer", [grad, lambda f: lambda x: jacrev(f)(x)], ids=["grad", "jacrev"])
@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
def test_grad_of_vmap_order_statistic_of_equal_and_missing_numbers(name: str, outer: Any) -> None:
    """Outside of vmap, too, elements that are equal to the result share the gradient; NaN is equal to NaN."""
    f = lambda x: getattr(x, name)().square()
    nan, inf = torch.nan, torch.inf
    x = torch.tensor(
        [[1.0, 1, 1, 1], [0, 2, 2, 1], [nan, 1, nan, 3], [-inf, nan, nan, 2], [inf, inf, -inf, -inf]]
    )
    torch.testing.assert_close(
        outer(lambda x: vmap(f)(x).sum())(x), gradients_by_loop(f, x)[0], equal_nan=True
    )
    nested = torch.stack([x, x.flip(0)])
    result = outer(lambda x: vmap(vmap(f))(x).sum())(nested)
    torch.testing.assert_close(
        result, torch.stack([gradients_by_loop(f, each)[0] for each in nested]), equal_nan=True
    )


@pytest.mark.parametrize("nest", ["grad", "jvp", "vmap of grad"])
def test_view_of_written_transpose_refused(nest: str) -> None:
    """A write may leave its numbers in another order in memory; `view` goes by the tensor's own."""

    def f(x: Tensor) -> Tensor:
        y = x.clone().select(-2, 1)
        y.sub_(0.5).transpose_(0, -1)
        y += 0.5
        return y.view(-1).sum()

    x = torch.randn(2, 2, 2, 2)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        f(x[0])
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        {
            "grad": lambda: grad(f)(x[0]),
            "jvp": lambda: jvp(f, (x[0],), (x[1],)),
            "vmap of grad": lambda: vmap(grad(f))(x),
        }[nest]()


def test_per_sample_gradients_bfloat16_norm_of_a_shared_tensor() -> None:
    """rms_norm of bfloat16 numbers has a scale in float32."""
    torch.manual_seed(0)
    table, x = torch.randn(4, 4, 4).bfloat16(), torch.randn(2, 4, 4, 1).bfloat16()
    f = lambda table, x: F.rms_norm(table, (4, 4), None, 1e-3).bmm(x).float().square().sum()
    gradients = per_sample_gradients(lambda p, x: f(p["table"], x), {"table": table}, x)
    (loop,) = gradients_by_loop(f, table.expand(len(x), *table.shape), x)
    assert gradients.materialise()["table"].shape == loop.shape
    norms = gradients.square_norms().sqrt()
    torch.testing.assert_close(norms, loop.double().flatten(1).norm(dim=1), rtol=2e-2, atol=0)


def test_cumprod_second_derivative_of_infinite_numbers_beside_a_zero() -> None:
    """The branch for numbers without a zero is not used, and its infinite products would meet zeros."""
    x = torch.tensor([[0.0, -torch.inf], [2.0, -torch.inf]], dtype=torch.float64)
    weights = torch.tensor([[0.5, 1.5], [-2.0, 0.7]], dtype=torch.float64)
    f = lambda x: (x.cumprod(0) * weights).sum()
    leaf = x.clone().requires_grad_()
    (loop,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad((loop * weights.T).sum(), leaf)
    assert second.isfinite().all()
    torch.testing.assert_close(grad(lambda x: (grad(f)(x) * weights.T).sum())(x), second)
