"""What was made of rows, kept in a temporary file, so that it is made once. No torch."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Hashable
from typing import IO


class KeptBytes:
    """Contents by key, in a file without a name that goes with this object.

    Args:
        room: the largest size of the file, in bytes; None for what the disk has room for. What there is no
            room for is not kept.
    """

    def __init__(self, room: int | None = None) -> None:
        self._room, self._end = room, 0
        self._file: IO[bytes] | None = None
        self._places: dict[Hashable, tuple[int, int]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._places

    def put(self, key: Hashable, content: bytes) -> None:
        """Keep a content, unless there is one of this key."""
        if key in self._places or (self._room is not None and self._end + len(content) > self._room):
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="psgrad-", buffering=0)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            os.pwrite(self._file.fileno(), content, self._end)
        except OSError:  # no room on the disk, whatever was free before
            self._room = 0
            return
        self._places[key] = self._end, len(content)
        self._end += len(content)

    def get(self, key: Hashable) -> bytes | None:
        """The content of a key; None where there is none."""
        if key not in self._places or self._file is None:
            return None
        place, size = self._places[key]
        return os.pread(self._file.fileno(), size, place)
