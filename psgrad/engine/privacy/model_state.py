"""What a model and its loss keep from call to call, put back whenever they are called again.

A private sum promises that a record moves it by its own clipped gradient. A model that keeps what it saw (a running maximum, a memory, a
counter) makes later records' gradients depend on earlier ones, and a buffer that it writes into would be published without noise. A few
rows, looked at beforehand, do not show which records lead to a write. So the state is put back around every run of the function that is
differentiated: every chunk, every half of one, every outcome of a branch, every second pass.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from psgrad.errors import ModelError

# Tensors with more bytes are compared by PyTorch's count of writes, not by value, and can't be put back.
_LARGE = 1 << 26
# Up to so many bytes a copy is compared faster than an array.
_TINY = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Whose instances and classes hold no state of a user's model, or the interpreter's own.
_FOREIGN = ("torch", "builtins", "numpy", "collections", "logging", "threading", "psgrad", "abc", "typing", "functools", "enum", "pathlib")


class _Kept(Protocol):
    """Something that can change, as it was."""

    def changed(self) -> bool: ...

    def restore(self) -> None: ...


class ModelState:
    """The state of a model and of all else that is called with it, as it was when this was made.

    Args:
        roots: the model, and the loss. From there on these are followed: attributes of modules and of other objects (`__dict__` and
            `__slots__`), class attributes of the user's classes, dicts, lists, sets, deques and tuples, what functions have as closures,
            defaults and attributes, tensors and numpy arrays, by their bits. Parameters are not put back: only the optimiser changes
            them, and a write into one while a record is computed is refused.

    What is not seen: global variables, what objects keep outside of Python (iterators, files, random generators), writes by `.data` or
    numpy into parameters, tensors on a GPU or above 64 MiB.
    """

    def __init__(self, *roots: object) -> None:
        self._roots = roots
        self.renew()

    def renew(self) -> None:
        """Take what is there now for what it was."""
        self._kept, self._parameters = _found(self._roots)

    def changes(self) -> list[str]:
        """Where something is no longer what it was."""
        return [where for where, kept in self._kept if kept.changed()]

    def restore(self) -> None:
        """Put back what has changed. Raises ModelError where that can't be done."""
        for where, kept in self._kept:
            if kept.changed():
                try:
                    kept.restore()
                except Exception as error:
                    raise _written(where, f", and it can't be put back: {error}") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """What runs inside finds the state as it was, and leaves it so. Raises ModelError where it wrote into a parameter."""
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
        """The loss, every run of which finds the state as it was."""

        @functools.wraps(loss)
        def held(*arguments: Any) -> Any:
            with self.held():
                return loss(*arguments)

        return held


def _written(where: str, why: str) -> ModelError:
    return ModelError(
        f"the model or the loss wrote into {where} while a record was computed{why}",
        expected="a loss of each record that depends on no other record, and parameters that the optimiser alone changes",
        cause="a running statistic, a memory of what was seen, or a first pass that sets the model up from the data",
        next_step="compute it from what is public, or keep nothing from one call to the next",
    )


def _place(tensor: Tensor) -> tuple[int, int]:
    """Another one after each write that PyTorch counts, and for another memory."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


# What is followed -----------------------------------------------------------------------------------------------------------------


def _found(roots: tuple[object, ...]) -> tuple[list[tuple[str, _Kept]], list[tuple[str, nn.Parameter]]]:
    """(where and what can change, the parameters), of all that can be reached from the roots.

    A name that ends with a point is that of an object's attributes: what is in them is named with the point, what is in another container
    with brackets.
    """
    kept: list[tuple[str, _Kept]] = []
    parameters: list[tuple[str, nn.Parameter]] = []
    seen: dict[int, object] = {}  # the objects themselves, so that no other one gets their identity
    waiting: list[tuple[str, Any]] = [("" if place == 0 else f"root {place}", root) for place, root in enumerate(roots)]
    while waiting:
        where, value = waiting.pop()
        if id(value) in seen or value is None or isinstance(value, (str, bytes, int, float, complex, types.ModuleType)):
            continue
        seen[id(value)] = value
        name = where.strip(".") or "the model"
        if isinstance(value, nn.Parameter):
            parameters.append((name, value))
        elif (own := _kept_of(value)) is not None:
            kept.append((name, own))
        waiting += _parts(where, value)
    return kept, parameters


def _kept_of(value: Any) -> _Kept | None:
    """What there is to compare and to put back of a value itself, not of what it holds; None for one that can't change."""
    if isinstance(value, Tensor):
        return _KeptTensor(value)
    if isinstance(value, np.ndarray):
        return _KeptArray(value) if value.flags.writeable and not isinstance(value, np.memmap) else None
    if isinstance(value, (dict, list, deque)):
        return _KeptContents(value)
    if isinstance(value, (set, bytearray)):
        return _KeptBag(value)
    if isinstance(value, type):
        return None if _is_foreign(value) else _KeptNames(value, lambda: [key for key in vars(value) if not key.startswith("__")])
    if isinstance(value, types.CellType):
        return _KeptNames(value, lambda: ["cell_contents"])
    return _KeptNames(value, partial(_slots, type(value))) if _slots(type(value)) else None


