"""Rows of a dataset with all their columns, as they are in its files, and files that they are written to."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from psgrad.config import DataConfig
from psgrad.config.data import data_format
from psgrad.data.sources.arrow_types import errors_of_damage
from psgrad.data.sources.formats.arrow import batches_of
from psgrad.data.sources.formats.csv import long_cells
from psgrad.data.sources.formats.json import objects
from psgrad.data.sources.library_datasets import library_dataset
from psgrad.data.sources.source import data_files
from psgrad.data.sources.text_files import lines_of, open_text, text_lines
from psgrad.errors import DataError

Record = dict[str, Any]
Rows: TypeAlias = "pa.Table | list[Record]"

ROW_SUFFIXES = (".csv", ".jsonl", ".parquet")
_ARROW = ("parquet", "arrow", "feather")
_TEXT = ("csv", "tsv", "json", "jsonl", "txt")


def has_whole_rows(data: DataConfig) -> bool:
    """Whether rows can be read with all columns: of tables, not of arrays, archives, images and code."""
    if data.path is not None:
        return data_format(data.paths[0]) in (*_ARROW, *_TEXT)
    return data.dataset is not None


class RowFilter:
    """Decides which rows are kept, asked once for each in their order.

    Args:
        chosen: of a row's place, counted from 0, and of its group, whether it is kept.
        group: the column of groups; None without one.

    Attributes:
        seen: how many rows there have been.
    """

    def __init__(self, chosen: Callable[[int, Any], bool], group: str | None = None) -> None:
        self._chosen, self.group, self.seen = chosen, group, 0

    def keeps(self, group: Any = None) -> bool:
        """Whether the next row is kept."""
        self.seen += 1
        return self._chosen(self.seen - 1, group)


def whole_rows(data: DataConfig, base: Path, rows: RowFilter) -> Rows:
    """The kept rows of a dataset, in its order, with all columns; cells of csv are text, as they are spelled.
    Raises DataError.
    """
    if data.dataset is not None:
        table = library_dataset(data, base)
        groups = [None] * len(table) if rows.group is None else table[rows.group]
        kept = np.flatnonzero([rows.keeps(group) for group in groups])
        return table.select(kept).with_format("arrow")[:]
    tables: list[pa.Table] = []
    records: list[Record] = []
    names: dict[str, None] = {}
    for path in data_files(data, base):
        with errors_of_damage(path, data_format(path)):
            if data_format(path) in _ARROW:
                tables.append(_kept_batches(path, rows))
            else:
                group = rows.group or ""
                for record in _records(path):
                    names.update(dict.fromkeys(record))
                    if rows.keeps(record.get(group)):
                        records.append(record)
    if not tables and not records:  # a table of no rows has its columns still
        return pa.table({name: pa.array([], pa.string()) for name in names})
    return pa.concat_tables(tables, promote_options="permissive") if tables else records


def _kept_batches(path: Path, rows: RowFilter) -> pa.Table:
    schema, batches = _batches(path)
    kept = []
    for batch in batches:
        groups = [None] * len(batch) if rows.group is None else batch.column(rows.group).to_pylist()
        kept.append(batch.filter(pa.array([rows.keeps(group) for group in groups], pa.bool_())))
    return pa.Table.from_batches(kept, schema)


def _batches(path: Path) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    """The schema of a file of Arrow's or Parquet's, and its rows, batch by batch."""
    if data_format(path) == "parquet":
        file = pq.ParquetFile(path)
        return file.schema_arrow, file.iter_batches()
    return batches_of(pa.memory_map(str(path)).read_buffer())


def _records(path: Path) -> Iterator[Record]:
    """The rows of a file of text: values of JSON, else cells as text. Blank lines are no rows."""
    kind = data_format(path)
    if kind == "json":
        yield from objects(path)
    elif kind == "jsonl":
        yield from (json.loads(line) for _, line in text_lines(path))
    elif kind == "txt":
        yield from ({"text": line} for _, line in text_lines(path))
    else:
        with open_text(path) as file, long_cells():
            yield from csv.DictReader(lines_of(path, file), delimiter="\t" if kind == "tsv" else ",")


# -- what is written -----------------------------------------------------------------------------------------


def content_of(rows: Rows, suffix: str) -> bytes:
    """Rows as the content of a file that ends in .csv, .jsonl or .parquet. Raises DataError for values that
    the format does not have.
    """
    if suffix == ".parquet":
        try:
            table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"the rows can't be written as parquet: {reason}",
                hint="write a .jsonl file",
            ) from error
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        return buffer.getvalue()
    records = rows.to_pylist() if isinstance(rows, pa.Table) else rows
    if suffix == ".jsonl":
        return "".join(f"{_json(record)}\n" for record in records).encode()
    names = list(dict.fromkeys(name for record in records for name in record))
    names = rows.column_names if isinstance(rows, pa.Table) else names
    text = _csv(names, records, csv.QUOTE_MINIMAL)
    # A cell with a carriage return is left bare, and readers would begin a new row inside it.
    return (_csv(names, records, csv.QUOTE_ALL) if "\r" in text else text).encode()


def _csv(names: Sequence[str], records: list[Record], quoting: Any) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    writer.writerow(names)
    for record in records:
        cells = (record.get(name) for name in names)
        writer.writerow([_json(cell) if isinstance(cell, list | dict | bytes) else cell for cell in cells])
    return text.getvalue()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_as_text)


def _as_text(value: Any) -> str:
    """A value that JSON does not have, such as a date."""
    if isinstance(value, bytes):
        raise DataError(
            "the rows hold bytes, such as images",
            hint="write a .parquet file",
        )
    return str(value)
