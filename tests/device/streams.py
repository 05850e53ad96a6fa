"""Streams and events of the strict device that check order: a copy on a side stream has its numbers once an
event behind it was waited for, and NaN before; and memory of a side stream must be recorded where it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Stream:
    """Work that was given to a stream, in order, and is not done before somebody waits for it."""

    def __init__(self, device: Any = None) -> None:
        self.work: list[Callable[[], Any]] = []
        self.given = 0

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None, "an event that was not recorded"
        event.stream.finish(event.given)

    def finish(self, given: int) -> None:
        while self.given - len(self.work) < given:
            self.work.pop(0)()


class Event:
    """A place in the work of a stream."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.given = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.given = stream, stream.given


class Streams:
    """What the device's module offers.

    Attributes:
        copies: how many copies ran on side streams.
        unrecorded: addresses of memory that was filled on a side stream, and is not recorded elsewhere.
        used: addresses of such memory that was used; what is read ahead in vain need not be recorded.
    """

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.copies = 0
        self.unrecorded: set[int] = set()
        self.used: set[int] = set()
        self._default = Stream()
        self._lock, self._here = threading.Lock(), threading.local()

    def device(self, device: Any) -> Any:
        return nullcontext()

    def current_stream(self, device: Any = None) -> Stream:
        return self._default

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = None

    def to(self, move: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Tensor.to: a copy that does not block is left to the stream that is current in this thread."""
        stream = getattr(self._here, "stream", None)
        if stream is None or not kwargs.get("non_blocking"):
            return move(tensor, *args, **kwargs)
        there = move(torch.full_like(tensor, float("nan")), *args, **kwargs)
        self.late(stream, there, tensor)
        return there

    def late(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        with self._lock:
            self.copies += 1
            self.unrecorded.add(target.data_ptr())
            self.used.discard(target.data_ptr())
        stream.given += 1
        stream.work.append(partial(target.copy_, source))

    def recorded(self, tensor: Tensor) -> None:
        self.unrecorded.discard(tensor.data_ptr())
