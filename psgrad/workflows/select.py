"""`psgrad select`: the rows of a dataset that a finished run chooses, written again; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from pydantic import ValidationError

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError, OutputError, OutputExistsError
from psgrad.inputs.sources.files import sha256_of
from psgrad.inputs.sources.selection import require_format, write_selected
from psgrad.inputs.sources.source import data_files
from psgrad.results.conditions import rows_where
from psgrad.storage.files import written_atomically
from psgrad.storage.finished import finished_manifest, require_there


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
    files = _unchanged_files(run, manifest)
    require_format(files, output)
    if output.exists() and not overwrite:
        raise OutputExistsError(
            f"{output} exists", next_step="name another file, or replace it with --overwrite"
        )
    if any(output.resolve() == file.resolve() for file in files):
        raise ConfigError(f"{output} is a file of the dataset itself", next_step="name another file")
    frame = _samples(run / "samples.parquet")
    chosen = rows_where(frame, where, "--where") ^ drop
    count = int((manifest.get("counts") or {}).get("in_dataset") or len(frame))
    kept = np.zeros(count, bool)
    kept[frame["dataset_row" if "dataset_row" in frame else "index"][chosen]] = True
    try:
        with written_atomically(output) as file:
            write_selected(files, kept, output, file)
    except OSError as error:
        raise OutputError(f"{output} can't be written: {error.strerror or error}") from error
    return Selection(output, int(chosen.sum()), len(frame), count)


def _samples(path: Path) -> pd.DataFrame:
    """The table of a run, the columns of one value a row."""
    try:
        table = pq.read_table(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read: {error}", next_step="run psgrad analyze again") from error
    require_there(table.column_names, ["index"], path)
    frame: pd.DataFrame = table.to_pandas()
    return frame.assign(label=frame["target"]) if "target" in frame and "label" not in frame else frame


def _unchanged_files(run: Path, manifest: dict[str, Any]) -> list[Path]:
    """The files of a run's dataset. Raises ConfigError where it is no dataset of files, DataError where they
    are not as they were.
    """
    about = manifest.get("data") or {}
    try:
        data = DataConfig.model_validate((manifest.get("config") or {}).get("data"), strict=False)
    except ValidationError as error:
        raise DataError(
            f"the dataset of the run in {run} is not known: {error.errors()[0]['msg']}"
        ) from error
    if data.path is None:
        raise ConfigError(
            f"the rows of the run in {run} come from {data.source}, which is no file",
            expected="a run on data.path: files whose rows can be copied",
            next_step="take ids or indices from samples.parquet, and select by them where the rows are made",
        )
    if about.get("files") is None:
        raise DataError(
            f"the run in {run} is of an older psgrad, which kept no hashes of the dataset's files",
            next_step="run psgrad analyze again",
        )
    base = Path(str(manifest.get("config_folder") or "."))
    files = data_files(data, base)
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DataError(
            f"the dataset's file {missing[0]} is not there",
            cause=None
            if base.is_absolute()
            else "the run's config was named by a path relative to another folder",
            next_step="call psgrad select in the folder where psgrad analyze was called",
        )
    if [sha256_of(file) for file in files] != about["files"]:
        raise DataError(
            f"the files of the dataset, {', '.join(map(str, files[:3]))}, are not those of the run in {run}",
            expected="the files as they were: rows are matched by their place",
            next_step="run psgrad analyze again on the files as they are now",
        )
    return files
