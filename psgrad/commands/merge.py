"""`psgrad merge`: a run in parts that do not know of each other, for job arrays, judged as one."""

from __future__ import annotations

from pathlib import Path

from psgrad.commands.analyze import analyze
from psgrad.commands.run_manifest import NUMBER_OF_PARTS
from psgrad.config.reading import config_from
from psgrad.engine.execution.ranks import MergingParts
from psgrad.errors import ConfigError
from psgrad.run import RunFolder
from psgrad.run.results import AnalyzeResult, ShowProgress


def merge(output: Path, *, report: bool = True, progress: ShowProgress = lambda _: None) -> AnalyzeResult:
    """Judge and report a run whose parts have measured all rows.

    Raises ConfigError for a folder that is not one of a run in parts, and DataError for rows that are missing
    or there twice.
    """
    manifest = RunFolder.manifest_of(output) or {}
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
