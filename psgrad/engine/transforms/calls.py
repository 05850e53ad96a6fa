"""Calls: functions with their own rules, and the function that passes a call to the levels that handle it.

A call takes a flat list of arguments and returns a flat list of results. It is passed down the stack of
levels like an operator. But it is passed to every level from the highest on, with or without tracers of the
level among its arguments, because the function may close over tracers.

- A derivative level calls `differentiate` (reverse) or `push` (forward), on the values one level below.
- A batching level calls `batch`. In most cases this is the same call for all samples together, one level
  below. Its functions enter the level again, also after the level has ended (in the backward pass), so that
  the tracers that the user's functions hold are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.batching import BatchLevel
from psgrad.engine.transforms.derivatives import DerivativeLevel
from psgrad.engine.transforms.forward import ForwardLevel
from psgrad.engine.transforms.levels import Divergence, Level, users_program
from psgrad.engine.transforms.operators import aten
from psgrad.engine.transforms.reverse import GradLevel, GradTracer
from psgrad.engine.transforms.state import ActiveLevel, state
from psgrad.engine.transforms.tracer import (
    Tracer,
    is_differentiable,
    map_tracers,
    note_autograd,
    on_active_levels,
    tensors_in,
)
from psgrad.errors import TransformError

Flat = list[Any]
Cotangents = list[Any]  # one a result or an argument; None stands for zero


@dataclass
class TapedCall:
    """The results of a call and its backward function, for the tape of a reverse-mode level."""

    outs: Flat
    # cotangents of the results -> cotangents of the arguments, followed by those of `captured`
    pull: Callable[[Cotangents], Cotangents]
    captured: list[GradTracer] = field(default_factory=list)  # recorded values that the function closed over
    constant: frozenset[int] = frozenset()  # results that are declared to have no derivative


class Call:
    """A function of flat arguments with its own rules. Subclasses define the rules."""

    batches = False  # whether `batch` does more than batch the function's operators one by one
    follows_captured = False  # whether it also differentiates in values that its function closes over

    def __init__(self, name: str, function: Callable[[Flat], Flat]) -> None:
        self.name, self.function = name, function

    def run(self, args: Flat) -> Flat:
        """The results if no level handles the call."""
        return self.function(args)

    def batch(self, level: BatchLevel, args: Flat) -> Flat:
        """The results as tracers of a batching level; by default those of `for_all_samples` below it."""
        args = [level.content(x) for x in args]
        mapped = Mapped(level, [level.owns(x) for x in args])
        outs = dispatch_call(self.for_all_samples(mapped), [level.batch.raw(x) for x in args], below=level)
        return mapped.up(outs, mapped.outs)

    def for_all_samples(self, mapped: Mapped) -> Call:
        """This call for all samples together, on physical values. It sets `mapped.outs`."""
        raise NotImplementedError

    def function_of_all(self, mapped: Mapped) -> Callable[[Flat], Flat]:
        """The call's function for all samples together, for `for_all_samples`."""

        def function(args: Flat) -> Flat:
            with entered_again(mapped.level):
                results = self.function(mapped.up(args, mapped.args))
            return mapped.down(results, self.name)

        return function

    def differentiate(self, level: GradLevel, values: Flat, needed: list[int]) -> TapedCall:
        """The results and the backward function, on values below a reverse-mode level; `needed`: the
        arguments that need a cotangent.
        """
        raise NotImplementedError

    def push(self, level: ForwardLevel, values: Flat, tangents: Flat) -> tuple[Flat, Flat]:
        """The results and their tangents, on values below a forward-mode level."""
        raise NotImplementedError

    def run_without_derivative(self, level: DerivativeLevel, args: Flat) -> Flat:
        """The results at a derivative level that follows no derivative here."""
        with without_adoption(level):
            outs = dispatch_call(self, level.unwrap(args), below=level)
        return [
            level.constant(x) if isinstance(x, torch.Tensor) else x
            for x in own_values(level, outs, self.name)
        ]


def dispatch_call(call: Call, args: Flat, below: Level | None = None) -> Flat:
    """The results of a call from the highest level that handles it; without such a level, from the function
    itself.
    """
    args = map_tracers(on_active_levels, args)
    for x in args:
        if isinstance(x, torch.Tensor):
            note_autograd(x)
    for depth in reversed(range(len(state.stack))):
        level = state.stack[depth]
        if below is not None and level.index >= below.index:
            continue
        # batching alone needs no rule of the call: the function's operators are batched one by one
        if (
            call.batches
            or state.attached
            or any(isinstance(lower, DerivativeLevel) for lower in state.stack[: depth + 1])
        ):
            return process(level, call, args)
    return call.run(args)


def process(level: ActiveLevel, call: Call, args: Flat) -> Flat:
    """A call at one level."""
    if isinstance(level, BatchLevel):
        return call.batch(level, args)
    assert isinstance(level, DerivativeLevel)
    inputs = [(i, x) for i, x in level.inputs(tuple(args)) if isinstance(i, int) and is_differentiable(x)]
    if level.reads is not None:
        level.reads.note(tensors_in(args, {}))
    followed = level.is_on() and (level.reads is None or level.reads.follows)
    if not followed or not (inputs or call.follows_captured):
        return call.run_without_derivative(level, args)
    values = level.unwrap(args)
    if isinstance(level, ForwardLevel):
        tangents = [None] * len(args)
        for i, x in inputs:
            tangents[i] = x.tangent
        results = call.push(level, values, tangents)
        return [level.dual(x, t) if isinstance(x, torch.Tensor) else x for x, t in zip(*results, strict=True)]
    assert isinstance(level, GradLevel)
    with watched_by_tape(level):
        taped = call.differentiate(level, values, [i for i, _ in inputs])
    places = inputs + [(len(args) + i, x) for i, x in enumerate(taped.captured)]
    return level.add_call(
        taped.outs, lambda arrived: dict(enumerate(taped.pull(arrived))), places, taped.constant
    )


