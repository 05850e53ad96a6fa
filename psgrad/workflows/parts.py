"""A run in parts that do not know of each other, for job arrays: `psgrad analyze --part 3/64`, then
`psgrad merge`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from psgrad.config import Config
from psgrad.config.reading import config_from
from psgrad.engine.execution.ranks import MergingParts, RowPart
from psgrad.errors import ConfigError, OutputError, OutputExistsError
from psgrad.results import AnalyzeResult, Progress, Say
from psgrad.results.manifest import RunManifest
from psgrad.storage import RunFolder
from psgrad.storage.folders import manifest_of
from psgrad.user_code import with_code_beside
from psgrad.workflows.analyze import analyze, new_folder, prepared
from psgrad.workflows.measure_setup import require_mergeable
from psgrad.workflows.run_identity import NUMBER_OF_PARTS, reopen
from psgrad.workflows.setup import Setup

# A part that begins makes the folder within this time, and others wait for it.
_SECONDS_TO_MAKE_FOLDER = 60.0


@with_code_beside
def measure_part(
    config: Config,
    number: int,
    count: int,
    *,
    limit: int | float | None = None,
    sample: bool = False,
    progress: Say = lambda _: None,
) -> Path:
    """Measure the part `number` of `count` of a dataset's rows; returns the run folder, which the
    parts share.

    A part that is run again goes on where it ended. Raises PsgradError.
    """
    start = prepared(config, limit, sample, progress)
    require_mergeable(start.every)
    size = config.engine.chunk_size
    rows = len(start.setting)
    part = RowPart.of(number, count, rows, size if isinstance(size, int) else 1)
    folder = shared_folder(config.output, start.run, start.manifest(start.identity(count)))
    progress(Progress(0, 0, "samples", f"rows {part.rows.start:,} to {part.rows.stop - 1:,} of {rows:,}"))
    start.measure(folder, progress, part, str(folder.manifest().get("run")))
    return folder.path


def merge(output: Path, *, report: bool = True, progress: Say = lambda _: None) -> AnalyzeResult:
    """Judge and report a run whose parts have measured all rows.

    Raises ConfigError for a folder that is not one of a run in parts, and DataError for rows that are missing
    or there twice.
    """
    manifest = manifest_of_parts(output, "analyze")
    parts, config = manifest["identity"][NUMBER_OF_PARTS], config_of(manifest, output)
    sample = manifest.get("sampled_by") is not None
    result = analyze(
        config,
        resume=True,
        limit=manifest.get("limit"),
        sample=sample,
        report=report,
        progress=progress,
        processes=MergingParts(parts),
    )
    assert result is not None, "the merging process leads"
    return result


def manifest_of_parts(output: Path, command: str) -> dict[str, Any]:
    """The manifest of a run in parts. Raises ConfigError for another folder."""
    manifest = manifest_of(output) or {}
    if manifest.get("command") != command or NUMBER_OF_PARTS not in (manifest.get("identity") or {}):
        raise ConfigError(
            f"{output} is not the folder of a run in parts",
            expected="the output folder of psgrad analyze --part K/N, or of psgrad influence --part K/N",
        )
    return manifest


def config_of(manifest: dict[str, Any], output: Path) -> Config:
    """The config that a run was begun with. output: its folder, wherever that lies now."""
    base = Path(str(manifest.get("config_folder") or "."))
    return config_from({**manifest["config"], "output": str(output.resolve())}, base=base)


def shared_folder(output: Path, run: Setup, manifest: RunManifest) -> RunFolder:
    """The folder of a run, which the first of its parts makes. manifest: at the run's beginning.

    Raises ConfigError where the folder is that of another run, and OutputExistsError where it is of none, or
    of a run that is merged.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        output.mkdir(0o700)
    except FileExistsError:
        return _existing_folder(output, run, manifest)
    except OSError as error:
        raise OutputError(f"the output folder {output} can't be made: {error.strerror or error}") from error
    folder = new_folder(output, run, overwrite=False)
    folder.write_manifest(replace(manifest, state="running").content())
    return folder


def _existing_folder(output: Path, run: Setup, manifest: RunManifest) -> RunFolder:
    """The folder that another part has made, or makes now."""
    end, command = time.monotonic() + _SECONDS_TO_MAKE_FOLDER, str(manifest.command)
    now = manifest.identity or {}
    while (folder := reopen(output, now, run, alone=False, command=command)) is None:
        if time.monotonic() > end:
            raise OutputExistsError(
                f"the output folder {output} exists, and holds no run",
                expected="a new or empty folder, or that of other parts of this run",
                next_step="choose another --output",
            )
        time.sleep(0.2)
    require_unmerged(folder)
    return folder


def require_unmerged(folder: RunFolder) -> None:
    """Raises OutputExistsError for a run that came to its end."""
    if folder.finished:
        raise OutputExistsError(
            f"the parts in {folder.path} are merged already",
            next_step="choose another --output for a new run",
        )
