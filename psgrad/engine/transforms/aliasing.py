"""The memory layout of a batched value, and that of the tensor of one sample.

The result of a batched kernel may have the part of one sample spread over memory: the channels of several
samples side by side, or the sample axis innermost. The strides of one sample's tensor decide which `view`
exists, whether `reshape` copies, and what `as_strided` returns. So a tracer shows the strides of PyTorch's
result for one sample. Before a view is taken, the value is copied to memory with these strides. Without a
view nothing is copied.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from psgrad.engine.transforms.operators import Op, aten
from psgrad.engine.transforms.private_torch import tree_map, without_modes
from psgrad.engine.transforms.tracer import SEQUENCE, TENSOR, TRACER, kinds, map_tracers

Strides = tuple[int, ...]

# Operators whose results are not contiguous for contiguous arguments.
_BY_COLUMNS: frozenset[Op] = frozenset({aten.triangular_solve.default, aten.linalg_lstsq.default})
# For these operators the strides on the meta device differ from the kernel's: the batched kernel's order of
# axes is used.
_OTHER_STRIDES_ON_META: frozenset[Op] = frozenset(
    {
        aten.conv1d.default,
        aten.conv_transpose1d.default,
        aten.convolution.default,
        aten._fft_c2r.default,
        aten._fft_r2c.default,
        aten._linalg_svd.default,
        aten.batch_norm.default,
        aten.instance_norm.default,
        aten.linalg_eig.default,
        aten.log_sigmoid_forward.default,
        aten.native_batch_norm.default,
        aten.native_dropout_backward.default,
    }
)
_MAX_SIGNATURES = 1 << 14
_of_signature: dict[Any, tuple[tuple[torch.Size, Strides], ...]] = {}


@functools.lru_cache(maxsize=_MAX_SIGNATURES)
def dense_strides(shape: torch.Size, strides: Strides) -> Strides:
    """The strides of `empty_like` for a tensor of this shape and these strides: the same order of axes,
    without gaps.
    """
    with without_modes():
        return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def is_contiguous_throughout(
    value: torch.Tensor, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a new batched value and the arguments of its operator are contiguous. They are then contiguous
    for one sample too.
    """
    if not value.is_contiguous() or (kwargs and "memory_format" in kwargs) or op in _BY_COLUMNS:
        return False
    for a in args:
        kind = kinds[type(a)]
        if (kind in (TENSOR, TRACER) and not a.is_contiguous()) or (
            kind == SEQUENCE and not all(map(_is_contiguous, a))
        ):
            return False
    return True


def _is_contiguous(item: Any) -> bool:
    return not isinstance(item, torch.Tensor) or item.is_contiguous()


def strides_of_one_sample(
    value: torch.Tensor, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], place: int
) -> Strides:
    """The strides of `op(*args, **kwargs)` (its tensor number `place`) in PyTorch, for the shapes and strides
    of one sample.

    value: the result of the batching rule, [n, *shape].
    """
    shape = value.shape[1:]
    return _strides(shape, op, args, kwargs, place) or dense_strides(shape, value.stride()[1:])


def _strides(
    shape: torch.Size, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], place: int
) -> Strides | None:
    """The dense strides of tensor number `place` of `op(*args, **kwargs)` in PyTorch; None if the meta device
    can't compute them.
    """
    results = _results_on_meta(op, args, kwargs) if op not in _OTHER_STRIDES_ON_META else ()
    if place >= len(results):
        return None
    expected, strides = results[place]
    return strides if expected == shape and dense_strides(shape, strides) == strides else None


def _results_on_meta(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[torch.Size, Strides], ...]:
    """(shape, strides) of each tensor that the operator returns on PyTorch's meta device; empty if it can't
    run there.
    """
    # the id is unique: operators exist until the process ends
    signature = id(op), _signature(args), _signature(tuple(kwargs.items()))
    try:
        if (cached := _of_signature.get(signature)) is not None:
            return cached
    except TypeError:  # an argument that can't be hashed
        return ()
    try:
        with without_modes():
            cached = tuple(_described(op(*_on_meta(args), **_on_meta(kwargs))))
    except Exception:  # no meta kernel, or one that needs values
        cached = ()
    if len(_of_signature) >= _MAX_SIGNATURES:
        _of_signature.clear()
    _of_signature[signature] = cached
    return cached


def _signature(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype
    return tuple([_signature(item) for item in tree]) if isinstance(tree, (list, tuple)) else tree


def _on_meta(tree: Any) -> Any:
    def emptied(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    return tree_map(emptied, tree)


def _described(result: Any) -> Iterator[tuple[torch.Size, Strides]]:
    if isinstance(result, torch.Tensor):
        yield result.shape, result.stride()
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _described(item)


def has_other_layout(value: torch.Tensor, strides: Strides) -> bool:
    """Whether the memory layout of a batched value [n, *shape] differs from n tensors of these strides, or
    several samples share memory.
    """
    own = value.stride()
    return not _same_strides(value.shape[1:], own[1:], strides) or (own[0] == 0 and value.shape[0] > 1)


def _same_strides(shape: torch.Size, some: Strides, others: Strides) -> bool:
    return some == others or all(
        a == b or length == 1 for length, a, b in zip(shape, some, others, strict=True)
    )


def laid_out(value: torch.Tensor, strides: Strides) -> torch.Tensor:
    """`value` in dense memory, with its axes in the order of these strides."""
    order = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    if order == sorted(order):
        return value.contiguous()
    return value.permute(order).contiguous().permute([order.index(axis) for axis in range(value.dim())])


def laid_out_by_kernel(result: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a program that replaces a kernel, in the memory layout of the kernel's result."""
    places = itertools.count()

    def placed(x: torch.Tensor) -> torch.Tensor:
        place = next(places)
        if is_contiguous_throughout(x, op, args, kwargs):
            return x
        strides = _strides(x.shape, op, args, kwargs, place)
        return x if strides is None or _same_strides(x.shape, x.stride(), strides) else laid_out(x, strides)

    return map_tracers(placed, result)
