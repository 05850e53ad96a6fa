"""Unpacked sequences whose lengths the samples do not agree on.

`pad_packed_sequence` gives each sample a tensor of its own length, so that a function which uses it would
have to run once for each length. Layers that work on each time alone, and sums, means and largest values over
the times, do not need that: they run for all samples at once, with the times behind a sample's end masked.
Any other use, also a look at the shape, needs the lengths, as with packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms.private_torch import DisableTorchFunction, make_wrapper, tree_map


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

    def settled(self) -> Tensor:
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
        return function(*tree_map(_settled, tuple(args)), **tree_map(_settled, kwargs))

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return op(*tree_map(_settled, args), **tree_map(_settled, kwargs or {}))


def _settled(x: Any) -> Any:
    return x.settled() if isinstance(x, StandIn) else x


class Unpacked(StandIn):
    """A tensor whose number of times the samples do not agree on."""

    rows: Tensor
    lengths: Tensor
    batch_first: bool

    def settled(self) -> Tensor:
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
