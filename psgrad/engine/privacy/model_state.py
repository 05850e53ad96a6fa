"""The state that a model and its loss keep from call to call, restored whenever they are called.

A private sum guarantees that a record moves it by its own clipped gradient. A model that keeps what it saw (a
running maximum, a memory, a counter) makes later records' gradients depend on earlier ones, and a buffer that
it writes into would be published without noise. A check of a few rows does not find every record that leads
to a write. So the state is restored around every run of the differentiated function: every chunk, every half
of one, every outcome of a branch, every second pass.
"""

from __future__ import annotations

import copy
import functools
import types
from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from psgrad.engine.privacy.reached import Cached, Globals, attributes, is_foreign, is_own, reached, slots_of
from psgrad.engine.transforms.private_torch import write_count
from psgrad.errors import ModelError

# Tensors with more bytes are compared by PyTorch's count of writes, not by value, and can't be put back.
_LARGE = 1 << 26
# Up to so many bytes a copy is compared faster than an array.
_TINY = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Kept(Protocol):
    """Something that can change, with its former value."""

    def changed(self) -> bool: ...

    def restore(self) -> None: ...


class ModelState:
    """The state of a model and of all else that is called with it, as it was when this was made.

    Args:
        roots: the model, and the loss. From there on these are followed (`reached.py`): attributes of modules
            and of other objects (`__dict__` and `__slots__`), class attributes of the user's classes, dicts,
            lists, sets, deques and tuples, what functions have as closures, defaults and attributes, the
            globals that the user's own functions name, tensors and numpy arrays, by their bits. Caches of
            functools are emptied, where they are the user's own. Parameters, and tensors and arrays of the
            same memory, are not put back: only the optimiser changes them, and a write into one while a
            record is computed is refused.

    What is not seen: globals of installed packages, what objects keep outside of Python (iterators, files),
    writes by numpy into parameters, and those by `.data` or numpy into tensors on a GPU or above 64 MiB.
    Random generators are `record_draws.py`'s.
    """

    def __init__(self, *roots: object) -> None:
        self._roots = roots
        self.renew()

    def renew(self) -> None:
        """Takes the present state as the one to restore."""
        self._kept, self._parameters = _found(self._roots)

    def changes(self) -> list[str]:
        """The places that have changed."""
        return [where for where, kept in self._kept if kept.changed()]

    def restore(self) -> None:
        """Restore all changes. Raises ModelError if that is impossible."""
        for where, kept in self._kept:
            if kept.changed():
                try:
                    kept.restore()
                except Exception as error:
                    raise _written(where, f", and it can't be put back: {error}") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context that begins and ends with the stored state. Raises ModelError if a parameter was written
        into.
        """
        self.restore()
        before = [_place(parameter) for _, parameter in self._parameters]
        try:
            yield
        finally:
            self.restore()
        for (where, parameter), was in zip(self._parameters, before, strict=True):
            if _place(parameter) != was:
                raise _written(where, "")

    def holding(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss; every run of it begins with the stored state."""

        @functools.wraps(loss)
        def held(*arguments: Any) -> Any:
            with self.held():
                return loss(*arguments)

        return held


def _written(where: str, why: str) -> ModelError:
    return ModelError(
        f"the model or the loss wrote into {where} while a record was computed{why}",
        expected=(
            "a loss of each record that depends on no other record, and parameters that the optimiser alone"
            " changes"
        ),
        cause=(
            "a running statistic, a memory of what was seen, or a first pass that sets the model up from the"
            " data"
        ),
        next_step="compute it from what is public, or keep nothing from one call to the next",
    )


def _place(tensor: Tensor) -> tuple[int, int]:
    """A number that changes with each write that PyTorch counts, and with the memory."""
    return 0 if tensor.is_inference() else write_count(tensor), tensor.data_ptr()


