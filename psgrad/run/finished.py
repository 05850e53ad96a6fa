"""A finished run, read back from its folder, and the files that a check reads and writes there
(samples.parquet, findings.jsonl, check.json), without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from psgrad.errors import DataError
from psgrad.run.folders import MANIFEST, MEASURES, RunFolder, file_name
from psgrad.run.results import AnalyzeResult, CheckResult, MeasureResult, TopSample
from psgrad.run.results.check import check_content, finding_content
from psgrad.run.results.manifest import RunManifest, read, read_manifest
from psgrad.wording import first_line

FINDINGS = "findings.jsonl"
CHECK = "check.json"
ISSUES, ISSUE_SUMMARY = "issues.parquet", "issue_summary.parquet"


def read_samples(
    folder: Path,
    needed: Sequence[str],
    optional: Iterable[str] | None = None,
    table: str = "samples.parquet",
) -> pd.DataFrame:
    """These columns of a run's table with a row a sample, and those of the optional columns that it has, by
    default all, in the order of the file.

    Raises DataError if the table can't be read, lacks a required column, or has one of another type: a
    verdict on that would be wrong.
    """
    path = folder / table
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [name for name in needed if name not in names]:
                raise DataError(
                    f"{path} has no column {', '.join(missing)}; expected the table as psgrad wrote it",
                    hint=f"an older psgrad wrote it, or it was changed; {_AGAIN}",
                )
            wanted = None if optional is None else [name for name in names if name in {*needed, *optional}]
            frame: pd.DataFrame = file.read(columns=wanted).to_pandas()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    for name, (is_kind, what) in _TYPES.items():
        if name in frame and not is_kind(frame[name]):
            raise DataError(
                f"the column {name} of {path} is of type {frame[name].dtype}; expected {what}",
                hint=f"the table was changed after the run; {_AGAIN}",
            )
    return frame


_AGAIN = "run psgrad analyze again, or the command that wrote it"
_TYPES: dict[str, tuple[Callable[[pd.Series[Any]], bool], str]] = {
    "loss": (pd.api.types.is_numeric_dtype, "numbers"),
    "grad_norm": (pd.api.types.is_numeric_dtype, "numbers"),
    "is_outlier_issue": (pd.api.types.is_bool_dtype, "true or false"),
    "status": (
        lambda column: not len(column) or pd.api.types.infer_dtype(column, skipna=False) == "string",
        "ok, nonfinite or skipped",
    ),
}


def write_check(folder: RunFolder, result: CheckResult) -> None:
    """Write findings.jsonl, a finding a line, and check.json, all else. Raises OutputError."""
    entries = map(finding_content, result.findings)
    lines = "".join(f"{json.dumps(entry, allow_nan=False)}\n" for entry in entries)
    folder.write_bytes(FINDINGS, lines.encode("ascii"))
    folder.write_json(CHECK, check_content(result))


def read_check(folder: Path) -> CheckResult | None:
    """A run's last check; None if there was none. Raises DataError for files that can't be read."""
    if not (folder / CHECK).exists():
        return None
    try:
        about = json.loads((folder / CHECK).read_bytes())
        lines = (folder / FINDINGS).read_text(encoding="utf-8").splitlines()
        return read(CheckResult, {**about, "findings": [json.loads(line) for line in lines]}, CHECK)
    except (OSError, ValueError, TypeError, DataError) as error:
        raise DataError(
            f"the findings in {folder} can't be read: {type(error).__name__}: {str(error)[:200]}; expected"
            f" {CHECK} and {FINDINGS} as psgrad wrote them",
            hint=f"psgrad check {folder} writes them again",
        ) from error


Array = np.ndarray[Any, Any]

_COLUMNS = ("id", "index", "status", "is_outlier_issue", "loss", "grad_norm")


def load_run(folder: Path) -> AnalyzeResult:
    """The result of a finished `psgrad analyze` in a folder. Raises DataError where it can't be read."""
    manifest = finished_manifest(folder)
    samples = read_samples(folder, _COLUMNS)
    told = _json(folder / f"{MEASURES}.json", {})
    measures = {name: _measure(folder, name, about) for name, about in told.items()}
    return AnalyzeResult(
        samples,
        _table(folder / "parameters.parquet"),
        manifest,
        folder,
        _inputs(folder),
        manifest.setting("data", "class_names"),
        measures,
        read_check(folder),
        {int(number): text for number, text in _json(folder / "inputs" / "vocabulary.json", {}).items()},
        frozenset(_json(folder / "inputs" / "special_tokens.json", [])),
        *(_table(path) if (path := folder / name).exists() else None for name in (ISSUES, ISSUE_SUMMARY)),
    )


def finished_manifest(folder: Path, commands: Sequence[str] = ("analyze",)) -> RunManifest:
    """The manifest of a finished run of one of these commands. Raises DataError."""
    content = RunFolder.manifest_of(folder)
    if content is None:
        raise DataError(
            f"{folder} holds no run of psgrad; expected the folder of a finished psgrad analyze: its"
            " `output`",
            hint="another folder was meant, or the run has not begun",
        )
    manifest = read_manifest(content, folder / MANIFEST)
    if manifest.command not in commands:
        raise DataError(
            f"the run in {folder} is one of psgrad {manifest.command}; expected a run of psgrad"
            f" {' or '.join(commands)}",
        )
    if manifest.state != "finished":
        raise DataError(
            f"the run in {folder} is not finished: its state is {manifest.state}; expected a finished run",
            hint="psgrad analyze CONFIG --resume goes on with it",
        )
    return manifest


def _measure(folder: Path, name: str, about: dict[str, Any]) -> MeasureResult:
    stem = folder / MEASURES / file_name(name)
    tables = {
        table: _table(stem.with_name(f"{stem.name}.{file_name(table)}.parquet"))
        for table in about.pop("tables")
    }
    arrays = _arrays(stem.with_name(f"{stem.name}.safetensors")) if about.pop("arrays") else {}
    return MeasureResult(name=name, tables=tables, arrays=arrays, **about)


def _inputs(folder: Path) -> list[TopSample]:
    listed = _json(folder / "inputs" / "inputs.json", [])
    file = folder / "inputs" / "images.safetensors"
    images = _arrays(file) if file.exists() else {}
    found = []
    for place, each in enumerate(listed):
        values = tuple((name, value) for name, value in each.get("values") or ())
        original = images.get(f"original.{place}")
        found.append(TopSample(each["id"], images.get(str(place)), each["text"], values, original))
    return found


def _table(path: Path) -> pd.DataFrame:
    try:
        if path.is_dir():  # which pandas takes for a table in parts
            raise IsADirectoryError(f"{path} is a folder")
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _json(path: Path, otherwise: Any) -> Any:
    if not path.exists():
        return otherwise
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _arrays(path: Path) -> dict[str, Array]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays: dict[str, Array] = load_file(path)
        return arrays
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} can't be read: {first_line(error)}; expected the file as psgrad wrote it",
        hint=f"it was changed or cut short after the run; {_AGAIN}",
    )
