"""The files of a config, each read by the reader of its suffix, as one table; and their hashes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.config.data import COMPRESSIONS, data_format
from psgrad.data.columns import ColumnRoles
from psgrad.data.sources.arrow_types import common_schema, errors_of_damage
from psgrad.data.sources.table_rows import TableRows, mapped
from psgrad.errors import ConfigError, DataError
from psgrad.plugins import located
from psgrad.run.identity import files_sha256
from psgrad.run.input_files import Stamp, require_file, require_unchanged, sha256_of

_READERS = {
    **dict.fromkeys(("csv", "tsv"), "psgrad.data.sources.csv_files:read_csv"),
    "jsonl": "psgrad.data.sources.json_files:read_jsonl",
    "json": "psgrad.data.sources.json_files:read_json",
    "txt": "psgrad.data.sources.json_files:read_txt",
    "parquet": "psgrad.data.sources.arrow_files:read_parquet",
    **dict.fromkeys(("arrow", "feather"), "psgrad.data.sources.arrow_files:read_arrow"),
    "npz": "psgrad.data.sources.array_files:read_npz",
    "safetensors": "psgrad.data.sources.array_files:read_safetensors",
}
_COMPRESSED = ("csv", "tsv", "jsonl", "json", "txt")
_MAPPED = ("arrow", "feather", "safetensors")  # from the files themselves, which must not change
_ARRAYS = ("npz", "safetensors")  # columns are arrays already: a list of them is not one vector
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
                    hint="check the path; it is relative to the config file's folder",
                )
        found += matches
    if len(set(found)) < len(found):
        twice = next(path for place, path in enumerate(found) if path in found[:place])
        raise ConfigError(f"data.path names {twice} twice; expected each file once")
    return found


def read_file(path: Path, roles: ColumnRoles) -> pa.Table:
    """Some columns of one file, in memory or mapped, by the reader of its suffix. Raises ConfigError for a
    column that is not there, DataError for a file that can't be used.
    """
    read: Any = located(_READERS[data_format(path)])
    table: pa.Table = read(path, roles)
    return table


def read_files(config: DataConfig, base: Path, roles: ColumnRoles) -> TableRows:
    """The rows of all files, one file after another. Raises ConfigError and DataError."""
    paths = [require_file(path, "dataset", DataError) for path in data_files(config, base)]
    form = data_format(paths[0])
    packed = [path for path in paths if path.suffix.lower() in COMPRESSIONS]
    if packed and form not in _COMPRESSED:
        raise DataError(
            f"{packed[0]} is compressed, which is not read for .{form} files",
            hint=f"decompress it; .{form} has a compression of its own, if it has any",
        )
    stamps = tuple(Stamp.of(path) for path in paths)
    tables = [read_file(path, roles) for path in paths]
    if len(tables) > 1:
        tables = _of_one_schema(paths, tables, roles)
    table = pa.concat_tables(tables)
    if form in ("csv", "tsv"):
        table = _with_whole_ids(table, roles.ids)
    fingerprint = files_sha256(paths)
    require_unchanged(stamps)
    return TableRows(
        table,
        str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else ""),
        fingerprint,
        tuple(paths),
        tuple(accumulate((each.num_rows for each in tables[:-1]), initial=0)),
        stamps=stamps if form in _MAPPED else (),
        stacks=form not in _ARRAYS,
    )


def _of_one_schema(paths: Sequence[Path], tables: Sequence[pa.Table], roles: ColumnRoles) -> list[pa.Table]:
    """The tables of files, all with the types that hold what each of them has."""
    filled = [(path, each.schema) for path, each in zip(paths, tables, strict=True) if each.num_rows]
    if not filled:
        return list(tables[:1])
    schema = common_schema(filled, {*roles.ids, *roles.texts})
    found = []
    for path, table in zip(paths, tables, strict=True):
        if not table.num_rows:  # which has no types
            table = schema.empty_table()
        elif not table.schema.equals(schema):
            with errors_of_damage(path, "rows like those of the other files"):
                table = mapped(schema, table.select(schema.names).to_batches())
        found.append(table)
    return found


def _with_whole_ids(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """The table with ids of text as whole numbers, where all of a column keep their spelling so."""
    for name in names:
        texts = table.column(name)
        try:
            numbers = texts.cast(pa.int64())
        except pa.ArrowInvalid:
            continue
        if numbers.cast(pa.string()).equals(texts):
            table = table.set_column(table.schema.get_field_index(name), name, numbers)
    return table


def hashes_of_files(data: DataConfig, base: Path) -> list[str] | None:
    """The hash of each file of a dataset, of a folder of images that of its listing; None where the dataset
    is not in files. Of a dataset of the datasets library that of the columns that are named.
    """
    if data.dataset is not None:
        from psgrad.data.sources.library_datasets import library_dataset, library_rows

        rows = library_rows(library_dataset(data, base), ColumnRoles.of(data).columns, data.dataset)
        return [rows.fingerprint]
    if data.images is not None:
        from psgrad.data.image_files import folder_rows

        return [folder_rows(data, base).fingerprint]
    return None if data.path is None else [sha256_of(path) for path in data_files(data, base)]
