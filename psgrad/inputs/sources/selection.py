"""Some rows of data files, written again in the files' own format: what is copied is not converted."""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from psgrad.config.data import data_format
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.sources.arrow import errors_of_damage, is_list, kind_of
from psgrad.inputs.sources.files import open_text, text_lines
from psgrad.inputs.sources.formats.tar import tar_files, tar_keys
from psgrad.inputs.sources.tables import Rows

Kept = npt.NDArray[np.bool_]
_ROWS_PER_PART = 4096
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def require_format(files: Sequence[Path], output: Path) -> None:
    """Raises ConfigError where rows of these files can't be written to a file of this name."""
    source, wanted = data_format(files[0]), data_format(output)
    if source not in _WRITERS:
        raise ConfigError(
            f"rows of .{source} files can't be written again", expected=f"one of {', '.join(_WRITERS)}"
        )
    if source != wanted and not {source, wanted} <= _TABLES:
        also = f", or .{', .'.join(sorted(_TABLES - {source}))}" if source in _TABLES else ""
        raise ConfigError(
            f"{output} ends in .{wanted}, and the rows are those of .{source} files",
            expected=f"a file that ends in .{source}{also}: columns are copied, and not converted",
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
    rows = _Rows(kept, ", ".join(map(str, files[:3])))
    compression = _COMPRESSED.get(output.suffix.lower())
    target: Any = file
    if compression is not None:  # over a copy of the descriptor, as it closes what it writes to
        target = pa.CompressedOutputStream(os.fdopen(os.dup(file.fileno()), "wb"), compression)
    with errors_of_damage(files[0], data_format(files[0])):
        _WRITERS[data_format(files[0] if compression else output)](files, rows, target)
    if compression is not None:
        target.close()
    rows.require_all()


def write_table(rows: Rows, schema: pa.Schema, kept: Kept, output: Path, file: BinaryIO) -> None:
    """Write the rows of a table for which `kept` is true as jsonl, parquet or arrow, by the suffix of
    `output`.

    Args:
        rows: with all columns.
        schema: the same columns with the metadata of the source.

    Raises DataError where they are not as many as `kept`, or where JSON can't have what they hold.
    """
    left = _Rows(kept, rows.source)
    writer = (
        _JSONLines(file, output) if output.suffix == ".jsonl" else _ARROW[data_format(output)](file, schema)
    )
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
                self._file.write(_line(json.dumps(row, ensure_ascii=False)))
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


class _Rows:
    """Which of the next rows are kept, asked in order."""

    def __init__(self, kept: Kept, source: str) -> None:
        self._kept, self._source, self._at = kept, source, 0

    def next(self, count: int = 1) -> Kept:
        found = self._kept[self._at : self._at + count]
        self._at += count
        if len(found) < count:
            self.require_all()
        return found

    def require_all(self) -> None:
        if self._at != len(self._kept):
            raise DataError(
                f"{self._source} has {'more' if self._at > len(self._kept) else 'fewer'} rows than the run's"
                f" dataset, which had {len(self._kept):,}",
                cause="the files were changed after the run",
            )


def _csv(delimiter: str) -> Callable[[Sequence[Path], _Rows, BinaryIO], None]:
    def write(files: Sequence[Path], rows: _Rows, target: BinaryIO) -> None:
        first: list[str] | None = None
        for path in files:
            with open_text(path) as file:
                records = _records(file, delimiter)
                text, names = next(records, ("", []))
                if first is None:
                    first = names
                    target.write(_line(text))
                elif names != first:
                    raise DataError(
                        f"the header of {path} is not that of {files[0]}",
                        expected="the same columns in the same order, as one file has one header",
                    )
                for text, _ in records:
                    if rows.next()[0]:
                        target.write(_line(text))

    return write


def _records(file: io.TextIOBase | Any, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    """(text, cells) of each record, which may have several lines. Blank lines are none."""
    lines: list[str] = []

    def taken() -> Iterator[str]:
        for line in file:
            lines.append(line)
            yield line

    for cells in csv.reader(taken(), delimiter=delimiter):
        if cells:
            yield "".join(lines), cells
        lines.clear()


def _line(text: str) -> bytes:
    return (text if text.endswith("\n") else f"{text}\n").encode()


def _lines(files: Sequence[Path], rows: _Rows, target: BinaryIO) -> None:
    for path in files:
        for _, line in text_lines(path):
            if rows.next()[0]:
                target.write(_line(line))


def _json(files: Sequence[Path], rows: _Rows, target: BinaryIO) -> None:
    found: list[Any] = []
    around: dict[str, Any] | None = None
    for path in files:
        with open_text(path) as file:
            content = json.load(file)
        around = content if isinstance(content, dict) else around
        objects = content["data"] if isinstance(content, dict) else content
        found += [each for each, kept in zip(objects, rows.next(len(objects)), strict=True) if kept]
    whole = found if around is None else {**around, "data": found}
    target.write(json.dumps(whole, ensure_ascii=False, indent=1).encode() + b"\n")


def _tables(files: Sequence[Path]) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """(schema, batches) of each file."""
    for path in files:
        if data_format(path) == "parquet":
            with pq.ParquetFile(path) as parquet:
                yield parquet.schema_arrow, parquet.iter_batches()
            continue
        mapped = pa.memory_map(str(path))
        with closing(mapped):
            try:
                opened = pa.ipc.open_file(mapped)
                batches = (opened.get_batch(place) for place in range(opened.num_record_batches))
            except pa.ArrowInvalid:  # a stream, as datasets writes it
                opened = pa.ipc.open_stream(mapped)
                batches = iter(opened)
            yield opened.schema, batches


def _arrow(open_writer: Callable[[Any, pa.Schema], Any]) -> Callable[[Sequence[Path], _Rows, BinaryIO], None]:
    def write(files: Sequence[Path], rows: _Rows, target: BinaryIO) -> None:
        writer, first = None, None
        for schema, batches in _tables(files):
            if writer is None:
                writer, first = open_writer(target, schema), schema
            for batch in batches:
                kept = batch.filter(pa.array(rows.next(batch.num_rows)))
                writer.write_table(pa.Table.from_batches([kept], schema=schema).cast(first))
        if writer is not None:
            writer.close()

    return write


def _npz(files: Sequence[Path], rows: _Rows, target: BinaryIO) -> None:
    found: list[dict[str, Any]] = []
    arrays: Mapping[str, Any]
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            kept = rows.next(len(arrays[next(iter(arrays))]))
            found.append({name: arrays[name][kept] for name in arrays})
            _require_same_names(found, files)
    joined: dict[str, Any] = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    np.savez(target, **joined)


def _require_same_names(parts: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> None:
    if {*parts[-1]} != {*parts[0]}:
        raise DataError(
            f"the columns of {files[len(parts) - 1]} are not those of {files[0]}",
            expected="the same columns in all files, as one file has rows of one kind",
        )


def _safetensors(files: Sequence[Path], rows: _Rows, target: BinaryIO) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save

    found: list[dict[str, Any]] = []
    metadata = None
    for path in files:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() if metadata is None else metadata
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            kept = rows.next(len(next(iter(columns.values()))))
            found.append({name: each[kept].contiguous() for name, each in columns.items()})
            _require_same_names(found, files)
    target.write(save({name: torch.cat([part[name] for part in found]) for name in found[0]}, metadata))


def _tar(files: Sequence[Path], rows: _Rows, target: BinaryIO) -> None:
    """The files of an archive as they are there, in the same order; those that are no rows are left out."""
    names: set[str] = set()
    with tarfile.open(fileobj=target, mode="w|") as written:
        for path in files:
            keys = tar_keys(path)
            kept = dict(zip(keys, rows.next(len(keys)), strict=True))
            for key, member, content in tar_files(path):
                if not kept[key]:
                    continue
                if member.name in names:
                    raise DataError(
                        f"{path} has the file {member.name}, as another archive before it",
                        expected="a name of its own for each row, as they go into one archive",
                    )
                names.add(member.name)
                written.addfile(member, content)


_ARROW: Mapping[str, Callable[[Any, pa.Schema], Any]] = {
    "parquet": pq.ParquetWriter,
    "arrow": pa.ipc.new_file,
    "feather": pa.ipc.new_file,
}
_TABLES = {"parquet", "arrow", "feather"}
_WRITERS: Mapping[str, Callable[[Sequence[Path], _Rows, BinaryIO], None]] = {
    "csv": _csv(","),
    "tsv": _csv("\t"),
    "jsonl": _lines,
    "txt": _lines,
    "json": _json,
    **{name: _arrow(open_writer) for name, open_writer in _ARROW.items()},
    "tar": _tar,
    "npz": _npz,
    "safetensors": _safetensors,
}
