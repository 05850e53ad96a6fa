"""Matrix products and pairs of vectors (distances, bilinear forms). A product with a matrix that all samples
share runs as one product over all rows of all samples.

Frozen weights of whole numbers or packed bits are constants of the forward pass. A product with one is linear
in the other factor; what the derivative needs of the weight is unpacked when the derivative is taken, and not
kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.elementwise import conj
from psgrad.engine.transforms.rules.families import aten, broadcasting, linear, on_physical, sum_to, unchanged
from psgrad.engine.transforms.rules.registry import Op, constant, define, refuse, replace
from psgrad.errors import TransformError


def rows(x: torch.Tensor) -> torch.Tensor:
    """[positions, features]: all leading axes as one."""
    if x.dim() == 1:
        return run(aten.unsqueeze.default, x, 0)
    return x if x.dim() == 2 else run(aten.reshape.default, x, [math.prod(x.shape[:-1]), x.shape[-1]])


def columns(x: torch.Tensor) -> torch.Tensor:
    """[features, positions]: the transpose of `rows`."""
    return run(aten.unsqueeze.default, x, 1) if x.dim() == 1 else run(aten.t.default, rows(x))


def h(x: torch.Tensor) -> torch.Tensor:
    """The conjugate transpose of the last two axes."""
    return conj(run(aten.transpose.int, x, -2, -1))


# -- x @ weightᵀ + bias, whole: one rule for vectors, rows, and rows of rows ---------------------------------


def _linear_of_vector_weight(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Any:
    """F.linear also takes a weight without output axis."""
    if weight.dim() == 2:
        return None
    out = torch.matmul(x, weight)
    return out if bias is None else out + bias


def _linear_weight(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda g: run(aten.mm.default, columns(g), conj(rows(x)))


def _linear_batch(
    batch: Any, op: Op, x: torch.Tensor, weight: torch.Tensor, bias: Any = None
) -> torch.Tensor:
    if batch.is_mapped(weight):
        out = (
            _matmul_batch(batch, aten.matmul.default, x, weight.t())
            if weight.dim() == 2
            else (batch.aligned(x, 1) * batch.raw(weight)).sum(-1)
        )
        return out if bias is None else out + batch.aligned(bias, out.dim() - 1)
    if batch.is_mapped(bias):
        return op(batch.physical(x), weight) + batch.aligned(bias, x.dim())
    return op(batch.physical(x), weight, bias)


define(
    aten.linear.default,
    vjp={
        0: lambda out, x, weight, bias=None: lambda g: run(aten.matmul.default, g, conj(weight)),
        1: _linear_weight,
        2: broadcasting(unchanged, 2),
    },
    batch=_linear_batch,
    instead=_linear_of_vector_weight,
)


# -- the plain products --------------------------------------------------------------------------------------

define(
    aten.mm.default,
    vjp={
        0: lambda out, a, b: lambda g: run(aten.mm.default, g, h(b)),
        1: lambda out, a, b: lambda g: run(aten.mm.default, h(a), g),
    },
    linear=(0, 1),
    batch=lambda batch, op, a, b: _matmul_batch(batch, aten.matmul.default, a, b),
)
define(
    aten.bmm.default,
    vjp={
        0: lambda out, a, b: lambda g: run(aten.bmm.default, g, h(b)),
        1: lambda out, a, b: lambda g: run(aten.bmm.default, h(a), g),
    },
    linear=(0, 1),
    batch=lambda batch, op, a, b: batch.unfold(op(batch.fold(a), batch.fold(b)), a.shape[0]),
)
define(
    aten.mv.default,
    vjp={
        0: lambda out, a, x: lambda g: aten.mm.default(g.unsqueeze(1), conj(x).unsqueeze(0)),
        1: lambda out, a, x: lambda g: aten.mv.default(h(a), g),
    },
    linear=(0, 1),
    batch=lambda batch, op, a, x: _matmul_batch(batch, aten.matmul.default, a, x),
)
define(
    aten.dot.default,
    vjp={0: lambda out, x, y: lambda g: g * conj(y), 1: lambda out, x, y: lambda g: g * conj(x)},
    linear=(0, 1),
    batch=lambda batch, op, x, y: (batch.raw(x) * batch.raw(y)).sum(-1),
)
define(
    aten.vdot.default,
    vjp={0: lambda out, x, y: lambda g: conj(g) * y, 1: lambda out, x, y: lambda g: g * x},
    batch=lambda batch, op, x, y: (conj(batch.raw(x)) * batch.raw(y)).sum(-1),
)


def _added(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def scaled_sum(bias: torch.Tensor, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
        scaled = product(a, b) if alpha == 1 else product(a, b) * alpha
        if beta == 0:  # the bias is not read: it may hold anything
            return scaled
        return (bias if beta == 1 else bias * beta) + scaled

    return scaled_sum


replace(aten.addmm.default)(_added(aten.mm.default))
replace(aten.baddbmm.default)(_added(aten.bmm.default))
replace(aten.addbmm.default)(_added(lambda a, b: aten.bmm.default(a, b).sum(0)))
replace(aten.addmv.default)(_added(aten.mv.default))
replace(aten.addr.default)(_added(lambda x, y: x.unsqueeze(1) * y.unsqueeze(0)))

# -- matmul, whole -------------------------------------------------------------------------------------------


def _matmul_left(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape, dtype, matrix = a.shape, a.dtype, a.dim() == 2
    if matrix and b.dim() > 2:  # one matrix for all of b: a contraction over all columns of all of b
        return lambda g: aten.mm.default(
            rows(g.transpose(-2, -1)).t(),
            conj(rows(b.transpose(-2, -1).expand(*g.shape[:-2], *b.shape[:-3:-1]))),
        )
    return lambda g: sum_to(run(aten.matmul.default, g, h(b)), shape, dtype)


def _matmul_right(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape, dtype, matrix = b.shape, b.dtype, b.dim() == 2
    if matrix:
        return lambda g: run(aten.mm.default, h(rows(a)), rows(g))
    return lambda g: sum_to(run(aten.matmul.default, h(a), g), shape, dtype)


def _vector_matmul(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Products with a vector, as products with a matrix of one row or one column."""
    if a.dim() > 1 and b.dim() > 1:
        return None
    if a.dim() == 1 and b.dim() == 1:
        return aten.dot.default(a, b)
    if a.dim() == 1:
        return aten.matmul.default(a.unsqueeze(0), b).squeeze(-2)
    return aten.mv.default(a, b) if a.dim() == 2 else aten.matmul.default(a, b.unsqueeze(1)).squeeze(-1)


