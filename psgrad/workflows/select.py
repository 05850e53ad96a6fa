"""`psgrad select`: the rows of a dataset, or of the groups of one, that a finished run chooses, written
again; without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from pydantic import ValidationError

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError, OutputError, OutputExistsError
from psgrad.inputs.image_files import folder_rows
from psgrad.inputs.sources.arrow_columns import plain
from psgrad.inputs.sources.file_checks import Wanted
from psgrad.inputs.sources.source import ArraySource, TableSource, source_of
from psgrad.results.matching_rows import rows_where
from psgrad.storage.durable_files import folder_atomically, written_atomically
from psgrad.storage.finished import finished_manifest, require_there
from psgrad.workflows.select_origins import Origin, in_folder, origin_of


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
        kept = rows_of_groups(frame["id"][chosen], data, base)
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
