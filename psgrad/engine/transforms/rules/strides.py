"""as_strided: other sizes and strides over a tensor's memory; and what a base becomes when one of its views
is overwritten.

A traced value has no memory. Its strides say where its elements would lie. That is enough as long as only its
own elements are read: the operator is then a lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.complex import from_pairs, to_pairs
from psgrad.engine.transforms.rules.families import aten, cast
from psgrad.engine.transforms.rules.registry import Op, define, replace
from psgrad.engine.transforms.rules.views import inverse_permutation
from psgrad.engine.transforms.tracer import Tracer, innermost, refuse_new_data
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
    if op in _INVERSES:
        return _INVERSES[op](new, *rest)
    if op in _SCATTERS:
        return _SCATTERS[op](base, new, *rest)
    if op is aten.unbind.int:
        return aten.select_scatter.default(base, new, rest[0] if rest else 0, output)
    if op in (aten.split.Tensor, aten.split_with_sizes.default) and output is not None:
        dim = rest[1] if len(rest) > 1 else 0
        sizes = rest[0]
        start = output * sizes if isinstance(sizes, int) else sum(sizes[:output])
        return aten.slice_scatter.default(base, new, dim, start, start + new.shape[dim], 1)
    return _write_by_place(op, base, new, rest) if op in (aten.expand.default, aten.unfold.default) else None


# Of views of all elements: the value of the base.
_INVERSES: dict[Op, Callable[..., Any]] = {
    aten.t.default: aten.t.default,
    aten.transpose.int: aten.transpose.int,
    aten.permute.default: lambda new, dims: aten.permute.default(new, inverse_permutation(dims)),
    aten.alias.default: lambda new: new,
    aten._conj.default: lambda new: new.conj(),
    aten._neg_view.default: lambda new: -new,
    aten.view_as_real.default: from_pairs,
    aten.view_as_complex.default: to_pairs,
}
# Of other views: (the base before, the new value of the view, its arguments) -> the base.
_SCATTERS: dict[Op, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
        ),
        lambda base, new, *_: new.reshape(base.shape),
    ),
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
    aten.real.default: lambda base, new: torch.complex(new, torch.imag(base)) if base.is_complex() else new,
    aten.imag.default: lambda base, new: torch.complex(torch.real(base), new),
    **dict.fromkeys(
        (aten.resolve_conj.default, aten.resolve_neg.default),
        # what was marked is a copy
        lambda base, new: None if innermost(base).is_conj() or innermost(base).is_neg() else new,
    ),
}


def _write_by_place(
    op: Op, base: torch.Tensor, new: torch.Tensor, rest: tuple[Any, ...]
) -> torch.Tensor | None:
    """For views in which a place of the base may occur several times: right as long as none does."""
    places = op(torch.arange(base.numel(), device=base.device).reshape(base.shape), *rest).reshape(-1)
    if places.unique().numel() != places.numel():
        return None
    return base.reshape(-1).scatter(0, places, new.reshape(-1)).reshape(base.shape)
