"""The level of one vmap: it runs an operator by its batching rule, as an in-place write, as a random draw, or
defers it.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.aliasing import (
    dense_strides,
    has_other_layout,
    is_contiguous_throughout,
    strides_of_one_sample,
)
from psgrad.engine.transforms.batch_values import Batch, BatchTracer, SampleAxis, traced
from psgrad.engine.transforms.fresh_tensors import FreshTracer, content, process_fresh
from psgrad.engine.transforms.interpreter import interpret
from psgrad.engine.transforms.operators import (
    Op,
    aten,
    facts,
    is_random,
    out_of_place,
    refuse_mutation,
)
from psgrad.engine.transforms.private_torch import count_write, make_wrapper, write_count
from psgrad.engine.transforms.refused_writes import refuse_overlapping_memory
from psgrad.engine.transforms.rules.registry import decompose, rules_of
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer, map_tracers, strides_of
from psgrad.errors import TransformError

RANDOMNESS = ("error", "same", "different")
# In-place operators that run on the physical value of their target, against which the others broadcast.
_BROADCAST_INTO_TARGET: frozenset[Op] = frozenset(
    {
        *[
            getattr(packet, name)
            for packet in (aten.add_, aten.sub_, aten.mul_, aten.div_)
            for name in ("Tensor", "Scalar")
        ],
        *(aten.zero_.default, aten.copy_.default, aten.fill_.Scalar, aten.masked_fill_.Scalar),
    }
)


class Deferral(Protocol):
    """The interface of a deferral policy. See engine/gradients/deferral/__init__.py for the only one."""

    def starts(self, op: Op) -> bool:
        """Whether `op` may begin a deferred value."""

    def apply(self, batch: Batch, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `op` un-run, with Deferred values in place of tensors; NotImplemented if `op` must
        run now.
        """


