"""Rows of tokens as Arrow tables: packed without padding, kept as memory-mapped files, stacked as tensors."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from psgrad.inputs.tasks.task import Array, EncodedRow, Field

_LENGTHS = "lengths"
_OPEN = 8  # files that stay mapped


def packed(rows: Sequence[EncodedRow], fields: Sequence[Field]) -> pa.Table:
    """A table of these rows: a column for each field, with the values of a row as a list, and the lengths."""
    columns: dict[str, pa.Array] = {}
    for place, field in enumerate(fields):
        values = [row[place] for row in rows]
        kind = np.dtype(np.float32 if values[0].dtype.kind == "f" else np.int32)
        ends = np.cumsum([0, *(value.size for value in values)], dtype=np.int64)
        flat = np.concatenate([value.ravel() for value in values]).astype(kind)
        columns[field.name] = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat))
    lengths = np.array([_lengths(row, fields) for row in rows], np.int64)
    columns[_LENGTHS] = pa.FixedSizeListArray.from_arrays(pa.array(lengths.ravel()), lengths.shape[1])
    shapes = {field.name: list(rows[0][place].shape) for place, field in enumerate(fields)}
    return pa.table(columns).replace_schema_metadata({"shapes": json.dumps(shapes)})


def _lengths(row: EncodedRow, fields: Sequence[Field]) -> list[int]:
    found = {
        column: row[place].shape[axis] for place, field in enumerate(fields) for axis, column in field.axes
    }
    return [found[column] for column in sorted(found)]


def stacked(table: pa.Table, fields: Sequence[Field]) -> tuple[list[Tensor], Tensor]:
    """(the tensor of each field [n, ...], padded to its longest row; lengths [n, a]) of packed rows."""
    count, shapes = len(table), json.loads(table.schema.metadata[b"shapes"])
    lengths = _flat(table.column(_LENGTHS)).reshape(count, -1)
    tensors = []
    for field in fields:
        values, shape, inside = _flat(table.column(field.name)), [count, *shapes[field.name]], None
        for axis, column in field.axes:
            shape[axis + 1] = width = int(lengths[:, column].max())
            own = np.arange(width) < lengths[:, column, None]
            own = own.reshape(count, *[1] * axis, width, *[1] * (len(shape) - axis - 2))
            inside = own if inside is None else inside & own
        kind = np.float32 if values.dtype.kind == "f" else np.int64
        whole = np.full(shape, field.padding, kind)
        whole[np.broadcast_to(True if inside is None else inside, shape)] = values
        tensors.append(torch.from_numpy(whole))
    return tensors, torch.from_numpy(lengths.astype(np.int64))


def _flat(column: pa.ChunkedArray) -> Array:
    found: Array = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return found


class TokenBlocks:
    """Tables by number, each in a file of its own.

    Args:
        kept: of a run, where files outlive this process once the run has begun; None for a temporary folder.
        key: what tells these tables from others in the same folder.

    A file that can't be written is not kept, one that can't be read counts as not there.
    """

    def __init__(self, kept: Path | None, key: str) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="psgrad-")  # removed with this object
        self._kept = kept
        self._name = hashlib.sha256(key.encode()).hexdigest()[:32]
        self._open: OrderedDict[int, pa.Table] = OrderedDict()

    def get(self, number: int) -> pa.Table | None:
        """The table of this number; None where there is none."""
        found = self._open.get(number)
        for folder in self._folders() if found is None else []:
            path = self._path(folder, number)
            with suppress(OSError, pa.ArrowException):
                if found is None and path.exists():
                    found = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        if found is not None:
            self._open[number] = found
            self._open.move_to_end(number)
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return found

    def put(self, number: int, table: pa.Table) -> pa.Table:
        """The same table, from its file where that could be written."""
        with suppress(OSError):
            path = self._path(self._folders()[0], number)
            path.parent.mkdir(parents=True, exist_ok=True)
            half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                with pa.ipc.new_file(str(half), table.schema) as writer:
                    writer.write_table(table)
                half.replace(path)
            finally:
                half.unlink(missing_ok=True)
        found = self.get(number)
        return table if found is None else found

    def _folders(self) -> list[Path]:
        temporary = Path(self._temporary.name)
        usable = self._kept is not None and (self._kept.parent / "manifest.json").exists()
        return [self._kept, temporary] if self._kept is not None and usable else [temporary]

    def _path(self, folder: Path, number: int) -> Path:
        return folder / self._name / f"{number:06d}.arrow"