def _found(roots: tuple[object, ...]) -> tuple[list[tuple[str, _Kept]], list[tuple[str, nn.Parameter]]]:
    """(where and what can change, the parameters), of all objects that can be reached from the roots."""
    everything = list(reached(roots))
    parameters = [(where, value) for where, value in everything if isinstance(value, nn.Parameter)]
    memory = _Memory(parameter for _, parameter in parameters)
    kept = [
        (where, own)
        for where, value in everything
        if not memory.has(value) and (own := _kept_of(value)) is not None
    ]
    return kept, parameters


class _Memory:
    """The memory of some tensors. Another tensor with a part of it is one of these tensors under another
    name.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._spans = sorted({span for tensor in tensors if (span := _span(tensor)) is not None})

    def has(self, value: Any) -> bool:
        """Whether a tensor or an array has a part of it."""
        if not isinstance(value, (Tensor, np.ndarray)) or (span := _span(value)) is None:
            return False
        place = bisect_left(self._spans, (span[1], 0)) - 1
        return place >= 0 and self._spans[place][1] > span[0]


def _span(value: Tensor | np.ndarray[Any, Any]) -> tuple[int, int] | None:
    """(address of the first byte, and behind the last one) of a tensor or an array; None for one without
    memory of its own.
    """
    if isinstance(value, np.ndarray):
        first, end = np.lib.array_utils.byte_bounds(value)
    elif value.layout != torch.strided or value.is_meta or not value.numel():
        return None
    else:
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        first = value.data_ptr()
        end = first + (last + 1) * value.element_size()
    return (first, end) if first != end else None


def _kept_of(value: Any) -> _Kept | None:
    """The part of a value itself that is compared and restored, without its parts; None for one that can't
    change.
    """
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else _KeptTensor(value)
    if isinstance(value, np.ndarray):
        return _KeptArray(value) if value.flags.writeable and not isinstance(value, np.memmap) else None
    if isinstance(value, (dict, list, deque)):
        return _KeptContents(value)
    if isinstance(value, (set, bytearray, array)):
        return _KeptBag(value)
    if isinstance(value, Cached):
        return _KeptEmpty(value) if is_own(getattr(value, "__wrapped__", None)) else None
    if isinstance(value, type):
        return (
            None
            if is_foreign(value)
            else _KeptNames(value, lambda: [key for key in vars(value) if not key.startswith("__")])
        )
    if isinstance(value, Globals):
        return _KeptGlobals(value)
    if isinstance(value, types.CellType):
        return _KeptNames(value, lambda: ["cell_contents"])
    return _KeptNames(value, partial(slots_of, type(value))) if slots_of(type(value)) else None


# -- kept values ---------------------------------------------------------------------------------------------


class _KeptContents:
    """A dict, list or deque: the same objects in the same order."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._keys, self._items = list(target), list(target.values()) if isinstance(target, dict) else None

    def changed(self) -> bool:
        target, items = self._target, self._items
        if len(target) != len(self._keys) or not all(map(is_, target, self._keys)):
            return True
        return items is not None and not all(map(is_, target.values(), items))

    def restore(self) -> None:
        kind: Any = next(kind for kind in (OrderedDict, dict, list, deque) if isinstance(self._target, kind))
        kind.clear(self._target)
        if self._items is None:
            kind.extend(self._target, self._keys)
        else:
            for key, item in zip(self._keys, self._items, strict=True):
                kind.__setitem__(self._target, key, item)


class _KeptBag:
    """A set, a bytearray or an array of the module of that name."""

    def __init__(self, target: Any) -> None:
        self._target, self._was = target, copy.copy(target)

    def changed(self) -> bool:
        return bool(self._target != self._was)

    def restore(self) -> None:
        if isinstance(self._target, set):
            self._target.clear()
            self._target.update(self._was)
        else:
            self._target[:] = self._was


class _KeptEmpty:
    """A cache of functools: empty whenever a run begins, as its content cannot be read."""

    def __init__(self, target: Any) -> None:
        self._target = target
        target.cache_clear()

    def changed(self) -> bool:
        return bool(self._target.cache_info().currsize)

    def restore(self) -> None:
        self._target.cache_clear()


