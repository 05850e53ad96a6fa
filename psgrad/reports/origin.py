"""What every page says of its run: the title, when it was made and by which version, and where the numbers
come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psgrad.reports.sections import Bullets, Facts, Section
from psgrad.reports.tables import Pairs
from psgrad.reports.words import brief, number
from psgrad.results.manifest import RunManifest, SelfCheckFacts

FACT_LIMIT = 300
MAX_NOTES = 20


def title_of(manifest: RunManifest, otherwise: str) -> str:
    """The title that the config gives the report."""
    report = manifest.config.get("report")
    title = report.get("title") if isinstance(report, Mapping) else None
    return brief(str(title), 120) if title else otherwise


def made_words(manifest: RunManifest) -> str:
    """When the run was made and by which version: 2025-11-22 10:31 UTC by psgrad 0.1.0; empty where neither
    is known.
    """
    created, version = manifest.created, manifest.versions.get("psgrad")
    when = brief(str(created), 40).replace("T", " ").replace("+00:00", " UTC") if created else ""
    return " ".join(part for part in (when, brief(f"by psgrad {version}", 60) if version else "") if part)


def this_run(manifest: RunManifest, folder: Path, before: Pairs = ()) -> Section:
    """The last section of a page: the facts of the run behind those of its method, and what was noted when
    the model was loaded.
    """
    notes = [brief(str(note), FACT_LIMIT) for note in manifest.model.notes][:MAX_NOTES]
    facts = Facts([*before, *facts_of(manifest, folder)])
    return Section("This run", [facts, *([Bullets(notes, "quiet")] if notes else [])])


def facts_of(manifest: RunManifest, folder: Path) -> list[tuple[str, str]]:
    """Where the numbers come from. What the manifest does not hold is left out."""
    model, revision = manifest.model, manifest.revision
    commit = "the commit in the config's folder; changes that are not committed are not seen"
    # How long the page itself takes is not known when it is made.
    timings = [f"{phase} {number(took)} s" for phase, took in manifest.timings.items() if phase != "report"]
    facts: list[tuple[str, Any]] = [
        ("Made", made_words(manifest)),
        ("Command", manifest.command_line),
        ("Revision", revision and f"{revision}, {commit}"),
        ("Model", model.name),
        ("Task", model.origin.get("task")),
        ("Adapters", ", ".join(model.origin.get("adapters", []))),
        ("Parameters", _counted(model.parameters)),
        ("Trainable parameters", _counted(model.trainable)),
        ("Checkpoint", model.checkpoint),
        ("Checkpoint SHA-256", model.sha256),
        ("Modules imported", ", ".join(model.modules_imported)),
        ("Loss", manifest.loss),
        ("Data", manifest.data.source),
        ("Data SHA-256", manifest.data.fingerprint),
        ("Device", manifest.engine.device),
        ("Arithmetic", manifest.engine.dtype),
        ("Chunk size", manifest.engine.chunk_size),
        ("Self-check", _check_words(manifest.self_check)),
        ("Time", ", ".join(timings)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        # As the config names it: the page made again elsewhere is the same page.
        ("Run folder", manifest.config.get("output") or folder),
    ]
    return [(name, brief(str(value), FACT_LIMIT)) for name, value in facts if value]


def _check_words(check: SelfCheckFacts) -> str | None:
    if not check.samples:
        return None
    return (
        f"{check.samples} samples compared with a plain one-sample gradient; "
        f"worst relative error {number(check.worst_relative_error)}"
    )


def _counted(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"
