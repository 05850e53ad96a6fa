"""Datasets of one array for each column: npz, held in memory, of which nothing is ever unpickled; and
safetensors, whose rows are read from the disk when asked for.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import safetensors
from numpy.lib import format as npy

from psgrad.data.sources.file_checks import Wanted, require_columns
from psgrad.data.sources.source import (
    ArraySource,
    Column,
    DataHeader,
    row_count,
)
from psgrad.errors import ConfigError, DataError

_KINDS = {"b": "boolean", "i": "integer", "u": "integer", "f": "fraction", "U": "text", "S": "text"}


class NPZ(ArraySource):
    """Named arrays, as numpy.savez writes them."""

    name: ClassVar[str] = "npz"

    def header(self, path: Path) -> DataHeader:
        _require_archive(path)
        columns = {}
        try:
            with zipfile.ZipFile(path) as archive:
                for entry in archive.namelist():
                    with archive.open(entry) as file:
                        version = npy.read_magic(file)
                        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                        shape, _, dtype = read(file)
                    kind = _KINDS.get(dtype.kind, dtype.name)
                    columns[entry.removesuffix(".npy")] = Column(kind, str(dtype), shape)
        except Exception as error:  # zipfile, zlib and numpy have a dozen errors for a damaged file
            raise unreadable(path, error) from error
        objects = {
            name: unreadable(path, ValueError("allow_pickle"))
            for name, column in columns.items()
            if column.dtype == "object"
        }
        return DataHeader(path, list(columns), columns, row_count(columns), unusable=objects)

    def arrays(self, path: Path, wanted: Wanted) -> dict[str, Any]:
        """The columns that are named, in memory; nothing in them is ever unpickled."""
        _require_archive(path)
        try:
            with np.load(path, allow_pickle=False) as file:
                require_columns(wanted.columns, file.files, str(path))
                return {name: file[name] for name in wanted.columns}
        except (DataError, ConfigError):
            raise
        except Exception as error:  # as above
            raise unreadable(path, error) from error


def _require_archive(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(4)
    if head != b"PK\x03\x04":
        raise DataError(f"{path} is no npz archive", expected="named arrays, as numpy.savez writes them")


def unreadable(path: Path, error: Exception) -> DataError:
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


class Safetensors(ArraySource):
    """Named tensors, as safetensors' save_file writes them."""

    name: ClassVar[str] = "safetensors"
    read_again: ClassVar[bool] = True

    def header(self, path: Path) -> DataHeader:
        columns = {}
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                for name in sorted(file.keys()):
                    found = file.get_slice(name)
                    dtype = found.get_dtype()
                    kind = "boolean" if dtype == "BOOL" else "integer" if dtype[0] in "IU" else "fraction"
                    columns[name] = Column(kind, dtype, tuple(found.get_shape()))
        except Exception as error:
            raise damaged(path, error) from error
        return DataHeader(path, list(columns), columns, row_count(columns))

    def arrays(self, path: Path, wanted: Wanted) -> dict[str, Any]:
        """The columns that are named; rows are read from the disk when they are asked for."""
        try:
            file: Any = safetensors.safe_open(path, framework="pt", device="cpu")
            require_columns(wanted.columns, sorted(file.keys()), str(path))
            return {name: file.get_tensor(name) for name in wanted.columns}  # mapped: nothing is read yet
        except ConfigError:
            raise
        except Exception as error:
            raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> DataError:
    """The error for a safetensors file that can't be read."""
    return DataError(
        f"{path} is damaged: {error}",
        expected="a whole safetensors file",
        cause="an interrupted copy or download",
    )