# -- contexts in which calls run their functions -------------------------------------------------------------


@contextmanager
def without_adoption(level: Level) -> Iterator[None]:
    """A context for a call that runs below a level: this level and higher ones do not adopt fresh tensors."""
    with _adopting(False, [other for other in state.stack if level.is_active and other.index >= level.index]):
        yield


@contextmanager
def watched_by_tape(level: GradLevel) -> Iterator[None]:
    """A context in which a stored tape also protects the values that a call uses. It does not record the
    call's operators.
    """
    before = state.watchers
    if (saved := level.saved) is not None:
        state.watchers = (*before, lambda op, args, kwargs: saved.need(tensors_in(args, kwargs)))
    try:
        yield
    finally:
        state.watchers = before


@contextmanager
def entered_again(level: Level) -> Iterator[None]:
    """A context inside a level, which is entered again if it has ended."""
    if level.is_active:
        with users_program(), _adopting(True, [level]):
            yield
        return
    with level.again():
        try:
            yield
        except Divergence as divergence:
            if divergence.level is not level:
                raise
            raise TransformError(
                f"samples disagree on a branch{divergence.where} in the backward pass, after their vmap",
                hint="write the branch with torch.where",
            ) from None


@contextmanager
def _adopting(adopts: bool, levels: Sequence[ActiveLevel]) -> Iterator[None]:
    before = [level.adopts for level in levels]
    try:
        for level in levels:
            level.adopts = adopts
        yield
    finally:
        for level, adopted in zip(levels, before, strict=True):
            level.adopts = adopted


def own_values(level: DerivativeLevel, results: Sequence[Any], name: str) -> Flat:
    """The results of a function below a level, as values of the levels below."""
    return lowered(results, level.index - 1, name)


def lowered(results: Sequence[Any], highest: int, name: str) -> Flat:
    """Results without the tracers of levels higher than `highest`. Those come from values that a function
    closes over.

    Constants of those levels are replaced by their values, and so are values that the level's `reads` notes.
    For all other values an error is raised, because the derivative would be lost.
    """
    return [_lowered(x, highest, name) for x in results]


def _lowered(value: Any, highest: int, name: str) -> Any:
    while isinstance(value, Tracer) and value.level.is_active and value.level.index > highest:
        level = value.level
        if isinstance(level, BatchLevel):
            if not level.owns(level.content(value)):
                value = level.content(value)
                continue
            raise TransformError(
                f"{name} closes over a value that carries the sample axis of another"
                f" vmap{diagnostics.where()}",
                hint="pass the value as an argument",
            )
        assert isinstance(level, DerivativeLevel)
        if value.varies:  # type: ignore[attr-defined]
            if level.reads is None or level.reads.follows:
                raise TransformError(
                    f"{name} closes over a value that is being differentiated{diagnostics.where()}",
                    hint="pass the value as an argument, or detach it if its derivative is to be ignored",
                )
            level.reads.note([value])
        value = level.unwrap(value)
    return value


@dataclass
class Mapped:
    """Flags for the arguments and results of a call that have a sample axis, and the conversions between
    tracers of the level and physical values.
    """

    level: BatchLevel
    args: list[bool]
    outs: list[bool] = field(default_factory=list)

    def up(self, values: Sequence[Any], flags: list[bool]) -> Flat:
        return [
            self.level.lift(x) if mapped and x is not None else x
            for x, mapped in zip(values, flags, strict=True)
        ]

    def down(self, results: Sequence[Any], name: str) -> Flat:
        """The results below the level. If any argument has a sample axis, all results get one."""
        results = lowered(
            [self.level.content(x) for x in lowered(results, self.level.index, name)], self.level.index, name
        )
        self.outs = [isinstance(x, torch.Tensor) and (any(self.args) or self.level.owns(x)) for x in results]
        return [
            self.level.batch.physical(x) if mapped else x
            for x, mapped in zip(results, self.outs, strict=True)
        ]

    def tangents_down(self, tangents: Sequence[Any]) -> Flat:
        contents = [self.level.content(t) for t in tangents]
        return [
            self.level.batch.physical(t) if mapped and t is not None else t
            for t, mapped in zip(contents, self.outs, strict=True)
        ]

    def cotangents_down(self, cotangents: Sequence[Any]) -> Cotangents:
        """The cotangents below the level. The cotangent of an argument that all samples share is summed over
        the samples.
        """
        result = []
        for g, mapped in zip(map(self.level.content, cotangents), self.args, strict=True):
            if g is not None and (any(self.outs) or self.level.owns(g)):
                g = self.level.batch.physical(g)
                g = g if mapped else aten.sum.dim_IntList(g, [0])
            result.append(g)
        return result


def kind_of(value: Any) -> str:
    """The type of a value, for error messages."""
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__
