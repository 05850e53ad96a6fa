"""`psgrad select`: the rows of a dataset that a finished run chooses, written again; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError, OutputError, OutputExistsError
from psgrad.inputs.images.folder import folder_rows, metadata_of, with_names
from psgrad.inputs.sources.files import sha256_of
from psgrad.inputs.sources.selection import require_format, require_list_format, write_list, write_selected
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
    data, base = _dataset(run, manifest)
    listing = data.images is not None and metadata_of(base / data.images) is None
    files = _unchanged_files(run, manifest, data, base)
    if listing:
        require_list_format(output)
    else:
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
            if listing:
                write_list(_images(data, base).filter(pa.array(kept)), output, file)
            else:
                write_selected(files, kept, output, file)
    except OSError as error:
        raise OutputError(f"{output} can't be written: {error.strerror or error}") from error
    return Selection(output, int(chosen.sum()), len(frame), count)


def _images(data: DataConfig, base: Path) -> pa.Table:
    """The rows of a folder of images, their paths in the first column."""
    rows, image = folder_rows(data, base), with_names(data, base).image
    table = rows.read(0, rows.count)
    return table.select([image, *(name for name in table.column_names if name != image)])


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
    """(the dataset of a run, what its paths are relative to). Raises ConfigError where it is not in files."""
    try:
        data = DataConfig.model_validate((manifest.get("config") or {}).get("data"), strict=False)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise DataError(f"the dataset of the run in {run} is not known: {reason}") from error
    if data.path is None and data.images is None:
        raise ConfigError(
            f"the rows of the run in {run} come from {data.source}, which is no file",
            expected="a run on data.path or data.images: files whose rows can be copied",
            next_step="take ids or indices from samples.parquet, and select by them where the rows are made",
        )
    if (manifest.get("data") or {}).get("files") is None:
        raise DataError(
            f"the run in {run} is of an older psgrad, which kept no hashes of the dataset's files",
            next_step="run psgrad analyze again",
        )
    return data, Path(str(manifest.get("config_folder") or "."))


def _unchanged_files(run: Path, manifest: dict[str, Any], data: DataConfig, base: Path) -> list[Path]:
    """The files of a run's dataset; of a folder of images its metadata file, or the folder. Raises DataError
    where they are not as they were.
    """
    where = base / data.images if data.images is not None else None
    files = data_files(data, base) if where is None else [metadata_of(where) or where]
    missing = [file for file in [*files, *([where] if where else [])] if not file.exists()]
    if missing:
        raise DataError(
            f"the dataset's file {missing[0]} is not there",
            cause=None if base.is_absolute() else "the run's config was named by a relative path",
            next_step="call psgrad select in the folder where psgrad analyze was called",
        )
    now = [sha256_of(file) for file in files] if where is None else [folder_rows(data, base).fingerprint]
    if now != manifest["data"]["files"]:
        raise DataError(
            f"the files of the dataset, {', '.join(map(str, files[:3]))}, are not those of the run in {run}",
            expected="the files as they were: rows are matched by their place",
            next_step="run psgrad analyze again on the files as they are now",
        )
    return files
