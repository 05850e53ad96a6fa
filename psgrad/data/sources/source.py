"""A source reads one format of data files: the facts in a file's header, and its rows.

The header needs no torch, so that a config is checked at once; rows are tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.config.data import COMPRESSIONS, data_format
from psgrad.data.sources.arrow_columns import is_list, kind_of
from psgrad.data.sources.file_checks import Wanted, not_numbers, require_columns, require_rows
from psgrad.errors import ConfigError, DataError, PsgradError
from psgrad.plugins import SOURCES, configured
from psgrad.run.input_files import require_file

if TYPE_CHECKING:
    from psgrad.data.rows import Samples
    from psgrad.data.sources.source_rows import SourceRows


class Source(ABC):
    """A format of data files. A subclass is a class in `psgrad/data/sources/formats`: a TableSource, an
    ArraySource, or one that loads its rows itself.

    Attributes:
        name: the suffix of its files, without the dot.
        compressed: whether it reads compressed files, too.
        read_again: whether each pass reads the files themselves; of others rows are taken from memory or from
            a copy.
    """

    name: ClassVar[str]
    compressed: ClassVar[bool] = False
    read_again: ClassVar[bool] = False

    @abstractmethod
    def header(self, path: Path) -> DataHeader:
        """The facts in the file's header, without torch and without its rows. Raises DataError."""

    def load(self, path: Path, config: DataConfig, unit: str | None = None) -> Samples:
        """The rows of the columns that `config` names, of a format that is neither a table nor arrays. unit:
        the column that says whom a row belongs to.

        Raises ConfigError for a column that is not there, DataError for data that can't be used.
        """
        raise NotImplementedError


class TableSource(Source):
    """A format whose rows can be read as Arrow tables, with columns of any type."""

    @abstractmethod
    def rows(self, path: Path, wanted: Wanted) -> SourceRows:
        """The wanted columns. Raises ConfigError for one that is not there, DataError for a damaged file."""


class BatchSource(TableSource):
    """A format of Arrow's batches."""

    @abstractmethod
    def batches(self, path: Path) -> AbstractContextManager[tuple[pa.Schema, Iterable[pa.RecordBatch]]]:
        """The schema of a file, and all its rows."""


class LineSource(TableSource):
    """A format of a row a line."""


class ArraySource(Source):
    """A format whose columns are arrays with an axis of rows."""

    @abstractmethod
    def arrays(self, path: Path, wanted: Wanted) -> dict[str, Any]:
        """The wanted columns, of numpy or torch. Raises ConfigError and DataError."""


@dataclass(frozen=True)
class Column:
    """kind: 'integer', 'fraction', 'boolean', 'text', or another word for what is no number; None where the
    header does not say. dtype: in the words of the file's format. shape: of all rows together; None where it
    is known from the rows alone.
    """

    kind: str | None
    dtype: str
    shape: tuple[int, ...] | None = None


def column_of(kind: pa.DataType) -> Column:
    """The facts about a column in its Arrow type."""
    value = kind
    while is_list(value) or pa.types.is_dictionary(value):
        value = value.value_type
    return Column(_WORDS.get(kind_of(value), kind_of(value)), str(kind))


_WORDS = {"whole numbers": "integer", "fractions": "fraction", "true and false": "boolean"}


@dataclass(frozen=True)
class DataHeader:
    """columns: by name, in the file's order; where a name is there twice, once. names: all of them. rows:
    None where they would have to be counted. texts: the first cells that are no numbers, (row, cell) by
    column, of a csv file. unusable: columns that can't be read at all, with the reason.
    """

    path: Path
    names: list[str]
    columns: Mapping[str, Column]
    rows: int | None
    texts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    unusable: Mapping[str, DataError] = field(default_factory=dict)


def data_headers(config: DataConfig, base: Path) -> list[DataHeader]:
    """The headers of the files that a config names. Raises ConfigError and DataError."""
    source, paths = source_of(config, base)
    return [source.header(path) for path in paths]


def source_for(path: Path) -> Source:
    """The source of a file's format. Raises ConfigError where there is none."""
    found: Source = configured(SOURCES, data_format(path), {}, path.parent)
    return found


def source_of(config: DataConfig, base: Path) -> tuple[Source, list[Path]]:
    """(the source that reads the files that a config names, the files). Raises ConfigError and DataError."""
    paths = [require_file(path, "dataset", DataError) for path in data_files(config, base)]
    source = source_for(paths[0])
    packed = [path for path in paths if path.suffix.lower() in COMPRESSIONS]
    if packed and not source.compressed:
        raise DataError(
            f"{packed[0]} is compressed, which is not read for .{source.name} files",
            next_step=f"decompress it; .{source.name} has a compression of its own, if it has any",
        )
    return source, paths


