"""Tensors that a batched function makes for itself: without a sample axis, until a value that has one is written into them.

`out = torch.zeros(3); out[0] = x` is one tensor for each sample as soon as `x` differs between samples. Until then it is the same for
all, and is neither copied nor computed with per sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from psgrad.engine.transforms.levels import Tracer, strides_of
from psgrad.engine.transforms.operators import Op

if TYPE_CHECKING:
    from psgrad.engine.transforms.batching import BatchLevel, BatchTracer


class FreshTracer(Tracer):
    """Stands for a tensor made inside the function: `plain`, the same for all samples, or `batched` from the first such write on.

    A view remembers what it was taken from (`view_of`: that, the operator, its other arguments, and which of its results): its memory is
    the base's, so when the base gets a sample axis the view is taken again.
    """

    level: BatchLevel
    plain: torch.Tensor
    batched: BatchTracer | None
    view_of: tuple[FreshTracer, Op, tuple[Any, ...], dict[str, Any], int | None] | None
    has_views: bool = False

    @staticmethod
    def __new__(cls, plain: torch.Tensor, level: BatchLevel) -> FreshTracer:
        tracer = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=strides_of(plain), storage_offset=0, dtype=plain.dtype, device=plain.device
        )
        tracer.plain, tracer.level = plain, level
        tracer.batched = tracer.view_of = None
        level.has_fresh = True
        return tracer  # type: ignore[no-any-return]

    def __init__(self, *args: Any) -> None:
        pass

    @property
    def value(self) -> Any:  # type: ignore[override]
        return self.content()

    def content(self) -> torch.Tensor:
        """What operators are to be given in its place."""
        if self.batched is None and self.view_of is not None:
            base, op, rest, kwargs, output = self.view_of
            source = base.content()
            if source is not base.plain:
                again = op(source, *rest, **kwargs)
                self.batched = again if output is None else again[output]
        return self.plain if self.batched is None else self.batched

    def spread(self) -> BatchTracer:
        """Give it, and what it is a view of, a sample axis: from here on each sample has its own."""
        if self.content() is self.plain:
            if self.view_of is None:
                self.batched = self.level.lift(_repeated(self.plain, self.level.size))
            else:
                self.view_of[0].spread()
                self.content()
        assert self.batched is not None
        return self.batched

    def below(self) -> torch.Tensor:
        return self.content()


def _repeated(plain: torch.Tensor, size: int) -> torch.Tensor:
    """[size, *shape], laid out in memory as `plain` for each sample, so that what was a view of it still is one."""
    extent = 1 + sum((length - 1) * stride for length, stride in zip(plain.shape, plain.stride(), strict=True)) if plain.numel() else 0
    return plain.new_empty_strided((size, *plain.shape), (extent, *plain.stride())).copy_(plain)
