"""Some rows of data files of tables, copied into one file: csv, jsonl, parquet, or lines of text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from psgrad.data.sources.arrow_columns import errors_of_damage
from psgrad.data.sources.file_checks import lines_of, open_text, text_lines
from psgrad.data.sources.formats.csv import CSV, long_cells
from psgrad.data.sources.formats.json import JSON, TXT, objects
from psgrad.data.sources.source import BatchSource, LineSource, Source, source_for
from psgrad.errors import DataError

Kept = npt.NDArray[np.bool_]


class KeptRows:
    """Which of the next rows are kept, asked in order.

    Args:
        kept: [n] bool.
        source: the data in words.
    """

    def __init__(self, kept: Kept, source: str) -> None:
        self._kept, self._source, self._at = kept, source, 0

    def next(self, count: int = 1) -> Kept:
        """Which of the next `count` rows are kept, [count] bool. Raises DataError where fewer are left."""
        found = self._kept[self._at : self._at + count]
        self._at += count
        if len(found) < count:
            self.require_all()
        return found

    def require_all(self) -> None:
        """Raises DataError unless just all rows were asked for."""
        if self._at != len(self._kept):
            raise DataError(
                f"{self._source} has {'more' if self._at > len(self._kept) else 'fewer'} rows than the run's"
                f" dataset, which had {len(self._kept):,}",
                cause="the files were changed after the run",
            )


def row_suffixes(source: Source) -> tuple[str, ...]:
    """The suffixes of files into which rows of this format can be copied; none of arrays and archives."""
    if isinstance(source, CSV):
        return (".csv", ".tsv")
    if isinstance(source, TXT):
        return (".txt",)
    if isinstance(source, LineSource | JSON):
        return (".jsonl",)
    return (".parquet",) if isinstance(source, BatchSource) else ()


def copy_rows(files: Sequence[Path], kept: Kept, output: Path, file: BinaryIO) -> None:
    """Write the rows of some files for which `kept` is true. output: a name with one of their row_suffixes.

    Raises DataError where the files have another number of rows, or can't be in one file.
    """
    rows = KeptRows(kept, ", ".join(map(str, files[:3])))
    source = source_for(files[0])
    with errors_of_damage(files[0], source.name):
        if isinstance(source, CSV):
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            delimiter = "\t" if output.suffix.lower() == ".tsv" else ","
            plain = csv.writer(text, delimiter=delimiter, lineterminator="\n")
            quoted = csv.writer(text, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
            with long_cells():
                for cells in _cells(files, source.delimiter, rows):
                    # The plain one leaves a carriage return without quotes, which then ends the row.
                    (quoted if any("\r" in cell for cell in cells) else plain).writerow(cells)
            text.detach()  # it flushes, and leaves the file open
        elif isinstance(source, BatchSource):
            _copy_batches(source, files, rows, file)
        else:
            for line in (line for path in files for line in _lines(source, path)):
                if rows.next()[0]:
                    file.write(f"{line}\n".encode())
    rows.require_all()


def _lines(source: Source, path: Path) -> Iterator[str]:
    """The rows of a file, a line each."""
    if isinstance(source, JSON):
        yield from (json.dumps(each, ensure_ascii=False) for each in objects(path))
    else:
        yield from (line for _, line in text_lines(path))


def _cells(files: Sequence[Path], delimiter: str, kept: KeptRows) -> Iterator[list[str]]:
    """The names of the columns, then the cells of each kept row as text, so that a number keeps its spelling.
    Blank lines are no rows.
    """
    first: list[str] | None = None
    for path in files:
        with open_text(path) as file:
            rows = (cells for cells in csv.reader(lines_of(path, file), delimiter=delimiter) if cells)
            names = next(rows, [])
            if first is None:
                first = names
                yield names
            elif names != first:
                raise DataError(
                    f"the header of {path} is not that of {files[0]}",
                    expected="the same columns in the same order, as one file has one header",
                )
            yield from (cells for cells in rows if kept.next()[0])


def _copy_batches(source: BatchSource, files: Sequence[Path], kept: KeptRows, file: BinaryIO) -> None:
    writer = None
    for path in files:
        with source.batches(path) as (schema, batches):
            writer = writer or pq.ParquetWriter(file, schema)
            for batch in batches:
                rows = batch.filter(pa.array(kept.next(batch.num_rows)))
                writer.write_table(pa.Table.from_batches([rows], schema=schema).cast(writer.schema))
    if writer is not None:
        writer.close()
