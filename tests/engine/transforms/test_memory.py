"""What a program may do with the memory of one sample's tensor: the strides that it sees, views, and writes
through them.

The oracle runs the program on one sample after the other, on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import grad, jvp, vmap
from tests.engine.transforms.loops import gradients_by_loop
from tests.seeds import set_seed

SAMPLES = 3

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def _same_numbers(float64: None) -> None:
    set_seed(0)


def rows(function: Callable[..., Tensor], *samples: Tensor, axis: int = 0) -> Tensor:
    return torch.stack([function(*[x.select(axis, i) for x in samples]) for i in range(SAMPLES)])


# -- strides -------------------------------------------------------------------------------------------------

OPERATORS = """
x.sin() | x + 1 | x * y | x + y[0] | y[:1] * x | x.mT.cos() | x.mT + y.mT.contiguous() | x.clone()
x.mT.clone() | x.relu() | x > 0
x.float() | x.to(torch.float32) | x.sum(0) | x.mean(1, keepdim=True) | x.cumsum(1) | x.softmax(-1)
x.mT.softmax(-1) | x.max(1).values
x.sort(0).values | x @ y.mT | x.mT @ y | x.mT @ y @ y.mT | torch.cat([x, y]) | torch.cat([x.mT, y.mT])
torch.stack([x, y], 1)
torch.where(x > 0, x, y) | x.flip(0) | x.roll(1, 0) | x[[2, 0]] | x[:, [1, 0]]
x.gather(1, torch.zeros(4, 2, dtype=torch.long))
x.tril() | x.index_select(1, torch.tensor([1, 1])) | x.repeat(2, 1) | x.repeat_interleave(2, 0)
torch.zeros_like(x.mT) + x.mT
x.mT.new_zeros(2, 3) + x.sum() | torch.addmm(x.mT @ x, x.mT, y) | torch.addmm((x.mT @ y).mT, x.mT, y)
torch.outer(x[0], y[1])
torch.einsum('ij,kj->ik', x, y) | torch.einsum('ij,kj->jik', x, y) | F.linear(x, y) | F.linear(x.mT, y.mT)
F.layer_norm(x, (6,))
F.layer_norm(x.mT, (4,)) | F.batch_norm(x.mT[None].repeat(2, 1, 1), None, None, training=True)
F.batch_norm(x[None].mT, y.mean(0), y.var(0)) | F.instance_norm(x[None].mT) | F.group_norm(x[None].mT, 2)
F.max_pool1d(x, 2)
F.avg_pool1d(x.mT, 2) | F.adaptive_avg_pool1d(x.mT, 2) | F.pad(x, (1, 1)) | F.pad(x.mT, (1, 0))
F.interpolate(x[None], 4)
F.conv1d(x, y[:2, :3].reshape(1, 2, 3).repeat(3, 2, 1))
F.conv1d(x[None], y[:2, :3].reshape(1, 2, 3).repeat(3, 2, 1))
F.conv1d(x[None].repeat(2, 1, 1), y[None, :, :2])
F.conv2d(x[None, None].repeat(2, 2, 1, 1), y[:2, :4].reshape(2, 2, 2, 1))
F.conv_transpose1d(x[None].repeat(2, 1, 1), y[:, None, :2]) | F.embedding(torch.tensor([[0, 3]]), x)
F.scaled_dot_product_attention(x, y, y)
F.scaled_dot_product_attention(*[z.reshape(4, 2, 3).transpose(0, 1) for z in (x, y, y)])
torch.linalg.qr(x).Q | torch.linalg.solve(x.mT @ x + torch.eye(6), y.mT)
torch.linalg.inv(x.mT @ x + torch.eye(6))
torch.linalg.cholesky(x.mT @ x + torch.eye(6)) | torch.fft.fft(x, dim=0)
torch.triangular_solve(y, torch.eye(4) + x[:, :4].tril()).solution | x.renorm(2, 0, 1.0)
x.index_fill(0, torch.tensor([0]), 1.0)
x.expand(2, 4, 6).sin() | x[None].expand(2, 4, 6) * y | x[:, ::2].exp() | x[1:, 1:].exp() + y[1:, 1:]
x.diagonal().exp()
x.unfold(1, 2, 2).exp() | x.mT.contiguous().mT + y | x.mT.reshape(-1) | x.reshape(2, -1).mT.tanh() | x.var(0)
"""


def layouts(x: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """[n, ...] tensors in several memories: where the sample axis is, and which one it is."""
    yield "in front", 0, x
    yield "behind", -1, x.movedim(0, -1).contiguous()
    yield "in the middle", 1, x.movedim(0, 1).contiguous()
    yield "in front of columns", 0, x.mT.contiguous().mT


def significant(x: Tensor) -> list[int | None]:
    """Strides, but for axes of one element."""
    return [stride if size > 1 else None for size, stride in zip(x.shape, x.stride(), strict=True)]


@pytest.mark.parametrize(
    "text", [text.strip() for line in OPERATORS.strip().splitlines() for text in line.split(" | ")]
)
@pytest.mark.filterwarnings("ignore:torch.triangular_solve")
def test_vmap_strides_of_result(text: str) -> None:
    x, y = torch.randn(2, SAMPLES, 4, 6)
    function = lambda x, y: eval(text, {"torch": torch, "F": F, "x": x, "y": y})
    for (words, axis, xs), (_, _, ys) in zip(layouts(x), layouts(y), strict=True):
        for given in ((axis, axis), (axis, None), (None, axis)):
            seen: list[Any] = []

            def noted(x: Tensor, y: Tensor, seen: list[Any] = seen) -> Tensor:
                result = function(x, y)
                seen.append(significant(result))
                return result

            first = [x.select(axis, 0) for x, axis in ((xs, axis), (ys, axis))]
            mapped = [z if d is not None else z.select(axis, 0) for z, d in zip((xs, ys), given, strict=True)]
            vmap(noted, in_dims=given)(*mapped)
            assert seen == [significant(function(*first))], f"sample axis {words}, in_dims {given}"


# -- views ---------------------------------------------------------------------------------------------------


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w)


def convolved_with_groups(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x.repeat(1, 2, 1, 1), w, groups=2)


def transposed_convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.conv_transpose2d(x, w)


@pytest.mark.parametrize("convolution", [convolved, convolved_with_groups, transposed_convolution])
@pytest.mark.parametrize("shared", [False, True], ids=["own images", "one image"])
def test_vmap_view_of_convolution_with_weights_of_each_sample(
    convolution: Callable[..., Tensor], shared: bool
) -> None:
    x, w = torch.randn(SAMPLES, 2, 2, 4, 4), torch.randn(SAMPLES, 2, 2, 2, 2)
    x = x[:1].expand_as(x) if shared else x
    for view in (
        lambda y: y.view(-1),
        lambda y: y.view(2, -1),
        lambda y: y.narrow(1, 0, 1).view(2, -1),
        lambda y: y.view(y.shape[0], y.shape[1], -1).sum(-1),
        lambda y: y.as_strided((2, 2), (2, 1)),
    ):
        f = lambda x, w, view=view: view(convolution(x, w))
        assert torch.allclose(vmap(f, (None if shared else 0, 0))(x[0] if shared else x, w), rows(f, x, w))
        loss = lambda w, x, f=f: f(x, w).cos().sum()
        result = vmap(grad(loss), (0, None if shared else 0))(w, x[0] if shared else x)
        assert torch.allclose(result, gradients_by_loop(loss, w, x)[0])


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_vmap_view_where_sample_axis_is_anywhere(axis: int) -> None:
    x = torch.randn(SAMPLES, 2, 3, 4)
    behind = x.movedim(0, axis).contiguous()

    def f(x: Tensor) -> Tensor:
        return x.sin().view(-1) + torch.where(x > 0, x.exp(), x).view(-1)

    assert torch.allclose(vmap(f, axis)(behind), rows(f, x))
    assert torch.allclose(
        vmap(grad(lambda x: f(x).square().sum()), axis)(behind),
        gradients_by_loop(lambda x: f(x).square().sum(), x)[0],
    )


@pytest.mark.parametrize(("outer", "inner"), [(0, 0), (0, 2), (3, 0), (2, 2), (1, 3), (3, 3)])
def test_vmap_of_vmap_view(outer: int, inner: int) -> None:
    x = torch.randn(4, 2, 3, SAMPLES).movedim(-1, outer)
    inner = min(inner, 2)

    def f(x: Tensor) -> Tensor:
        return (x * x).view(-1)

    expected = torch.stack(
        [
            torch.stack([f(y.select(inner, j).clone()) for j in range(y.shape[inner])])
            for y in (x.select(outer, i) for i in range(SAMPLES))
        ]
    )
    assert torch.allclose(vmap(vmap(f, inner), outer)(x), expected)


def test_vmap_view_that_pytorch_refuses() -> None:
    x = torch.randn(SAMPLES, 2, 4)
    for f in (
        lambda x: x.mT.sin().view(-1),
        lambda x: x.exp()[:, ::2].mT.view(-1),
        lambda x: (x + 1)[:, 1:].view(-1),
    ):
        for axis in (0, 1, 2):
            behind = x.movedim(0, axis).contiguous()
            for refusing in (
                lambda f=f, x=behind, axis=axis: f(x.select(axis, 0)),
                lambda f=f, x=behind, axis=axis: vmap(f, axis)(x),
            ):
                with pytest.raises(RuntimeError, match="view size is not compatible"):
                    refusing()


def test_vmap_as_strided_where_sample_axis_is_behind() -> None:
    x = torch.randn(2, 4, SAMPLES)
    f = lambda x: x.exp().as_strided((4, 2), (1, 4))
    assert torch.equal(vmap(f, 2)(x), rows(f, x, axis=2))


def test_batch_norm_of_transposed_view() -> None:
    x = torch.randn(SAMPLES, 2, 5, 3)
    mean, var = torch.randn(3), torch.rand(3) + 0.5
    f = lambda x: F.batch_norm(x.transpose(1, 2), mean, var).view(2, -1).sin().sum()
    assert torch.allclose(vmap(grad(f))(x), gradients_by_loop(f, x)[0])


# -- writes through views ------------------------------------------------------------------------------------


def written_through(x: Tensor, w: Tensor) -> Tensor:
    y = F.conv2d(x, w)
    y.mul_(1.5)
    flat = y.view(-1)
    flat[1:].mul_(flat[:1].detach().clone() + 2)
    part = y[:, :1].view(2, -1)
    part.add_(x.mean())
    y.exp_()
    return torch.cat([flat, part.reshape(-1), y.reshape(-1)])


def test_vmap_write_through_view_of_convolution() -> None:
    x, w = torch.randn(SAMPLES, 2, 2, 3, 3), 0.2 * torch.randn(SAMPLES, 2, 2, 2, 2)
    assert torch.allclose(vmap(written_through)(x, w), rows(written_through, x, w))
    loss = lambda w, x: written_through(x, w).sum()
    expected = gradients_by_loop(loss, w, x)[0]
    assert torch.allclose(vmap(grad(loss))(w, x), expected)
    assert torch.allclose(grad(lambda w: vmap(loss)(w, x).sum())(w), expected)
    assert torch.allclose(
        vmap(lambda w, x: jvp(lambda w: loss(w, x), (w,), (w,))[1])(w, x), (expected * w).flatten(1).sum(1)
    )
    leaf = w.clone().requires_grad_()
    assert torch.allclose(torch.autograd.grad(vmap(loss)(leaf, x).sum(), leaf)[0], expected)


def test_vmap_view_under_no_grad_keeps_the_history_of_its_base() -> None:
    x, w = torch.randn(SAMPLES, 2, 2, 3, 3), torch.randn(SAMPLES, 2, 2, 2, 2)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = F.conv2d(x, w)
        with torch.no_grad():
            largest = y.view(-1).max()
        return (y * largest).sum()

    expected = gradients_by_loop(loss, w, x)[0]
    assert torch.allclose(vmap(grad(loss))(w, x), expected)
    assert torch.allclose(grad(lambda w: vmap(loss)(w, x).sum())(w), expected)
    leaf = w.clone().requires_grad_()
    assert torch.allclose(torch.autograd.grad(vmap(loss)(leaf, x).sum(), leaf)[0], expected)


def test_vmap_reshape_shares_memory_where_sample_axis_is_behind() -> None:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        y.reshape(-1).mul_(2)  # a view, as y is contiguous for one sample
        z = y.mT + 1
        z.reshape(-1).mul_(2)  # a copy
        return y.mT + z

    x = torch.randn(2, 3, SAMPLES)
    assert torch.equal(vmap(f, 2)(x), rows(f, x, axis=2))


def test_vmap_write_into_shared_result() -> None:
    matrix, b = torch.randn(3, 3), torch.randn(SAMPLES, 3)

    def f(b: Tensor) -> Tensor:
        factors = torch.ops.aten._linalg_solve_ex(matrix, b)[1]
        factors.mul_(b.sum())
        return factors

    assert torch.allclose(vmap(f)(b), rows(f, b))


# -- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 8])
def test_vmap_grad_view_of_gradient(channels: int) -> None:
    x, w, v = torch.randn(SAMPLES, 1, channels, 6, 6), torch.randn(4, channels, 3, 3), torch.randn(5, 4)

    def loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return (F.conv2d(x, w).tanh().mean((2, 3)) @ v.mT).square().sum()

    def flat(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return torch.cat([g.view(-1) for g in grad(loss, (0, 1))(w, v, x)])

    expected = gradients_by_loop(
        loss, w.expand(SAMPLES, *w.shape), v.expand(SAMPLES, *v.shape), x, argnums=(0, 1)
    )
    assert torch.allclose(
        vmap(flat, (None, None, 0))(w, v, x), torch.cat([g.flatten(1) for g in expected], 1)
    )
    second = vmap(grad(lambda w, v, x: flat(w, v, x).square().sum()), (None, None, 0))(w, v, x)
    assert second.shape == (SAMPLES, *w.shape)
