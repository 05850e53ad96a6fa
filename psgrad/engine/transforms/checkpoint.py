"""checkpoint: a function that saves only its arguments for the backward pass, and runs again there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from psgrad import random_state
from psgrad.engine.transforms.calls import (
    Call,
    Cotangents,
    Flat,
    Mapped,
    TapedCall,
    dispatch_call,
    entered_again,
    lowered,
    own_values,
)
from psgrad.engine.transforms.derivatives import DerivativeLevel, DerivativeTracer, creation_numbers
from psgrad.engine.transforms.forward import ForwardLevel
from psgrad.engine.transforms.functional import current_swaps, swapped_again
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.private_torch import (
    DisableTorchFunction,
    make_fx_runs,
    tree_flatten,
    tree_unflatten,
    without_modes,
)
from psgrad.engine.transforms.refused_writes import read_only
from psgrad.engine.transforms.reverse import GradLevel, GradTracer
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tape import Node, TapePosition, pull_back
from psgrad.engine.transforms.tracer import map_tracers, on_active_levels
from psgrad.errors import TransformError


def checkpoint(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`func(*args, **kwargs)`; reverse mode saves only its arguments, not its intermediate values.

    In the backward pass `func` runs again, with the same random draws, autocast settings and swapped
    parameters (`functional_call`), and is differentiated then. This saves the memory of the intermediate
    values, and computes `func` twice. It takes and returns pytrees. Parameters and other traced values that
    it closes over are differentiated too.

    `func` must compute the same when it runs again: values that it reads from elsewhere must not change. It
    must not write in place into its arguments, nor into values that it closes over.
    """
    flat, spec = tree_flatten((args, kwargs))
    out_spec: Any = None

    def function(values: Flat) -> Flat:
        nonlocal out_spec
        given, named = tree_unflatten(values, spec)
        results, out_spec = tree_flatten(func(*given, **named))
        return results

    return tree_unflatten(
        dispatch_call(
            RecomputedCall(f"checkpoint({getattr(func, '__name__', func)!s})", function),
            flat,
        ),
        out_spec,
    )


class RecomputedCall(Call):
    """A call whose derivative is that of its function, which runs again in the backward pass."""

    follows_captured = True

    def for_all_samples(self, mapped: Mapped) -> RecomputedCall:
        return RecomputedCall(self.name, self.function_of_all(mapped))

    def run_without_derivative(self, level: DerivativeLevel, args: Flat) -> Flat:
        return self.function(args)

    def push(self, level: ForwardLevel, values: Flat, tangents: Flat) -> tuple[Flat, Flat]:
        duals = [
            level.dual(x, t) if isinstance(x, torch.Tensor) else x
            for x, t in zip(values, tangents, strict=True)
        ]
        outs = lowered(self.function(duals), level.index, self.name)
        return [level.unwrap(x) for x in outs], [x.tangent if level.owns(x) else None for x in outs]

    def differentiate(self, level: GradLevel, values: Flat, needed: list[int]) -> TapedCall:
        watch, settings = OutsideValues(level, self.name), CallSettings()
        with watch.over_first_run(), settings.noted(), read_only(values):
            outs = own_values(level, dispatch_call(self, values, below=level), self.name)
        captured = watch.captured()
        shapes = [getattr(x, "shape", None) for x in outs]

        def run_again(cotangents: Cotangents) -> tuple[list[tuple[TapePosition, Any]], list[Node]]:
            """(tape positions of the results with their cotangents, the nodes of what goes in)"""
            with (
                entered_again(level),
                torch.set_grad_enabled(True),
                settings.restored(),
                read_only(values),
                watch.over_second_run(captured) as nodes,
            ):
                leaves = {i: level.leaf(values[i]) for i in needed}
                again = map_tracers(
                    on_active_levels, self.function([leaves.get(i, x) for i, x in enumerate(values)])
                )
                if [getattr(x, "shape", None) for x in again] != shapes:
                    raise changed(self.name)
                ends = [
                    (_position(x), g)
                    for x, g in zip(again, cotangents, strict=True)
                    if level.owns(x) and g is not None
                ]
                return ends, [leaf.node for leaf in leaves.values()] + nodes  # type: ignore[return-value]

        def pull(cotangents: Cotangents) -> Cotangents:
            ends, starts = run_again(cotangents)
            cotangents_of_inputs = pull_back(
                ends, starts, keep=False, attached=level.attached, of_shared=level.of_shared
            )
            of_args = dict(zip(needed, cotangents_of_inputs, strict=False))
            return [of_args.get(i) for i in range(len(values))] + cotangents_of_inputs[len(needed) :]

        return TapedCall(outs, pull, captured)


