"""The states of a run that its derivative needs in reverse order: in memory, or in a file that has no name
and so is gone with the process, however that ends.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

import torch

from psgrad.engine.influence.training_steps import TrainingState
from psgrad.engine.transforms.private_torch import tree_flatten, tree_unflatten
from psgrad.errors import InfluenceError

# The share of the free space of a disk that states may take.
_SHARE = 0.5


class Kept(Protocol):
    """Points of a run, of which the last is taken first."""

    def append(self, point: TrainingState, /) -> None:
        """Keep one more."""

    def pop(self) -> TrainingState:
        """The last of them, which is kept no longer."""


class OnDisk:
    """Points in a file without a name in a folder, bit by bit as they are in memory.

    Raises InfluenceError where the disk has no room for them.
    """

    def __init__(self, folder: Path, like: TrainingState) -> None:
        leaves, self._tree = tree_flatten((like.params, like.state))
        self._like = [(leaf.dtype, leaf.shape, leaf.nbytes, leaf.device) for leaf in leaves]
        self._folder, self._bytes, self._count = folder, like.bytes, 0
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with this object
        except OSError as error:
            raise self._unwritable(error) from error
        weakref.finalize(self, self._file.close)

    def append(self, point: TrainingState) -> None:
        leaves, _ = tree_flatten((point.params, point.state))
        try:
            self._file.seek(self._count * self._bytes)
            for leaf in leaves:
                self._file.write(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # what is left in its buffer can't be written either
                self._file.close()
            raise self._unwritable(error) from error
        self._count += 1

    def pop(self) -> TrainingState:
        self._count -= 1
        self._file.seek(self._count * self._bytes)
        leaves = []
        for dtype, shape, size, device in self._like:
            content = torch.frombuffer(bytearray(self._file.read(size)), dtype=torch.uint8) if size else None
            leaf = torch.empty(shape, dtype=dtype) if content is None else content.view(dtype).reshape(shape)
            leaves.append(leaf.to(device))
        params, state = tree_unflatten(leaves, self._tree)
        return TrainingState(params, state)

    def _unwritable(self, error: OSError) -> InfluenceError:
        return InfluenceError(
            f"state number {self._count:,} of the training run can't be written to {self._folder}:"
            f" {error.strerror}",
            expected=f"{self._bytes:,} free bytes for each state (influence.training.states: disk)",
            cause="a full disk or a quota, or a folder that can't be written to",
            next_step="free some space, choose an --output on another disk, or set"
            " influence.training.states: memory, which computes again what does not fit",
        )


def room_on_disk(folder: Path, point: TrainingState) -> int:
    """How many states like this one a folder's disk takes."""
    return int(shutil.disk_usage(folder).free * _SHARE) // max(point.bytes, 1)
