"""Results of a recomputed function's first run that its second run does not compute again: it takes those
that were kept, and leaves out those whose numbers no derivative reads.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.batch_values import BatchTracer
from psgrad.engine.transforms.operators import Op, aten, facts, is_random
from psgrad.engine.transforms.private_torch import (
    DisableTorchFunction,
    FakeTensor,
    storage_key,
    without_modes,
    write_count,
)
from psgrad.engine.transforms.scratch_file import ScratchFile, ScratchFolder
from psgrad.engine.transforms.tracer import Tracer, innermost, tensors_in

# By operator, the multiplications for one number of its result.
_MULTIPLICATIONS: dict[Op, Callable[..., int]] = {
    aten.mm.default: lambda a, b: a.shape[-1],
    aten.bmm.default: lambda a, b: a.shape[-1],
    aten.matmul.default: lambda a, b: a.shape[-1],
    aten.linear.default: lambda x, weight, bias=None: x.shape[-1],
    aten.convolution.default: lambda x, weight, *rest: weight.shape[1:].numel(),
    aten.conv1d.default: lambda x, weight, *rest: weight.shape[1:].numel(),
    aten.conv2d.default: lambda x, weight, *rest: weight.shape[1:].numel(),
    aten.conv3d.default: lambda x, weight, *rest: weight.shape[1:].numel(),
}
# Programs of these, which are run as such both times.
COMPOSED: frozenset[Op] = frozenset({aten.addmm.default, aten.baddbmm.default, aten.addbmm.default})
# Besides views, operators whose derivatives need no number of their arguments.
_PASS_ON: frozenset[Op] = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.neg.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.reshape.default,
        aten._unsafe_view.default,
    }
)
# A result of fewer is as soon computed as it is compared.
FEWEST = 32


class Room:
    """Memory for kept results. Where it is full, those stay whose computation takes most for a byte.

    size: bytes; 0 keeps nothing. scratch: on a disk, for those that do not stay; None computes them again.
    """

    def __init__(self, size: int, scratch: ScratchFolder | None = None) -> None:
        self.size, self.scratch = size, scratch
        self._held: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return self.size > 0

    def take(self, kept: _Kept) -> None:
        """Hold the value of `kept`, or let it go, or those of others."""
        held = sorted((each for each in self._held if each.value is not None), key=lambda each: each.worth)
        used = sum(each.bytes for each in held)
        fewer = [each for each in held if each.worth < kept.worth]
        if used - sum(each.bytes for each in fewer) + kept.bytes > self.size:
            kept.let_go()
            return
        for each in fewer:
            if used + kept.bytes <= self.size:
                break
            used -= each.bytes
            self._held.discard(each)
            each.let_go()
        self._held.add(kept)


class StandInRead(BaseException):
    """The second run reads the numbers of a result that no operator of the first run had read."""


class KeptResults:
    """The results of one call's first run. A result is taken by the second run where the same operator has
    the same arguments, so a function that computes something else is computed.

    A result that is only added to others, or seen through views, until the function ends has numbers that no
    derivative reads. The second run gets a stand-in without memory for it. All numbers of a stand-in are NaN.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self.file = None if room.scratch is None else ScratchFile(room.scratch)
        self.follows = False  # whether the second run has begun
        self.stand_in_was_read = False
        self._constant: set[int] = set()  # memories
        self._kept: dict[Any, list[_Kept]] = {}
        self._stand_ins: list[_Kept] = []  # that the second run has got
        # By id, the values whose numbers are those of results that no operator has read so far.
        self._unread: dict[int, tuple[weakref.ref[Any], list[_Kept]]] = {}

    def note_constant(self, value: Any) -> None:
        """A value that the function reads, and that is the same in both runs."""
        if isinstance(plain := innermost(value), torch.Tensor):
            self._constant.add(_memory(plain))

    def result(self, op: Op, args: tuple[Any, ...], kwargs: Any, compute: Callable[..., Any]) -> Any:
        """What `op` returns for these arguments, values below the level of the call."""
        unread = self._among(tensors_in(args, kwargs)) if self._unread else []
        passes_on = op in _PASS_ON or facts(op).is_view
        if unread and not (passes_on and self._passes_as_before(unread[0], op, args, kwargs)):
            self._read(unread)
            unread = []
        result = self._result(op, args, kwargs, compute)
        if unread:
            for value in result if isinstance(result, (tuple, list)) else [result]:
                self._unread[id(value)] = weakref.ref(value), unread
        return result

    def _result(self, op: Op, args: tuple[Any, ...], kwargs: Any, compute: Callable[..., Any]) -> Any:
        multiplications = None if kwargs or is_random(op, args, kwargs) else _MULTIPLICATIONS.get(op)
        if multiplications is None or (worth := multiplications(*args)) < FEWEST:
            return compute(op, args, kwargs)
        asked = _asked(op, args, self._constant)
        if asked is None:
            return compute(op, args, kwargs)
        if self.follows:
            kept = self._found(*asked)
            found = None if kept is None else kept.taken()
            if kept is not None and found is not None and kept.stands_in:
                self._stand_ins.append(kept)
                self._unread[id(found)] = weakref.ref(found), [kept]
            return compute(op, args, kwargs) if found is None else found
        result = compute(op, args, kwargs)
        plain = innermost(result)
        if isinstance(plain, torch.Tensor) and plain.numel():
            kept = _Kept(result, asked[1], worth / plain.itemsize, self.file)
            self._kept.setdefault(asked[0], []).append(kept)
            self._unread[id(result)] = weakref.ref(result), [kept]
        return result

    def _passes_as_before(self, kept: _Kept, op: Op, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether the same operator passed the value on in the first run, with the same other arguments; in
        the first run, whether that can be compared.
        """
        others = [None if self._among([x]) else x for x in args]
        asked = _asked(op, [*others, *sorted(kwargs.items())], self._constant)
        if asked is None:
            return False
        if not self.follows:
            kept.met.append(asked)
            return True
        call, prints = kept.met.pop(0) if kept.met else (None, [])
        return call == asked[0] and all(map(torch.equal, prints, asked[1]))

    def end_second_run(self) -> None:
        """Raises StandInRead where a stand-in was read, or not passed on as the result in its place was."""
        if self.stand_in_was_read or any(kept.met for kept in self._stand_ins):
            raise StandInRead

    def read(self, values: Iterable[Any]) -> None:
        """The numbers of values are read by something that is no operator of the level."""
        if self._unread and (unread := self._among(values)):
            self._read(unread)

    def end_first_run(self) -> None:
        """Stand-ins take the places of the results that nothing has read."""
        for kept in {id(kept): kept for _, unread in self._unread.values() for kept in unread}.values():
            if not kept.is_read:
                kept.become_stand_in()
        self._unread.clear()
        if self.file is not None:
            self.file.end_writing()

    def forget(self) -> None:
        """The next run computes everything."""
        self._kept.clear()
        self._stand_ins.clear()
        self.stand_in_was_read = False

    def is_left_out(self, value: Any) -> bool:
        """Whether a value of the second run has the numbers of stand-ins."""
        return self.follows and bool(self._among([value]))

    def _among(self, values: Iterable[Any]) -> list[_Kept]:
        return [
            kept
            for value in values
            if (found := self._unread.get(id(value))) is not None and found[0]() is value
            for kept in found[1]
            if not kept.is_read
        ]

    def _read(self, unread: list[_Kept]) -> None:
        if self.follows:
            self.stand_in_was_read = True
            raise StandInRead
        for kept in unread:
            if not kept.is_read:
                kept.is_read = True
                self.room.take(kept)

    def _found(self, call: Any, prints: list[torch.Tensor]) -> _Kept | None:
        for place, kept in enumerate(found := self._kept.get(call, [])):
            if all(map(torch.equal, kept.prints, prints)):
                return found.pop(place)
        return None


class _Kept:
    """A result; None where it is not held.

    prints: of the arguments. worth: multiplications for a byte. place: of its numbers in the file, where the
    value is without.
    is_read: whether an operator has read the numbers. stands_in: whether the value is without numbers.
    met: the operators that passed it on with their other arguments, as of `_asked`, in their order.
    """

    def __init__(
        self, value: Any, prints: list[torch.Tensor], worth: float, file: ScratchFile | None
    ) -> None:
        plain = innermost(value)
        self.value, self.prints, self.worth, self.file = value, prints, worth, file
        self.place: int | None = None
        self.bytes = plain.numel() * plain.itemsize
        self.writes = _writes(plain)
        self.is_read = self.stands_in = False
        self.met: list[tuple[Any, list[torch.Tensor]]] = []

    def become_stand_in(self) -> None:
        self.value, self.stands_in = _stand_in(self.value), True
        self.writes = 0 if self.value is None else _writes(innermost(self.value))

    def let_go(self) -> None:
        """The memory is needed. The numbers go into the file, if there is one."""
        value, self.value = self.value, None
        plain = innermost(value)
        if self.file is None or not plain.is_contiguous() or _writes(plain) != self.writes:
            return
        without_numbers = _stand_in(value)
        if without_numbers is not None and type(plain) is torch.Tensor:
            self.place = self.file.write(plain)
            self.value = None if self.place is None else without_numbers

    def taken(self) -> Any:
        """The value, unless something was written into it."""
        value, self.value = self.value, None
        if value is None:
            return None
        if self.place is not None and self.file is not None:
            numbers = self.file.read(self.place, innermost(value).device)
            return None if numbers is None else _with_numbers(value, numbers)
        return value if _writes(innermost(value)) == self.writes else None


def _asked(op: Op, args: Sequence[Any], constant: set[int]) -> tuple[Any, list[torch.Tensor]] | None:
    """(all about a call but its numbers, prints of the arguments that may have others the next time); None
    for a call that can't be compared. constant: the memories that stay as they are.
    """
    call: list[Any] = [op]
    prints = []
    for argument in args:
        if not isinstance(argument, torch.Tensor):
            call.append(tuple(argument) if isinstance(argument, list) else argument)
            continue
        plain = innermost(argument)
        if not isinstance(plain, torch.Tensor) or not plain.is_floating_point():
            return None
        call += [argument.shape, argument.stride(), plain.shape, plain.stride(), plain.dtype, plain.device]
        memory = _memory(plain)
        if memory in constant or isinstance(plain, torch.nn.Parameter):
            call += [memory, plain.storage_offset(), _writes(plain)]
        elif type(plain) is torch.Tensor:
            prints.append(_print(plain))
        elif not isinstance(plain, FakeTensor):
            return None
    return tuple(call), prints


def _stand_in(value: Any) -> Any:
    """A value without numbers of this shape, with the same sample axes; None for other kinds of values."""
    if isinstance(value, BatchTracer):
        physical = _stand_in(value.value)
        return None if physical is None else value.level.lift(physical)
    if type(value) is not torch.Tensor and not isinstance(value, FakeTensor):
        return None
    with without_modes():
        return value.new_full((), math.nan).expand(value.shape)


def _with_numbers(stand_in: Any, plain: torch.Tensor) -> Any:
    """The value whose stand-in this is."""
    if isinstance(stand_in, BatchTracer):
        return stand_in.level.lift(_with_numbers(stand_in.value, plain))
    return plain


def is_left_out(value: Any) -> bool:
    """Whether the numbers of a second run's result are not computed, as no derivative reads them."""
    while isinstance(value, Tracer):
        kept = getattr(value.level, "kept", None)
        value = value.below()
        if kept is not None and kept.is_left_out(value):
            return True
    return False


def _writes(plain: torch.Tensor) -> int:
    return 0 if plain.is_inference() else write_count(plain)


def _memory(plain: torch.Tensor) -> int:
    """A key of a tensor's memory. Kinds of tensors whose numbers lie elsewhere say where by data_ptr, or are
    told apart themselves.
    """
    with DisableTorchFunction():
        if type(plain) in (torch.Tensor, torch.nn.Parameter, FakeTensor):
            return storage_key(plain.untyped_storage())
        try:
            return plain.data_ptr() or id(plain)
        except RuntimeError:  # no storage
            return id(plain)


def _print(plain: torch.Tensor) -> torch.Tensor:
    """[...]: the product of each row with random numbers, which tells tensors apart."""
    with without_modes():
        wide = plain if plain.itemsize > 2 else plain.float()
        if not wide.dim():
            return wide.clone()
        return wide @ _random(plain.shape[-1], wide.dtype, wide.device)


@functools.lru_cache(maxsize=64)
def _random(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator, dtype=dtype, device="cpu").to(device)
