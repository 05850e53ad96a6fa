"""Values that can change, each with its former value: what of a model's state is compared and restored; and
whether tensors are the same, bit for bit, by sums of their bits: of any size, on any device, however they
were written into.
"""

from __future__ import annotations

import copy
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from psgrad.engine.privacy.reached import Cached, Globals, attributes, is_foreign, is_own, slots_of
from psgrad.engine.transforms.private_torch import write_count

# Tensors with more bytes are compared by PyTorch's count of writes, not by value, and can't be put back.
_LARGE = 1 << 26
# Up to this number of bytes a copy is compared faster than an array.
_TINY = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kept(Protocol):
    """Something that can change, with its former value."""

    def changed(self) -> bool: ...

    def restore(self) -> None: ...


def place_of(tensor: Tensor) -> tuple[int, int, bool]:
    """Numbers that change with each write that PyTorch counts, with the memory (of a dense tensor), and with
    whether a gradient is required.
    """
    count = 0 if tensor.is_inference() else write_count(tensor)
    return count, tensor.data_ptr() if tensor.layout == torch.strided else 0, tensor.requires_grad


def kept_of(value: Any) -> Kept | None:
    """The part of a value itself that is compared and restored, without its parts; None for one that can't
    change.
    """
    if isinstance(value, Tensor):
        return KeptTensor(value)
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
            else KeptNames(value, lambda: [key for key in vars(value) if not key.startswith("__")])
        )
    if isinstance(value, Globals):
        return _KeptGlobals(value)
    if isinstance(value, ContextVar):
        return _KeptVariable(value)
    if isinstance(value, types.CellType):
        return KeptNames(value, lambda: ["cell_contents"])
    if isinstance(value, types.FunctionType):
        names = ["__code__", "__defaults__", "__kwdefaults__"]
        return KeptNames(value, lambda: names) if is_own(value) else None
    if is_own(type(value)):
        return KeptNames(value, lambda: ["__class__", *slots_of(type(value))])
    return KeptNames(value, partial(slots_of, type(value))) if slots_of(type(value)) else None


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


class KeptNames:
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


class _KeptVariable:
    """A variable of `contextvars`."""

    def __init__(self, target: ContextVar[Any]) -> None:
        self._target = target
        self._was = self._now()

    def _now(self) -> Any:
        try:
            return self._target.get()
        except LookupError:
            return _NOTHING

    def changed(self) -> bool:
        return self._now() is not self._was

    def restore(self) -> None:
        if self._was is _NOTHING:
            raise ValueError("it had no value")
        self._target.set(self._was)


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


class KeptTensor:
    """A tensor that is not a parameter: compared by its bits on a CPU, else by PyTorch's count of writes.

    Attributes:
        target: the tensor.
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self._memory = target.detach()
        self._place, self._shape = place_of(target), _shape(target)
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

    @property
    def by_count(self) -> bool:
        """Whether only writes that PyTorch counts show at once."""
        return self._bits is None

    def changed(self) -> bool:
        target = self.target
        if place_of(target) != self._place or _shape(target) != self._shape:
            return True
        return self._bits is not None and _differ(self._bits, self._bits_were)

    def restore(self) -> None:
        if self._was is None:
            raise ValueError("it has more than 64 MiB, or is no dense tensor")
        if self.target.data_ptr() != self._memory.data_ptr() or _shape(self.target) != self._shape:
            self.target.data = self._memory
        self.target.requires_grad_(self._place[2])
        if self._bits is not None:
            self._bits[...] = self._bits_were
        else:
            self.target.data.copy_(self._was)
        self._place = place_of(self.target)


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride() if tensor.layout == torch.strided else ()


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


_ROW = 1 << 12  # words in a row
_WORD = 8  # bytes that are read as one whole number: four times as fast as single float32 numbers


@dataclass(frozen=True, eq=False)
class BitSums:
    """The sums of a tensor's bits, as words of 8 bytes, along the rows and down the columns of a table.

    A write of other numbers, or of the same in another order, changes some of these sums, except by chance.

    Attributes:
        kind: type and shape of the tensor.
        rows, columns, rest: int64, int64, and the bytes behind the last whole row.
    """

    kind: tuple[torch.dtype, torch.Size]
    rows: Tensor
    columns: Tensor
    rest: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> BitSums:
        """The sums of a dense tensor of any type and device."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
        size = plain.element_size()
        whole = len(plain) - len(plain) % (_ROW * _WORD // size)
        words = plain[:whole]
        if words.storage_offset() * size % _WORD:
            words = words.clone()
        table = words.view(torch.int64).view(-1, _ROW)
        return cls(
            (tensor.dtype, tensor.shape), table.sum(1), table.sum(0), plain[whole:].view(torch.uint8).clone()
        )

    def same(self, other: BitSums) -> bool:
        """Whether the other ones are of the same bits."""
        return self.kind == other.kind and all(
            torch.equal(mine, theirs)
            for mine, theirs in (
                (self.rows, other.rows),
                (self.columns, other.columns),
                (self.rest, other.rest),
            )
        )


def has_bits(tensor: Tensor) -> bool:
    """Whether a tensor is a dense one with memory."""
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
