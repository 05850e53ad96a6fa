"""Rows of a dataset with all their columns, as they are in its files, and files that they are written to."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from psgrad.config import DataConfig
from psgrad.config.data import data_format
from psgrad.data.sources.arrow_files import batches_of
from psgrad.data.sources.arrow_types import errors_of_damage
from psgrad.data.sources.csv_files import long_cells
from psgrad.data.sources.files import data_files
from psgrad.data.sources.json_files import lines_of, objects, objects_by_line, open_text, text_lines
from psgrad.data.sources.library_datasets import library_dataset
from psgrad.errors import DataError

Record = dict[str, Any]
Rows: TypeAlias = "pa.Table | list[Record]"

ROW_SUFFIXES = (".csv", ".jsonl", ".parquet")
_ARROW = ("parquet", "arrow", "feather")
_TEXT = ("csv", "tsv", "json", "jsonl", "txt")
_ROWS_PER_PART = 4096


def has_whole_rows(data: DataConfig) -> bool:
    """Whether rows can be read with all columns: of tables, not of arrays, images and code."""
    if data.path is not None:
        return data_format(data.paths[0]) in (*_ARROW, *_TEXT)
    return data.dataset is not None


def whole_rows(
    data: DataConfig, base: Path, places: Collection[int], groups: Collection[str] | None = None
) -> tuple[Rows, int]:
    """(the rows at these places, counted from 0, in the order of the dataset, with all columns; how many rows
    there are). groups: in place of places, what the column `data.group` of the rows holds. Cells of csv are
    text, as they are spelled. Raises DataError.
    """
    kept: list[Rows] = []
    names: dict[str, None] = {}
    count = 0
    for part in _parts(data, base):
        if not isinstance(part, pa.Table):
            names.update(dict.fromkeys(name for row in part for name in row))
        if groups is None:
            mask = [place in places for place in range(count, count + len(part))]
        else:
            mask = [str(group) in groups for group in _column(part, str(data.group))]
        kept.append(
            part.filter(pa.array(mask, pa.bool_()))
            if isinstance(part, pa.Table)
            else [row for row, wanted in zip(part, mask, strict=True) if wanted]
        )
        count += len(part)
    if kept and isinstance(kept[0], pa.Table):
        return pa.concat_tables(kept, promote_options="permissive"), count
    records = [row for part in kept for row in part]
    if not records:  # a table of no rows has its columns still
        return pa.table({name: pa.array([], pa.string()) for name in names}), count
    return records, count


def _column(part: Rows, name: str) -> list[Any]:
    if isinstance(part, pa.Table):
        found: list[Any] = part.column(name).to_pylist()
        return found
    return [row.get(name) for row in part]


def _parts(data: DataConfig, base: Path) -> Iterator[Rows]:
    """All rows of a dataset, part by part."""
    if data.dataset is not None:
        dataset = library_dataset(data, base).with_format("arrow")
        yield from (
            dataset[start : start + _ROWS_PER_PART] for start in range(0, len(dataset), _ROWS_PER_PART)
        )
        return
    for path in data_files(data, base):
        with errors_of_damage(path, data_format(path)):
            if data_format(path) == "parquet":
                file = pq.ParquetFile(path)
                yield from (pa.Table.from_batches([batch]) for batch in file.iter_batches())
            elif data_format(path) in _ARROW:
                schema, batches = batches_of(pa.memory_map(str(path)).read_buffer())
                yield from (pa.Table.from_batches([batch], schema) for batch in batches)
            else:
                records = _records(path)
                while part := list(islice(records, _ROWS_PER_PART)):
                    yield part


def _records(path: Path) -> Iterator[Record]:
    """The rows of a file of text: values of JSON, else cells as text. Blank lines are no rows."""
    kind = data_format(path)
    if kind == "json":
        yield from objects(path)
    elif kind == "jsonl":
        yield from objects_by_line(path)
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
            raise DataError(
                f"the rows can't be written as parquet: {str(error).splitlines()[0]}",
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
        raise DataError("the rows hold bytes, such as images", hint="write a .parquet file")
    return str(value)
