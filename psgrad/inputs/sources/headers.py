"""What a data file says of itself before its rows are read: columns, types, shapes, and how many rows there
are. No torch.
"""

from __future__ import annotations

import csv
import errno
import itertools
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from psgrad.config import DataConfig
from psgrad.errors import DataError, PsgradError
from psgrad.inputs.sources.files import (
    input_names,
    is_archive,
    named_columns,
    not_numbers,
    require_columns,
    require_file,
    require_rows,
    require_single_names,
)

if TYPE_CHECKING:
    import pyarrow as pa

_CSV_ROWS = 1000  # that are looked at


@dataclass(frozen=True)
class Column:
    """kind: 'integer', 'fraction', 'boolean', 'text', or another word for what is no number; None where the
    header does not say. dtype: in the words of the file's format. shape: of all rows together; None where it
    is known from the rows alone.
    """

    kind: str | None
    dtype: str
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DataHeader:
    """columns: by name, in the file's order; where a name is there twice, once. names: all of them. rows:
    None where they would have to be counted. `texts` are the first cells that are no numbers, (row, cell) by
    column, of a csv file.
    """

    path: Path
    names: list[str]
    columns: Mapping[str, Column]
    rows: int | None
    texts: Mapping[str, tuple[int, str]] = field(default_factory=dict)


def data_header(config: DataConfig, base: Path) -> DataHeader:
    """The header of the file that a config names. Raises ConfigError where there is none, DataError where it
    can't be read.
    """
    assert config.path is not None
    path = require_file(base / config.path, "dataset", DataError)
    return _READERS[path.suffix.lower()](path)


def header_problems(header: DataHeader, config: DataConfig, unit: str | None = None) -> Iterator[PsgradError]:
    """All that is wrong with the columns that a config names, as loading would tell it, one after the
    other.
    """
    wanted = named_columns(config, unit)
    yield from _told(require_rows, header.rows if header.rows is not None else 1, str(header.path))
    for name in wanted:
        yield from _told(require_columns, [name], header.names, str(header.path))
    yield from _told(require_single_names, header.names, wanted, header.path)
    for name in wanted:
        if name in header.columns and header.columns[name].dtype == "object":
            yield unreadable_npz(header.path, ValueError("allow_pickle"))
            return
    for name in dict.fromkeys([*input_names(config), *([] if config.target is None else [config.target])]):
        column = header.columns.get(name)
        if column is not None and name in header.texts:
            row, cell = header.texts[name]
            yield not_numbers(name, "text", f"row {row} holds {cell!r}")
        elif column is not None and column.kind not in (None, "integer", "fraction", "boolean"):
            yield not_numbers(name, column.dtype)
    for identifier in (config.id, unit):
        shape = (
            header.columns[identifier].shape
            if identifier is not None and identifier in header.columns
            else None
        )
        if shape is not None and len(shape) != 1:
            yield DataError(
                f"the ids {identifier!r} in {header.path} have the shape {list(shape)}",
                expected="one per row",
            )
    yield from _told(_require_one_length, header, wanted)


def _require_one_length(header: DataHeader, wanted: list[str]) -> None:
    shapes = {
        name: shape
        for name in wanted
        if name in header.columns and (shape := header.columns[name].shape) is not None
    }
    common_length(shapes, header.path)


