"""Columns of Arrow tables as numbers: lists of unequal length are padded, their lengths are kept."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from psgrad.errors import DataError
from psgrad.inputs.sources.arrow_columns import is_list, plain
from psgrad.inputs.sources.host_files import arrays_made_once, in_pieces, is_divided
from psgrad.inputs.sources.source_rows import Array, SourceRows, pieces_of

RowName = Callable[[int], str]
_ROWS_PER_PART = 8192


def numbers(column: pa.ChunkedArray | pa.Array, name: str, row_name: RowName, fill: float = 0) -> Array:
    """[n, ...] of a column of numbers or of (lists of) lists of them, padded with `fill` to the longest.

    An empty cell is NaN among fractions, so that its row is reported as nonfinite, and an error among whole
    numbers and lists, which have no NaN. `row_name` names the row of a place in messages.
    """
    array = plain(column)
    _require_cells(array, name, row_name)
    if not is_list(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    lengths = _lengths(array)
    values = array.flatten()
    inner = numbers(values, name, _name_by_value(lengths, row_name), fill)
    width = int(lengths.max(initial=0))
    if width == 0:
        return np.empty((len(array), 0), dtype=np.float32)
    if (lengths == width).all():
        return inner.reshape(len(array), width, *inner.shape[1:])
    padded = np.full((len(array), width, *inner.shape[1:]), fill, inner.dtype)
    padded[np.arange(width) < lengths[:, None]] = inner
    return padded


def axis_lengths(rows: SourceRows, names: Sequence[str]) -> dict[str, Array]:
    """name -> [n, depth] int64: the length of each axis of each row, of columns of lists; all rows are read,
    by all processes of a run together.

    Raises DataError for a row that is missing, whose lists differ in length among themselves, or that is
    empty where others are not.
    """
    if not names:
        return {}
    known = all(_is_fixed(rows.schema.field(name).type) for name in names)
    of, parts = f"lengths of {list(names)} in {rows.fingerprint}", pieces_of(rows, _ROWS_PER_PART)

    def look() -> Iterator[dict[str, Array]]:
        if known or not is_divided():
            return (_axis_lengths(rows, names, part) for part in ([range(1)] if known else parts))
        made = in_pieces(of, len(parts), lambda k: _saved(_axis_lengths(rows, names, parts[k])))
        return map(_loaded, made)

    look()  # this process's share, where work is divided
    lengths = arrays_made_once(of, lambda: _checked(rows, look()))
    return {name: np.broadcast_to(each, (rows.count, each.shape[1])) for name, each in lengths.items()}


def _axis_lengths(rows: SourceRows, names: Sequence[str], part: range) -> dict[str, Array]:
    """name -> [rows of the part, depth]."""
    found: dict[str, list[Array]] = {name: [] for name in names}
    for start in range(part.start, part.stop, _ROWS_PER_PART):
        table = rows.read(start, min(start + _ROWS_PER_PART, part.stop))
        for name in names:
            array = plain(table.column(name))
            found[name].append(_shapes(array, name, partial(_name_from, rows, start)))
    return {name: np.concatenate(each) for name, each in found.items()}


def _checked(rows: SourceRows, parts: Iterable[dict[str, Array]]) -> dict[str, Array]:
    """The parts one after another. Raises DataError for a row that is empty where others are not."""
    every = list(parts)
    lengths = {name: np.concatenate([part[name] for part in every]) for name in every[0]}
    for name, each in lengths.items():
        if (empty := (each == 0).any(axis=1)).any() and not (each == 0).any(axis=1).all():
            raise DataError(
                f"{rows.row_name(int(np.argmax(empty)))} of the column {name!r} is an empty list",
                expected="at least one value in each row",
            )
    return lengths


def _saved(arrays: dict[str, Array]) -> bytes:
    """Compressed: rows of one length are most of them."""
    found = io.BytesIO()
    np.savez_compressed(found, **arrays)  # type: ignore[arg-type]
    return found.getvalue()


def _loaded(content: bytes) -> dict[str, Array]:
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return dict(found)


def _shapes(array: pa.Array, name: str, row_name: RowName) -> Array:
    """[n, depth]: the lengths of each row's lists, and of the lists in them."""
    _require_cells(array, name, row_name)
    lengths = _lengths(array)
    values, name_of_value = array.flatten(), _name_by_value(lengths, row_name)
    if not is_list(array.type.value_type):
        _require_cells(values, name, name_of_value)
        return lengths[:, None]
    inner = _shapes(values, name, name_of_value)
    filled = lengths > 0
    starts = (np.cumsum(lengths) - lengths)[filled]
    found = np.zeros((len(array), 1 + inner.shape[1]), np.int64)
    found[:, 0] = lengths
    if len(starts):
        shortest, longest = np.minimum.reduceat(inner, starts), np.maximum.reduceat(inner, starts)
        if (uneven := (shortest != longest).any(axis=1)).any():
            row = int(np.flatnonzero(filled)[np.argmax(uneven)])
            raise DataError(
                f"{row_name(row)} of the column {name!r} has lists of {shortest[uneven][0].max()} and"
                f" {longest[uneven][0].max()} values",
                expected="lists of one length inside a row",
            )
        found[filled, 1:] = longest
    return found


def _require_cells(array: pa.Array, name: str, row_name: RowName) -> None:
    if array.null_count and not pa.types.is_floating(array.type):
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(
            f"{row_name(row)} of the column {name!r} is empty", expected=f"a value of type {array.type}"
        )


def _lengths(array: pa.Array) -> Array:
    return np.asarray(pc.list_value_length(array).to_numpy(zero_copy_only=False), np.int64)


def _name_by_value(lengths: Array, row_name: RowName) -> RowName:
    """Names the row that a value belongs to, of lists of these lengths."""
    return lambda place: row_name(int(np.searchsorted(np.cumsum(lengths), place, side="right")))


def _name_from(rows: SourceRows, first: int, place: int) -> str:
    return rows.row_name(first + place)


def _is_fixed(kind: pa.DataType) -> bool:
    return not is_list(kind) or (pa.types.is_fixed_size_list(kind) and _is_fixed(kind.value_type))
