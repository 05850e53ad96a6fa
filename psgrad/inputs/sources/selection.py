"""Some rows of data files, written again in the files' own format: what is copied is not converted."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from psgrad.config.data import data_format
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.sources.arrow_columns import errors_of_damage, is_list, kind_of
from psgrad.inputs.sources.file_checks import as_line
from psgrad.inputs.sources.source import BatchSource, KeptRows, Source, source_for
from psgrad.inputs.sources.source_rows import SourceRows
from psgrad.plugins import SOURCES, own_classes

Kept = npt.NDArray[np.bool_]
_ROWS_PER_PART = 4096
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def require_format(files: Sequence[Path], output: Path) -> None:
    """Raises ConfigError where rows of these files can't be written to a file of this name."""
    source, wanted = source_for(files[0]), data_format(output)
    if type(source).write is Source.write:
        raise ConfigError(
            f"rows of .{source.name} files can't be written again",
            expected=f"one of {', '.join(own_classes(SOURCES))}",
        )
    own = own_classes(SOURCES).items() if isinstance(source, BatchSource) else ()
    others = [name for name, each in own if issubclass(each, BatchSource) and name != source.name]
    if wanted not in (source.name, *others):
        also = f", or .{', .'.join(others)}" if others else ""
        raise ConfigError(
            f"{output} ends in .{wanted}, and the rows are those of .{source.name} files",
            expected=f"a file that ends in .{source.name}{also}: columns are copied, and not converted",
        )


def require_list_format(output: Path) -> None:
    """Raises ConfigError where a list of images can't be written to a file of this name."""
    if output.suffix.lower() not in (".txt", ".csv"):
        raise ConfigError(
            f"{output} ends in {output.suffix}, and the rows are images of a folder",
            expected="a .txt file of their paths in it, or a .csv file with file_name and label",
        )


def write_list(rows: pa.Table, output: Path, file: BinaryIO) -> None:
    """Write the paths of images in their folder; to a csv file as the metadata file of such a folder."""
    names = ["file_name", *rows.column_names[1:]]
    if output.suffix.lower() == ".txt":
        file.write("".join(f"{path}\n" for path in rows.column(0).to_pylist()).encode())
    else:
        pyarrow.csv.write_csv(rows.rename_columns(names), file)


def write_selected(files: Sequence[Path], kept: Kept, output: Path, file: BinaryIO) -> None:
    """Write the rows of some files for which `kept` is true; the suffixes of `output` say how.

    Raises DataError where the files have another number of rows.
    """
    rows = KeptRows(kept, ", ".join(map(str, files[:3])))
    source = source_for(files[0])
    compression = _COMPRESSED.get(output.suffix.lower())
    target: Any = file
    if compression is not None:  # over a copy of the descriptor, as it closes what it writes to
        target = pa.CompressedOutputStream(os.fdopen(os.dup(file.fileno()), "wb"), compression)
    with errors_of_damage(files[0], source.name):
        source.write(files, rows, target, source if compression else source_for(output))
    if compression is not None:
        target.close()
    rows.require_all()


def write_table(rows: SourceRows, schema: pa.Schema, kept: Kept, output: Path, file: BinaryIO) -> None:
    """Write the rows of a table for which `kept` is true as jsonl, parquet or arrow, by the suffix of
    `output`.

    Args:
        rows: with all columns.
        schema: the same columns with the metadata of the source.

    Raises DataError where they are not as many as `kept`, or where JSON can't have what they hold.
    """
    left = KeptRows(kept, rows.source)
    writer: Any = _JSONLines(file, output)
    if output.suffix != ".jsonl":
        source = source_for(output)
        assert isinstance(source, BatchSource)
        writer = source.writer(file, schema)
    for start in range(0, rows.count, _ROWS_PER_PART):
        table = rows.read(start, min(start + _ROWS_PER_PART, rows.count))
        writer.write_table(table.filter(pa.array(left.next(table.num_rows))).cast(schema))
    writer.close()
    left.require_all()


class _JSONLines:
    """Writes tables as objects, one a line."""

    def __init__(self, file: BinaryIO, output: Path) -> None:
        self._file, self._output = file, output

    def write_table(self, table: pa.Table) -> None:
        try:
            for row in table.to_pylist():
                self._file.write(as_line(json.dumps(row, ensure_ascii=False)))
        except TypeError as error:
            kinds = [f"{field.name} ({field.type})" for field in table.schema if not _is_json(field.type)]
            raise DataError(
                f"{self._output} can't hold the columns {', '.join(kinds)}: {error}",
                expected="a .parquet or .arrow file for bytes, dates and images",
            ) from error

    def close(self) -> None:
        """Every line is written by now."""


def _is_json(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    if is_list(kind):
        return _is_json(kind.value_type)
    return kind_of(kind) in ("nothing", "true and false", "whole numbers", "fractions", "text")
