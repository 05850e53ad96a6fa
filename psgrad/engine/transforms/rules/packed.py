"""Packed sequences, and unpacked ones, whose lengths the samples do not agree on.

How much memory a packed sequence takes is data. Where samples disagree on it, the function would have to run
once for each length. What most functions do with a packed sequence does not depend on its memory: they give
it to recurrent layers, and use the states at the ends. So the two tensors of such a sequence are stand-ins.
Recurrent layers take them for all samples at once, and unpacking gives a stand-in too.

`pad_packed_sequence` gives each sample a tensor of its own length. Layers that work on each time alone, and
sums, means and largest values over the times, do not need that: they run for all samples at once, with the
times behind a sample's end masked.

Any other use of a stand-in, also to read its shape, needs the lengths. The function then runs for the samples
of each length.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_packed_sequence

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.private_torch import DisableTorchFunction, make_wrapper, tree_map
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.recurrent import LAYERS, layers
from psgrad.engine.transforms.rules.registry import replace
from psgrad.engine.transforms.state import Divergence
from psgrad.engine.transforms.tracer import innermost
from psgrad.errors import TransformError


def unpacked(rows: Tensor, lengths: Tensor, batch_first: bool) -> Unpacked:
    """The stand-in for one sequence a sample.

    rows: [t, width], as many as the longest sample may have; what is behind a sample's end is not read.
    lengths: [1], on the CPU. The stand-in is [1, t, width], or [t, 1, width] unless `batch_first`.
    """
    whole = rows.unsqueeze(0 if batch_first else 1)
    made: Unpacked = make_wrapper(Unpacked, whole.shape, dtype=rows.dtype, device=rows.device)
    made.rows, made.lengths, made.batch_first = rows, lengths, batch_first
    return made


class StandIn(torch.Tensor):
    """A tensor whose shape the samples do not agree on. Subclasses define the two methods."""

    def plain_value(self) -> Tensor:
        """The tensor for samples that agree on the length; Divergence if they do not."""
        raise NotImplementedError

    @classmethod
    def for_all(cls, function: Any, args: Any, kwargs: Any) -> Any:
        """The result for samples of all lengths; None where it has to be found for each length. The first
        argument is of this class.
        """
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _SAME_FOR_ALL:
            with DisableTorchFunction():
                return function(*args, **kwargs)
        found = cls.for_all(function, args, kwargs) if isinstance(args[0], cls) else None
        if found is not None:
            return found
        return function(*tree_map(_plain_value, tuple(args)), **tree_map(_plain_value, kwargs))

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return op(*tree_map(_plain_value, args), **tree_map(_plain_value, kwargs or {}))


def _plain_value(x: Any) -> Any:
    return x.plain_value() if isinstance(x, StandIn) else x


class Unpacked(StandIn):
    """A tensor whose number of times the samples do not agree on."""

    rows: Tensor
    lengths: Tensor
    batch_first: bool

    def plain_value(self) -> Tensor:
        return self.rows[: self.lengths.tolist()[0]].unsqueeze(0 if self.batch_first else 1)

    @classmethod
    def for_all(cls, function: Any, args: Any, kwargs: Any) -> Any:
        return _for_all(function, args, kwargs)


_SAME_FOR_ALL = (
    torch.Tensor.dim,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,  # type: ignore[attr-defined]
)
_EACH_TIME = (F.linear, F.relu, torch.relu, torch.Tensor.relu, torch.tanh, torch.Tensor.tanh)
_MEANS = (torch.mean, torch.Tensor.mean)
_SUMS = (torch.sum, torch.Tensor.sum)
_LARGEST = (torch.amax, torch.Tensor.amax, torch.max, torch.Tensor.max)


def _for_all(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, rest = args[0], args[1:]
    sequence = 0 if x.batch_first else 1
    if function is torch.Tensor.index_select and rest[:1] == (sequence,) and _has_one_entry(rest, kwargs):
        return x  # each sample has one sequence, so its order is the only one
    if function is torch.Tensor.size and rest in ((-1,), (2,)):
        return x.rows.shape[1]
    if function in _EACH_TIME and not any(isinstance(y, Unpacked) for y in (*rest, *kwargs.values())):
        return unpacked(function(x.rows, *rest, **kwargs), x.lengths, x.batch_first)
    places = rest if not kwargs else (kwargs["dim"],) if not rest and kwargs.keys() == {"dim"} else ()
    if len(places) != 1 or type(places[0]) is not int or places[0] not in (1 - sequence, -2 - sequence):
        return None
    if function in _LARGEST:
        return function(_masked(x, float("-inf")), 1 - sequence)
    if function in _SUMS:
        return _masked(x, 0.0).sum(1 - sequence)
    if function in _MEANS and x.dtype in (torch.float32, torch.float64):
        return _masked(x, 0.0).sum(1 - sequence) / x.lengths.to(x.device, x.dtype)
    return None


def _has_one_entry(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(rest) == 2 and not kwargs and isinstance(rest[1], Tensor) and tuple(rest[1].shape) == (1,)


def _masked(x: Unpacked, behind: float) -> Tensor:
    """The whole tensor, with this value behind the sample's end."""
    runs = torch.arange(x.rows.shape[0], device=x.device) < x.lengths.to(x.device)
    whole = torch.where(runs.unsqueeze(1), x.rows, torch.full((), behind, dtype=x.dtype, device=x.device))
    return whole.unsqueeze(0 if x.batch_first else 1)


