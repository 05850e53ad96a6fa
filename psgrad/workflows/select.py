"""`psgrad select`: the rows of a dataset, or of the groups of one, that a finished run chooses, written
again: where they came from, and how they are written. Without torch.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError, OutputError, OutputExistsError
from psgrad.inputs.image_files import folder_rows, metadata_of, with_names
from psgrad.inputs.sources.arrow_columns import plain
from psgrad.inputs.sources.file_checks import Wanted
from psgrad.inputs.sources.file_hashes import file_hashes
from psgrad.inputs.sources.library_datasets import LibraryRows, library_dataset, library_hashes, saved_to_disk
from psgrad.inputs.sources.selection import (
    Kept,
    require_format,
    require_list_format,
    write_list,
    write_selected,
    write_table,
)
from psgrad.inputs.sources.source import ArraySource, TableSource, data_files, source_of
from psgrad.results.analyze import rows_where
from psgrad.storage.durable_files import folder_atomically, written_atomically
from psgrad.storage.finished import finished_manifest, require_there

_LISTS = (".txt", ".csv", ".jsonl", ".parquet")
_TABLES = (".jsonl", ".parquet", ".arrow", ".feather")


def in_folder(output: Path) -> bool:
    """Whether the name of an output is that of a folder: it has no suffix."""
    return not output.suffix


class Origin(ABC):
    """Where the rows of a run came from.

    Attributes:
        files: those that the rows are in, none of which may be the output.
    """

    files: Sequence[Path] = ()

    @abstractmethod
    def hashes(self) -> list[str] | None:
        """What manifest.json has in `data.files` of the dataset as it is now; None where nothing is read
        again. Raises ConfigError and DataError.
        """

    @abstractmethod
    def require(self, output: Path) -> None:
        """Raises ConfigError where rows can't be written to a file or folder of this name."""

    @abstractmethod
    def write(self, kept: Kept, rows: pd.DataFrame, output: Path, file: BinaryIO) -> None:
        """Write rows into a file. kept: [n] of the dataset. rows: the same ones, as samples.parquet has them.
        Raises DataError.
        """

    def write_folder(self, kept: Kept, folder: Path) -> None:
        """Write rows into a new folder. Raises DataError."""
        raise NotImplementedError


def origin_of(data: DataConfig, base: Path) -> Origin:
    """Where the rows of a dataset are."""
    if data.images is not None:
        return _Images(data, base)
    if data.dataset is not None and not data.streaming:
        return _LibraryDataset(data, base)
    return _Files(data, base) if data.path is not None else _Code(data)


class _Files(Origin):
    def __init__(self, data: DataConfig, base: Path) -> None:
        self.files = data_files(data, base)

    def hashes(self) -> list[str]:
        return file_hashes(self.files)

    def require(self, output: Path) -> None:
        require_format(self.files, output)

    def write(self, kept: Kept, rows: pd.DataFrame, output: Path, file: BinaryIO) -> None:
        write_selected(self.files, kept, output, file)


class _Images(Origin):
    """A folder of images: a list of them, rows of its metadata file, or another such folder."""

    def __init__(self, data: DataConfig, base: Path) -> None:
        self._data, self._base = data, base
        assert data.images is not None
        self._folder = base / data.images
        self._metadata = metadata_of(self._folder)
        self.files = [self._metadata or self._folder]

    def hashes(self) -> list[str]:
        return [folder_rows(self._data, self._base).fingerprint]

    def require(self, output: Path) -> None:
        if in_folder(output):
            if output.resolve().is_relative_to(self._folder.resolve()):
                raise ConfigError(
                    f"{output} is in the folder of images itself", next_step="name a folder beside it"
                )
        elif self._metadata is not None:
            require_format(self.files, output)
        else:
            require_list_format(output)

    def write(self, kept: Kept, rows: pd.DataFrame, output: Path, file: BinaryIO) -> None:
        if self._metadata is not None:
            write_selected(self.files, kept, output, file)
        else:
            write_list(self._table(kept), output, file)

    def write_folder(self, kept: Kept, folder: Path) -> None:
        for name in self._table(kept).column(0).to_pylist():
            source = self._folder / name
            target = folder / name  # inside, as the reader refuses a name that leads out
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(source, target)
            except FileNotFoundError as error:
                raise DataError(f"the image {source} is not there") from error
        if self._metadata is not None:
            with (folder / self._metadata.name).open("wb") as file:
                write_selected(self.files, kept, self._metadata, file)

    def _table(self, kept: Kept) -> pa.Table:
        """The rows, the paths of their images in the first column."""
        rows, image = folder_rows(self._data, self._base), with_names(self._data, self._base).image
        table = rows.read(0, rows.count)
        names = [image, *(name for name in table.column_names if name != image)]
        return table.select(names).filter(pa.array(kept))


