"""A finished run, read back from its folder, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.errors import DataError
from psgrad.results import AnalyzeResult, MeasureResult, TopSample
from psgrad.storage.folders import MEASURES, file_name, manifest_of
from psgrad.storage.verdicts import read_check, require_there, require_typed

Array = np.ndarray[Any, Any]

_COLUMNS = ("id", "index", "status", "is_outlier_issue", "loss", "grad_norm")
_GROUPS = ("config", "counts", "data", "model", "versions", "outliers")


def load_run(folder: Path) -> AnalyzeResult:
    """What `psgrad analyze` left in a folder. Raises DataError where it is no finished run, or a file of it can't be read."""
    manifest = finished_manifest(folder)
    samples = _table(folder / "samples.parquet")
    require_there(list(map(str, samples)), _COLUMNS, folder / "samples.parquet")
    require_typed(samples, folder / "samples.parquet")
    measures = {name: _measure(folder, name, about) for name, about in _json(folder / f"{MEASURES}.json", {}).items()}
    return AnalyzeResult(
        samples,
        _table(folder / "parameters.parquet"),
        manifest,
        folder,
        _inputs(folder),
        manifest.get("config", {}).get("data", {}).get("class_names"),
        measures,
        read_check(folder),
        {int(number): text for number, text in _json(folder / "inputs" / "vocabulary.json", {}).items()},
    )


def finished_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished `psgrad analyze`. Raises DataError."""
    manifest = manifest_of(folder)
    if manifest is None:
        raise DataError(
            f"{folder} holds no run of psgrad",
            expected="the folder of a finished psgrad analyze: its `output`",
            cause="another folder was meant, or the run has not begun",
        )
    if manifest.get("command") != "analyze":
        raise DataError(f"the run in {folder} is one of psgrad {manifest.get('command')}", expected="a run of psgrad analyze")
    if manifest.get("state") != "finished":
        raise DataError(
            f"the run in {folder} is not finished: its state is {manifest.get('state')}",
            expected="a finished run",
            next_step="psgrad analyze CONFIG --resume goes on with it",
        )
    damaged = [name for name in _GROUPS if not isinstance(manifest.get(name) or {}, dict)]
    if damaged or not isinstance(manifest.get("config", {}).get("data") or {}, dict):
        raise DataError(
            f"{folder / 'manifest.json'} can't be read: {', '.join(damaged) or 'config.data'} holds no keys and values",
            expected="the file as psgrad analyze wrote it",
            cause="it was changed after the run",
            next_step="run psgrad analyze again",
        )
    return manifest


def _measure(folder: Path, name: str, about: dict[str, Any]) -> MeasureResult:
    stem = folder / MEASURES / file_name(name)
    tables = {table: _table(stem.with_name(f"{stem.name}.{file_name(table)}.parquet")) for table in about.pop("tables")}
    arrays = _arrays(stem.with_name(f"{stem.name}.safetensors")) if about.pop("arrays") else {}
    return MeasureResult(name=name, tables=tables, arrays=arrays, **about)


def _inputs(folder: Path) -> list[TopSample]:
    listed = _json(folder / "inputs" / "inputs.json", [])
    images = _arrays(folder / "inputs" / "images.safetensors") if (folder / "inputs" / "images.safetensors").exists() else {}
    values = [tuple((name, value) for name, value in each.get("values") or ()) for each in listed]
    return [TopSample(each["id"], images.get(str(place)), each["text"], values[place]) for place, each in enumerate(listed)]


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
        found: dict[str, Array] = load_file(path)
        return found
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} can't be read: {next(iter(str(error).splitlines()), type(error).__name__)}",
        expected="the file as psgrad analyze wrote it",
        cause="it was changed or cut short after the run",
        next_step="run psgrad analyze again",
    )
