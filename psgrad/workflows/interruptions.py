"""Ctrl-C at a moment that suits: what must not be left half done is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def held() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the block is done, and are then handled as they would have been. Of each the second waits no longer.

    Outside of the main thread, which alone hears signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before: dict[int, Any] = {}

    def wait(signum: int, frame: FrameType | None) -> None:
        waiting.append((signum, frame))
        signal.signal(signum, before[signum])

    for signum in (int(signal.SIGINT), int(signal.SIGTERM)):
        before[signum] = signal.getsignal(signum)
        if callable(before[signum]):
            signal.signal(signum, wait)
    try:
        yield
    finally:
        for signum, handler in before.items():
            if callable(handler):
                signal.signal(signum, handler)
    for arrived, frame in waiting:
        before[arrived](arrived, frame)
