"""Refuses in-place writes that would give a wrong result.

`read_only`: to memory that is still needed while a function of the user runs. The other checks: a write whose
result depends on the order in which a kernel accesses memory, as it writes one element in memory several
times, or reads elements that it also writes. PyTorch refuses some of them ("refer to a single memory
location"), and returns an undefined number for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from psgrad.engine.transforms.operators import Op, aten, facts, refuse_mutation, written_by
from psgrad.engine.transforms.private_torch import DisableTorchFunction, storage_key, without_modes
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import innermost


@contextmanager
def read_only(values: Iterable[Any]) -> Iterator[None]:
    """Raise an error if a function of the user writes to these values or their memory, which are used
    elsewhere.
    """
    memories = {memory_of(x) for x in values if isinstance(x, torch.Tensor)}

    def refuse_writes(op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        for target in written_by(op, args, kwargs):
            if isinstance(target, torch.Tensor) and memory_of(target) in memories:
                refuse_mutation(
                    op,
                    "an argument of a function with a derivative of its own (checkpoint, autograd.Function),"
                    " or a cotangent",
                )

    before = state.watchers
    state.watchers = (*before, refuse_writes)
    try:
        yield
    finally:
        state.watchers = before


def memory_of(tensor: torch.Tensor) -> int:
    """A key of the memory under all tracers; views of one tensor have the same key."""
    value = innermost(tensor)
    if not isinstance(value, torch.Tensor):
        return id(value)
    with DisableTorchFunction():  # the user's function does not call this operator
        return storage_key(value.untyped_storage())


# These write the same number everywhere, so the order of their writes does not matter.
_WRITES_ONE_NUMBER: frozenset[Op] = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})
_MAX_SIGNATURES = 1 << 14


def refuse_overlapping_memory(op: Op, args: tuple[Any, ...]) -> None:
    """Raise TransformError for an in-place write that writes one place in memory several times, or places
    that are also read as other elements.
    """
    if op in _WRITES_ONE_NUMBER or torch.Tag.inplace_view in op.tags:
        return
    for position in facts(op).mutated:
        target = args[position]
        if not isinstance(target, torch.Tensor):
            continue
        if overlaps_itself(target.shape, target.stride()):
            refuse_mutation(
                op,
                "a tensor that has one place in memory for several elements (unfold, as_strided, expand)",
                hint="write into a clone of it, or use the operator that returns a new tensor",
            )
        if any(_reads_other_elements(target, x) for x in args if x is not target):
            refuse_mutation(
                op,
                "memory that another argument reads as other elements",
                hint="pass a clone of the argument, or use the operator that returns a new tensor",
            )


@functools.lru_cache(maxsize=_MAX_SIGNATURES)
def overlaps_itself(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether two elements of a tensor of these strides share one place in memory, as in the windows of
    `unfold`.
    """
    if 0 in shape:
        return False
    extent = 0  # of the axes so far, from the smallest stride
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride <= extent:
                break
            extent += (length - 1) * stride
    else:
        return False
    with without_modes():
        last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        places = torch.arange(last + 1, device="cpu").as_strided(shape, strides)
        return places.unique().numel() < places.numel()


Placement = tuple[torch.Size, tuple[int, ...], int]  # shape, strides, offset


def _reads_other_elements(target: torch.Tensor, other: Any) -> bool:
    """Whether `other` is a view of the target's memory and reads the place of an element as another one."""
    written, read = innermost(target), innermost(other)
    if type(read) is not torch.Tensor or type(written) is not torch.Tensor:
        return False
    memory = written.untyped_storage().data_ptr()
    if memory == 0 or memory != read.untyped_storage().data_ptr():
        return False
    return written.dtype != read.dtype or _share_places(_placement(written), _placement(read))


def _placement(x: torch.Tensor) -> Placement:
    """Shape, strides and offset without axes of length 1, whose strides have no effect."""
    kept = [(length, stride) for length, stride in zip(x.shape, x.stride(), strict=True) if length != 1]
    return (
        torch.Size(length for length, _ in kept),
        tuple(stride for _, stride in kept),
        int(x.storage_offset()),
    )


@functools.lru_cache(maxsize=_MAX_SIGNATURES)
def _share_places(written: Placement, read: Placement) -> bool:
    """Whether two different views of one memory share places."""
    if written == read or 0 in written[0] or 0 in read[0]:
        return False
    with without_modes():
        places = torch.zeros(1 + max(_last(written), _last(read)), dtype=torch.bool)
        places.as_strided(*written).fill_(True)
        return bool(places.as_strided(*read).any())


def _last(view: Placement) -> int:
    shape, strides, offset = view
    return offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
