"""Calls: functions with rules of their own, and how a call is passed to the levels that handle it.

A call takes a flat list of arguments and returns a flat list of results. It is passed down the stack of
levels like an operator. But it visits every level from the top, with or without tracers among its arguments,
because the function may close over some.

- A derivative level calls `differentiate` (reverse) or `push` (forward), on the values one level below.
- A batching level calls `batch`, which mostly means: the same call for all samples at once, one level below.
  Its functions then enter the level again, also after the level was left (in the backward pass), and the
  tracers that the user's functions hold become valid with it.
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
from psgrad.engine.transforms.forward import ForwardLevel, transpose
from psgrad.engine.transforms.interpreter import Tracer, map_tracers, meet, resurrect, tensors_in
from psgrad.engine.transforms.levels import Divergence, Level, users_program
from psgrad.engine.transforms.operators import aten
from psgrad.engine.transforms.private_torch import DelayedError
from psgrad.engine.transforms.read_only import read_only
from psgrad.engine.transforms.reverse import GradLevel, GradTracer
from psgrad.engine.transforms.rules.families import cast
from psgrad.engine.transforms.state import ActiveLevel, state
from psgrad.engine.transforms.tape import pull_back
from psgrad.errors import TransformError

Flat = list[Any]
Cotangents = list[Any]  # one a result or an argument; None stands for zero


@dataclass
class Recorded:
    """What a reverse-mode level keeps of a call."""

    outs: Flat
    pull: Callable[
        [Cotangents], Cotangents
    ]  # cotangents of the results -> those of the arguments, and behind them of `captured`
    captured: list[GradTracer] = field(default_factory=list)  # recorded values that the function closed over
    constant: frozenset[int] = frozenset()  # results that are said to have no derivative


class Call:
    """A function of flat arguments with rules of its own. Subclasses say which."""

    batches = False  # whether `batch` does more than batch its operators one by one
    follows_captured = False  # whether it differentiates also in what its function closes over

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, args: Flat) -> Flat:
        """The results where no level handles the call."""
        raise NotImplementedError

    def batch(self, level: BatchLevel, args: Flat) -> Flat:
        """The results as tracers of a batching level."""
        raise NotImplementedError

    def differentiate(self, level: GradLevel, values: Flat, needed: list[int]) -> Recorded:
        """The results and the backward function, on values below a reverse-mode level; `needed`: the
        arguments that need a cotangent.
        """
        raise NotImplementedError

    def push(self, level: ForwardLevel, values: Flat, tangents: Flat) -> tuple[Flat, Flat]:
        """The results and their tangents, on values below a forward-mode level."""
        raise NotImplementedError

    def unfollowed(self, level: DerivativeLevel, args: Flat) -> Flat:
        """The results at a derivative level where no derivative is followed."""
        with resting(level):
            outs = hand_down(self, level.unwrap(args), below=level)
        return [
            level.constant(x) if isinstance(x, torch.Tensor) else x
            for x in own_values(level, outs, self.name)
        ]


def hand_down(call: Call, args: Flat, below: Level | None = None) -> Flat:
    """The results of a call: of the highest level that handles it, else of the function itself."""
    args = map_tracers(resurrect, args)
    for x in args:
        if isinstance(x, torch.Tensor):
            meet(x)
    for depth in reversed(range(len(state.stack))):
        level = state.stack[depth]
        if below is not None and level.index >= below.index:
            continue
        # batching alone needs no rule: the function's operators are batched one by one
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
    inputs = [
        (i, x)
        for i, x in level.inputs(tuple(args))
        if isinstance(i, int) and (x.dtype.is_floating_point or x.dtype.is_complex)
    ]
    if level.reads is not None:
        level.reads.note(tensors_in(args, {}))
    followed = level.is_on() and (level.reads is None or level.reads.follows)
    if not followed or not (inputs or call.follows_captured):
        return call.unfollowed(level, args)
    values = level.unwrap(args)
    if isinstance(level, ForwardLevel):
        tangents = [None] * len(args)
        for i, x in inputs:
            tangents[i] = x.tangent
        results = call.push(level, values, tangents)
        return [level.dual(x, t) if isinstance(x, torch.Tensor) else x for x, t in zip(*results, strict=True)]
    assert isinstance(level, GradLevel)
    with witnessed(level):
        recorded = call.differentiate(level, values, [i for i, _ in inputs])
    places = inputs + [(len(args) + i, x) for i, x in enumerate(recorded.captured)]
    return level.record_call(
        recorded.outs, lambda arrived: dict(enumerate(recorded.pull(arrived))), places, recorded.constant
    )


# -- levels, from the point of view of a call ----------------------------------------------------------------


@contextmanager
def resting(level: Level) -> Iterator[None]:
    """While a call runs below a level, this level and those above do not adopt fresh tensors."""
    with _adopting(False, [other for other in state.stack if level.alive and other.index >= level.index]):
        yield


@contextmanager
def program_on(*values: Any) -> Iterator[None]:
    """While a rule runs a function of the user, fresh tensors belong to the levels of its values only."""
    present: set[ActiveLevel] = set()
    for value in values:
        while isinstance(value, Tracer):
            present.add(value.level)
            value = value.below()
    with users_program(), _adopting(False, [level for level in state.stack if level not in present]):
        yield


@contextmanager
def witnessed(level: GradLevel) -> Iterator[None]:
    """The tape of a function that has ended also watches what a call uses, whose operators it does not
    record.
    """
    before = state.watchers
    if (saved := level.saved) is not None:
        state.watchers = (*before, lambda op, args, kwargs: saved.need(tensors_in(args, kwargs)))
    try:
        yield
    finally:
        state.watchers = before


@contextmanager
def back_in(level: Level) -> Iterator[None]:
    """Inside a level, which is entered again if it was left."""
    if level.alive:
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
                f"samples disagree on a branch{divergence.where} in a function that runs on the way back",
                cause="their vmap has ended, which would have run the function once for each outcome",
                next_step="write the branch with torch.where",
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
    """Results without the tracers of levels higher than `highest`, which come from values that a function
    closes over.

    Constants of those levels are replaced by their values, and so is what a level's watch notes; for all
    others an error is raised, because the derivative would be lost.
    """
    return [_lowered(x, highest, name) for x in results]


def _lowered(value: Any, highest: int, name: str) -> Any:
    while isinstance(value, Tracer) and value.level.alive and value.level.index > highest:
        level = value.level
        if isinstance(level, BatchLevel):
            if not level.owns(level.content(value)):
                value = level.content(value)
                continue
            raise TransformError(
                f"{name} closes over a value that carries the sample axis of another"
                f" vmap{diagnostics.where()}",
                next_step="pass the value as an argument",
            )
        assert isinstance(level, DerivativeLevel)
        if value.varies:  # type: ignore[attr-defined]
            if level.reads is None or level.reads.follows:
                raise TransformError(
                    f"{name} closes over a value that is being differentiated{diagnostics.where()}",
                    expected=(
                        "a function that takes all that it depends on as arguments: its rule says derivatives"
                        " for those alone"
                    ),
                    next_step=(
                        "pass the value as an argument, or detach it if its derivative is to be ignored"
                    ),
                )
            level.reads.note([value])
        value = level.unwrap(value)
    return value


@dataclass
class Mapped:
    """Which arguments and results of a call have a hidden sample axis, and the conversions between samples
    and batches.
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
        """Results below the level. If any argument has a sample axis, all results get one."""
        results = lowered(
            [self.level.content(x) for x in lowered(results, self.level.index, name)], self.level.index, name
        )
        self.outs = [isinstance(x, torch.Tensor) and (any(self.args) or self.level.owns(x)) for x in results]
        return [
            self.level.batch.physical(x) if mapped else x
            for x, mapped in zip(results, self.outs, strict=True)
        ]

    def tangents_down(self, tangents: Sequence[Any]) -> Flat:
        found = [self.level.content(t) for t in tangents]
        return [
            self.level.batch.physical(t) if mapped and t is not None else t
            for t, mapped in zip(found, self.outs, strict=True)
        ]

    def cotangents_down(self, cotangents: Sequence[Any]) -> Cotangents:
        """The cotangents below the level. That of an argument that all samples share is summed over the
        samples.
        """
        found = []
        for g, mapped in zip(map(self.level.content, cotangents), self.args, strict=True):
            if g is not None and (any(self.outs) or self.level.owns(g)):
                g = self.level.batch.physical(g)
                g = g if mapped else aten.sum.dim_IntList(g, [0])
            found.append(g)
        return found