@dataclass(frozen=True)
class Ragged:
    """One sequence a sample, each of its own length.

    Attributes:
        rows: [t, width], as many as the longest of them may have.
        lengths: [1], on the CPU.
    """

    rows: Tensor
    lengths: Tensor

    def stand_ins(self) -> tuple[Tensor, Tensor]:
        """The data, and the sizes of the batch at each time."""
        data = make_wrapper(Packed, self.rows.shape, dtype=self.rows.dtype, device=self.rows.device)
        sizes = make_wrapper(Packed, self.rows.shape[:1], dtype=torch.int64, device=self.lengths.device)
        data.ragged = sizes.ragged = self
        return data, sizes

    def packed(self) -> tuple[Tensor, Tensor]:
        """The data and sizes for samples that agree on the length; Divergence if they do not."""
        return _packed(self.rows.unsqueeze(1), self.lengths.tolist())


class Packed(StandIn):
    """One of the two tensors of a packed sequence."""

    ragged: Ragged

    def plain_value(self) -> Tensor:
        return self.ragged.packed()[2 - self.dim()]

    @classmethod
    def for_all(cls, function: Any, args: Any, kwargs: Any) -> Any:
        first = args[0]
        if function is torch.Tensor.size and args[1:] == (-1,) and first.dim() == 2:
            return first.ragged.rows.shape[1]
        if function is torch.Tensor.__getitem__ and type(args[1]) is int and first.dim() == 1 and not args[1]:
            return torch.ones((), dtype=torch.int64)  # each sample has one sequence
        if function is torch.Tensor.size and args[1:] == (0,) and _unpacks_to_own_length(sys._getframe(2)):
            return -1  # which the operator below takes for no total length
        cell = _LAYERS.get(function)
        if cell is not None and isinstance(args[1], cls) and not kwargs:
            return _recurrent(cell, first.ragged, *args[2:])
        if function.__name__ == "_pad_packed_sequence" and args[4] <= 0 and not kwargs:
            ragged = first.ragged
            return unpacked(ragged.rows, ragged.lengths, args[2]), ragged.lengths
        return None


_LAYERS = {getattr(torch, name): cell for name, cell in LAYERS.items()}


def _unpacks_to_own_length(caller: FrameType) -> bool:
    """Whether the caller is PyTorch's pad_packed_sequence without a total length. It reads the number of
    times to give it to the operator alone; any other caller may compute with it.
    """
    return caller.f_code is pad_packed_sequence.__code__ and caller.f_locals["total_length"] is None


def _recurrent(
    cell: str,
    ragged: Ragged,
    start: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    count: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...] | None:
    """What the operator of the layers returns; None where it has to run for each length: a mask that is drawn
    for as many rows as the longest sample has would be another for each batch.
    """
    projected = len(weights) % (4 if has_biases else 2) != 0
    if projected or (dropout and train and count > 1):
        return None
    sizes = [1] * ragged.rows.shape[0]
    starts = tuple(start) if isinstance(start, (tuple, list)) else (start,)
    out, ends = layers(
        cell, ragged.rows, sizes, starts, weights, count, 0.0, bidirectional, lengths=ragged.lengths
    )
    return Ragged(out, ragged.lengths).stand_ins()[0], *ends


@replace(aten._pack_padded_sequence.default, unwrapped=True)
def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    x = x.transpose(0, 1) if batch_first else x
    try:
        running = lengths.tolist()
    except Divergence as divergence:
        if x.shape[1] != 1 or x.dim() != 3:
            raise
        divergence.level.diverged = None
        _refuse_lengths(divergence.outcomes, x.shape[0])
        return Ragged(x.squeeze(1), lengths).stand_ins()
    if not innermost(lengths).numel():  # an empty batch has no lengths
        running = [x.shape[0]] * len(running)
    _refuse_lengths(running, x.shape[0])
    return _packed(x, running)


def _refuse_lengths(lengths: Iterable[int], times: int) -> None:
    for length in lengths:
        if not 0 < length <= times:
            raise TransformError(
                f"a packed sequence with a length of {length} for {times} times{diagnostics.where()};"
                " expected lengths from 1 to the number of times",
            )


def _packed(x: Tensor, running: list[int]) -> tuple[Tensor, Tensor]:
    """The sequences of [times, b, ...], longest first, time after time without what lies behind their
    ends.
    """
    sizes = [sum(length > time for length in running) for time in range(running[0])]
    if running[0] == running[-1]:
        return x[: running[0]].flatten(0, 1), torch.tensor(sizes)
    return torch.cat([x[time, :size] for time, size in enumerate(sizes)]), torch.tensor(sizes)


@replace(aten._pad_packed_sequence.default)
def _unpack(
    data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    running: list[int] = sizes.tolist()
    b, rest = running[0], data.shape[1:]
    if b == running[-1]:
        times = [data.unflatten(0, (len(running), b))]
    else:
        times = [
            torch.cat([piece, piece.new_full((b - size, *rest), padding)]) if size < b else piece
            for piece, size in zip(data.split(running), running, strict=True)
        ]
        times = [torch.stack(times)]
    if total > len(running):
        times.append(data.new_full((total - len(running), b, *rest), padding))
    out = torch.cat(times)
    lengths = torch.tensor([sum(size > place for size in running) for place in range(b)])
    return out.transpose(0, 1) if batch_first else out, lengths
