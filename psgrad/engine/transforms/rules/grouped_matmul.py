"""Grouped matrix products: rows in consecutive groups, each with a matrix of its own, as a layer of experts
has them.

A group is named by the row behind its last one. Under vmap every sample has groups of its own: which expert
a token goes to depends on the data. The rows of all samples that go to one expert are brought together, so
that there is one product an expert, and not one for each sample and expert.

PyTorch's kernel takes no float64, and only rows whose lengths are multiples of 16 bytes. The two operators
here take all types and sizes; rows behind the last group are zero, where the kernel leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import Op, define, replace
from psgrad.errors import TransformError

_library = torch.library.Library("psgrad", "FRAGMENT")
_library.define("grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_library.define("grouped_outer(Tensor left, Tensor right, Tensor ends) -> Tensor")
grouped_mm = torch.ops.psgrad.grouped_mm.default
grouped_outer = torch.ops.psgrad.grouped_outer.default


def _bounds(ends: Tensor) -> list[tuple[int, int]]:
    """Where each group begins and ends."""
    stops: list[int] = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


def _grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[s, b]: the rows [s, a], each times the matrix of its group, [g, a, b]."""
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    if _has_kernel(rows, matrices):
        inside = torch.arange(rows.shape[0], device=ends.device).unsqueeze(1) < ends[-1:]
        return torch.where(inside, aten._grouped_mm.default(rows, matrices, ends), out)
    for group, (start, stop) in enumerate(_bounds(ends)):
        if stop > start:
            torch.mm(rows[start:stop], matrices[group], out=out[start:stop])
    return out


def _grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """[g, a, b]: for each group the sum over its rows of the outer products of left [s, a] and right
    [s, b].
    """
    out = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for group, (start, stop) in enumerate(_bounds(ends)):
        if stop > start:
            torch.mm(left[start:stop].t(), right[start:stop], out=out[group])
    return out


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Whether PyTorch's kernel takes these without waiting for the device: on a GPU, in bfloat16."""
    return (
        rows.device.type == "cuda"
        and rows.dtype == torch.bfloat16
        and rows.shape[0] > 0
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
        and all(_aligned(x) for x in (rows, matrices))
    )


def _aligned(x: Tensor) -> bool:
    strides = x.stride()[-2:]
    return (
        1 in strides
        and all(stride * x.element_size() % 16 == 0 for stride in strides if stride != 1)
        and x.data_ptr() % 16 == 0
    )


_library.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")
_library.impl("grouped_outer", _grouped_outer, "CompositeExplicitAutograd")
torch.library.register_fake(
    "psgrad::grouped_mm",
    lambda rows, matrices, ends: rows.new_empty(rows.shape[0], matrices.shape[2]),
    lib=_library,
)
torch.library.register_fake(
    "psgrad::grouped_outer",
    lambda left, right, ends: left.new_empty(ends.shape[0], left.shape[1], right.shape[1]),
    lib=_library,
)


@replace(aten._grouped_mm.default)
def _by_dimensions(
    a: Tensor, b: Tensor, ends: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The groups are in the axis that a and b do not share: rows of a, columns of b, or what is summed."""
    _check(a, b, ends)
    if bias is not None or out_dtype not in (None, a.dtype):
        raise TransformError(
            f"a grouped matrix product with bias or out_dtype{diagnostics.where()}; expected operands and"
            " result of one dtype, without bias, as PyTorch's kernel has it",
            hint="add the bias behind the product",
        )
    if a.dim() == b.dim() == 3:
        return aten.bmm.default(a, b)  # type: ignore[no-any-return]
    if a.dim() == 2 and b.dim() == 3:
        return grouped_mm(a, b, ends)  # type: ignore[no-any-return]
    if a.dim() == 3:
        return grouped_mm(b.t(), a.transpose(1, 2), ends).t()  # type: ignore[no-any-return]
    return grouped_outer(a.t(), b, ends)  # type: ignore[no-any-return]


def _check(a: Tensor, b: Tensor, ends: Tensor | None) -> None:
    """Refuse what the kernel refuses."""
    groups = {x.shape[0] for x in (a, b) if x.dim() == 3} | ({ends.shape[0]} if ends is not None else set())
    if (
        a.dim() not in (2, 3)
        or b.dim() not in (2, 3)
        or a.shape[-1] != b.shape[-2]
        or a.dtype != b.dtype
        or len(groups) != 1
        or (ends is None) != (a.dim() == b.dim() == 3)
        or (ends is not None and (ends.dim() != 1 or ends.dtype != torch.int32))
    ):
        last = "no ends" if ends is None else f"ends {tuple(ends.shape)} {ends.dtype}"
        raise TransformError(
            f"a grouped matrix product of {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype} with"
            f" {last}{diagnostics.where()}; expected operands of 2 or 3 axes and one dtype, with equal"
            " sizes of the axis that is summed, and the int32 ends of the groups where an operand has 2"
            " axes",
        )


# -- derivatives ---------------------------------------------------------------------------------------------


def _of_matrices(out: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda g: run(grouped_outer, rows, g, ends)


def _of_left(out: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda g: run(grouped_mm, right, g.transpose(1, 2), ends)


# -- batching ------------------------------------------------------------------------------------------------


def group_of_rows(ends: Tensor, count: int) -> Tensor:
    """[n, count]: the group of each row, by the ends [n, g] of the groups; g for rows behind the last."""
    rows = torch.arange(count, device=ends.device, dtype=ends.dtype).expand(ends.shape[0], count)
    return torch.searchsorted(ends.contiguous(), rows.contiguous(), right=True)


def _apart(ends: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For groups of which each sample has its own: the order [n * count] that brings the rows behind the
    last group of their sample to the end, and where the n * g groups then end.
    """
    n, groups = ends.shape
    sample = torch.arange(n, device=ends.device).unsqueeze(1)
    key = group_of_rows(ends, count)
    key = torch.where(key < groups, key + sample * groups, n * groups)
    sizes = torch.diff(ends, dim=1, prepend=ends.new_zeros(n, 1))
    return key.flatten().argsort(stable=True), sizes.flatten().cumsum(0, dtype=ends.dtype)


def _batch_mm(batch: Any, op: Op, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    x, stops = batch.physical(rows), batch.physical(ends)
    n, count, width = x.shape
    if batch.is_mapped(matrices):
        order, stops = _apart(stops, count)
        matrices = batch.fold(matrices)
    else:
        order = group_of_rows(stops, count).flatten().argsort(stable=True)
        stops = stops.sum(0, dtype=stops.dtype)
    out = op(x.reshape(n * count, width).index_select(0, order), matrices, stops)
    return out.index_select(0, order.argsort()).reshape(n, count, out.shape[1])


def _batch_outer(batch: Any, op: Op, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    x, y = batch.physical(left), batch.physical(right)
    order, stops = _apart(batch.physical(ends), x.shape[1])
    out = op(*[z.flatten(0, 1).index_select(0, order) for z in (x, y)], stops)
    return batch.unfold(out, ends.shape[0])


define(
    grouped_mm,
    vjp={
        0: lambda out, rows, matrices, ends: lambda g: run(grouped_mm, g, matrices.transpose(1, 2), ends),
        1: _of_matrices,
    },
    linear=(0, 1),
    batch=_batch_mm,
)
define(
    grouped_outer,
    vjp={0: _of_left, 1: lambda out, left, right, ends: lambda g: run(grouped_mm, left, g, ends)},
    linear=(0, 1),
    batch=_batch_outer,
)