class BatchLevel(SampleAxis):
    """vmap: `size` samples; `randomness` decides how random operators draw for them.

    Attributes:
        counted: [size] bool, the samples whose numbers Python code reads where they agree; the others follow
            them. None for all.
    """

    counted: torch.Tensor | None = None
    not_owned = "a tensor without a sample axis, from one that has it"

    def __init__(self, size: int, randomness: str = "error", deferral: Deferral | None = None) -> None:
        super().__init__(size, randomness)
        self.deferral = deferral
        self.has_deferred = False
        self.defers = False  # whether a contraction over the sample axis may be deferred now

    def explained(self, error: BaseException) -> TransformError | None:
        # nn.functional raises this for a batch of one, before any operator runs.
        if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
            where = diagnostics.where(error)
            if any(frame.name == "group_norm" for frame in traceback.extract_tb(error.__traceback__)):
                return diagnostics.group_of_one_error(where)
            return diagnostics.batch_statistics_error(where)
        return super().explained(error)

    def draws(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return True

    def adopt(self, value: torch.Tensor) -> FreshTracer:
        return FreshTracer(value, self)

    def write_outside(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.lower_untraced(op, args, kwargs)

    def content(self, value: Any) -> Any:
        """The value of a fresh tensor of this level; any other value unchanged."""
        return content(value, self)

    def process(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.has_fresh and self._has_fresh((*args, *kwargs.values()) if kwargs else args):
            return process_fresh(self, op, args, kwargs)
        if self.defers or self.has_deferred:
            result = self._defer(op, args, kwargs)
            if result is not NotImplemented:
                return result
        operator = rules_of(op)
        if operator.facts.is_random and is_random(op, args, kwargs):
            refuse_overlapping_memory(op, args)
            return self._draw(op, args, kwargs)
        if operator.writes:
            return self.in_place(op, args, kwargs)
        rule = operator.batching
        if rule is None:
            return decompose(op, args, kwargs)
        if operator.facts.is_view:
            if self.owns(args[0]) and args[0].has_other_layout:
                args[0].lay_out()
            result = rule(self.batch, op, *args, **kwargs)
            return traced(result, self) if type(result) is torch.Tensor else self._wrap(result)
        result = rule(self.batch, op, *args, **kwargs)
        return (
            self._made(result, op, args, kwargs)
            if type(result) is torch.Tensor
            else self._all_made(result, op, args, kwargs)
        )

    def _has_fresh(self, args: Any) -> bool:
        for a in args:
            kind = type(a)
            if kind is FreshTracer:
                if a.level is self:
                    return True
            elif (kind is list or kind is tuple) and a and type(a[0]) is not int and self._has_fresh(a):
                return True
        return False

    def _wrap(self, result: Any) -> Any:
        if type(result) is tuple:
            return tuple([traced(x, self) if type(x) is torch.Tensor else self._wrap(x) for x in result])
        return map_tracers(self._wrap_one, result)

    def _wrap_one(self, physical: torch.Tensor) -> torch.Tensor:
        return physical if self.owns(physical) else traced(physical, self)

    def _made(
        self, value: torch.Tensor, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], place: int = 0
    ) -> BatchTracer:
        """The tracer of a new result, with the strides that PyTorch gives one sample's result."""
        if is_contiguous_throughout(value, op, args, kwargs) if state.interpreting else value.is_contiguous():
            return traced(value, self)
        own = strides_of(value)[1:]
        shape = value.shape[1:]
        strides = (
            strides_of_one_sample(value, op, args, kwargs, place)
            if state.interpreting
            else dense_strides(shape, own)
        )
        tracer = make_wrapper(BatchTracer, shape, strides, 0, dtype=value.dtype, device=value.device)
        tracer.value, tracer.level, tracer.has_other_layout = value, self, has_other_layout(value, strides)
        return tracer  # type: ignore[no-any-return]

    def _all_made(self, result: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = itertools.count()

        def made(value: torch.Tensor) -> torch.Tensor:
            place = next(places)
            return value if self.owns(value) else self._made(value, op, args, kwargs, place)

        return map_tracers(made, result)

    def of_shared(self, closure: Callable[..., Any], *arrived: Any) -> Any:
        """The result of a VJP: the cotangent of a value that all samples share. Only there a contraction over
        the sample axis may stay un-run.
        """
        before, self.defers = self.defers, self.deferral is not None
        try:
            return closure(*arrived)
        finally:
            self.defers = before

    def _defer(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        deferral = self.deferral
        assert deferral is not None
        if not (self.defers and deferral.starts(op)) and not (self.has_deferred and self._waiting(args)):
            return NotImplemented
        self.has_deferred = True
        result = deferral.apply(self.batch, op, args, kwargs)
        if result is NotImplemented or isinstance(result, torch.Tensor):
            return result
        if isinstance(result, tuple):
            return tuple(traced(item, self) if item is not None else None for item in result)
        return traced(result, self)

    def _waiting(self, args: tuple[Any, ...]) -> bool:
        for a in args:  # a generator would take twice the time
            if type(a) is BatchTracer and a.level is self and not isinstance(a.value, torch.Tensor):
                return True
        return bool(args) and type(args[0]) is list and self._waiting(tuple(args[0]))

    def overwrite(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target, rest = args[0], args[1:]
        if op not in _BROADCAST_INTO_TARGET:
            # The caller's autograd may save the target for the operator's derivative, so it gets a copy of
            # the value before the write.
            before = aten.clone.default(target) if state.attached else target
            rest = (out_of_place(op, (before, *rest), kwargs),)
            op, kwargs = aten.copy_.default, {}
        if not target.numel():
            return  # autograd must not count a write
        if target.has_other_layout and 0 in target.value.stride():  # samples or elements share memory
            target.lay_out()
        physical = target.below()
        version = None if isinstance(physical, Tracer) else write_count(physical)
        op(physical, *[self.batch.aligned(a, target.dim()) for a in rest], **kwargs)
        if version is not None and write_count(physical) == version:
            count_write([physical])  # below autograd, PyTorch does not count

    def reshape(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.owns(args[0]) and not torch.is_grad_enabled() and isinstance(args[0].value, Tracer):
            refuse_mutation(op, "a traced tensor under no_grad")
        super().reshape(op, args, kwargs)

    def _draw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.randomness == "error":
            raise TransformError(
                f"a random operator ({op.name()}) was called with randomness='error'{diagnostics.where()}",
                hint="call model.eval(), or pass randomness='different' or 'same' (one draw for all)",
            )
        mapped = any(self.owns(a) for a in args)
        rule, shared = rules_of(op).batching, rules_of(op).same
        if rule is None:
            raise TransformError(f"the random operator {op.name()} has no batching rule{diagnostics.where()}")
        mutated = facts(op).mutated
        if self.randomness == "same":
            if mapped and mutated and shared is not None:
                return aten.copy_.default(args[0], shared(self._draw_below, op, *args, **kwargs))
            if mutated and self.owns(args[0]) and not any(self.owns(a) for a in args[1:]):
                # one draw for all samples: without the sample axis, then written to every sample
                target = self.batch.physical(args[0])
                drawn = torch.empty_like(target[0]) if self.size else torch.empty(args[0].shape)
                self._draw_below(op, drawn, *args[1:], **kwargs)
                target.copy_(drawn.expand_as(target))
                return args[0]
            if mapped:
                if shared is not None:
                    return shared(self._draw_below, op, *args, **kwargs)
                raise TransformError(
                    f"{op.name()} on batched values can't use one draw for all samples{diagnostics.where()}",
                    hint="use randomness='different'",
                )
            return map_tracers(
                lambda x: x if mutated else FreshTracer(x, self), self._draw_below(op, *args, **kwargs)
            )
        if mutated:
            if not self.owns(args[0]):
                refuse_mutation(op, "a tensor without a sample axis, with a different draw for each sample")
            rule(self.batch, partial(self._draw_below, op), *args, **kwargs)
            return args[0]
        return self._wrap(rule(self.batch, partial(self._draw_below, op), *args, **kwargs))

    def _draw_below(self, op: Op, *args: Any, **kwargs: Any) -> Any:
        """The result of a random operator one level below, where an outer level may handle it."""
        return interpret(op, args, kwargs, below=self)
