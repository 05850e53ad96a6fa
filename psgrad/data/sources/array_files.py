"""Datasets of one array for each column, its first axis the rows: npz, of which nothing is ever unpickled,
and safetensors, which is mapped from the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import safetensors

from psgrad.data.columns import ColumnRoles, not_numbers, require_columns
from psgrad.errors import DataError, PsgradError

_ZIP = b"PK\x03\x04"


def read_npz(path: Path, roles: ColumnRoles) -> pa.Table:
    """Some of the named arrays that numpy.savez wrote, in memory."""
    if path.open("rb").read(len(_ZIP)) != _ZIP:
        raise DataError(f"{path} is no npz archive; expected named arrays, as numpy.savez writes them")
    with _errors_of_damage(path), np.load(path, allow_pickle=False) as file:
        require_columns(roles.columns, file.files, path)
        return _table({name: file[name] for name in roles.columns}, path)


def read_safetensors(path: Path, roles: ColumnRoles) -> pa.Table:
    """Some of the named tensors that safetensors' save_file wrote, mapped from the file."""
    with _errors_of_damage(path):
        file: Any = safetensors.safe_open(path, framework="pt", device="cpu")
        require_columns(roles.columns, sorted(file.keys()), path)
        found = {name: file.get_tensor(name) for name in roles.columns}  # mapped: nothing is read yet
    # numpy lacks bfloat16 and the types of 8 bits.
    small = {name: x.is_floating_point() and x.element_size() < 4 for name, x in found.items()}
    return _table({name: (x.float() if small[name] else x).numpy() for name, x in found.items()}, path)


@contextmanager
def _errors_of_damage(path: Path) -> Iterator[None]:
    """What the libraries raise for a file without readable arrays becomes DataError."""
    try:
        yield
    except PsgradError:
        raise
    except Exception as error:  # zipfile, zlib, numpy and safetensors have a dozen errors for a damaged file
        if "allow_pickle" in str(error):
            raise DataError(
                f"{path} holds an array of Python objects, which is a pickle; it was not opened",
                hint="pad rows to one length before numpy.savez; save ids with numpy.array(ids, dtype=str)",
            ) from error
        raise DataError(
            f"{path} is damaged: {error}; expected a whole {path.suffix} file",
            hint="an interrupted copy or download",
        ) from error


def _table(arrays: Mapping[str, npt.NDArray[Any]], path: Path) -> pa.Table:
    """Arrays as the columns of a table, which are not copied. Raises DataError where their first axes differ,
    or where one is of no type that a table has.
    """
    for name, array in arrays.items():
        if not array.ndim:
            raise DataError(
                f"{name!r} in {path} is a single number; expected an array with one row per sample"
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DataError(
            f"the columns of {path} have different numbers of rows: {listed}",
        )
    return pa.table({name: _column(array, name) for name, array in arrays.items()})


def _column(array: npt.NDArray[Any], name: str) -> pa.Array:
    if array.dtype.kind not in "biufUS":
        raise not_numbers(name, array.dtype)
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    found = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        found = pa.FixedSizeListArray.from_arrays(found, size)
    return found
