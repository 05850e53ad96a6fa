"""The finished part of a pass over the samples, kept as shards, so that a killed run continues after the last
one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.storage.folders import SHARDS, RunFolder, packed

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

_ORDER = "order"


@dataclass(frozen=True)
class Kept:
    """The finished part of a pass: its first rows, in order.

    rows: how many. table: a row a sample, its columns of one number (or text) a sample. arrays: name ->
        [rows, ...], its other columns. state: what was gathered over these rows.
    """

    rows: int = 0
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    arrays: Arrays = field(default_factory=dict)
    state: Arrays = field(default_factory=dict)


class Shards:
    """The shards of one pass: parts/<name>/00000.parquet with the table, beside it, behind an underscore so
    that readers of the folder skip them, the arrays, and the state after it.

    The parquet file is written last, and completes the shard: before that it does not exist. `counted`: its
    rows are the finished samples of the run.
    """

    def __init__(self, folder: RunFolder, name: str, counted: bool = False) -> None:
        self._folder, self._name, self._counted = folder, name, counted
        self._count = 0
        self._rows = 0

    def append(self, table: pd.DataFrame, arrays: Arrays, state: Arrays) -> None:
        """Store these rows durably, and all that was gathered up to them. Raises OutputError."""
        about = _about(self._rows, len(table))
        self._folder.write_bytes(
            self._name_of("arrays", self._count), packed(arrays, {**about, _ORDER: json.dumps(list(arrays))})
        )
        self._folder.write_bytes(
            self._name_of("state", self._count), packed(state, {**about, _ORDER: json.dumps(list(state))})
        )
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        self._folder.write_bytes(self._name_of("table", self._count), buffer.getbuffer())
        if self._count:
            self._path("state", self._count - 1).unlink(missing_ok=True)
        self._count += 1
        self._set_rows(self._rows + len(table))

    def read(self) -> Kept:
        """The complete shards, from the first row on; shards behind one that is damaged or missing are
        ignored, and written anew. `append` goes on from here.
        """
        result: list[tuple[pd.DataFrame, Arrays]] = []
        while (shard := self._shard(len(result), sum(len(table) for table, _ in result))) is not None:
            result.append(shard)
        # The state goes with the last shard alone: those before it have none, but for the moment of writing.
        while result:
            state = self._state(
                len(result) - 1, sum(len(table) for table, _ in result[:-1]), len(result[-1][0])
            )
            if state is not None:
                break
            result.pop()
        else:
            state = {}
        self._count = len(result)
        self._set_rows(sum(len(table) for table, _ in result))
        if not result:
            return Kept()
        table = pd.concat([table for table, _ in result], ignore_index=True)
        arrays = {name: np.concatenate([parts[name] for _, parts in result]) for name in result[0][1]}
        return Kept(self._rows, table, arrays, state or {})

    def _set_rows(self, rows: int) -> None:
        self._rows = rows
        if self._counted:
            self._folder.rows = rows

    def _name_of(self, kind: str, number: int) -> str:
        return (
            f"{SHARDS}/{self._name}/{number:05d}.parquet"
            if kind == "table"
            else f"{SHARDS}/{self._name}/_{number:05d}.{kind}.safetensors"
        )

    def _path(self, kind: str, number: int) -> Path:
        return self._folder.path / self._name_of(kind, number)

    def _shard(self, number: int, first: int) -> tuple[pd.DataFrame, Arrays] | None:
        try:
            table = pd.read_parquet(self._path("table", number))
        except (OSError, ValueError):  # missing or damaged: pyarrow's own errors are ValueErrors
            return None
        arrays = _unpacked(self._path("arrays", number), _about(first, len(table)))
        return None if arrays is None else (table, arrays)

    def _state(self, number: int, first: int, rows: int) -> Arrays | None:
        return _unpacked(self._path("state", number), _about(first, rows))


def _about(first: int, rows: int) -> dict[str, str]:
    return {"first": str(first), "rows": str(rows)}


def _unpacked(path: Path, about: Mapping[str, str]) -> Arrays | None:
    """The arrays of a file; None if it is missing, damaged, or of other rows."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            # A file has its arrays in an order of its own, and sums depend on the order.
            order = json.loads(metadata.pop(_ORDER, "null"))
            if metadata != dict(about) or sorted(order) != sorted(file.keys()):
                return None
            return {name: file.get_tensor(name) for name in order}
    except (OSError, ValueError, TypeError, SafetensorError):
        return None
