"""The finished part of a pass over the samples, kept as shards, so that a killed run continues after them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.errors import DataError
from psgrad.run.folders import SHARDS, RunFolder, packed

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

_ORDER = "order"


@dataclass(frozen=True)
class Shard:
    """The columns of the rows first, ..., first + n - 1 of the dataset.

    table: one row for each sample, with the columns of one number (or text) for each. arrays: name -> [n,
    ...], its other columns.
    """

    first: int
    table: pd.DataFrame
    arrays: Arrays

    @property
    def rows(self) -> range:
        return range(self.first, self.first + len(self.table))


@dataclass(frozen=True)
class FinishedShards:
    """The finished part of a process's pass: its shards, in order, and what it gathered over their rows."""

    shards: list[Shard] = field(default_factory=list)
    state: Arrays = field(default_factory=dict)

    @property
    def ranges(self) -> list[range]:
        return [shard.rows for shard in self.shards]


class Shards:
    """The shards that one process writes for one pass: the table in parts/<name>/<part>/00000.parquet; beside
    it the arrays and the state after it, whose names begin with an underscore so that readers of the folder
    skip them.

    The parquet file is written last, and completes the shard: before that it does not exist. part: of the
    process, empty for a process alone. run: a hash of the identity of the run. counted: its rows are finished
    samples of the run.
    """

    def __init__(
        self, folder: RunFolder, name: str, run: str = "", part: str = "", counted: bool = False
    ) -> None:
        self._folder, self.name, self._run, self._counted = folder, name, run, counted
        self._prefix = "/".join(filter(None, (SHARDS, name, part)))
        self._count = 0
        self._rows = 0

    def append(self, first: int, table: pd.DataFrame, arrays: Arrays, state: Arrays) -> None:
        """Store rows from `first` on, durably, and what was gathered up to them. Raises OutputError."""
        about = {"first": str(first), "rows": str(len(table)), "run": self._run}
        for kind, content in (("arrays", arrays), ("state", state)):
            packed_content = packed(content, {**about, _ORDER: json.dumps(list(content))})
            self._folder.write_bytes(self._name_of(kind, self._count), packed_content)
        self._folder.write_table(self._name_of("table", self._count), table)
        if self._count:
            self._path("state", self._count - 1).unlink(missing_ok=True)
        self._count += 1
        self._set_rows(self._rows + len(table))

    def read(self) -> FinishedShards:
        """The complete shards; those behind one that is damaged or missing are ignored, and written anew.
        `append` goes on from here. Raises DataError for shards of another run.
        """
        result: list[Shard] = []
        while (shard := self._shard(len(result))) is not None:
            result.append(shard)
        # The state goes with the last shard alone: those before it have none, but for the moment of writing.
        state: Arrays | None = None
        while result and (state := self._state(len(result) - 1, result[-1])) is None:
            result.pop()
        self._count = len(result)
        self._set_rows(sum(len(shard.table) for shard in result))
        return FinishedShards(result, state or {})

    @staticmethod
    def parts(folder: RunFolder, name: str) -> list[str]:
        """The parts that a pass has in this folder, in order; the empty name for that of a process alone."""
        place = folder.path / SHARDS / name
        below = sorted(each.name for each in place.iterdir() if each.is_dir()) if place.is_dir() else []
        return ["", *below]

    def _set_rows(self, rows: int) -> None:
        self._rows = rows
        if self._counted:
            self._folder.rows = rows

    def _name_of(self, kind: str, number: int) -> str:
        file = f"{number:05d}.parquet" if kind == "table" else f"_{number:05d}.{kind}.safetensors"
        return f"{self._prefix}/{file}"

    def _path(self, kind: str, number: int) -> Path:
        return self._folder.path / self._name_of(kind, number)

    def _shard(self, number: int) -> Shard | None:
        try:
            table = pd.read_parquet(self._path("table", number))
        except (OSError, ValueError):  # missing or damaged: pyarrow's own errors are ValueErrors
            return None
        arrays, first, rows, run = _unpacked(self._path("arrays", number))
        if arrays is None or rows != len(table):
            return None
        if run != self._run:
            raise DataError(
                f"{self._path('table', number)} is of another run; expected parts of one config, model and"
                " dataset",
                hint="remove the folder that it lies in, and run that part again",
            )
        return Shard(first, table, arrays)

    def _state(self, number: int, shard: Shard) -> Arrays | None:
        state, first, rows, _ = _unpacked(self._path("state", number))
        return state if (first, rows) == (shard.first, len(shard.table)) else None


def _unpacked(path: Path) -> tuple[Arrays | None, int, int, str]:
    """(the arrays of a file, None if it is missing or damaged; the first of its rows; how many; whose)."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            # A file has its arrays in an order of its own, and sums depend on the order.
            order = json.loads(metadata[_ORDER])
            if sorted(order) != sorted(file.keys()):
                return None, 0, 0, ""
            arrays = {name: file.get_tensor(name) for name in order}
            return arrays, int(metadata["first"]), int(metadata["rows"]), metadata["run"]
    except (OSError, ValueError, TypeError, KeyError, SafetensorError):
        return None, 0, 0, ""