def _position(tracer: GradTracer) -> TapePosition:
    tracer.level.refresh(tracer)
    return TapePosition.of(tracer)


def changed(name: str) -> TransformError:
    return TransformError(
        f"{name} computed something else when it ran again",
        hint="pass what changes as an argument, and draw by PyTorch alone; or call it without checkpoint",
    )


class OutsideValues:
    """Collects the values of a level that a function reads besides its arguments: in the first run, which is
    not recorded, and in the second.
    """

    def __init__(self, level: GradLevel, name: str) -> None:
        self.level, self.name = level, name
        self.reads: dict[int, DerivativeTracer] = {}
        self.follows = False
        self.since = 0

    def note(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if self.level.owns(tensor) and tensor.created < self.since:
                if self.follows and tensor.varies and id(tensor) not in self.reads:
                    raise changed(self.name)
                if not self.follows:
                    self._keep(tensor)

    def _keep(self, tracer: DerivativeTracer) -> None:
        self.level.refresh(tracer)
        self.reads[id(tracer)] = tracer
        while tracer is not None:
            tracer.read_by = self.name
            tracer = tracer.view_of[0] if tracer.view_of is not None else None  # type: ignore[assignment]

    def captured(self) -> list[Any]:
        return [tracer for tracer in self.reads.values() if tracer.varies]

    @contextmanager
    def over_first_run(self) -> Iterator[None]:
        with self._watching(follows=False):
            yield

    @contextmanager
    def over_second_run(self, captured: Sequence[GradTracer]) -> Iterator[list[Node]]:
        """Make the captured values leaves of the second tape. Yields their nodes; their cotangents go on in
        the tape of the call.
        """
        before = [(tracer.node, tracer.output) for tracer in captured]
        nodes = [Node() for _ in captured]
        for tracer, node in zip(captured, nodes, strict=True):
            tracer.node, tracer.output = node, 0
        try:
            with self._watching(follows=True):
                yield nodes
        finally:
            for tracer, (own, output) in zip(captured, before, strict=True):
                tracer.node, tracer.output = own, output

    @contextmanager
    def _watching(self, *, follows: bool) -> Iterator[None]:
        before, self.level.reads = self.level.reads, self
        self.follows, self.since = follows, next(creation_numbers)
        try:
            yield
        finally:
            self.level.reads = before


class CallSettings:
    """The settings on which a function's result depends: the states of random generators, autocast, and the
    parameters that are swapped into modules.
    """

    def __init__(self) -> None:
        with without_modes():
            self.generators = random_state.states()
        self.autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
            for device in _AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        ]
        self.swaps = current_swaps()
        self.drew = False  # whether the state of the generators matters

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the state of each generator of the function before its first draw, and whether the function
        draws.
        """
        before = state.draws
        state.draws = (*before, self._note)
        try:
            yield
        finally:
            state.draws = before
        # Some kernels draw without being marked as random (dropout between the layers of an LSTM). The
        # comparison is not an operator of the function, so no mode may get it.
        with without_modes(), DisableTorchFunction():
            self.drew = any(
                not torch.equal(random_state.state_of(generator), then) for generator, then in self.generators
            )

    def _note(self, op: Op, args: Any, generator: torch.Generator | None) -> None:
        if generator is not None and all(noted is not generator for noted, _ in self.generators):
            self.generators += random_state.states([generator])

    @contextmanager
    def restored(self) -> Iterator[None]:
        now = random_state.states([generator for generator, _ in self.generators])
        with ExitStack() as exits:
            for device in _AUTOCAST_DEVICES:
                settings = next((s for s in self.autocast if s[0] == device), None)
                if settings is not None:
                    exits.enter_context(torch.autocast(device, settings[1], cache_enabled=settings[2]))
                elif torch.is_autocast_enabled(device):
                    exits.enter_context(torch.autocast(device, enabled=False))
            exits.enter_context(swapped_again(self.swaps))
            if self.drew:
                self._refuse_to_be_recorded()
                random_state.restore(self.generators)
                exits.callback(random_state.restore, now)
            yield

    def _refuse_to_be_recorded(self) -> None:
        if make_fx_runs():
            raise TransformError(
                "make_fx records a function under checkpoint that draws: its two runs would differ",
                hint="call the function without checkpoint when it is recorded",
            )


_AUTOCAST_DEVICES = ("cpu", "cuda")