def common_length(shapes: Mapping[str, tuple[int, ...]], path: Path) -> int | None:
    """How many rows there are; None where no column has a shape. Raises DataError where columns differ, or
    where one has no rows.
    """
    for name, shape in shapes.items():
        if not shape:
            raise DataError(
                f"{name!r} in {path} is a single number", expected="an array with one row per sample"
            )
    lengths = {name: shape[0] for name, shape in shapes.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DataError(
            f"the columns of {path} have different numbers of rows: {listed}",
            expected="one row per sample in each",
        )
    return next(iter(lengths.values()), None)


def _told(check: Callable[..., object], *arguments: Any) -> Iterator[PsgradError]:
    try:
        check(*arguments)
    except PsgradError as error:
        yield error


# -- npz -----------------------------------------------------------------------------------------------------

_KINDS = {"b": "boolean", "i": "integer", "u": "integer", "f": "fraction", "U": "text", "S": "text"}


def _npz_header(path: Path) -> DataHeader:
    if not is_archive(path):
        raise DataError(f"{path} is no npz archive", expected="named arrays, as numpy.savez writes them")
    columns = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                with archive.open(entry) as file:
                    version = np.lib.format.read_magic(file)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = read(file)
                columns[entry.removesuffix(".npy")] = Column(
                    _KINDS.get(dtype.kind, dtype.name), str(dtype), shape
                )
    except (
        Exception
    ) as error:  # zipfile, zlib and numpy's header parser have a dozen errors for a damaged file
        raise unreadable_npz(path, error) from error
    return DataHeader(path, list(columns), columns, _rows(columns))


def _rows(columns: Mapping[str, Column]) -> int | None:
    return next((column.shape[0] for column in columns.values() if column.shape), None)


def unreadable_npz(path: Path, error: Exception) -> DataError:
    """The error for an npz file of which numpy reads no arrays."""
    if "allow_pickle" in str(error):
        return DataError(
            f"{path} holds an array of Python objects, which is a pickle; it was not opened",
            expected="arrays of numbers, or of fixed-width text for ids",
            cause="rows of unequal length, or texts, put into one array",
            next_step=(
                "pad the rows to one length before numpy.savez; save ids with numpy.array(ids, dtype=str)"
            ),
        )
    return DataError(
        f"{path} is damaged: {error}", expected="a whole npz archive", cause="an interrupted copy or download"
    )


# -- safetensors ---------------------------------------------------------------------------------------------


def _safetensors_header(path: Path) -> DataHeader:
    import safetensors

    columns = {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            for name in sorted(file.keys()):
                found = file.get_slice(name)
                kind = (
                    "boolean"
                    if found.get_dtype() == "BOOL"
                    else "integer"
                    if found.get_dtype()[0] in "IU"
                    else "fraction"
                )
                columns[name] = Column(kind, found.get_dtype(), tuple(found.get_shape()))
    except Exception as error:
        raise damaged_data(path, error) from error
    return DataHeader(path, list(columns), columns, _rows(columns))


def damaged_data(path: Path, error: Exception) -> DataError:
    """The error for a safetensors file that can't be read."""
    return DataError(
        f"{path} is damaged: {error}",
        expected="a whole safetensors file",
        cause="an interrupted copy or download",
    )


# -- csv -----------------------------------------------------------------------------------------------------


def _csv_file_header(path: Path) -> DataHeader:
    names = csv_header(path)
    if not names:
        raise DataError(f"{path} has no header", expected="a first line with the names of the columns")
    texts: dict[str, tuple[int, str]] = {}
    rows = None
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = itertools.islice(csv.reader(file), 1, None)
            row = -1
            for row, cells in enumerate(line for line in itertools.islice(lines, _CSV_ROWS) if line):
                if len(cells) != len(names):
                    raise cut_row(path, row, len(cells), len(names))
                for name, cell in zip(names, cells, strict=True):
                    if name not in texts and not _is_number(cell):
                        texts[name] = row, cell
            if row + 1 < _CSV_ROWS:
                rows = row + 1
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path} can't be read as csv: {error}",
            cause="an interrupted copy or download, or another format",
        ) from error
    columns = {name: Column(None, "text" if name in texts else "numbers") for name in names}
    return DataHeader(path, names, columns, rows, texts)


def cut_row(path: Path, row: int, cells: int, names: int) -> DataError:
    """The error for a row of a csv file with another number of cells than the header has."""
    return DataError(
        f"row {row} of {path} has {cells} cells, the header {names}",
        cause="a comma inside a text that is not quoted, or a line that was cut",
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell.strip() or "nan")
    except ValueError:
        return False
    return True


def csv_header(path: Path) -> list[str]:
    """The names in the first line. Raises DataError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"the header of {path} can't be read: {error}", expected="comma-separated names in UTF-8"
        ) from error


# -- parquet -------------------------------------------------------------------------------------------------


def _parquet_header(path: Path) -> DataHeader:
    import pyarrow.parquet as pq

    with damage_told(path, "parquet"):
        file = pq.ParquetFile(path)
        names, rows = file.schema_arrow.names, file.metadata.num_rows
    columns = {name: _arrow_column(name, file.schema_arrow.types[place]) for place, name in enumerate(names)}
    return DataHeader(path, list(names), columns, rows)


def _arrow_column(name: str, kind: pa.DataType) -> Column:
    import pyarrow as pa

    try:
        value = require_numbers(name, kind)
    except DataError:
        return Column("text", str(kind))
    return Column(
        "fraction" if pa.types.is_floating(value) else "boolean" if pa.types.is_boolean(value) else "integer",
        str(kind),
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def require_numbers(name: str, kind: pa.DataType) -> pa.DataType:
    """The type of the numbers in a column of numbers or of lists of them. Raises DataError where it holds
    something else.
    """
    import pyarrow as pa

    value = kind
    while is_list(value):
        value = value.value_type
    if pa.types.is_dictionary(value):
        value = value.value_type
    if not (pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value)):
        raise not_numbers(name, kind)
    return value


@contextmanager
def damage_told(path: Path, kind: str) -> Iterator[None]:
    """What Arrow says of a damaged file is told as DataError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"the temporary folder {tempfile.gettempdir()} has no room for {path}, converted",
                next_step=(
                    "set TMPDIR to a folder with as much room as the file takes, or save the data as parquet"
                ),
            ) from error
        reason = next(iter(str(error).splitlines()), "")
        raise DataError(
            f"{path} can't be read as {kind}: {reason}",
            cause="an interrupted copy or download, or another format",
        ) from error


_READERS: Mapping[str, Callable[[Path], DataHeader]] = {
    ".npz": _npz_header,
    ".csv": _csv_file_header,
    ".parquet": _parquet_header,
    ".safetensors": _safetensors_header,
}
