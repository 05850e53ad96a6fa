"""`psgrad check`: the gate's verdict on a finished run, without torch; and the same at the end of `psgrad
analyze`.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from psgrad.config import GateConfig
from psgrad.config.reading import load_gate
from psgrad.errors import ConfigError, DataError, OutputError
from psgrad.quality.findings import (
    LEAK_OF,
    NEEDED,
    OPTIONAL,
    IgnoreEntry,
    counts_of,
    in_order,
    listed_findings,
    named_samples,
    read_ignore_list,
    with_states,
)
from psgrad.quality.gates import evaluate
from psgrad.run import RunFolder
from psgrad.run.finished import finished_manifest, read_samples, write_check
from psgrad.run.results import CheckResult, Location
from psgrad.run.results.check import Baseline, BaselineChange, CheckFacts
from psgrad.run.results.manifest import RunManifest

BASELINE = Path("psgrad-baseline.json")


@dataclass(frozen=True)
class GateFiles:
    """What a gate is evaluated with: its rules, and the files that it names, read."""

    gate: GateConfig
    baseline: Baseline | None = None
    baseline_path: Path | None = None
    ignored: tuple[IgnoreEntry, ...] = ()
    ignore_path: Path | None = None
    warnings: tuple[str, ...] = ()


def gate_files(gate: GateConfig, base: Path) -> GateFiles:
    """Read what a gate names, relative to the folder of the config, so that a mistake there is an error
    before any work is done.

    A baseline that is not there yet holds nothing: everything counts as new, and a warning says so. Raises
    ConfigError and DataError.
    """
    baseline, warnings = None, list[str]()
    baseline_path = None if gate.baseline is None else base / gate.baseline
    if baseline_path is not None and baseline_path.exists():
        from psgrad.quality.baselines import read_baseline

        baseline = read_baseline(baseline_path)
    elif baseline_path is not None:
        warnings.append(
            f"there is no baseline {baseline_path} yet: all findings are new; psgrad baseline save makes one"
            " of a finished run"
        )
    ignore_path = None if gate.ignore is None else base / gate.ignore
    ignored = () if ignore_path is None else read_ignore_list(ignore_path)
    return GateFiles(gate, baseline, baseline_path, ignored, ignore_path, tuple(warnings))


def check(folder: Path, *, settings: Sequence[str] = (), baseline: Path | None = None) -> CheckResult:
    """Evaluate the gate of a finished run's config, changed by `settings` such as `gate.max_outliers=3`.

    `baseline` is a file, relative to the current directory: what it holds does not count. Writes
    findings.jsonl and check.json into the folder, or warns where it can't. Raises DataError for a folder that
    holds no finished run, ConfigError for wrong settings.
    """
    run = finished_manifest(folder)
    gate, base = _gate_of(run, settings)
    if baseline is not None:
        from psgrad.quality.baselines import read_baseline

        read_baseline(baseline)  # a file that the user named must exist
        gate = gate.model_copy(update={"baseline": baseline.absolute()})
    found = _check(_samples(folder, run), run, str(folder), gate_files(gate, base))
    try:
        write_check(RunFolder(folder), found)
    except OutputError as error:
        warning = f"the verdict is not kept in the run folder: {error.message}"
        found = replace(found, warnings=(*found.warnings, warning))
    return found


def check_samples(
    samples: pd.DataFrame, run: RunManifest, folder: RunFolder, files: GateFiles
) -> CheckResult:
    """The verdict on a run that has just ended, written into its folder. Raises OutputError."""
    found = _check(samples, run, str(folder.path), files)
    write_check(folder, found)
    return found


def save_baseline(folder: Path, *, output: Path = BASELINE, grow: bool = False) -> BaselineChange:
    """Make a baseline of a finished run; one that is there already only shrinks, unless `grow` is set.

    Raises DataError for a folder that holds no finished run, ConfigError for a run of a part of the dataset,
    OutputError.
    """
    from psgrad.quality.baselines import changed, read_baseline, saved_reference, written

    run = finished_manifest(folder)
    if run.partial:
        raise ConfigError(
            f"{folder} can't be a baseline: the run {run.partial}; expected a run of the whole dataset:"
            " what a baseline does not hold is new, and what a run does not find is dropped",
            hint="run psgrad analyze without --limit",
        )
    gate, base = _gate_of(run, ())
    before = read_baseline(output) if output.exists() else None
    samples = _samples(folder, run)
    named, _ = with_states(named_samples(samples, run), gate_files(gate, base).ignored, _today())
    about = {
        "psgrad": run.versions.get("psgrad"),
        "data": run.data.fingerprint,
        "checkpoint": run.model.sha256,
        "weights": run.hashes.get("weights"),
        "samples": len(samples),
    }
    change = changed(before, named, about, saved_reference(samples, run), output, grow)
    RunFolder(output.parent).write_json(output.name, written(change.baseline))
    return change


def _check(samples: pd.DataFrame, run: RunManifest, folder: str, files: GateFiles) -> CheckResult:
    gate, warnings = files.gate, list(files.warnings)
    partial = f"the run {run.partial}" if run.partial else None
    named = named_samples(samples, run)
    if files.baseline is not None:
        from psgrad.quality.baselines import gone, mark_known

        named = mark_known(named, files.baseline)
        # A run of a part of the dataset knows nothing about the rest.
        if not partial and (stale := gone(named, files.baseline)):
            warnings.append(
                f"{stale:,} of {len(files.baseline.findings):,} entries of the baseline {files.baseline_path}"
                f" are not found any more; psgrad baseline save {folder} --output {files.baseline_path} drops"
                " them"
            )
    named, told = with_states(named, files.ignored, _today())
    warnings += [each for each in told if not partial or "names nothing" not in each]
    if partial:
        warnings.append(f"PARTIAL: {partial}; the gate is evaluated on these samples only")
    counts, ordered = counts_of(named), in_order(named, samples)
    outcomes = evaluate(gate, ordered, counts, run.outliers, len(samples), leaks=LEAK_OF in samples)
    location, lines = _located(run, samples, ordered)
    facts = CheckFacts(
        counts,
        partial,
        run.score,
        None if files.baseline_path is None else str(files.baseline_path),
        None if files.ignore_path is None else str(files.ignore_path),
        run.versions.get("psgrad"),
    )
    findings = tuple(listed_findings(ordered, samples, gate, run.score, location, lines))
    return CheckResult(tuple(outcomes), findings, folder, len(samples), tuple(warnings), facts)


def _gate_of(run: RunManifest, settings: Sequence[str]) -> tuple[GateConfig, Path]:
    """The gate of a run's config with these settings, and the folder that its files are relative to."""
    return load_gate(run.setting("gate") or {}, settings), Path(run.config_folder)


