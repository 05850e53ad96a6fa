"""A check that a model and its loss keep nothing of the records that they are computed on.

A record's gradient must be a function of the parameters, the record and the step's coins. What Python code
can keep from call to call is a buffer, a parameter, or a value in a module's attributes; these are compared,
and a change ends the run before anything is paid for or released. What code keeps elsewhere (globals,
closures, files, C objects) is not looked at: docs/explanation/dp.md names it as an assumption.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from psgrad.engine.execution.placement import is_quantised
from psgrad.engine.execution.stored import Stored
from psgrad.engine.transforms.private_torch import DisableTorchFunction
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import ModelError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# What PyTorch keeps of a module, without the hooks, which are part of what the module computes.
_PYTORCHS_OWN = {name for name in nn.Module().__dict__ if name.startswith("_")}
_PYTORCHS_OWN -= {"_forward_pre_hooks", "_forward_hooks"}
_ABSENT = object()

_ROW = 1 << 12  # words in a row of a table of bits
_WORD = 8  # bytes that are read as one whole number: four times as fast as single float32 numbers


class Unchanged:
    """The state of a model and a loss, to be compared with their state later: parameters, buffers, and the
    values, tensors and arrays in the attributes of their modules, in lists, tuples, dicts and sets, too.

    Args:
        roots: modules, and other objects, whose own attributes count as well.

    Attributes:
        version: how often `renew` found a value that is another one, or another tensor in a place.
    """

    def __init__(self, *roots: object) -> None:
        self._owners = _owners(roots)
        self._places: Places = {}
        self._tensors: dict[str, Tensor] = {}
        self._bits: dict[str, BitSums] = {}
        self.version = 0
        self.renew()

    def renew(self) -> None:
        """Takes the present state as the one to compare with."""
        before, bits = self._places, self._bits
        with DisableTorchFunction():
            self._places, self._tensors = _snapshot(self._owners)
            self.version += _without_counts(before) != _without_counts(self._places)
            # Of frozen parameters, which are most of a large model. Others may share memory with what the
            # optimiser writes into, which their own counts do not show.
            same = {
                where
                for where in bits
                if _is_frozen(self._tensors.get(where)) and before[where] == self._places[where]
            }
            self._bits = {
                where: bits[where] if where in same else BitSums.of(tensor)
                for where, tensor in self._tensors.items()
                if has_bits(tensor)
            }

    def changes(self, by_bits: bool = False) -> list[str]:
        """The names of values that are others, and of tensors that were written into, by PyTorch's counts, or
        by their bits, too, which also shows writes that PyTorch does not count.
        """
        with DisableTorchFunction():
            places, _ = _snapshot(self._owners)
            names = [] if places == self._places else [*self._places, *places]
            changed = [name for name in names if self._places.get(name, _ABSENT) != places.get(name, _ABSENT)]
            if by_bits:
                changed += [
                    name
                    for name, bits in self._bits.items()
                    if not bits.same(BitSums.of(self._tensors[name]))
                ]
        return list(dict.fromkeys(changed))

    def require(self, by_bits: bool = False) -> None:
        """Raises ModelError where there are `changes`."""
        changed = self.changes(by_bits)
        if changed:
            raise ModelError(
                f"the model or the loss wrote into {changed[0]} while records were computed; nothing was paid"
                " for or released",
                expected="a gradient of each record that depends on no other record",
                cause=(
                    "a running statistic, a memory of what was seen, a cache that grows, or a first pass that"
                    " sets the model up from the data"
                ),
                next_step="compute it from what is public, or keep nothing from one call to the next",
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


def _owners(roots: tuple[object, ...]) -> list[tuple[str, object]]:
    """(name in messages, object) of everything whose attributes are compared."""
    owners: list[tuple[str, object]] = []
    for root in roots:
        if isinstance(root, functools.partial):
            owners += _owners((root.func, *root.args, *root.keywords.values()))
        elif isinstance(root, nn.Module):
            owners += list(root.named_modules())
        elif hasattr(root, "__self__"):
            owners += _owners((root.__self__,))
        elif hasattr(root, "__dict__") and not isinstance(root, type):
            owners.append((type(root).__name__, root))
    return owners


Places = dict[str, Any]


class _Written(NamedTuple):
    """A tensor, and how often it was written into."""

    tensor: int
    count: Any


def _without_counts(places: Places) -> Places:
    return {where: each.tensor if isinstance(each, _Written) else each for where, each in places.items()}


def _snapshot(owners: list[tuple[str, object]]) -> tuple[Places, dict[str, Tensor]]:
    """(name -> what can be compared, name -> tensor) of the attributes of all owners."""
    places: Places = {}
    tensors: dict[str, Tensor] = {}

    def note(where: str, value: Any) -> None:
        if isinstance(value, Tensor):
            places[where] = _Written(id(value), _count(value))
            tensors[where] = value
        elif isinstance(value, _PLAIN):
            places[where] = repr(value) if isinstance(value, float | complex) else value  # NaN equals NaN
        elif isinstance(value, np.ndarray):
            places[where] = (value.dtype, value.shape, value.tobytes())
        elif isinstance(value, dict):
            places[where] = (
                dict,
                len(value),
                [id(key) if not isinstance(key, _PLAIN) else key for key in value],
            )
            for key, item in value.items():
                note(f"{where}[{key!r}]", item)
        elif isinstance(value, set | frozenset):
            places[where] = {item if isinstance(item, _PLAIN) else id(item) for item in value}
        elif isinstance(value, _CONTAINERS):
            places[where] = (type(value), len(value))
            for place, item in enumerate(value):
                note(f"{where}[{place}]", item)
        else:
            places[where] = id(value)  # another object in its place

    for name, owner in owners:
        attributes = vars(owner)
        if isinstance(owner, nn.Module):
            attributes = {
                **{key: value for key, value in attributes.items() if key not in _PYTORCHS_OWN},
                **owner._parameters,
                **owner._buffers,
            }
        for key, value in attributes.items():
            note(f"{name}.{key}" if name else key, value)
    return places, tensors


def _count(tensor: Tensor) -> Any:
    """PyTorch's count of writes into a tensor, and where its memory is."""
    return (tensor._version, tensor.data_ptr(), tensor.shape) if has_bits(tensor) else None


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
