"""What the oracle runs in place of functions whose derivatives in PyTorch it can't take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Conventions:
    """torch.nn.functional, but for three functions: `embedding` has two derivatives in PyTorch, of which its
    tangent is the forward mode's, and `embedding_bag` has neither forward mode nor a second derivative.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
        return (
            F.embedding(index, weight)
            if padding_idx is None
            else _Embedding.apply(weight, index, padding_idx)
        )

    @staticmethod
    def embedding_bag(index: Tensor, weight: Tensor, *, mode: str) -> Tensor:
        """Of bags [b, k]."""
        if not weight.isfinite().all():  # of NaN the kernel takes another maximum
            return F.embedding_bag(index, weight, mode=mode)
        rows = weight[index]
        return rows.max(1).values if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)

    @staticmethod
    def multi_margin_loss(
        x: Tensor,
        target: Tensor,
        p: int = 1,
        margin: float = 1.0,
        weight: Tensor | None = None,
        *,
        reduction: str = "mean",
    ) -> Tensor:
        """PyTorch's has neither forward mode nor a second derivative."""
        rows, labels = torch.atleast_2d(x), torch.atleast_1d(target)
        excess = margin - rows.gather(1, labels[:, None]) + rows
        counts = (excess > 0) & (torch.arange(rows.shape[1]) != labels[:, None])
        loss = torch.where(counts, excess, 0).pow(p).sum(1) / rows.shape[1]
        loss = (loss if weight is None else loss * weight[labels]).reshape(target.shape)
        return {"mean": loss.mean, "sum": loss.sum, "none": lambda: loss}[reduction]()


class _Embedding(torch.autograd.Function):
    """The padding row has no gradient, but a tangent as any other row: that is the derivative of the
    derivative in its cotangent.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, padding: int) -> Tensor:
        ctx.index, ctx.padding, ctx.rows = index, padding, len(weight)
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _EmbeddingBack.apply(g, ctx.index, ctx.padding, ctx.rows), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: Any) -> Tensor:
        return F.embedding(ctx.index, tangent, ctx.padding)


class _EmbeddingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, index: Tensor, padding: int, rows: int) -> Tensor:
        ctx.index, ctx.padding = index, padding
        return torch.ops.aten.embedding_dense_backward(g, index, rows, padding, False)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Any:
        return _Embedding.apply(tangent, ctx.index, ctx.padding), None, None, None


class WrittenOut(Conventions):
    """Normalisations, and one loss, as programs of elementwise operators.

    The second derivatives of PyTorch's kernels take the means and deviations that the kernels return for
    constants, so that third derivatives through them are wrong.

    moved: moves a value by rounding. The kernels of normalisations multiply the values first, and take the
    mean times the scale off: what the two lose is of the size of the values.
    """

    def __init__(self, moved: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.moved = moved

    def layer_norm(
        self,
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        out = _affine(self._normal(_wide(x), list(range(-len(shape), 0)), eps), weight, bias, x.dtype)
        return out.contiguous()  # as the kernel's, which as_strided reads

    def group_norm(
        self,
        x: Tensor,
        groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        F.group_norm(x, groups, weight, bias, eps)  # which refuses what it refuses
        cut = _wide(x).reshape(x.shape[0], groups, -1)
        return _affine(
            self._normal(cut, [2], eps).reshape(x.shape),
            _by_channel(weight, x),
            _by_channel(bias, x),
            x.dtype,
        )

    def instance_norm(
        self, x: Tensor, *, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        F.instance_norm(x, weight=weight, bias=bias, eps=eps)
        return _affine(
            self._normal(_wide(x), list(range(2, x.dim())), eps),
            _by_channel(weight, x),
            _by_channel(bias, x),
            x.dtype,
        )

    @staticmethod
    def binary_cross_entropy(x: Tensor, y: Tensor, *, reduction: str = "mean") -> Tensor:
        loss = _CrossEntropy.apply(x, y)
        return {"mean": loss.mean(), "sum": loss.sum(), "none": loss}[reduction]

    def batch_norm(
        self,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
        wide = _wide(x)
        if training or mean is None or var is None:
            out = self._normal(wide, [0, *range(2, x.dim())], eps)
        else:
            out = (self.moved(wide) - _by_channel(mean, x)) * (_by_channel(var, x) + eps).rsqrt()
        return _affine(out, _by_channel(weight, x), _by_channel(bias, x), x.dtype)

    def _normal(self, x: Tensor, axes: list[int], eps: float) -> Tensor:
        centred = self.moved(x) - x.mean(axes, keepdim=True)
        return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()


class WithVariance(WrittenOut):
    """The same by PyTorch's variance, as PyTorch's own decompositions have it: beside an infinite scale other
    places of the derivative are infinite, and not NaN.
    """

    def _normal(self, x: Tensor, axes: list[int], eps: float) -> Tensor:
        moved = self.moved(x)
        return (moved - x.mean(axes, keepdim=True)) * (
            moved.var(axes, correction=0, keepdim=True) + eps
        ).rsqrt()


class _CrossEntropy(torch.autograd.Function):
    """The derivatives that PyTorch has, without what its second derivatives add to what they divide by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)
        return F.binary_cross_entropy(x, y, reduction="none")

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * (x - y) / ((1 - x) * x).clamp_min(float(torch.tensor(1e-12))), -g * torch.logit(x)

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> Tensor:
        toward_x, _ = _CrossEntropy.backward(ctx, x_tangent)
        return toward_x + _CrossEntropy.backward(ctx, y_tangent)[1]


class WrittenOutTorch:
    """torch, but for one function: near zero PyTorch's slope of sinc is a difference of equal numbers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def kron(a: Tensor, b: Tensor) -> Tensor:
        """Where one of them is overwritten afterwards, PyTorch's own has the gradient of the new values."""
        rank = max(a.dim(), b.dim())
        a, b = (x.reshape(*(1,) * (rank - x.dim()), *x.shape) for x in (a, b))
        for axis in range(rank):
            a, b = a.unsqueeze(2 * axis + 1), b.unsqueeze(2 * axis)
        return (a * b).reshape([m * n for m, n in zip(a.shape[::2], b.shape[1::2], strict=True)])

    @staticmethod
    def sinc(x: Tensor) -> Tensor:
        """Around zero the Taylor series: the sum over k of (-1)^k (pi x)^2k / (2k + 1)!."""
        angle = math.pi * _wide(x)
        near = angle.abs() < 1
        square, series = torch.where(near, angle, 0).square(), torch.zeros_like(angle)
        for k in range(10, -1, -1):
            series = series * square + (-1) ** k / math.factorial(2 * k + 1)
        return torch.where(near, series, angle.sin() / torch.where(near, 1, angle)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _by_channel(values: Tensor | None, x: Tensor) -> Any:
    return None if values is None else _wide(values).reshape(1, -1, *(1,) * (x.dim() - 2))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).to(dtype)
