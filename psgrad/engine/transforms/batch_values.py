"""Tracers with a sample axis that is hidden from the user's function, and the interface of a batch for
batching rules.

The physical value of a `BatchTracer` always has the sample axis in front; its logical shape is that of one
sample. A value without the axis stays a plain value (or a tracer of a lower level) and is never copied for
each sample.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch

from psgrad.engine.transforms.aliasing import laid_out
from psgrad.engine.transforms.interpreter import InterpretedTracer
from psgrad.engine.transforms.levels import Level
from psgrad.engine.transforms.private_torch import make_wrapper
from psgrad.engine.transforms.tracer import rewritten, strides_of


class Deferred(Protocol):
    """A batched value that has not been computed: a deferral policy returns it in place of a tensor."""

    shape: torch.Size  # logical, without the sample axis
    dtype: torch.dtype
    device: torch.device

    def materialise(self) -> torch.Tensor:
        """The value, sample axis in front."""


class BatchTracer(InterpretedTracer):
    """A value with a sample axis. `value` is the physical tensor, or a Deferred value that is materialised
    when it is needed.
    """

    __slots__ = ()

    level: SampleAxis
    carries_samples = True
    has_other_layout = False  # whether its memory layout differs from the strides (see aliasing.py)

    def below(self) -> torch.Tensor:
        if not isinstance(self.value, torch.Tensor):
            self.value = self.value.materialise()
        return self.value

    def lay_out(self) -> None:
        """Copy the value to memory with the tracer's strides. Only for a value without views."""
        with torch.enable_grad():  # the copy has the derivative at all levels
            self.value, self.has_other_layout = laid_out(self.below(), (sys.maxsize, *self.stride())), False

    def with_contiguous_strides(self) -> BatchTracer:
        if self.is_contiguous():
            return self
        same = make_wrapper(BatchTracer, self.shape, dtype=self.dtype, device=self.device)
        same.value, same.level, same.has_other_layout = self.value, self.level, True
        return same  # type: ignore[no-any-return]

    def twin(self) -> BatchTracer:
        return self  # its views have its memory

    def become_view(self, view: BatchTracer) -> None:
        self.value = view.value

    def rewritten(self, new: Any) -> Any:
        return self.level.lift(rewritten(self.below(), new.below())) if self.level.owns(new) else new


def traced(value: Any, level: SampleAxis) -> BatchTracer:
    """The tracer of a physical value, or of a deferred one. A function, because a call of the class takes
    twice as long.
    """
    if isinstance(value, torch.Tensor):
        strides = strides_of(value)
        tracer = make_wrapper(
            BatchTracer, value.shape[1:], strides[1:], 0, dtype=value.dtype, device=value.device
        )
    else:
        tracer = make_wrapper(BatchTracer, value.shape, dtype=value.dtype, device=value.device)
    tracer.value, tracer.level = value, level
    return tracer  # type: ignore[no-any-return]


class SampleAxis(Level):
    """A level whose tracers carry a sample axis. BatchLevel (batching.py) handles operators."""

    def __init__(self, size: int, randomness: str) -> None:
        super().__init__()
        self.size = size  # samples
        self.randomness = randomness
        self.has_fresh = False  # whether it has made a tracer for a fresh tensor
        self.batch = Batch(self)

    def lift(self, physical: Any) -> BatchTracer:
        """The tracer of a physical value [n, *shape]."""
        return traced(physical, self)

    def owns(self, value: Any) -> bool:
        """Whether `value` is a tracer of this level with a sample axis."""
        return type(value) is BatchTracer and value.level is self


class Batch:
    """The interface of a batch for batching rules."""

    def __init__(self, level: SampleAxis) -> None:
        self.level = level

    @property
    def size(self) -> int:
        return self.level.size

    def is_mapped(self, value: Any) -> bool:
        """Whether `value` carries the sample axis."""
        return type(value) is BatchTracer and value.level is self.level

    def raw(self, value: Any) -> Any:
        """The physical value of a mapped tensor; any other value unchanged."""
        return value.below() if type(value) is BatchTracer and value.level is self.level else value

    def physical(self, value: Any) -> torch.Tensor:
        """[n, *shape]: the physical value; a value without the axis is expanded, without a copy."""
        if self.is_mapped(value):
            return value.below()  # type: ignore[no-any-return]
        return value.unsqueeze(0).expand(self.level.size, *value.shape)  # type: ignore[no-any-return]

    def aligned(self, value: Any, rank: int) -> Any:
        """The physical value with axes of length one inserted after the sample axis, so that it broadcasts
        against values of logical rank `rank`; a value that is not mapped unchanged.
        """
        if not (type(value) is BatchTracer and value.level is self.level):
            return value
        physical = value.below()
        missing = rank + 1 - physical.dim()
        if missing > 0:
            return physical.reshape(physical.shape[0], *(1,) * missing, *physical.shape[1:])
        return physical

    def fold(self, value: torch.Tensor) -> torch.Tensor:
        """[n * b, ...] from a logical [b, ...]: the sample axis goes into the kernel's own batch axis."""
        return self.physical(value).flatten(0, 1)

    def unfold(self, physical: Any, b: int) -> Any:
        """The inverse of `fold`, for one result or a tuple of them. b: the length of their first axis, which
        an empty batch does not tell.
        """
        if isinstance(physical, tuple):
            return tuple(self.unfold(item, b) for item in physical)
        return physical.reshape(self.level.size, b, *physical.shape[1:])
