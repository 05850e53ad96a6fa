"""`psgrad select`: the rows of a dataset that a finished run chooses, copied into a file, or their ids.
Without torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from pydantic import ValidationError

from psgrad.config import DataConfig
from psgrad.data.image_files import folder_rows
from psgrad.data.sources.arrow_columns import plain
from psgrad.data.sources.file_checks import Wanted
from psgrad.data.sources.file_hashes import file_hashes
from psgrad.data.sources.library_datasets import library_dataset, library_hashes
from psgrad.data.sources.selection import Kept, copy_rows, row_suffixes
from psgrad.data.sources.source import TableSource, data_files, source_of
from psgrad.errors import ConfigError, DataError, OutputError, OutputExistsError
from psgrad.run.durable_files import written_atomically
from psgrad.run.finished import finished_manifest, require_there
from psgrad.run.results.analyze import rows_where

# The table with a row a sample, of each command that has one.
_TABLES = ("samples.parquet", "self_influence.parquet")
_INFLUENCE = "influence"  # of --by: the mean of a row's scores over the queries
_LISTS = (".txt", ".csv", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Choice:
    """Which rows are chosen: those for which a condition holds, of these the highest by a column, or with
    `drop` all others.

    Attributes:
        where: a condition on the columns of the run's table.
        by, top: a column, and how many of its highest values, such as "20" or "5%".
    """

    where: str | None = None
    by: str | None = None
    top: str | None = None
    drop: bool = False


@dataclass(frozen=True)
class Selection:
    """What was written: `rows` of the `measured` rows of a run, whose dataset has `in_dataset`."""

    output: Path
    rows: int
    measured: int
    in_dataset: int


def select(
    run: Path, choice: Choice, *, output: Path, rejected: Path | None = None, overwrite: bool = False
) -> Selection:
    """Write the rows of a finished run's dataset that are chosen, and a list of the others with a reason for
    each: the whole of `psgrad select`.

    Raises ConfigError for a choice or an output that can't be, DataError where the dataset's files are not
    those of the run.
    """
    manifest = finished_manifest(run, ("analyze", "influence"))
    data, base = _dataset(run, manifest)
    files = _unchanged(run, manifest, data, base)
    suffixes = _suffixes(data, base)
    _require_name(output, suffixes or _LISTS, data.source)
    for path in (output, *([] if rejected is None else [rejected])):
        _require_free(path, files, overwrite)
    if rejected is not None:
        if rejected.resolve() == output.resolve():
            raise ConfigError(f"--rejected and --output both name {output}", expected="two files")
        _require_name(rejected, _LISTS, "the rows that are not written")
    frame = _samples(run)
    reasons = _reasons(frame, choice)
    chosen = reasons.isna().to_numpy()
    count = int((manifest.get("counts") or {}).get("in_dataset") or len(frame))
    copied = output.suffix.lower() in suffixes
    try:
        with written_atomically(output) as file:
            if copied:
                _copy(data, base, _kept(data, base, frame[chosen], count), output, file)
            else:
                _write_list(_places(frame[chosen], data), output, file)
        if rejected is not None:
            others = _places(frame[~chosen], data).assign(reason=reasons[~chosen])
            with written_atomically(rejected) as file:
                _write_list(others, rejected, file)
    except OSError as error:
        raise OutputError(f"{output} can't be written: {error.strerror or error}") from error
    return Selection(output, int(chosen.sum()), len(frame), count)


# -- which rows ----------------------------------------------------------------------------------------------


def _reasons(frame: pd.DataFrame, choice: Choice) -> pd.Series[Any]:
    """[n]: why a row is not chosen; nothing for one that is. Raises ConfigError."""
    if choice.where is None and choice.by is None:
        raise ConfigError("nothing says which rows", expected="--where, or --by with --top, or both")
    if (choice.by is None) != (choice.top is None):
        raise ConfigError("--by and --top belong together", expected="such as --by grad_norm --top 5%")
    reasons = pd.Series(None, index=frame.index, dtype=object)
    if choice.where is not None:
        reasons[~rows_where(frame, choice.where, "--where")] = f"not {choice.where}"
    if choice.by is not None and choice.top is not None:
        values = _column(frame, choice.by)[reasons.isna()]
        count = _amount(choice.top, len(values))
        ranks = values.rank(method="first", ascending=False)  # a value that is not a number has none
        others = ranks[~(ranks <= count)]
        places = ["without a rank" if np.isnan(rank) else f"rank {int(rank)}" for rank in others]
        reasons[others.index] = [
            f"{place} by {choice.by}, not among the highest {choice.top}" for place in places
        ]
    if choice.drop:
        highest = None if choice.by is None else f"among the highest {choice.top} by {choice.by}"
        wanted = " and ".join(each for each in (choice.where, highest) if each is not None)
        return reasons.isna().map({True: wanted, False: None})
    return reasons


def _column(frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    """A column of numbers. Raises ConfigError."""
    known = "overall" if name == _INFLUENCE and "overall" in frame else name
    numbers = [str(each) for each in frame if pd.api.types.is_numeric_dtype(frame[each])]
    if known not in numbers:
        raise ConfigError(
            f"--by: there is no column of numbers {name!r}", expected=f"one of {', '.join(numbers)}"
        )
    return frame[known].astype(float)


def _amount(top: str, rows: int) -> int:
    """How many rows "20" or "5%" of so many are; of a percentage at least one. Raises ConfigError."""
    try:
        share = float(top.removesuffix("%"))
        if top.endswith("%") and 0 < share <= 100:
            return max(1, round(share * rows / 100))
        if not top.endswith("%") and int(top) > 0:
            return int(top)
    except ValueError:
        pass
    raise ConfigError(
        f"--top {top} is no amount", expected="a number of rows such as 20, or a share such as 5%"
    )


def _samples(run: Path) -> pd.DataFrame:
    """The table of a run with a row a sample, the columns of one value a row."""
    path = next((run / name for name in _TABLES if (run / name).exists()), run / _TABLES[0])
    try:
        table = pq.read_table(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read: {error}", next_step="run it again") from error
    require_there(table.column_names, ["index"], path)
    frame: pd.DataFrame = table.to_pandas()
    return frame.assign(label=frame["target"]) if "target" in frame and "label" not in frame else frame


# -- where the rows are --------------------------------------------------------------------------------------


def _dataset(run: Path, manifest: dict[str, Any]) -> tuple[DataConfig, Path]:
    """(the dataset of a run, what its paths are relative to). Raises DataError."""
    try:
        data = DataConfig.model_validate((manifest.get("config") or {}).get("data"), strict=False)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise DataError(f"the dataset of the run in {run} is not known: {reason}") from error
    return data, Path(str(manifest.get("config_folder") or "."))


def _unchanged(run: Path, manifest: dict[str, Any], data: DataConfig, base: Path) -> list[Path]:
    """The files of a run's dataset. Raises DataError where they are not as they were."""
    files = [] if data.path is None else data_files(data, base)
    files += [] if data.images is None else [base / data.images]
    missing = [file for file in files if not file.exists()]
    if missing:
        relative = not base.is_absolute()
        raise DataError(
            f"the dataset's file {missing[0]} is not there",
            cause="the run's config was named by a relative path" if relative else None,
            next_step="call psgrad select in the folder where the run was made" if relative else None,
        )
    if data.images is not None:
        now = [folder_rows(data, base).fingerprint]
    elif data.dataset is not None and not data.streaming:
        now = library_hashes(data, library_dataset(data, base))
    elif data.path is not None:
        now = file_hashes(files)
    else:
        return files  # code makes the rows: nothing is read again
    if now != (manifest.get("data") or {}).get("files"):
        raise DataError(
            f"the files of the dataset, {', '.join(map(str, files[:3])) or data.source}, are not those of the"
            f" run in {run}",
            expected="the files as they were: rows are matched by their place",
            next_step="run it again on the files as they are now",
        )
    return files