class _LibraryDataset(Origin):
    """A dataset of the `datasets` library: a table, or a folder of save_to_disk."""

    def __init__(self, data: DataConfig, base: Path) -> None:
        self._data, self._dataset = data, library_dataset(data, base)
        folder = base / str(data.dataset)
        self.files = [folder] if folder.is_dir() else []

    def hashes(self) -> list[str]:
        return library_hashes(self._data, self._dataset)

    def require(self, output: Path) -> None:
        if not in_folder(output) and output.suffix.lower() not in _TABLES:
            raise ConfigError(
                f"{output} ends in {output.suffix}, and the rows are those of the dataset"
                f" {self._data.dataset}",
                expected=f"a file that ends in one of {', '.join(_TABLES)}, or a name without a suffix for a"
                " folder of save_to_disk",
            )

    def write(self, kept: Kept, rows: pd.DataFrame, output: Path, file: BinaryIO) -> None:
        found = LibraryRows(self._dataset, self._dataset.column_names, str(self._data.dataset))
        write_table(found, self._dataset.features.arrow_schema, kept, output, file)

    def write_folder(self, kept: Kept, folder: Path) -> None:
        saved_to_disk(self._dataset.select(np.flatnonzero(kept)), folder)


class _Code(Origin):
    """Rows that code makes, or that were streamed: their ids are written."""

    def __init__(self, data: DataConfig) -> None:
        self._source = data.source

    def hashes(self) -> None:
        return None

    def require(self, output: Path) -> None:
        if output.suffix.lower() not in _LISTS:
            ending = f"ends in {output.suffix}" if output.suffix else "has no suffix"
            raise ConfigError(
                f"{output} {ending}, and the rows come from {self._source}, which is no file",
                expected=f"a file that ends in one of {', '.join(_LISTS)}, for the ids of the rows",
                next_step="select by them where the rows are made",
            )

    def write(self, kept: Kept, rows: pd.DataFrame, output: Path, file: BinaryIO) -> None:
        place = "dataset_row" if "dataset_row" in rows else "index"
        table = pd.DataFrame({"id": rows["id"], "index": rows[place]})
        if output.suffix.lower() == ".parquet":
            table.to_parquet(file, index=False)
        elif output.suffix.lower() == ".csv":
            file.write(table.to_csv(index=False).encode())
        elif output.suffix.lower() == ".jsonl":
            file.write(table.to_json(orient="records", lines=True, force_ascii=False).encode())
        else:
            lines = [str(each) for each in table["id"]]
            broken = [each for each in lines if "\n" in each or "\r" in each]
            if broken:
                raise DataError(
                    f"the id {broken[0]!r} has a line break",
                    expected="ids of one line each in a .txt file",
                    next_step="write a .csv or .jsonl file",
                )
            file.write("".join(f"{each}\n" for each in lines).encode())


@dataclass(frozen=True)
class Selection:
    """What was written: `rows` of the `measured` rows of a run, whose dataset has `in_dataset`."""

    output: Path
    rows: int
    measured: int
    in_dataset: int


def select(run: Path, where: str, *, output: Path, drop: bool = False, overwrite: bool = False) -> Selection:
    """Write the rows of a finished run's dataset for which a condition on the columns of samples.parquet
    holds, or with `drop` the others: the whole of `psgrad select`.

    Raises ConfigError for a condition or an output that can't be, DataError where the dataset's files are not
    those of the run.
    """
    manifest = finished_manifest(run)
    data, base = _dataset(run, manifest)
    origin = _unchanged(run, manifest, data, base)
    origin.require(output)
    _require_free(output, origin, overwrite)
    frame = _samples(run / "samples.parquet")
    chosen = rows_where(frame, where, "--where") ^ drop
    count = int((manifest.get("counts") or {}).get("in_dataset") or len(frame))
    if data.group is None:
        kept = np.zeros(count, bool)
        kept[frame["dataset_row" if "dataset_row" in frame else "index"][chosen]] = True
    else:
        groups = set(map(str, frame["id"][chosen]))
        kept = np.array([str(each) in groups for each in _groups(data, base)], bool)
    try:
        if in_folder(output):
            with folder_atomically(output) as folder:
                origin.write_folder(kept, folder)
        else:
            with written_atomically(output) as file:
                origin.write(kept, frame[chosen], output, file)
    except OSError as error:
        raise OutputError(f"{output} can't be written: {error.strerror or error}") from error
    return Selection(output, int(chosen.sum()), len(frame), count)