def _samples(folder: Path, run: RunManifest) -> pd.DataFrame:
    by = run.setting("analyze", "outliers", "group_by")
    # Columns by which a baseline groups scores, in addition to those that findings are made of.
    return read_samples(
        folder,
        NEEDED,
        (*OPTIONAL, "dataset_row", run.score, "log_norm", *(("target", "length", by) if by else ())),
    )


def _located(
    run: RunManifest, samples: pd.DataFrame, ordered: pd.DataFrame
) -> tuple[Location, dict[int, int]]:
    """The data file, relative to the current directory where it is below that, and the lines of the rows that
    are named.

    Lines are left out where the file is not there any more, is not the one that was read, or has none.
    """
    base, data = Path(run.config_folder), run.setting("data") or {}
    if data.get("path") is None:
        code = str(data.get("factory") or "data").rpartition(":")[0] or str(data.get("factory"))
        return Location(shown_path(base / code if code.endswith(".py") else Path(code))), {}
    paths = data["path"] if isinstance(data["path"], list) else [data["path"]]
    path = base / paths[0]
    lines: dict[int, int] = {}
    if len(ordered):
        from psgrad.run.identity import files_sha256

        shown = samples.iloc[ordered["row"].to_numpy(int)]
        rows = shown["dataset_row" if "dataset_row" in shown else "index"].tolist()
        try:
            if files_sha256([path]) == run.data.fingerprint:
                found = row_lines(path, rows)
                lines = {
                    place: found[row] for place, row in zip(shown["index"], rows, strict=True) if row in found
                }
        except (OSError, DataError):
            pass  # a run outlives its data: the path alone says enough
    return Location(shown_path(path)), lines


def row_lines(path: Path, rows: Sequence[int]) -> dict[int, int]:
    """row -> its line, from 1, in a file of lines; empty for other files. Raises OSError and DataError."""
    if path.suffix.lower() in (".csv", ".tsv"):
        from psgrad.data.sources.csv_files import csv_lines  # which these files alone need

        return csv_lines(path, rows)
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        return {}
    with path.open("rb") as file:
        numbers = [number for number, line in enumerate(file, 1) if line.strip()]
    return {row: numbers[row] for row in rows if row < len(numbers)}


def shown_path(path: Path) -> str:
    """As hosts of code want it: relative to the current directory where it is below that, with slashes."""
    relative = os.path.relpath(path)
    return (path if relative.startswith("..") else Path(relative)).as_posix()


def _today() -> datetime.date:
    return datetime.datetime.now(tz=datetime.UTC).date()
