"""`psgrad select`: the rows of a dataset that a finished run chooses, copied into a file, or their ids.
Without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.data.sources.files import data_files, hashes_of_files
from psgrad.data.sources.selection import (
    ROW_SUFFIXES,
    Rows,
    content_of,
    has_whole_rows,
    whole_rows,
)
from psgrad.errors import ConfigError, DataError, OutputExistsError
from psgrad.run import RunFolder
from psgrad.run.finished import finished_manifest, read_samples
from psgrad.run.results.analyze import rows_where
from psgrad.run.results.manifest import RunManifest, read

# The table with a row a sample, of each command that has one.
_TABLES = ("samples.parquet", "self_influence.parquet")
_INFLUENCE = "influence"  # of --by: the mean of a row's scores over the queries


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
    data, base = read(DataConfig, manifest.setting("data")), Path(manifest.config_folder)
    files = _unchanged(run, manifest, data, base)
    for path in (output, *([] if rejected is None else [rejected])):
        _require_output(path, files, overwrite)
    if rejected is not None and rejected.resolve() == output.resolve():
        raise ConfigError(f"--rejected and --output both name {output}; expected two files")
    frame = _samples(run)
    reasons = _reasons(frame, choice)
    chosen = reasons.isna().to_numpy()
    count = manifest.counts.in_dataset or len(frame)
    rows: Rows = _places(frame[chosen])
    if has_whole_rows(data) and output.suffix.lower() in ROW_SUFFIXES:
        rows = _copied(data, base, frame[chosen], count)
    _write(output, rows)
    if rejected is not None:
        _write(rejected, _places(frame[~chosen], reasons[~chosen]))
    return Selection(output, int(chosen.sum()), len(frame), count)


def _reasons(frame: pd.DataFrame, choice: Choice) -> pd.Series[Any]:
    """[n]: why a row is not chosen; nothing for one that is. Raises ConfigError."""
    if choice.where is None and choice.by is None:
        raise ConfigError("nothing says which rows; expected --where, or --by with --top, or both")
    if (choice.by is None) != (choice.top is None):
        raise ConfigError("--by and --top belong together; expected such as --by grad_norm --top 5%")
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
            f"--by: there is no column of numbers {name!r}; expected one of {', '.join(numbers)}"
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
        f"--top {top} is no amount; expected a number of rows such as 20, or a share such as 5%"
    )


def _samples(run: Path) -> pd.DataFrame:
    """The table of a run with a row a sample, the columns of one value a row."""
    table = next((name for name in _TABLES if (run / name).exists()), _TABLES[0])
    frame = read_samples(run, ["index"], table=table)
    return frame.assign(label=frame["target"]) if "target" in frame and "label" not in frame else frame


def _unchanged(run: Path, manifest: RunManifest, data: DataConfig, base: Path) -> list[Path]:
    """The files of a run's dataset. Raises DataError where they are not as they were."""
    files = [] if data.path is None else data_files(data, base)
    files += [] if data.images is None else [base / data.images]
    missing = [file for file in files if not file.exists()]
    if missing:
        raise DataError(
            f"the dataset's file {missing[0]} is not there",
            hint=None if base.is_absolute() else "call psgrad select in the folder where the run was made",
        )
    now = hashes_of_files(data, base)  # None where code makes the rows: nothing is read again
    if now is not None and now != manifest.data.files:
        raise DataError(
            f"the files of the dataset, {', '.join(map(str, files[:3])) or data.source}, are not those of"
            f" the run in {run}; expected the files as they were: rows are matched by their place",
            hint="run it again on the files as they are now",
        )
    return files


def _require_output(output: Path, files: Sequence[Path], overwrite: bool) -> None:
    """Raises ConfigError for a name that does not say how rows, or their ids, are written, and for a file of
    the dataset; OutputExistsError where there is something that may not be replaced.
    """
    if output.suffix.lower() not in (*ROW_SUFFIXES, ".txt"):
        ending = f"ends in {output.suffix}" if output.suffix else "has no suffix"
        raise ConfigError(
            f"{output} {ending}; expected a name that ends in one of {', '.join(ROW_SUFFIXES)}, .txt"
        )
    if overwrite and any(output.resolve() == file.resolve() for file in files):
        raise ConfigError(f"{output} is a file of the dataset itself", hint="name another file")
    if output.exists() and not overwrite:
        raise OutputExistsError(f"{output} exists", hint="name another file, or add --overwrite")


def _copied(data: DataConfig, base: Path, chosen: pd.DataFrame, count: int) -> Rows:
    """The chosen rows with all columns. count: the rows of the dataset. Raises DataError."""
    rows, found = whole_rows(data, base, {place["index"] for place in _places(chosen)})
    if found != count:
        raise DataError(
            f"{data.source} has {found:,} rows, and the run's dataset had {count:,}",
            hint="run it again on the files as they are now",
        )
    return rows


# -- what is written -----------------------------------------------------------------------------------------


def _places(frame: pd.DataFrame, reasons: pd.Series[Any] | None = None) -> Rows:
    """The `id` of each row, and its `index` in the whole dataset; with reasons each row's `reason` too."""
    columns = {"id": "id", "dataset_row" if "dataset_row" in frame else "index": "index"}
    found = frame[list(columns)].rename(columns=columns)
    if reasons is not None:
        found = found.assign(reason=reasons)
    if found.empty:  # a table of no rows has its columns still
        return pa.Table.from_pandas(found, preserve_index=False)
    records = found.to_dict("records")
    return [{str(name): value for name, value in record.items()} for record in records]


def _write(output: Path, rows: Rows) -> None:
    """Write rows by the suffix of the output; to a txt file their ids, one a line, with the reasons."""
    suffix = output.suffix.lower()
    content = _lines(rows) if suffix == ".txt" else content_of(rows, suffix)
    RunFolder(output.parent).write_bytes(output.name, content)


def _lines(rows: Rows) -> bytes:
    """The ids of rows, one a line, with the reasons."""
    records = rows.to_pylist() if isinstance(rows, pa.Table) else rows
    lines = ["\t".join(str(row[name]) for name in ("id", "reason") if name in row) for row in records]
    broken = [line for line in lines if "\n" in line or "\r" in line]
    if broken:
        raise DataError(
            f"the id {broken[0]!r} has a line break; expected ids of one line each in a .txt file",
            hint="write a .csv or .jsonl file",
        )
    return "".join(f"{line}\n" for line in lines).encode()