def _suffixes(data: DataConfig, base: Path) -> tuple[str, ...]:
    """The suffixes of a file into which rows themselves are copied; none where only ids can be written."""
    if data.dataset is not None and not data.streaming:
        return () if data.group else (".parquet",)  # its groups are not read here
    return () if data.path is None else row_suffixes(source_of(data, base)[0])


def _require_name(output: Path, suffixes: Sequence[str], source: str) -> None:
    """Raises ConfigError for a name that does not say how rows, or their ids, are written."""
    suffixes = tuple(dict.fromkeys((*suffixes, ".txt")))
    if output.suffix.lower() not in suffixes:
        ending = f"ends in {output.suffix}" if output.suffix else "has no suffix"
        raise ConfigError(
            f"{output} {ending}; what is written is of {source}",
            expected=f"a name that ends in one of {', '.join(suffixes)}",
        )


def _require_free(output: Path, files: Sequence[Path], overwrite: bool) -> None:
    """Raises OutputExistsError where there is something that may not be replaced, ConfigError where it is the
    dataset.
    """
    if overwrite and any(output.resolve() == file.resolve() for file in files):
        raise ConfigError(f"{output} is a file of the dataset itself", next_step="name another file")
    if output.exists() and not overwrite:
        raise OutputExistsError(
            f"{output} exists", next_step="name another file, or replace it with --overwrite"
        )


