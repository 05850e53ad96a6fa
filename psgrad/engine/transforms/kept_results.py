"""Results of a recomputed function's first run that its second run takes instead of computing them again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.operators import Op, aten, is_random
from psgrad.engine.transforms.private_torch import (
    DisableTorchFunction,
    FakeTensor,
    storage_key,
    without_modes,
    write_count,
)
from psgrad.engine.transforms.tracer import innermost

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
# A result of fewer is as soon computed as it is compared.
FEWEST = 32


class Room:
    """Memory for kept results. Where it is full, those stay whose computation takes most for a byte.

    size: bytes; 0 keeps nothing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return self.size > 0

    def take(self, kept: _Kept) -> None:
        """Hold the value of `kept`, or delete it, or those of others."""
        held = sorted((each for each in self._held if each.value is not None), key=lambda each: each.worth)
        used = sum(each.bytes for each in held)
        fewer = [each for each in held if each.worth < kept.worth]
        if used - sum(each.bytes for each in fewer) + kept.bytes > self.size:
            kept.value = None
            return
        for each in fewer:
            if used + kept.bytes <= self.size:
                break
            used -= each.bytes
            each.value = None
        self._held.add(kept)


class KeptResults:
    """The results of one call's first run. A result is taken by the second run where the same operator has
    the same arguments, so a function that computes something else is computed.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self.follows = False  # whether the second run has begun
        self._constant: set[int] = set()  # memories
        self._kept: dict[Any, list[_Kept]] = {}

    def note_constant(self, value: Any) -> None:
        """A value that the function reads, and that is the same in both runs."""
        if isinstance(plain := innermost(value), torch.Tensor):
            self._constant.add(_memory(plain))

    def result(self, op: Op, args: tuple[Any, ...], kwargs: Any, compute: Callable[..., Any]) -> Any:
        """What `op` returns for these arguments, values below the level of the call."""
        multiplications = None if kwargs or is_random(op, args, kwargs) else _MULTIPLICATIONS.get(op)
        if multiplications is None or (worth := multiplications(*args)) < FEWEST:
            return compute(op, args, kwargs)
        asked = _asked(op, args, self._constant)
        if asked is None:
            return compute(op, args, kwargs)
        if self.follows:
            found = self._found(*asked)
            return compute(op, args, kwargs) if found is None else found
        result = compute(op, args, kwargs)
        plain = innermost(result)
        if isinstance(plain, torch.Tensor) and plain.numel():
            kept = _Kept(result, asked[1], worth / plain.itemsize)
            self._kept.setdefault(asked[0], []).append(kept)
            self.room.take(kept)
        return result

    def _found(self, call: Any, prints: list[torch.Tensor]) -> Any:
        for place, kept in enumerate(found := self._kept.get(call, [])):
            if all(map(torch.equal, kept.prints, prints)):
                del found[place]
                return kept.taken()
        return None


class _Kept:
    """A result; None where it is not held.

    prints: of the arguments. worth: multiplications for a byte.
    """

    def __init__(self, value: Any, prints: list[torch.Tensor], worth: float) -> None:
        plain = innermost(value)
        self.value, self.prints, self.worth = value, prints, worth
        self.bytes = plain.numel() * plain.itemsize
        self.writes = _writes(plain)

    def taken(self) -> Any:
        """The value, unless something was written into it."""
        value, self.value = self.value, None
        return value if value is not None and _writes(innermost(value)) == self.writes else None


def _asked(op: Op, args: tuple[Any, ...], constant: set[int]) -> tuple[Any, list[torch.Tensor]] | None:
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
        return wide @ _random(plain.shape[-1], wide.dtype, wide.device)


@functools.lru_cache(maxsize=64)
def _random(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator, dtype=dtype, device="cpu").to(device)
