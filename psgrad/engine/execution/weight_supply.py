"""Brings weights to the device as operators need them."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from psgrad.engine.execution.memory import give_freed_memory_back
from psgrad.engine.execution.weight_sources import WeightSource


class Supply:
    """Brings weights to the device as operators need them, and keeps those that were used last.

    A pass uses the weights from the first to the last and back, so those that were used last are the next
    ones. The one that followed a weight the last time is read ahead, while operators run on it.

    Args:
        device: where operators run.
        budget: bytes that weights may take there, with the one that is read ahead.

    Attributes:
        moved: bytes that were brought so far.
    """

    def __init__(self, device: torch.device, budget: int) -> None:
        self.device, self.budget = device, budget
        self.moved = 0
        self._kept: dict[WeightSource, Tensor] = {}  # in their stored type, the one used last at the end
        self._followed: dict[tuple[WeightSource | None, WeightSource | None], WeightSource] = {}
        self._last: tuple[WeightSource | None, WeightSource | None] = (None, None)
        self._ahead: tuple[WeightSource, Future[_Arrival]] | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._side: Any = None  # a stream for copies beside the one that operators run on
        if device.type == "cpu":
            give_freed_memory_back()
        elif hasattr(module := torch.get_device_module(device), "Stream"):
            self._side = module.Stream(device)
        self._using = threading.Lock()

    def bring(self, source: WeightSource, view: Tensor) -> Tensor:
        """The numbers of `view`, a view of the source's layout, on the device and in the stored type."""
        layout = source.layout
        with self._using:
            if view.numel() < layout.numel() and source not in self._kept:  # only this part is moved
                return self._moved(_Arrival(source.read(view), self.device))
            whole = self._whole(source)
        return whole.as_strided(view.shape, view.stride(), view.storage_offset() - layout.storage_offset())

    def bring_rows(self, source: WeightSource, view: Tensor, rows: Tensor) -> Tensor:
        """These rows (int64 [k]) of `view`, on the device and in the stored type."""
        with self._using:
            if source not in self._kept:
                return self._moved(_Arrival(source.rows(view, rows.cpu()), self.device))
        return self.bring(source, view)[rows]

    def give_back(self) -> None:
        """Free the weights that are kept on the device and the one that is read ahead, because memory is
        short.
        """
        with self._using:
            self._kept.clear()
            self._ahead = None

    def _whole(self, source: WeightSource) -> Tensor:
        found = self._kept.pop(source, None)
        if found is None:
            found = self._arrived(source)
            self._make_room(found.nbytes)
        self._kept[source] = found
        self._followed[self._last] = source
        self._last = (self._last[1], source)
        self._read_ahead()
        return found

    def _make_room(self, size: int) -> None:
        """Drop the weights that were not used for longest, until `size` bytes fit."""
        while self._kept and sum(each.nbytes for each in self._kept.values()) + size > self.budget:
            del self._kept[next(iter(self._kept))]

    def _arrived(self, source: WeightSource) -> Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is source:
            return self._moved(ahead[1].result())
        return self._moved(self._read(source))

    def _moved(self, arrival: _Arrival) -> Tensor:
        self.moved += arrival.host.nbytes
        return arrival.on_device()

    def _read_ahead(self) -> None:
        following = self._followed.get(self._last)
        if following is None or following in self._kept or self._ahead is not None:
            return
        size = following.layout.nbytes
        if size + self._kept[self._last[1]].nbytes > self.budget:  # type: ignore[index]
            return
        self._make_room(size)
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="psgrad-weights")
        self._ahead = following, self._reader.submit(self._read, following)

    def _read(self, source: WeightSource) -> _Arrival:
        pinned = self._side is not None
        return _Arrival(source.read(source.layout, pinned=pinned), self.device, self._side)


class _Arrival:
    """Numbers that were read, on their way to the device: on a GPU by a copy on a stream of its own."""

    def __init__(self, host: Tensor, device: torch.device, side: Any = None) -> None:
        self.host, self.device = host, device
        self.copied: Any = None
        if side is not None:
            module = torch.get_device_module(device)
            with module.device(device), module.stream(side):
                self.there = host.to(device, non_blocking=True)
                self.copied = module.Event()
                self.copied.record(side)

    def on_device(self) -> Tensor:
        """The numbers, for operators of the current stream."""
        if self.copied is None:
            return self.host.to(self.device)
        here = torch.get_device_module(self.device).current_stream(self.device)
        here.wait_event(self.copied)
        self.there.record_stream(here)  # its memory was asked for on the other stream
        return self.there