def _kept(data: DataConfig, base: Path, chosen: pd.DataFrame, count: int) -> Kept:
    """[n]: which rows of the dataset are chosen, or are in a group that is. Raises DataError."""
    if data.group is None:
        kept = np.zeros(count, bool)
        kept[_places(chosen, data)["index"]] = True
        return kept
    source, paths = source_of(data, base)
    assert isinstance(source, TableSource)
    wanted = Wanted(ids=(data.group,))
    columns = [plain(source.rows(path, wanted).column(data.group)).to_pylist() for path in paths]
    groups = set(map(str, chosen["id"]))
    return np.array([str(each) in groups for column in columns for each in column], bool)


# -- what is written -----------------------------------------------------------------------------------------


def _copy(data: DataConfig, base: Path, kept: Kept, output: Path, file: BinaryIO) -> None:
    if data.path is not None:
        copy_rows(data_files(data, base), kept, output, file)
    else:
        library_dataset(data, base).select(np.flatnonzero(kept)).to_parquet(file)


def _places(frame: pd.DataFrame, data: DataConfig) -> pd.DataFrame:
    """The `id` of each row, and its `index` in the whole dataset; of groups of rows the ids."""
    if data.group is not None:
        return pd.DataFrame({"id": frame["id"]})
    place = "dataset_row" if "dataset_row" in frame else "index"
    return pd.DataFrame({"id": frame["id"], "index": frame[place]})


def _write_list(table: pd.DataFrame, output: Path, file: BinaryIO) -> None:
    """Write a table by the suffix of the output; to a txt file its ids, one a line, with the reasons."""
    suffix = output.suffix.lower()
    if suffix == ".parquet":
        table.to_parquet(file, index=False)
    elif suffix == ".csv":
        file.write(table.to_csv(index=False).encode())
    elif suffix == ".jsonl":
        rows = (json.dumps(row, ensure_ascii=False) for row in table.to_dict("records"))
        file.write("".join(f"{row}\n" for row in rows).encode())
    else:
        columns = table.drop(columns="index", errors="ignore").astype(str)
        lines = ["\t".join(row) for row in columns.itertuples(index=False)]
        broken = [line for line in lines if "\n" in line or "\r" in line]
        if broken:
            raise DataError(
                f"the id {broken[0]!r} has a line break",
                expected="ids of one line each in a .txt file",
                next_step="write a .csv or .jsonl file",
            )
        file.write("".join(f"{line}\n" for line in lines).encode())
