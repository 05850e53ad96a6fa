"""Tensors that wait in a file on a disk, as memory does not hold them."""

from __future__ import annotations

import os
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch

from psgrad.engine.transforms.private_torch import without_modes
from psgrad.errors import ConfigError


class ScratchFolder:
    """Where scratch files are made. They have no names, so none stays behind a process that is killed.

    A worker thread reads each file as a whole before it is needed, and lets the system forget the pages of
    files that are on the disk.

    Raises ConfigError for a folder in which no file can be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worker = ThreadPoolExecutor(1, "psgrad-scratch")
        self.last: weakref.ref[ScratchFile] | None = None  # the file that was begun last
        try:
            self.new_file().close()
        except OSError as error:
            raise ConfigError(
                f"engine.scratch: no file can be made in {folder}: {error.strerror}",
                expected="a folder that exists, on a disk with free space",
                next_step="make the folder, name another one, or leave engine.scratch out",
            ) from error

    def new_file(self) -> IO[bytes]:
        return tempfile.TemporaryFile(buffering=0, dir=self.folder)


class ScratchFile:
    """Tensors of one recomputed call, written in its first run and read in the second. Calls run again in
    the opposite order, so the file that was begun before is read ahead.

    A disk that fails, or is full, costs time: what it does not hold is computed again.
    """

    def __init__(self, folder: ScratchFolder) -> None:
        self.folder = folder
        self._before: weakref.ref[ScratchFile] | None = None  # the file that was begun before
        self._file: IO[bytes] | None = None
        self._end = 0
        self._tensors: dict[int, torch.Tensor] = {}  # by their place in the file, without numbers
        self._is_whole = False
        self._loading: Future[dict[int, torch.Tensor]] | None = None

    def write(self, tensor: torch.Tensor) -> int | None:
        """The place of a contiguous tensor in the file; None if the disk does not take it."""
        with without_modes():
            numbers = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().data
            without_numbers = torch.empty_like(tensor, device="meta", requires_grad=False)
        place = self._end
        try:
            if self._file is None:
                self._file = self.folder.new_file()
                self._before, self.folder.last = self.folder.last, weakref.ref(self)
            if os.pwrite(self._file.fileno(), numbers, place) != len(numbers):
                return None
        except OSError:
            return None
        self._end += len(numbers)
        self._tensors[place] = without_numbers
        return place

    def end_writing(self) -> None:
        self._is_whole = True
        if self._file is not None:
            self.folder.worker.submit(self._forget_pages)

    def read(self, place: int, device: torch.device) -> torch.Tensor | None:
        """The tensor at a place; None if the disk does not give it back."""
        self._load()
        if self._before is not None and (before := self._before()) is not None:
            before._load()
        assert self._loading is not None
        found = self._loading.result().pop(place, None)
        with without_modes():
            return found if found is None else found.to(device)

    def _load(self) -> None:
        if self._loading is None and self._is_whole:
            self._loading = self.folder.worker.submit(self._all)

    def _all(self) -> dict[int, torch.Tensor]:
        assert self._file is not None
        found = {}
        for place, like in list(self._tensors.items()):  # results of a call in this one may still be let go
            tensor = torch.empty_like(like, device="cpu")
            numbers = tensor.view(-1).view(torch.uint8).numpy().data
            with suppress(OSError):
                if os.preadv(self._file.fileno(), [numbers], place) == len(numbers):
                    found[place] = tensor
        return found

    def _forget_pages(self) -> None:
        assert self._file is not None
        if hasattr(os, "posix_fadvise"):  # not on macOS
            with suppress(OSError):
                os.fdatasync(self._file)
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