def kind_of(value: Any) -> str:
    """The kind of a value, in the user's words."""
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def wrong_cotangent(name: str, g: Any, position: int, shape: torch.Size) -> TransformError:
    what = f"shape {tuple(g.shape)}" if isinstance(g, torch.Tensor) else f"type {kind_of(g)}"
    return TransformError(
        f"the reverse rule of {name} gave a cotangent of {what} for argument {position}, of shape"
        f" {tuple(shape)}",
        expected="a cotangent shaped like the argument, or None for zero",
        cause=(
            "an argument that was broadcast: its cotangent is summed over the axes along which it was"
            " repeated"
        ),
    )


# -- calls whose derivative is given -------------------------------------------------------------------------


class Ruled(Call):
    """A call whose derivative is given by the user, in reverse mode, in forward mode, or both: each is the
    other's transpose.

    function: arguments -> results.
    prepare: (arguments, results or None, which arguments need cotangents) -> (results, context of `pull`,
        constant results).
    pull: (context, cotangents of the results) -> cotangents of the arguments.
    forward: (arguments, results or None, tangents) -> (results, tangents of the results).
    value_first: whether `prepare` and `forward` are given the results, computed one level below by the call
        itself; otherwise they compute them, as ordinary programs there.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Flat], Flat],
        prepare: Callable[[Flat, Flat | None, list[int]], tuple[Flat, Any, frozenset[int]]] | None = None,
        pull: Callable[[Any, Cotangents], Cotangents] | None = None,
        forward: Callable[[Flat, Flat | None, Flat], tuple[Flat, Flat]] | None = None,
        *,
        value_first: bool = False,
    ) -> None:
        super().__init__(name)
        self.function, self.prepare, self.pull, self.forward = function, prepare, pull, forward
        self.value_first = value_first

    def run(self, args: Flat) -> Flat:
        followed = (
            any(isinstance(x, torch.Tensor) and x.requires_grad for x in args) and torch.is_grad_enabled()
        )
        with read_only(args):
            if not followed:
                return self.function(args)
            with torch.no_grad():
                return self._without_autograd(self.function(args))

    def _without_autograd(self, outs: Flat) -> Flat:
        """Results whose backward pass in PyTorch's autograd raises an error: it would differentiate the
        function as it is written, which may be wrong.
        """
        message = (
            f"{self.name} has a derivative of its own, which PyTorch's autograd does not know: differentiate"
            " with psgrad's grad or vjp"
        )
        places = [
            i
            for i, x in enumerate(outs)
            if isinstance(x, torch.Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex)
        ]
        refusal = DelayedError(message.encode(), len(places))
        refused = refusal(*[outs[i].detach().requires_grad_() for i in places])
        for i, x in zip(places, refused if isinstance(refused, tuple) else (refused,), strict=True):
            outs[i] = x
        return outs

    def batch(self, level: BatchLevel, args: Flat) -> Flat:
        args = [level.content(x) for x in args]
        mapped = Mapped(level, [level.owns(x) for x in args])
        outs = hand_down(self._for_all_samples(mapped), [level.batch.raw(x) for x in args], below=level)
        return mapped.up(outs, mapped.outs)

    def _for_all_samples(self, mapped: Mapped) -> Ruled:
        def function(args: Flat) -> Flat:
            with back_in(mapped.level):
                results = self.function(mapped.up(args, mapped.args))
            return mapped.down(results, self.name)

        def prepare(args: Flat, outs: Flat | None, needed: list[int]) -> tuple[Flat, Any, frozenset[int]]:
            assert self.prepare is not None
            with back_in(mapped.level):
                given = mapped.up(outs, mapped.outs) if outs is not None else None
                results, context, constant = self.prepare(mapped.up(args, mapped.args), given, needed)
            return mapped.down(results, self.name), context, constant

        def pull(context: Any, cotangents: Cotangents) -> Cotangents:
            assert self.pull is not None
            with back_in(mapped.level):
                found = self.pull(context, mapped.up(cotangents, mapped.outs))
            return mapped.cotangents_down(found)

        def forward(args: Flat, outs: Flat | None, tangents: Flat) -> tuple[Flat, Flat]:
            assert self.forward is not None
            with back_in(mapped.level):
                given = mapped.up(outs, mapped.outs) if outs is not None else None
                results, pushed = self.forward(
                    mapped.up(args, mapped.args), given, mapped.up(tangents, mapped.args)
                )
            return mapped.down(results, self.name), mapped.tangents_down(pushed)

        return Ruled(
            self.name,
            function,
            prepare if self.prepare is not None else None,
            pull if self.pull is not None else None,
            forward if self.forward is not None else None,
            value_first=self.value_first,
        )

    def differentiate(self, level: GradLevel, values: Flat, needed: list[int]) -> Recorded:
        with resting(level), read_only(values):
            if self.pull is not None:
                outs, context, constant = self._prepared(level, values, needed)
                return Recorded(
                    outs,
                    lambda cotangents: self._checked(self._pulled(context, cotangents), values),
                    constant=constant,
                )
            outs, pull = self._transposed_forward(level, values, needed)
            return Recorded(outs, pull)

    def push(self, level: ForwardLevel, values: Flat, tangents: Flat) -> tuple[Flat, Flat]:
        with resting(level), read_only(values):
            if self.forward is not None:
                outs, pushed = self.forward(values, self._value(level, values), tangents)
                return own_values(level, outs, self.name), own_values(level, pushed, self.name)
            needed = [i for i, t in enumerate(tangents) if t is not None]
            outs, context, constant = self._prepared(level, values, needed)

            def backwards(leaves: Flat) -> Flat:
                found = self._checked(self._pulled(context, leaves), values)
                return [found[i] for i in needed]

            varying = [None if i in constant else x for i, x in enumerate(outs)]
            return outs, self._transposed_backward(backwards, varying, [tangents[i] for i in needed], level)

    def _transposed_backward(
        self, backwards: Callable[[Flat], Flat], outs: Flat, tangents: Flat, level: ForwardLevel
    ) -> Flat:
        """Forward mode from the backward rule. A rule that is not linear (it may clip) has no transpose; this
        is checked at two points.
        """
        pushed = transpose(backwards, outs, tangents, above=level)
        for elsewhere in (1e3, -1e3):
            for here, there in zip(
                pushed, transpose(backwards, outs, tangents, above=level, at=elsewhere), strict=True
            ):
                same = here is there or (
                    here is not None
                    and there is not None
                    and torch.allclose(here, there, 1e-3, 1e-6, equal_nan=True)
                )
                if not same:
                    raise TransformError(
                        f"forward mode of {self.name}{diagnostics.where()}, whose backward is not linear in"
                        " the cotangents",
                        expected="a linear backward, of which forward mode is the transpose",
                        cause="the backward clips, rounds or compares the cotangents that it is given",
                        next_step=(
                            "give the function a rule for forward mode as well, or differentiate it in"
                            " reverse mode only"
                        ),
                    )
        return pushed

    def _value(self, level: DerivativeLevel, values: Flat) -> Flat | None:
        return (
            own_values(level, hand_down(self, values, below=level), self.name) if self.value_first else None
        )

    def _prepared(
        self, level: DerivativeLevel, values: Flat, needed: list[int]
    ) -> tuple[Flat, Any, frozenset[int]]:
        if self.prepare is None or self.pull is None:
            raise self.without_rule()
        outs, context, constant = self.prepare(values, self._value(level, values), needed)
        return own_values(level, outs, self.name), context, constant

    def _pulled(self, context: Any, cotangents: Cotangents) -> Cotangents:
        assert self.pull is not None
        with users_program(), read_only(cotangents):
            return self.pull(context, cotangents)

    def _checked(self, cotangents: Cotangents, values: Flat) -> Cotangents:
        """The cotangents that the user's rule gave, in the arguments' dtypes; an error if a shape is
        wrong.
        """
        found: Cotangents = []
        for position, (g, x) in enumerate(zip(cotangents, values, strict=True)):
            differentiable = isinstance(x, torch.Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex)
            if g is None or not differentiable:
                found.append(None)
                continue
            if not isinstance(g, torch.Tensor) or g.shape != x.shape:
                raise wrong_cotangent(self.name, g, position, x.shape)
            found.append(cast(g, x.dtype))
        return found

    def _transposed_forward(
        self, level: GradLevel, values: Flat, needed: list[int]
    ) -> tuple[Flat, Callable[[Cotangents], Cotangents]]:
        """Reverse mode from the forward rule: its tangents are recorded as a linear function, which is
        transposed.
        """
        if self.forward is None:
            raise self.without_rule()
        outs = self._value(level, values)
        tape = GradLevel()
        with tape.active(above=level), torch.set_grad_enabled(True):
            leaves = {i: tape.leaf(torch.zeros_like(values[i])) for i in needed}
            outs, tangents = self.forward(values, outs, [leaves.get(i) for i in range(len(values))])
            outs = [tape.unwrap(x) for x in outs]
            ends = [(place, t) for place, t in enumerate(tangents) if tape.owns(t) and t.varies]
        starts = [leaves[i].node for i in needed]

        def pull(cotangents: Cotangents) -> Cotangents:
            seeds = [(end, cotangents[place]) for place, end in ends]
            found = dict(
                zip(needed, pull_back(seeds, starts, keep=True, attached=tape.attached), strict=True)
            )
            return [found.get(i) for i in range(len(values))]

        return own_values(level, outs, self.name), pull

    def without_rule(self) -> TransformError:
        return TransformError(
            f"{self.name} has no rule for its derivative{diagnostics.where()}",
            next_step="give it one: defvjp or defjvp, or the backward or jvp of the Function",
        )
