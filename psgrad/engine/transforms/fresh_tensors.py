"""Tensors that a batched function makes. They have no sample axis until a value with a sample axis is written
into them.

After `out = torch.zeros(3); out[0] = x`, each sample has its own `out` if `x` differs between samples. Before
the write all samples share one tensor, which is not copied.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from psgrad.engine.transforms.batch_values import BatchTracer, SampleAxis
from psgrad.engine.transforms.interpreter import InterpretedTracer, interpret
from psgrad.engine.transforms.operators import (
    Op,
    facts,
    is_random,
    refuse_mutation,
    reshapes_in_place,
)
from psgrad.engine.transforms.private_torch import make_wrapper
from psgrad.engine.transforms.rules.registry import decompose, rules_of
from psgrad.engine.transforms.tracer import Tracer, map_tracers, rewritten, strides_of, tensors_in


class FreshTracer(InterpretedTracer):
    """A tensor made inside the function: `plain`, the same for all samples, or `batched` after the first
    write of a value with a sample axis.

    A view stores its origin in `view_of`: the base, the operator, its other arguments, and the number of its
    result. It shares the base's memory, so the view is taken again when the base gets a sample axis.
    """

    level: SampleAxis
    plain: torch.Tensor
    batched: BatchTracer | None
    view_of: tuple[FreshTracer, Op, tuple[Any, ...], dict[str, Any], int | None] | None

    @staticmethod
    def __new__(cls, plain: torch.Tensor, level: SampleAxis) -> FreshTracer:
        tracer = make_wrapper(
            cls,
            plain.shape,
            strides=strides_of(plain),
            storage_offset=0,
            dtype=plain.dtype,
            device=plain.device,
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
        """The value that operators receive in place of this tracer."""
        if self.batched is None and self.view_of is not None:
            base, op, rest, kwargs, output = self.view_of
            source = base.content()
            if source is not base.plain:
                again = op(source, *rest, **kwargs)
                self.batched = again if output is None else again[output]
        return self.plain if self.batched is None else self.batched

    def spread(self) -> BatchTracer:
        """Give this tensor and its base a sample axis. Returns its batched value."""
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

    def rewritten(self, new: Any) -> Any:
        value = rewritten(self.content(), content(new, self.level))
        return value if self.level.owns(value) else FreshTracer(value, self.level)

    def twin(self) -> FreshTracer:
        same = FreshTracer(self.plain, self.level)
        same.batched, same.view_of = self.batched, self.view_of
        return same

    def become_view(self, view: Any) -> None:
        if is_fresh(view, self.level):
            self.plain, self.batched, self.view_of = view.plain, view.batched, view.view_of
        else:
            self.batched = view


def _repeated(plain: torch.Tensor, size: int) -> torch.Tensor:
    """[size, *shape], in the memory layout of `plain` for each sample, so that its views stay views."""
    extent = (
        1 + sum((length - 1) * stride for length, stride in zip(plain.shape, plain.stride(), strict=True))
        if plain.numel()
        else 0
    )
    return plain.new_empty_strided((size, *plain.shape), (extent, *plain.stride())).copy_(plain)


def is_fresh(value: Any, level: SampleAxis) -> bool:
    return isinstance(value, FreshTracer) and value.level is level


def content(value: Any, level: SampleAxis) -> Any:
    """The value of a fresh tensor of `level`; any other value unchanged."""
    return value.content() if is_fresh(value, level) else value


def is_shared(value: Any) -> bool:
    """Whether a value is the same for all samples: it is from outside, or was computed from values from
    outside and fresh tensors only.
    """
    return not isinstance(value, Tracer) or (
        type(value) is FreshTracer and not isinstance(value.content(), Tracer)
    )


def process_fresh(level: SampleAxis, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator with fresh tensors among its arguments."""
    operator = facts(op)
    stands_for = partial(content, level=level)
    contents, keywords = map_tracers(stands_for, args), map_tracers(stands_for, kwargs)
    mapped = any(level.owns(x) for x in tensors_in(contents, keywords))
    if operator.mutated:
        target = args[operator.mutated[0]]
        if reshapes_in_place(op):
            level.reshape(op, args, kwargs)
            return target
        if is_random(op, args, kwargs):
            mapped = mapped or level.randomness != "same"
        if mapped:
            spread = tuple(
                x.spread() if i in operator.mutated and is_fresh(x, level) else contents[i]
                for i, x in enumerate(args)
            )
            result = level.process(op, spread, keywords)
        else:
            shape = target.shape
            result = interpret(op, contents, keywords, below=level)
            if is_fresh(target, level) and target.plain.shape != shape:
                refuse_mutation(op, "a tensor's shape")
        if operator.returns_target:
            return target
        return result if mapped else map_tracers(lambda x: FreshTracer(x, level), result)
    if is_random(op, args, kwargs):
        return level.process(op, contents, keywords)
    if mapped:
        return (
            decompose(op, args, kwargs)
            if rules_of(op).batching is None
            else level.process(op, contents, keywords)
        )
    if rules_of(op).is_decomposed:
        return decompose(op, args, kwargs)
    result = map_tracers(lambda x: FreshTracer(x, level), interpret(op, contents, keywords, below=level))
    if operator.is_view and is_fresh(args[0], level):
        for output, view in enumerate(result) if isinstance(result, (tuple, list)) else [(None, result)]:
            view.view_of = (args[0], op, args[1:], kwargs, output)
        args[0].has_views = True
    return result
