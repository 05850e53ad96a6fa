"""A run in parts that do not know of each other, for job arrays: `psgrad analyze --part 3/64`, then `psgrad
merge`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from psgrad.commands.analyze import analyze, load_analysis
from psgrad.commands.measure_setup import require_mergeable
from psgrad.commands.run_manifest import NUMBER_OF_PARTS, reopen
from psgrad.config import Config
from psgrad.config.reading import config_from
from psgrad.engine.execution.ranks import MergingParts, OneProcess, Processes, RowPart
from psgrad.errors import ConfigError, OutputError, OutputExistsError
from psgrad.run import RunFolder
from psgrad.run.folders import manifest_of
from psgrad.run.results import AnalyzeResult, Progress, ShowProgress
from psgrad.run.results.manifest import RunManifest
from psgrad.run.run import Run
from psgrad.user_code import with_code_beside

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
    progress: ShowProgress = lambda _: None,
) -> Path:
    """Measure the part `number` of `count` of a dataset's rows; returns the run folder, which the
    parts share.

    A part that is run again goes on where it ended. Raises PsgradError.
    """
    run = Run[Processes](config.output, OneProcess(), progress)
    analysis = load_analysis(config, limit, sample, run)
    require_mergeable(analysis.every)
    size = config.engine.chunk_size
    rows = len(analysis.setting)
    part = RowPart.of(number, count, rows, size if isinstance(size, int) else 1)
    run = Run[Processes](config.output, part, progress)
    run.folder = _shared_folder(config.output, analysis.manifest(analysis.identity(count)))
    progress(Progress(0, 0, "samples", f"rows {part.rows.start:,} to {part.rows.stop - 1:,} of {rows:,}"))
    analysis.measure(run)
    return run.path


def merge(output: Path, *, report: bool = True, progress: ShowProgress = lambda _: None) -> AnalyzeResult:
    """Judge and report a run whose parts have measured all rows.

    Raises ConfigError for a folder that is not one of a run in parts, and DataError for rows that are missing
    or there twice.
    """
    manifest = manifest_of(output) or {}
    if manifest.get("command") != "analyze" or NUMBER_OF_PARTS not in (manifest.get("identity") or {}):
        raise ConfigError(
            f"{output} is not the folder of a run in parts",
            hint="name the output folder of psgrad analyze --part K/N",
        )
    base = Path(str(manifest.get("config_folder") or "."))
    config = config_from({**manifest["config"], "output": str(output.resolve())}, base=base)
    result = analyze(
        config,
        resume=True,
        limit=manifest.get("limit"),
        sample=manifest.get("sampled_by") is not None,
        report=report,
        progress=progress,
        processes=MergingParts(manifest["identity"][NUMBER_OF_PARTS]),
    )
    assert result is not None, "the merging process leads"
    return result


def _shared_folder(output: Path, manifest: RunManifest) -> RunFolder:
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
        return _existing_folder(output, manifest)
    except OSError as error:
        raise OutputError(f"the output folder {output} can't be made: {error.strerror or error}") from error
    folder = RunFolder.create(output)
    folder.write_manifest(replace(manifest, state="running").content())
    return folder


def _existing_folder(output: Path, manifest: RunManifest) -> RunFolder:
    """The folder that another part has made, or makes now."""
    end = time.monotonic() + _SECONDS_TO_MAKE_FOLDER
    while (folder := reopen(output, manifest.identity or {}, alone=False)) is None:
        if time.monotonic() > end:
            raise OutputExistsError(
                f"the output folder {output} exists, and holds no run; expected a new or empty folder, or"
                " that of other parts of this run",
                hint="choose another --output",
            )
        time.sleep(0.2)
    if folder.finished:
        raise OutputExistsError(
            f"the parts in {folder.path} are merged already", hint="choose another --output for a new run"
        )
    folder.hold()
    return folder
