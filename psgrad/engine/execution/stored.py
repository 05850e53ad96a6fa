"""Weights whose numbers lie elsewhere, or in another type, than operators see them: in half precision, in the
memory of the host, or in a checkpoint's file.

A `Stored` tensor has the shape, the type and the device that operators see. An operator on it brings the
numbers in, runs, and lets them go; a view of it is a view of what is stored. So a level of a transform holds
no numbers of a weight, whatever the model does with it, and no module has to be wrapped.

A file is read where a mapping of it would do as well, because a disk that fails or a file that was cut then
is an error that can be named; a mapping would end the process (see docs/decisions/0052-offloaded-weights.md).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from psgrad.engine.execution.memory import give_freed_memory_back
from psgrad.engine.transforms.private_torch import make_wrapper, no_torch_function, schema_of, tree_map
from psgrad.engine.transforms.rules.casts import with_scaled_cotangent
from psgrad.errors import CheckpointError, ModelError

_aten = torch.ops.aten
# What only looks at a weight; an operator that is missing here brings the numbers in, and is as right.
_VIEWS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.diagonal.default,
    _aten.expand.default,
    _aten.movedim.int,
    _aten.movedim.intlist,
    _aten.narrow.default,
    _aten.numpy_T.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unfold.default,
    _aten.unsqueeze.default,
    _aten.view.default,
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FEW_ROWS = 1 / 4
"""Rows of a table are read one by one if they are at most this share of it."""


class WeightSource(Protocol):
    """Where the numbers of one tensor lie.

    Attributes:
        layout: a tensor of the type that the numbers have where they lie, with their shape and strides. Its
            values are not used, except for InMemory.
    """

    layout: Tensor

    def read(self, view: Tensor, *, pinned: bool = False) -> Tensor:
        """The numbers that `view`, a view of `layout`, sees: a plain tensor with its shape and strides."""

    def rows(self, view: Tensor, rows: Tensor) -> Tensor:
        """[k, ...]: these rows (int64 [k], on the CPU) of what `view` sees."""


class InMemory:
    """The numbers of a plain tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.layout = tensor

    def read(self, view: Tensor, *, pinned: bool = False) -> Tensor:
        return view

    def rows(self, view: Tensor, rows: Tensor) -> Tensor:
        return view[rows.to(view.device)]


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
        self.stamp = self._looks()

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
        if self._looks() != self.stamp:
            raise self._changed("it was written to")

    def _looks(self) -> tuple[int, ...]:
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
                cause="a disk, or the network to it, that failed in the middle of the run",
                next_step="copy the checkpoint to a disk that works; a run goes on with --resume",
            ) from error

    def _changed(self, how: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self.path} has changed while weights were read from it: {how}",
            expected="the file that the run began with",
            cause="a training run that saves under this name, or a copy that was not done",
            next_step="name a checkpoint that stays as it is, or set engine.parameters: resident",
        )


