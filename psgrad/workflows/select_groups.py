"""Which rows of a dataset belong to the groups that `psgrad select` keeps; without torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from psgrad.config import DataConfig
from psgrad.errors import ConfigError
from psgrad.inputs.images.folder import folder_rows
from psgrad.inputs.sources.arrow import plain
from psgrad.inputs.sources.files import Wanted
from psgrad.inputs.sources.source import ArraySource, TableSource, source_of


def rows_of_groups(groups: Iterable[object], data: DataConfig, base: Path) -> np.ndarray[Any, Any]:
    """[rows] bool: which rows belong to these groups. Raises ConfigError where the column can't be read."""
    found = {str(each) for each in groups}
    return np.array([str(each) in found for each in _column(data, base)], bool)


def _column(data: DataConfig, base: Path) -> list[Any]:
    """The group of each row."""
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
