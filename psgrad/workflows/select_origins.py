"""Where the rows of a run came from, and how some of them are written again. Without torch."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pandas as pd
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.image_files import folder_rows, metadata_of, with_names
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
from psgrad.inputs.sources.source import data_files

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
            if not source.resolve().is_relative_to(self._folder.resolve()):
                raise DataError(
                    f"the image {name} is outside of {self._folder}",
                    expected="images in the folder, as the others are",
                    next_step=f"name a file of rows, such as clean{(self._metadata or source).suffix}",
                )
            target = folder / name
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