class InFile:
    """Numbers that lie in a file, one after another in their order.

    Args:
        file: see WeightFile.
        offset: of the first byte.
    """

    def __init__(self, file: WeightFile, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.file, self.offset = file, offset
        self.layout = torch.empty(shape, dtype=dtype, device="meta")

    def read(self, view: Tensor, *, pinned: bool = False) -> Tensor:
        if not view.numel():
            return torch.empty(view.shape, dtype=view.dtype)
        first = int(view.storage_offset())
        count = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        return self._numbers(first, count, pinned).as_strided(view.shape, view.stride())

    def rows(self, view: Tensor, rows: Tensor) -> Tensor:
        chosen, places = rows.unique(return_inverse=True)
        if not view.is_contiguous() or len(chosen) > FEW_ROWS * len(view):
            return self.read(view)[rows]
        size = view[0].numel()
        found = [self._numbers(int(view.storage_offset()) + row * size, size) for row in chosen.tolist()]
        return torch.stack(found).reshape(len(chosen), *view.shape[1:])[places]

    def _numbers(self, first: int, count: int, pinned: bool = False) -> Tensor:
        kind = self.layout.dtype
        # in a CPU's memory of PyTorch's own, so that kernels find it aligned as they find a resident weight
        found = torch.empty(count, dtype=kind, pin_memory=pinned, device="cpu")
        self.file.read_into(found.view(torch.uint8), self.offset + first * kind.itemsize)
        return found


class Stored(Tensor):
    """A weight whose numbers an operator brings in for as long as it runs.

    Attributes:
        source: where the numbers lie.
        view: of the source's layout: what of it this tensor sees.
        supply: brings the numbers to the device; None for those that lie there.
    """

    source: WeightSource
    view_of_source: Tensor
    supply: Supply | None

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        source: WeightSource,
        dtype: torch.dtype,
        supply: Supply | None = None,
        view: Tensor | None = None,
    ) -> Stored:
        seen = source.layout if view is None else view
        device = torch.device("cpu") if seen.is_meta else seen.device
        if supply is not None:
            device = supply.device
        return make_wrapper(  # type: ignore[no-any-return]
            cls,
            seen.shape,
            strides=seen.stride(),
            storage_offset=seen.storage_offset(),
            dtype=dtype,
            device=device,
        )

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        supply: Supply | None = None,
        view: Tensor | None = None,
    ) -> None:
        self.source, self.supply = source, supply
        self.view_of_source = source.layout if view is None else view

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.source.layout.dtype

    def numbers(self) -> Tensor:
        """A plain tensor with the numbers, on the device and in the type that operators see."""
        found = (
            self.source.read(self.view_of_source)
            if self.supply is None
            else self.supply.bring(self.source, self.view_of_source)
        )
        return found.to(self.dtype)

    def rows(self, rows: Tensor) -> Tensor:
        """[k, ...]: these rows (int64 [k]) as operators see them."""
        if self.supply is None:
            found = self.source.rows(self.view_of_source, rows)
        else:
            found = self.supply.bring_rows(self.source, self.view_of_source, rows)
        return found.to(self.dtype)

    def as_stored(self) -> Tensor:
        """A plain tensor with the numbers where they lie, on the CPU for those in a file, in their type."""
        return self.source.read(self.view_of_source)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if not all(issubclass(each, cls) or each in (Tensor, torch.nn.Parameter) for each in types):
            return NotImplemented  # a traced tensor's level comes first
        kwargs = kwargs or {}
        if op is with_scaled_cotangent:  # the weight itself
            return args[0]._seen_as(args[0].view_of_source)
        if op in _VIEWS:
            return tree_map(args[0]._seen_as, op(args[0].view_of_source, *args[1:], **kwargs))
        if op is _aten._to_copy.default and set(kwargs) == {"dtype"} and kwargs["dtype"] in _FLOATS:
            return args[0]._in(kwargs["dtype"])
        if op is _aten.embedding.default and isinstance(args[0], Stored):
            return args[0].rows(args[1].reshape(-1)).reshape(*args[1].shape, *args[0].shape[1:])
        if schema_of(op).is_mutable and any(
            _is_written(op, place, value) for place, value in enumerate(args)
        ):
            raise next(each for each in args if isinstance(each, Stored))._written_by(op)
        return op(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))

    def _seen_as(self, view: Any) -> Any:
        if not isinstance(view, Tensor):
            return view
        if self.supply is None and isinstance(self.source, InMemory):  # nothing else is kept of the source
            return Stored(InMemory(view), self.dtype)
        return Stored(self.source, self.dtype, self.supply, view)

    def _in(self, dtype: torch.dtype) -> Stored:
        return Stored(self.source, dtype, self.supply, self.view_of_source)

    def _written_by(self, op: Any) -> ModelError:
        if self.supply is None and isinstance(self.source, InMemory):
            return ModelError(
                f"the model writes into a frozen weight that is stored as {self.stored_dtype} ({op})",
                next_step="set model.dtype: float32",
            )
        return ModelError(
            f"the model writes into an offloaded weight of shape {tuple(self.shape)} ({op})",
            next_step="set engine.parameters: resident",
        )

    def data_ptr(self) -> int:
        return self.view_of_source.data_ptr() if isinstance(self.source, InMemory) else id(self.source)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stored({tuple(self.shape)}, {self.stored_dtype}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Stored:
        if isinstance(self.source, InMemory):
            return Stored(InMemory(self.view_of_source.clone()), self.dtype, self.supply)
        return self._seen_as(self.view_of_source)  # type: ignore[no-any-return]


def _numbers(value: Any) -> Any:
    return value.numbers() if isinstance(value, Stored) else value


def _is_written(op: Any, place: int, value: Any) -> bool:
    written = schema_of(op).arguments[place].alias_info
    return isinstance(value, Stored) and written is not None and written.is_write


def as_stored(tensor: Tensor) -> Tensor:
    """The tensor in the type that a weight in memory has: halves beside float32 as they are stored, others as
    operators see them; the tensor itself, but for a `Stored` one.
    """
    data = tensor.data
    if not isinstance(data, Stored):
        return tensor
    found = data.as_stored()
    return found if data.dtype == torch.float32 and found.itemsize == 2 else found.to(data.dtype)


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
        self._side = side_stream(device)
        if device.type == "cpu":
            give_freed_memory_back()
        self._using = threading.Lock()

    def bring(self, source: WeightSource, view: Tensor) -> Tensor:
        """On the device, in the stored type: the numbers that `view`, a view of the source's layout, sees."""
        layout = source.layout
        with self._using:
            if view.numel() < layout.numel() and source not in self._kept:  # a part: the others stay away
                return self._moved(_Arrival(source.read(view), self.device))
            whole = self._whole(source)
        return whole.as_strided(view.shape, view.stride(), view.storage_offset() - layout.storage_offset())

    def bring_rows(self, source: WeightSource, view: Tensor, rows: Tensor) -> Tensor:
        """These rows (int64 [k]) of what `view` sees, on the device and in the stored type."""
        with self._using:
            if source not in self._kept:
                return self._moved(_Arrival(source.rows(view, rows.cpu()), self.device))
        return self.bring(source, view)[rows]

    def give_back(self) -> None:
        """Memory is short: keep nothing."""
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
        """Drop the weights that were not used for longest, until so many bytes fit."""
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


def side_stream(device: torch.device) -> Any:
    """A stream for copies beside the one that operators run on; None for a device without streams."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module.Stream(device) if hasattr(module, "Stream") else None


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
