"""A mode that watches a function while it is captured, and raises an error at anything that a program would
not repeat.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from psgrad import random_state
from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.operators import Op, aten, is_random
from psgrad.engine.transforms.private_torch import (
    DispatchMode,
    FakeTensor,
    buffer_store,
    schema_of,
    tree_flatten,
    without_modes,
)
from psgrad.engine.transforms.tracer import Tracer, innermost, map_tracers


class NotCapturable(Exception):
    """The reason why a program can't be captured. `capture` catches it and runs the function uncaptured."""


# The types of values that a captured function may take and return besides tensors.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class _Refuser:
    """Raises an error for anything that a program would not repeat, and stores its reason, because the
    function may catch exceptions.
    """

    reason: str | None = None

    def refuse(self, why: str) -> NoReturn:
        self.reason = self.reason or why
        raise NotCapturable(self.reason)

    def raise_if_refused(self) -> None:
        if self.reason is not None:
            self.refuse(self.reason)


def properties(x: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a tensor, without its values, that must not change between capture and replay."""
    return x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg()


def writes(op: Any) -> bool:
    return isinstance(op, Op) and schema_of(op).is_mutable


def draws(op: Any) -> bool:
    return isinstance(op, Op) and torch.Tag.nondeterministic_seeded in op.tags


class Watch(_Refuser, DispatchMode):
    """A mode that gets the kernels of a function that is captured, and raises an error for anything that a
    program would not repeat.

    inside: from a tensor from outside to the tensor that stands for it in the program.
    """

    def __init__(self, random_states: RandomStates, inside: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.random_states = random_states
        self.outside: dict[int, torch.Tensor] = {}  # tensors from outside that were used so far, by id
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.kernels: list[Any] = []  # the kernels and the properties of their arguments
        self._inside = inside

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tracer) for kind in types):
            return NotImplemented  # a level's operator; it comes back as kernels
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in op.tags or (
            torch.Tag.dynamic_output_shape in op.tags and not indexes_by_numbers(op, args)
        ):
            self.refuse(f"its operators depend on data, by {op}{diagnostics.where()}")
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.refuse(f"{op} draws from a generator of its own{diagnostics.where()}")
        if draws(op) and is_random(op, args, kwargs):
            self.random_states.drawn()
        # the result of torch.tensor(..) has a value, but is not from outside
        if op is not aten.lift_fresh.default:
            args, kwargs = map_tracers(self.inside, args), map_tracers(self.inside, kwargs)
        result = op(*args, **kwargs)
        self.made += [weakref.ref(x) for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
        self.kernels.append((op, repr(map_tracers(properties, (args, kwargs)))))
        return result

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor):
            return x
        self.outside.setdefault(id(x), x)
        return self._inside(x)

    def require_nothing_kept(self) -> None:
        """An error if a tensor outlives the capture: it would be missing, or stale, at a replay."""
        if any(made() is not None for made in self.made):
            gc.collect()
        if any(made() is not None for made in self.made):
            self.refuse("it keeps tensors from one call to the next")


class NoReads(_Refuser, TorchFunctionMode):
    """Refuses methods that read a tensor's memory without an operator."""

    _READ = frozenset(
        {
            "tolist",
            "numpy",
            "__array__",
            "__dlpack__",
            "data_ptr",
            "storage",
            "untyped_storage",
            "__deepcopy__",
            "__reduce_ex__",
        }
    )

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in self._READ:
            self.refuse(f"its operators depend on data, by Tensor.{name}{diagnostics.where()}")
        return function(*args, **(kwargs or {}))


class RandomStates(_Refuser):
    """Finds a function that sets PyTorch's random states, which a replay would not repeat. A checkpoint,
    which restores them, is allowed.

    On tensors without values nothing is drawn. Instead, one number is drawn from each generator for each
    operator that draws. If the function sets a generator, its state is not the expected one. At the end the
    states are restored.
    """

    def __enter__(self) -> RandomStates:
        self.before = self.known = random_state.states()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        unchanged = self._unchanged()
        random_state.restore(self.before)
        if kind is None and not unchanged:
            self.refuse("it sets PyTorch's random state")

    def drawn(self) -> None:
        with without_modes():
            if not self._unchanged():
                self.refuse("it sets PyTorch's random state")
            for generator in random_state.generators():
                if generator.device.type == "cuda":
                    generator.set_offset(generator.get_offset() + 4)
                else:
                    torch.rand((), generator=generator)
            self.known = random_state.states()

    def _unchanged(self) -> bool:
        return all(
            torch.equal(now, known)
            for (_, now), (_, known) in zip(random_state.states(), self.known, strict=True)
        )


def indexes_by_numbers(op: Op, args: Any) -> bool:
    return op is aten.index.Tensor and all(
        i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1]
    )


@contextlib.contextmanager
def modules_unchanged() -> Iterator[None]:
    """At the end, remove the tensors without values that modules stored during the capture (a cache, the last
    attention map).
    """
    stores: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def note(module: torch.nn.Module, args: Any) -> None:
        for store in (buffer_store(module), module.__dict__):  # in this order: the second contains the first
            stores.setdefault(id(store), (store, dict(store)))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for store, before in stores.values():
            for key in [key for key, value in store.items() if _recorded(value)]:
                if key in before and not _recorded(before[key]):
                    store[key] = before[key]
                else:
                    del store[key]


def _recorded(value: Any) -> bool:
    return any(
        isinstance(leaf, FakeTensor) or (isinstance(leaf, Tracer) and _recorded(innermost(leaf)))
        for leaf in tree_flatten(value)[0]
    )


@contextlib.contextmanager
def python_random_states() -> Iterator[None]:
    """Refuse a program that uses Python's or NumPy's generators: a replay would repeat the same numbers."""
    numpy = sys.modules.get("numpy")
    before, numpy_before = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
        if random.getstate() != before or (
            numpy is not None and repr(numpy.random.get_state()) != repr(numpy_before)
        ):
            raise NotCapturable("it draws from Python's or NumPy's generator")
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(numpy_before)