def _require_free(output: Path, origin: Origin, overwrite: bool) -> None:
    """Raises OutputExistsError where there is something that may not be replaced, ConfigError where it is the
    dataset.
    """
    if any(output.resolve() == file.resolve() for file in origin.files) and overwrite:
        raise ConfigError(f"{output} is a file of the dataset itself", next_step="name another file")
    if output.exists() and (in_folder(output) or not overwrite):
        raise OutputExistsError(
            f"{output} exists",
            next_step="name another folder"
            if in_folder(output)
            else "name another file, or replace it with --overwrite",
        )


def _samples(path: Path) -> pd.DataFrame:
    """The table of a run, the columns of one value a row."""
    try:
        table = pq.read_table(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read: {error}", next_step="run psgrad analyze again") from error
    require_there(table.column_names, ["index"], path)
    frame: pd.DataFrame = table.to_pandas()
    return frame.assign(label=frame["target"]) if "target" in frame and "label" not in frame else frame


def _dataset(run: Path, manifest: dict[str, Any]) -> tuple[DataConfig, Path]:
    """(the dataset of a run, what its paths are relative to). Raises DataError."""
    try:
        data = DataConfig.model_validate((manifest.get("config") or {}).get("data"), strict=False)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise DataError(f"the dataset of the run in {run} is not known: {reason}") from error
    return data, Path(str(manifest.get("config_folder") or "."))


def _unchanged(run: Path, manifest: dict[str, Any], data: DataConfig, base: Path) -> Origin:
    """Where a run's rows came from. Raises DataError where they are not as they were."""
    relative = None if base.is_absolute() else "the run's config was named by a relative path"
    here = "call psgrad select in the folder where psgrad analyze was called" if relative else None
    if data.images is not None and not (base / data.images).exists():
        raise _gone(base / data.images, relative, here)
    origin = origin_of(data, base)
    missing = [file for file in origin.files if not file.exists()]
    if missing:
        raise _gone(missing[0], relative, here)
    now, then = origin.hashes(), (manifest.get("data") or {}).get("files")
    if now is not None and then is None:
        raise DataError(
            f"the run in {run} is of an older psgrad, which kept no hashes of the dataset's files",
            next_step="run psgrad analyze again",
        )
    if now is not None and now != then:
        named = ", ".join(map(str, origin.files[:3])) or data.source
        raise DataError(
            f"the files of the dataset, {named}, are not those of the run in {run}",
            expected="the files as they were: rows are matched by their place",
            next_step="run psgrad analyze again on the files as they are now",
        )
    return origin


def _gone(file: Path, cause: str | None, next_step: str | None) -> DataError:
    return DataError(f"the dataset's file {file} is not there", cause=cause, next_step=next_step)


def _groups(data: DataConfig, base: Path) -> list[Any]:
    """The group of each row. Raises ConfigError where the column can't be read."""
    assert data.group is not None
    if data.images is not None:
        return plain(folder_rows(data, base).column(data.group)).to_pylist()  # type: ignore[no-any-return]
    if data.path is not None:
        source, paths = source_of(data, base)
        wanted = Wanted(ids=(data.group,))
        if isinstance(source, TableSource):
            tables = [source.rows(path, wanted) for path in paths]
            return [each for table in tables for each in plain(table.column(data.group)).to_pylist()]
        if isinstance(source, ArraySource):
            return source.arrays(paths[0], wanted)[data.group].tolist()  # type: ignore[no-any-return]
    raise ConfigError(
        f"the groups of the rows of {data.source} can't be read again",
        expected="a run on data.path, of a table or arrays, or on data.images",
        next_step="take ids from samples.parquet, and select by them where the rows are made",
    )