def _matmul_batch(batch: Any, op: Op, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Physical operands broadcast over the sample axis; vectors become matrices first, because a sample axis
    would make them matrices.
    """
    if a.dim() == 1 and b.dim() == 1:
        return (batch.raw(a) * batch.raw(b)).sum(-1)
    if b.dim() == 1:
        if not batch.is_mapped(b):
            return op(batch.physical(a), b)
        return op(
            batch.aligned(a, max(a.dim(), 2)),
            batch.raw(b).reshape(batch.size, *(1,) * (a.dim() - 2), b.shape[0], 1),
        ).squeeze(-1)
    if a.dim() == 1:
        if not batch.is_mapped(a):
            return op(a, batch.physical(b))
        if not batch.is_mapped(b) and b.dim() == 2:
            return op(batch.raw(a), b)
        return op(
            batch.raw(a).reshape(batch.size, *(1,) * (b.dim() - 2), 1, a.shape[0]), batch.raw(b)
        ).squeeze(-2)
    if not batch.is_mapped(a) and b.dim() == 2 and a.dim() == 2:
        return op(a, batch.physical(b))
    if batch.is_mapped(a) and batch.is_mapped(b) and a.dim() == 2 and b.dim() == 2:
        left, right = batch.raw(a), batch.raw(b)
        # one position: an outer product
        return left * right if a.shape[1] == 1 and a.dtype == b.dtype else aten.bmm.default(left, right)
    if b.dim() == 2 and batch.is_mapped(b):
        # one matrix for all rows of a sample: broadcasting would copy it for each of the leading axes
        left = batch.raw(a).flatten(1, -2) if batch.is_mapped(a) else a.flatten(0, -2)
        out = op(left, batch.raw(b)) if left.dim() == 2 else aten.bmm.default(left, batch.raw(b))
        return out.reshape(batch.size, *a.shape[:-1], b.shape[-1])
    rank = max(a.dim(), b.dim())
    left = batch.aligned(a, rank) if batch.is_mapped(a) else a
    right = batch.aligned(b, rank) if batch.is_mapped(b) else b
    return op(left, right)


define(
    aten.matmul.default,
    vjp={0: _matmul_left, 1: _matmul_right},
    linear=(0, 1),
    batch=_matmul_batch,
    instead=_vector_matmul,
)


# -- distances -----------------------------------------------------------------------------------------------


@replace(aten.cdist.default)
def _cdist(x: torch.Tensor, y: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    return aten._cdist_forward.default(x, y, p, compute_mode)


def _cdist_batch(
    batch: Any, op: Op, x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None
) -> torch.Tensor:
    rank = max(x.dim(), y.dim())
    return op(batch.aligned(x, rank), batch.aligned(y, rank), p, compute_mode)


def _cdist_x(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None) -> Any:
    return lambda g: sum_to(_pull(g, x, y, p, out), x.shape, x.dtype)


def _cdist_y(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None) -> Any:
    return lambda g: sum_to(_pull(g.mT, y, x, p, out.mT), y.shape, y.dtype)


def _pull(
    g: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    """The cotangent of `x`, with all leading axes. The kernel does not broadcast."""
    lead = g.shape[:-2]
    full = [t.expand(*lead, *t.shape[-2:]) for t in (x, y)]
    return run(aten._cdist_backward.default, g, *full, p, distances)  # type: ignore[no-any-return]


define(aten._cdist_forward.default, vjp={0: _cdist_x, 1: _cdist_y}, batch=_cdist_batch)


define(aten._cdist_backward.default, batch=on_physical)


@replace(aten._cdist_backward.default)
def _cdist_backward(
    g: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    """The sum of the kernel, pair by pair, for its own derivative. At distance zero the derivative is
    zero.
    """
    apart = x.unsqueeze(-2) - y.unsqueeze(-3)
    g, distances = g.unsqueeze(-1), distances.unsqueeze(-1)
    if p == 0:
        return torch.zeros_like(x)
    if p == 1:
        return (g * torch.sgn(apart)).sum(-2)
    if p == float("inf"):
        return (g * torch.sgn(apart) * (apart.abs() == distances)).sum(-2)
    together = distances == 0
    safe = torch.where(together, 1, distances)
    if p == 2:
        return torch.where(together, 0, g * apart / safe).sum(-2)
    size = torch.where(apart == 0, 1, apart.abs())
    return torch.where(apart == 0, 0, g * torch.sgn(apart) * (size / safe) ** (p - 1)).sum(-2)


@replace(aten._pdist_forward.default)
def _pdist(x: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """The pairs above the diagonal, by differences: a matrix product would lose digits if two points are
    close.
    """
    first, second = torch.triu_indices(len(x), len(x), 1, device=x.device).unbind()
    by_differences = 2
    return aten.index.Tensor(aten._cdist_forward.default(x, x, p, by_differences), [first, second])


# -- bilinear forms ------------------------------------------------------------------------------------------


@replace(aten.bilinear.default)
def _bilinear(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear layer from x to one vector an output feature, each then multiplied with y."""
    outputs, inputs, others = weight.shape
    vectors = aten.linear.default(x, weight.transpose(1, 2).reshape(outputs * others, inputs))
    out = torch.matmul(vectors.unflatten(-1, (outputs, others)), y.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias


def _rows(batch: Any, op: Op, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """The rows of all samples as one product. A packed weight is the same for all."""
    if any(batch.is_mapped(y) for y in (weight, *rest)):
        raise TransformError(
            f"{op.name()} with a quantised weight of each sample's own{diagnostics.where()}; expected one"
            " quantised weight for all samples",
        )
    if not batch.is_mapped(x):
        return batch.physical(op(x, weight, *rest))
    return batch.unfold(op(batch.fold(x), weight, *rest), x.shape[0])


# -- products of whole numbers, whose result has no derivative -----------------------------------------------


def _int_mm_batch(batch: Any, op: Op, a: Tensor, b: Tensor) -> Tensor:
    if not batch.is_mapped(b):
        return _rows(batch, op, a, b)
    exact = torch.matmul(batch.raw(a).double(), batch.raw(b).double())  # below 2^53, so every digit is there
    return exact.to(torch.int32)


constant(aten._int_mm.default, batch=_int_mm_batch)


# -- products of floating-point rows with a packed weight ----------------------------------------------------


def _int8_rows(out: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda g: run(aten.mm.default, g * scales, weight.to(g.dtype))


def _int8_scales(out: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda g: (g * run(aten.mm.default, x, weight.t().to(x.dtype))).sum(0)


define(aten._weight_int8pack_mm.default, vjp={0: _int8_rows, 2: _int8_scales}, linear=(0, 2), batch=_rows)


def _define_packed(op: Op) -> None:
    """How the bits are packed is internal to the kernel: its product with the identity unpacks them."""

    def back(out: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Callable[[Tensor], Tensor]:
        width, dtype, device = x.shape[1], x.dtype, x.device

        def pull(g: Tensor) -> Tensor:
            columns = op(torch.eye(width, dtype=dtype, device=device), weight, *rest)
            return run(aten.mm.default, g, columns.t())  # type: ignore[no-any-return]

        return pull

    linear(op, back=back, batch=_rows)


for _name in (
    "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu",
    "_weight_int4pack_mm_with_scales_and_zeros",
):
    if hasattr(aten, _name):
        _define_packed(getattr(aten, _name).default)


# -- refused -------------------------------------------------------------------------------------------------


@refuse(aten._scaled_mm.default)
def _scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
    raise TransformError(
        f"a product of float8 matrices (_scaled_mm){diagnostics.where()}, which has no derivative",
        hint="cast the weights up in the forward (weight.to(x.dtype) * scale), or quantise weights alone",
    )