def _parts(where: str, value: Any) -> list[tuple[str, Any]]:
    """(where, what) is reached from a value in one step."""
    if isinstance(value, dict):
        if where.endswith("."):  # a module's parameters, buffers and modules are named as it names them
            return [(where if key in _REGISTERED else f"{where}{key}", item) for key, item in value.items()]
        return [(f"{where}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(f"{where}[{place}]", item) for place, item in enumerate(value)]
    if isinstance(value, np.ndarray):
        return [(where, item) for item in value.flat] if value.dtype == object else []
    if isinstance(value, type):
        return [] if _is_foreign(value) else [(f"{where}.{key}", item) for key, item in vars(value).items() if not key.startswith("__")]
    if isinstance(value, types.CellType):
        return [(where, item) for item in _values(value, ["cell_contents"]).values()]
    if isinstance(value, types.MethodType):
        return [(where, value.__self__), (where, value.__func__)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        defaults = (value.__defaults__, value.__kwdefaults__)
        found = [*((f"{where}'s {name}", cell) for name, cell in cells), *((f"{where}'s defaults", item) for item in defaults)]
        return [] if _is_foreign(value) else [*found, (f"{where}.", value.__dict__)]
    if isinstance(value, functools.partial):
        return [(where, value.func), (where, value.args), (where, value.keywords)]
    if _is_foreign(type(value)) and not isinstance(value, (nn.Module, Tensor, types.SimpleNamespace)):
        return []
    slots = [(f"{where}.{key}", item) for key, item in _values(value, _slots(type(value))).items()]
    classes = [(f"{where}'s class", base) for base in type(value).__mro__]
    return [*slots, *classes, (f"{where}.", getattr(value, "__dict__", None))]


_REGISTERED = ("_parameters", "_buffers", "_modules")


def _is_foreign(what: Any) -> bool:
    """Whether a class or a function is of a library whose own state is none of a model's."""
    return (getattr(what, "__module__", None) or "builtins").partition(".")[0] in _FOREIGN


def _slots(kind: type) -> list[str]:
    """The names of the attributes that instances keep outside of a `__dict__`."""
    names: list[str] = []
    for base in () if _is_foreign(kind) else kind.__mro__:
        own = base.__dict__.get("__slots__", ())
        names += [own] if isinstance(own, str) else own
    return [name for name in names if not name.startswith("__")]


def _values(value: Any, names: list[str]) -> dict[str, Any]:
    """The attributes of these names that there are."""
    found = {}
    for name in names:
        with suppress(AttributeError, ValueError):  # an empty slot, an empty cell
            found[name] = value.__dict__[name] if isinstance(value, type) else getattr(value, name)
    return found


# What is kept ---------------------------------------------------------------------------------------------------------------------


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
    """A set or a bytearray."""

    def __init__(self, target: Any) -> None:
        self._target, self._was = target, target.copy()

    def changed(self) -> bool:
        return bool(self._target != self._was)

    def restore(self) -> None:
        self._target.clear()
        (self._target.extend if isinstance(self._target, bytearray) else self._target.update)(self._was)


class _KeptNames:
    """Attributes that are in no dict: of a class, in slots, in a closure's cell."""

    def __init__(self, target: Any, names: Callable[[], list[str]]) -> None:
        self._target, self._names = target, names
        self._was = _values(target, names())

    def changed(self) -> bool:
        now = _values(self._target, self._names())
        return len(now) != len(self._was) or not all(name in now and now[name] is value for name, value in self._was.items())

    def restore(self) -> None:
        change = type if isinstance(self._target, type) else object
        for name in _values(self._target, self._names()).keys() - self._was.keys():
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
        if target.layout == torch.strided and target.numel() * target.element_size() <= _LARGE and not target.is_quantized:
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
        if self._target.data_ptr() != self._memory.data_ptr() or (self._target.shape, self._target.stride()) != self._shape:
            self._target.data = self._memory
        if self._bits is not None:
            self._bits[...] = self._bits_were
        else:
            self._target.data.copy_(self._was)
        self._place = _place(self._target)


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a tensor on the CPU as integers, shared with it."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    found: np.ndarray[Any, Any] = plain.view(_INTEGERS[plain.element_size()]).numpy()
    return found


def _differ(now: np.ndarray[Any, Any], was: np.ndarray[Any, Any]) -> bool:
    if now.nbytes <= _TINY or now.dtype.hasobject:
        return now.tobytes() != was.tobytes()
    return not np.array_equal(_as_integers(now), _as_integers(was))


def _as_integers(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Its bits, where numbers of that size have an integer type: zero has a sign, and NaN is NaN."""
    kind = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(array.itemsize)
    return array if kind is None else array.view(kind)