def files_read_again(config: DataConfig, base: Path) -> list[Path]:
    """The files of data.path that each pass reads. Raises ConfigError and DataError."""
    if config.path is None:
        return []
    source, paths = source_of(config, base)
    return paths if source.read_again else []


_GLOB = frozenset("*?[")


def data_files(config: DataConfig, base: Path) -> list[Path]:
    """The files of data.path, those of a glob in the order of their names. Raises ConfigError without any."""
    found = []
    for path in (base / each for each in config.paths):
        matches = [path]
        if not path.exists() and _GLOB & {*str(path)}:
            matches = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            if not matches:
                raise ConfigError(
                    f"there is no dataset {path}: no file has such a name",
                    next_step="check the path; it is relative to the config file's folder",
                )
        found += matches
    if len(set(found)) < len(found):
        twice = next(path for place, path in enumerate(found) if path in found[:place])
        raise ConfigError(f"data.path names {twice} twice", expected="each file once")
    return found


def header_problems(
    header: DataHeader, config: DataConfig, unit: str | None = None, *, labels: bool = False
) -> Iterator[PsgradError]:
    """All problems of the columns that a config names, in the words of loading, one after the other. `labels`
    says whether the target may be the names of classes.
    """
    roles = Wanted.of(config, unit)
    wanted = roles.columns
    yield from _error_of(require_rows, header.rows if header.rows is not None else 1, str(header.path))
    for name in wanted:
        yield from _error_of(require_columns, [name], header.names, str(header.path))
    for name in wanted:
        if name in header.unusable:
            yield header.unusable[name]
            return
    for name in [*roles.numbers, *(() if labels else roles.labels)]:  # images are among the texts
        column = header.columns.get(name)
        if column is not None and name in header.texts:
            row, cell = header.texts[name]
            yield not_numbers(name, "text", f"row {row} holds {cell!r}")
        elif column is not None and column.kind not in (None, "integer", "fraction", "boolean"):
            yield not_numbers(name, column.dtype)
    for name in roles.texts:
        column = header.columns.get(name)
        if column is not None and column.kind in ("integer", "fraction", "boolean"):
            yield DataError(f"{name!r} is of type {column.dtype}", expected="text, chats or images")
    for identifier in (config.id, unit):
        found = header.columns.get(identifier or "")
        if found is not None and found.shape is not None and len(found.shape) != 1:
            yield DataError(
                f"the ids {identifier!r} in {header.path} have the shape {list(found.shape)}",
                expected="one per row",
            )
    named = {name: header.columns[name] for name in wanted if name in header.columns}
    shapes = {name: each.shape for name, each in named.items() if each.shape is not None}
    yield from _error_of(common_length, shapes, header.path)


def with_rows(headers: list[DataHeader]) -> list[DataHeader]:
    """The headers of files that have rows, as loading leaves out the others; all where none has."""
    return [each for each in headers if each.rows != 0] or headers


def joined_header(headers: Sequence[DataHeader]) -> DataHeader:
    """The joined facts of the headers of several files. Raises DataError for a column of mixed types."""
    first = headers[0]
    for other in headers[1:]:
        for name, column in other.columns.items():
            before = first.columns.get(name)
            kinds = {each.kind for each in (before, column) if each is not None and each.kind is not None}
            if before is not None and len(kinds - {"fraction", "nothing"} | ({"integer"} & kinds)) > 1:
                raise DataError(
                    f"the column {name!r} has mixed types: {before.dtype} in {first.path}, {column.dtype} in"
                    f" {other.path}",
                    expected="one type in all files",
                )
    rows = [header.rows for header in headers]
    known = [count for count in rows if count is not None]
    return replace(first, rows=sum(known) if len(known) == len(rows) else None)


def common_length(shapes: Mapping[str, tuple[int, ...]], path: Path | str) -> int | None:
    """How many rows there are, None without shapes. Raises DataError where columns differ or have no rows."""
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


def _error_of(check: Callable[..., object], *arguments: Any) -> Iterator[PsgradError]:
    try:
        check(*arguments)
    except PsgradError as error:
        yield error


def row_count(columns: Mapping[str, Column]) -> int | None:
    """How many rows arrays with these headers have; None where none has an axis."""
    return next((column.shape[0] for column in columns.values() if column.shape), None)
