"""A check that a model and its loss keep nothing of the records that they are computed on.

A record's gradient must be a function of the parameters, the record and the step's coins. What Python code
can keep from call to call is a buffer, a parameter, or a value in the attributes of a module or of an object
in them; these are compared, and a change ends the run before anything is paid for or released. What code
keeps elsewhere (globals, classes, closures, hooks, files, C objects) is not looked at:
docs/explanation/dp.md names it as an assumption.
"""

from __future__ import annotations

import copyreg
import functools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from psgrad.engine.execution.placement import is_quantised
from psgrad.engine.execution.stored import Stored
from psgrad.engine.transforms.private_torch import (
    DisableTorchFunction,
    buffer_store,
    parameter_store,
    write_count,
)
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import ModelError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# What PyTorch keeps of a module, without the hooks, which are part of what the module computes.
_PYTORCHS_OWN = {name for name in nn.Module().__dict__ if name.startswith("_")}
_PYTORCHS_OWN -= {"_forward_pre_hooks", "_forward_hooks"}
_ABSENT = object()

_ROW = 1 << 12  # words in a row of a table of bits
_WORD = 8  # bytes that are read as one whole number: four times as fast as single float32 numbers


class Unchanged:
    """The state of a model and a loss, to be compared with their state later: parameters, buffers, and the
    values, tensors and arrays in their attributes, in lists, tuples, dicts, sets, and in the attributes of
    objects there, too.

    Args:
        roots: modules, and other objects.

    Attributes:
        version: how often `renew` found a value that is another one, or another tensor in a place.
    """

    def __init__(self, *roots: object) -> None:
        self._roots = [root.__self__ if isinstance(root, MethodType) else root for root in roots]
        self._state = _State([])
        self._bits: dict[str, BitSums] = {}
        self.version = 0
        self.renew()

    def renew(self) -> None:
        """Takes the present state as the one to compare with."""
        before, bits = self._state.places, self._bits
        with DisableTorchFunction():
            self._state = state = _State(self._roots)
            self.version += _without_counts(before) != _without_counts(state.places)
            # Of frozen parameters, which are most of a large model. Others may share memory with what the
            # optimiser writes into, which their own counts do not show.
            same = {
                where
                for where in bits
                if _is_frozen(state.tensors.get(where)) and before[where] == state.places[where]
            }
            self._bits = {
                where: bits[where] if where in same else BitSums.of(tensor)
                for where, tensor in state.tensors.items()
                if has_bits(tensor)
            }

    def changes(self, by_bits: bool = False) -> list[str]:
        """The names of values that are others, and of tensors that were written into, by PyTorch's counts, or
        by their bits, too, which also shows writes that PyTorch does not count.
        """
        with DisableTorchFunction():
            was, now = self._state.places, _State(self._roots).places
            names = [] if now == was else [*was, *now]
            changed = [name for name in names if was.get(name, _ABSENT) != now.get(name, _ABSENT)]
            if by_bits:
                changed += [
                    name
                    for name, bits in self._bits.items()
                    if not bits.same(BitSums.of(self._state.tensors[name]))
                ]
        return list(dict.fromkeys(changed))

    def require(self, by_bits: bool = False) -> None:
        """Raises ModelError where there are `changes`."""
        changed = self.changes(by_bits)
        if changed:
            raise ModelError(
                f"the model or the loss wrote into {changed[0]} while records were computed; nothing was"
                " paid for or released",
                hint=(
                    "keep nothing from one call to the next (a running statistic, a memory, a cache), or"
                    " compute it from what is public"
                ),
            )

    def checked(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss; after each run of it `require` is called."""

        @functools.wraps(loss)
        def of_sample(*arguments: Any) -> Any:
            result = loss(*arguments)
            self.require()
            return result

        return of_sample

    @contextmanager
    def throughout(self) -> Iterator[None]:
        """A context, around the sum of a batch, at whose end bits are compared. It begins with the
        present state: what the optimiser has changed is no change.
        """
        self.renew()
        yield
        self.require(by_bits=True)


Places = dict[str, Any]


class _Written(NamedTuple):
    """A tensor, and how often it was written into."""

    tensor: int
    count: Any


def _without_counts(places: Places) -> Places:
    return {where: each.tensor if isinstance(each, _Written) else each for where, each in places.items()}


class _State:
    """What can be compared of some objects and of all that is in their attributes.

    Attributes:
        places: name -> value, or number of the object.
        tensors: name -> tensor.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.places: Places = {}
        self.tensors: dict[str, Tensor] = {}
        self._objects: dict[int, object] = {}  # kept, so that their numbers stay their own
        for root in roots:
            self._note("" if isinstance(root, nn.Module) else type(root).__name__, root)

    def _note(self, where: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            nan_equals_nan = isinstance(value, float | complex)
            self.places[where] = repr(value) if nan_equals_nan else value
        elif isinstance(value, Tensor):
            self.places[where] = _Written(id(value), _count(value))
            self.tensors[where] = value
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            self.places[where] = (value.dtype, value.shape, value.tobytes())
        elif isinstance(value, bytearray | memoryview | array):
            self.places[where] = (type(value), bytes(value))
        elif id(value) in self._objects:
            self.places[where] = id(value)
        else:
            self._objects[id(value)] = value
            self._note_parts(where, value)

    def _note_parts(self, where: str, value: Any) -> None:
        if isinstance(value, dict):
            self.places[where] = (type(value), [key if isinstance(key, _PLAIN) else id(key) for key in value])
            for key, item in value.items():
                self._note(f"{where}[{key!r}]", item)
        elif isinstance(value, set | frozenset):
            self.places[where] = {item if isinstance(item, _PLAIN) else id(item) for item in value}
        elif isinstance(value, list | tuple | deque | np.ndarray):
            self.places[where] = (type(value), len(value))
            for place, item in enumerate(value):
                self._note(f"{where}[{place}]", item)
        else:
            self.places[where] = id(value)  # another object in its place
        for key, item in attributes_of(value).items():
            self._note(f"{where}.{key}" if where else key, item)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object by their names; what PyTorch keeps of a module is left out but for its
    parameters, buffers and modules.
    """
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"__self__": value.__self__}
    if isinstance(value, type | ModuleType | FunctionType):
        return {}
    own = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        own = {
            **{key: item for key, item in own.items() if key not in _PYTORCHS_OWN},
            **parameter_store(value),
            **buffer_store(value),
            **dict(value.named_children()),
        }
    slots = {name: getattr(value, name, None) for name in copyreg._slotnames(type(value))}  # type: ignore[attr-defined]
    return {**own, **slots}


def _count(tensor: Tensor) -> Any:
    """PyTorch's count of writes into a tensor, where its memory is, and whether it requires a gradient."""
    writes = None if tensor.is_inference() else write_count(tensor)
    if not has_bits(tensor):
        return writes
    return writes, tensor.data_ptr(), tensor.shape, tensor.requires_grad


def _is_frozen(tensor: Tensor | None) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def has_bits(tensor: Tensor) -> bool:
    """Whether a tensor is a dense one with memory that can be written into: not one in a file, and not a
    quantised one.
    """
    if isinstance(tensor.data, Stored) or is_quantised(tensor) or isinstance(tensor, Tracer):
        return False
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


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
