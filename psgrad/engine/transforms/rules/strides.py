"""as_strided: other sizes and strides over a tensor's memory; and what a base becomes when one of its views
is overwritten.

A traced value has no memory. Its strides say where its elements would lie. That is enough as long as only its
own elements are read: the operator is then a lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.complex import write_part
from psgrad.engine.transforms.rules.families import aten, cast
from psgrad.engine.transforms.rules.registry import Op, define, replace
from psgrad.engine.transforms.rules.views import inverse_permutation
from psgrad.engine.transforms.tracer import Tracer, refuse_new_data
from psgrad.errors import TransformError, one_line


def _positions(size: Sequence[int], stride: Sequence[int], device: torch.device) -> torch.Tensor:
    """[*size]: the place of each element in memory, counted from the first."""
    total = torch.zeros(tuple(size), dtype=torch.long, device=device)
    for axis, (length, step) in enumerate(zip(size, stride, strict=True)):
        total = total + torch.arange(length, device=device).reshape(-1, *(1,) * (len(size) - axis - 1)) * step
    return total


def _lookup(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> torch.Tensor:
    """[*size]: which element of the flattened `x` lies at each requested place."""
    if offset is not None and not _begins_its_memory(x):
        _refuse(
            f"storage_offset={offset} on a view",
            "the offset counts from the beginning of the memory that the view looks into",
        )
    own, requested = (
        _positions(x.shape, x.stride(), x.device).reshape(-1),
        _positions(size, stride, x.device) + (offset or 0),
    )
    if not requested.numel():
        return requested
    table = torch.full(
        (max(int(own.max()) if own.numel() else 0, int(requested.max())) + 1,), -1, device=x.device
    )
    table[own] = torch.arange(len(own), device=x.device)
    elements = table[requested.clamp(min=0)]
    if bool((elements < 0).any()) or bool((requested < 0).any()):
        _refuse(
            f"size {tuple(size)} and strides {tuple(stride)} on shape {tuple(x.shape)}",
            "it reaches memory that is not the tensor's own",
        )
    if bool((table[own] != torch.arange(len(own), device=x.device)).any()):
        _refuse(f"an expanded tensor of shape {tuple(x.shape)}", "several of its elements lie at one place")
    return elements


def _begins_its_memory(x: torch.Tensor) -> bool:
    while isinstance(x, Tracer):
        if getattr(x, "view_of", None) is not None:
            return False
        x = x.below()
    return x.storage_offset() == 0


def _refuse(what: str, cause: str) -> None:
    raise TransformError(
        f"as_strided with {what}{diagnostics.where()}; expected a lookup of the traced tensor's own elements",
        hint=one_line(cause, "use unfold, index or slices, or apply .contiguous() first"),
    )


@replace(aten.as_strided_copy.default)
def _strided_copy(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    return aten.index.Tensor(x.reshape(-1), [_lookup(x, size, stride, offset)])


def _strided_batch(
    batch: Any, op: Op, x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    """A view of every sample's own part."""
    _lookup(x, size, stride, offset)  # refuses places of another sample
    physical = batch.physical(x)
    return op(physical, [batch.size, *size], [physical.stride(0), *stride], offset)


define(aten.as_strided.default, instead=_strided_copy, batch=_strided_batch)


@replace(aten.as_strided_scatter.default)
def _strided_scatter(
    x: torch.Tensor,
    source: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> torch.Tensor:
    places = _lookup(x, size, stride, offset).reshape(-1)
    if places.unique().numel() < places.numel():
        _refuse(
            f"strides {tuple(stride)}, to be written to",
            "several elements of what is written lie at one place",
        )
    written = cast(source, x.dtype).expand(tuple(size)).reshape(-1)
    return aten.index_put.default(x.reshape(-1), [places], written).reshape(x.shape)


@replace(aten._has_compatible_shallow_copy_type.default)
def _before_new_data(x: torch.Tensor, data: torch.Tensor) -> bool:
    """What PyTorch calls before a tensor takes another's memory, `weight.data = ...`: with a traced one, it
    would crash.
    """
    refuse_new_data()


def write_through(
    op: Op, base: Any, new: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], output: int | None
) -> Any:
    """The base after its view, made by `op(base, *rest)` (result number `output` of it), was overwritten by
    `new`.

    None where a write through this kind of view is not supported (an expanded tensor has several elements at
    one place).
    """
    if op in (
        aten.view.default,
        aten._unsafe_view.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    ):
        return new.reshape(base.shape)
    if op is aten.t.default:
        return aten.t.default(new)
    if op is aten.transpose.int:
        return aten.transpose.int(new, *rest)
    if op is aten.permute.default:
        return aten.permute.default(new, inverse_permutation(rest[0]))
    if op is aten.alias.default:
        return new
    if op is aten.select.int:
        return aten.select_scatter.default(base, new, *rest)
    if op is aten.slice.Tensor:
        return aten.slice_scatter.default(base, new, *rest)
    if op is aten.diagonal.default:
        return aten.diagonal_scatter.default(base, new, *rest)
    if op is aten.as_strided.default:
        return aten.as_strided_scatter.default(base, new, *rest)
    if op is aten.unbind.int and output is not None:
        return aten.select_scatter.default(base, new, rest[0] if rest else 0, output)
    if op in (aten.split.Tensor, aten.split_with_sizes.default) and output is not None:
        dim = rest[1] if len(rest) > 1 else 0
        sizes = rest[0]
        start = output * sizes if isinstance(sizes, int) else sum(sizes[:output])
        return aten.slice_scatter.default(base, new, dim, start, start + new.shape[dim], 1)
    if op in (aten.expand.default, aten.unfold.default):
        return _write_by_place(op, base, new, rest)
    return write_part(op, base, new)


def _write_by_place(
    op: Op, base: torch.Tensor, new: torch.Tensor, rest: tuple[Any, ...]
) -> torch.Tensor | None:
    """For views in which a place of the base may occur several times: right as long as none does."""
    places = op(torch.arange(base.numel(), device=base.device).reshape(base.shape), *rest).reshape(-1)
    if places.unique().numel() != places.numel():
        return None
    return base.reshape(-1).scatter(0, places, new.reshape(-1)).reshape(base.shape)