class _KeptGlobals:
    """Some globals of a module: the same objects, under the same names. Imported names are not state."""

    def __init__(self, target: Globals) -> None:
        self._content, self._names = target.content, target.names
        self._was = attributes(target, target.names)

    def _differing(self) -> list[str]:
        content, was = self._content, self._was
        changed = [name for name in self._names if content.get(name, _NOTHING) is not was.get(name, _NOTHING)]
        return [name for name in changed if not isinstance(content.get(name), types.ModuleType)]

    def changed(self) -> bool:
        return bool(self._differing())

    def restore(self) -> None:
        for name in self._differing():
            if name in self._was:
                self._content[name] = self._was[name]
            else:
                del self._content[name]


_NOTHING = object()


class _KeptNames:
    """Attributes that are in no dict: of a class, in slots, in a closure's cell."""

    def __init__(self, target: Any, names: Callable[[], list[str]]) -> None:
        self._target, self._names = target, names
        self._was = attributes(target, names())

    def changed(self) -> bool:
        now = attributes(self._target, self._names())
        return len(now) != len(self._was) or not all(
            name in now and now[name] is value for name, value in self._was.items()
        )

    def restore(self) -> None:
        change = type if isinstance(self._target, type) else object
        for name in attributes(self._target, self._names()).keys() - self._was.keys():
            change.__delattr__(self._target, name)
        for name, value in self._was.items():
            change.__setattr__(self._target, name, value)


class _KeptArray:
    """A numpy array, by its bits."""

    def __init__(self, target: np.ndarray[Any, Any]) -> None:
        self._target, self._was = target, target.copy()
        self._kind = target.shape, target.dtype

    def changed(self) -> bool:
        return (self._target.shape, self._target.dtype) != self._kind or _differ(self._target, self._was)

    def restore(self) -> None:
        if (self._target.shape, self._target.dtype) != self._kind:
            raise ValueError("its shape or type is another one")
        self._target[...] = self._was


class _KeptTensor:
    """A tensor that is no parameter: by its bits on a CPU, else by PyTorch's count of writes."""

    def __init__(self, target: Tensor) -> None:
        self._target, self._memory = target, target.detach()
        self._place, self._shape = _place(target), (target.shape, target.stride())
        self._was: Tensor | None = None
        self._bits: np.ndarray[Any, Any] | None = None
        if (
            target.layout == torch.strided
            and target.numel() * target.element_size() <= _LARGE
            and not target.is_quantized
        ):
            self._was = self._memory.clone()
            if target.device.type == "cpu" and not target.is_conj():
                self._bits, self._bits_were = _bits(self._memory), _bits(self._was)

    def changed(self) -> bool:
        target = self._target
        if _place(target) != self._place or (target.shape, target.stride()) != self._shape:
            return True
        return self._bits is not None and _differ(self._bits, self._bits_were)

    def restore(self) -> None:
        if self._was is None:
            raise ValueError("it has more than 64 MiB, or is no dense tensor")
        if (
            self._target.data_ptr() != self._memory.data_ptr()
            or (self._target.shape, self._target.stride()) != self._shape
        ):
            self._target.data = self._memory
        if self._bits is not None:
            self._bits[...] = self._bits_were
        else:
            self._target.data.copy_(self._was)
        self._place = _place(self._target)


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a tensor on the CPU as integers, shared with it."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits: np.ndarray[Any, Any] = plain.view(_INTEGERS[plain.element_size()]).numpy()
    return bits


def _differ(now: np.ndarray[Any, Any], was: np.ndarray[Any, Any]) -> bool:
    if now.nbytes <= _TINY or now.dtype.hasobject:
        return now.tobytes() != was.tobytes()
    return not np.array_equal(_as_integers(now), _as_integers(was))


def _as_integers(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Its bits, for element sizes with an integer type: so signed zeros and NaN are compared exactly."""
    kind = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(array.itemsize)
    return array if kind is None else array.view(kind)
