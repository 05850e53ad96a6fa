"""Where the numbers of a weight lie: in memory, in fewer bits, or in a file that is read and not mapped.

A file is read where a mapping of it would do as well, because a disk that fails or a file that was cut then
is an error that can be named; a mapping would end the process.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from psgrad.errors import CheckpointError

FEW_ROWS = 1 / 4
"""Rows of a table are read one by one if they are at most this share of it."""


class WeightSource(ABC):
    """Where the numbers of one tensor lie.

    Attributes:
        layout: a tensor of the type that the numbers have where they lie, with their shape and strides. Its
            values are not used, except for InMemory.
    """

    layout: Tensor

    @abstractmethod
    def read(self, view: Tensor, *, pinned: bool = False) -> Tensor:
        """The numbers that `view`, a view of `layout`, sees: a plain tensor with its shape and strides."""

    def rows(self, view: Tensor, rows: Tensor) -> Tensor:
        """[k, ...]: these rows (int64 [k], on the CPU) of what `view` sees."""
        found = self.read(view)
        return found[rows.to(found.device)]


class InMemory(WeightSource):
    """The numbers of a plain tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.layout = tensor

    def read(self, view: Tensor, *, pinned: bool = False) -> Tensor:
        return view


class WeightFile:
    """A file that weights are read from as long as it stays what it was.

    Raises CheckpointError where it can't be read, is shorter than it was, or was written to.

    Attributes:
        stamp: by which it is distinguished from other files, and from itself after a write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._errors_named():
            self._descriptor = os.open(path, os.O_RDONLY)
        self.stamp = self._stat()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._descriptor)

    def read_into(self, target: Tensor, offset: int) -> None:
        """Fill a flat tensor of bytes with those from `offset` on."""
        memory, done = target.numpy().data, 0
        while done < len(memory):
            with self._errors_named():
                count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if not count:
                raise self._changed("it is shorter than it was")
            done += count
        if self._stat() != self.stamp:
            raise self._changed("it was written to")

    def _stat(self) -> tuple[int, ...]:
        with self._errors_named():
            found = os.fstat(self._descriptor)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {self.path} can't be read: {error.strerror or error}",
                hint=(
                    "a disk, or the network to it, that failed in the middle of the run; copy the"
                    " checkpoint to a disk that works; a run goes on with --resume"
                ),
            ) from error

    def _changed(self, how: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self.path} has changed while weights were read from it: {how}; expected the"
            " file that the run began with",
            hint=(
                "a training run that saves under this name, or a copy that was not done; name a"
                " checkpoint that stays as it is, or set engine.parameters: resident"
            ),
        )


class _InOrder(WeightSource):
    """Numbers that can be had from one place to another, in their order."""

    device = torch.device("cpu")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.layout = torch.empty(shape, dtype=dtype, device="meta")

    def read(self, view: Tensor, *, pinned: bool = False) -> Tensor:
        if not view.numel():
            return torch.empty(view.shape, dtype=view.dtype, device=self.device)
        first = int(view.storage_offset())
        count = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        return self._numbers(first, count, pinned).as_strided(view.shape, view.stride())

    def rows(self, view: Tensor, rows: Tensor) -> Tensor:
        chosen, places = rows.unique(return_inverse=True)
        if not view.is_contiguous() or len(chosen) > FEW_ROWS * len(view):
            return super().rows(view, rows)
        size = view[0].numel()
        found = [self._numbers(int(view.storage_offset()) + row * size, size) for row in chosen.tolist()]
        return torch.stack(found).reshape(len(chosen), *view.shape[1:])[places.to(self.device)]

    @abstractmethod
    def _numbers(self, first: int, count: int, pinned: bool = False) -> Tensor:
        """[count]: the numbers from place `first` on."""


class InFile(_InOrder):
    """Numbers that lie in a file, one after another in their order.

    Args:
        file: see WeightFile.
        offset: of the first byte.
    """

    def __init__(self, file: WeightFile, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.file, self.offset = file, offset

    def _numbers(self, first: int, count: int, pinned: bool = False) -> Tensor:
        kind = self.layout.dtype
        # in a CPU's memory of PyTorch's own, so that kernels find it aligned as they find a resident weight
        found = torch.empty(count, dtype=kind, pin_memory=pinned, device="cpu")
        self.file.read_into(found.view(torch.uint8), self.offset + first * kind.itemsize)
        return found


class Quantised(_InOrder):
    """Numbers that are kept in fewer bits, and computed again each time that they are read.

    Args:
        parts: name -> what is kept of them; `packed` holds the bits.
        dequantise: (parts, first, count) to the numbers [count] from place `first` on.
        dtype: of these.
    """

    def __init__(
        self, parts: Mapping[str, Tensor], dequantise: Dequantise, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        super().__init__(shape, dtype)
        self.parts, self.dequantise = dict(parts), dequantise
        self.device = self.parts["packed"].device

    def to(self, device: torch.device) -> Quantised:
        """The same on a device."""
        parts = {name: part.to(device) for name, part in self.parts.items()}
        return Quantised(parts, self.dequantise, tuple(self.layout.shape), self.layout.dtype)

    def _numbers(self, first: int, count: int, pinned: bool = False) -> Tensor:
        return self.dequantise(self.parts, first, count)


Dequantise = Callable[[Mapping[str, Tensor], int, int], Tensor]
