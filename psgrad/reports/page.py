"""Pages: Jinja templates that hold their prose, rendered as HTML that needs nothing else and opens offline.

Texts are escaped, unless they are `Markup`. What pages of several commands say of their run is made here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from psgrad.reports.words import (
    FACT_LIMIT,
    brief,
    cell,
    count,
    identifier,
    label,
    number,
    percent,
    plural,
    words_of,
)
from psgrad.run.results.manifest import RunManifest

if TYPE_CHECKING:
    import jinja2

MAX_NOTES = 20


def render_template(template: str, **values: Any) -> str:
    """The page of a template with these values."""
    return _templates().get_template(template).render(**values)


def data_uri(kind: str, data: bytes) -> str:
    """Bytes of a file, to stand where a page names one."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


@cache
def _templates() -> jinja2.Environment:
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("psgrad.reports", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "brief": lambda value, limit: brief(str(value), limit),
        "cell": cell,
        "counted": count,
        "fact": lambda value: brief(str(value), FACT_LIMIT),
        "identifier": identifier,
        "label": label,
        "number": number,
        "percent": percent,
        "plural": lambda n, noun: plural(n, noun),
        "sentence": lambda text: f"{text[:1].upper()}{text[1:]}",
        "thousands": lambda n: f"{n:,}",
        "words": words_of,
        "image": lambda plot: data_uri("image/svg+xml", plot.svg()),
    }
    assert templates.loader is not None
    script, _, _ = templates.loader.get_source(templates, "page.js")
    # The policy of a page knows its script by this hash, and lets no other one run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    templates.globals |= {"script": Markup(script), "digest": digest}
    return templates


def title_of(manifest: RunManifest, otherwise: str) -> str:
    """The title that the config gives the report."""
    report = manifest.config.get("report")
    title = report.get("title") if isinstance(report, Mapping) else None
    return brief(str(title), 120) if title else otherwise


def about_run(manifest: RunManifest, folder: Path) -> dict[str, Any]:
    """What a page says of its run, by the names in its template: when and by which version it was made, where
    its numbers come from, and what was noted when model and data were loaded.
    """
    notes = [*manifest.model.notes, *manifest.data.notes]
    return {
        "made": made_words(manifest),
        "facts": facts_of(manifest, folder),
        "notes": [brief(str(note), FACT_LIMIT) for note in notes][:MAX_NOTES],
    }


def made_words(manifest: RunManifest) -> str:
    """When the run was made and by which version: 2025-11-22 10:31 UTC by psgrad 0.1.0; empty where neither
    is known.
    """
    created, version = manifest.created, manifest.versions.get("psgrad")
    when = brief(str(created), 40).replace("T", " ").replace("+00:00", " UTC") if created else ""
    return " ".join(part for part in (when, brief(f"by psgrad {version}", 60) if version else "") if part)


def facts_of(manifest: RunManifest, folder: Path) -> list[tuple[str, str]]:
    """Where the numbers come from: (name, value). What the manifest does not hold is left out."""
    model, check = manifest.model, manifest.self_check
    # How long the page itself takes is not known when it is made.
    timings = [f"{phase} {number(took)} s" for phase, took in manifest.timings.items() if phase != "report"]
    arithmetic = manifest.engine.dtype
    if check.worst_norm_error_of_autocast is not None:
        arithmetic = (
            f"{arithmetic}; on {check.samples} samples norms differ from float32's by up to"
            f" {number(check.worst_norm_error_of_autocast)} of themselves"
        )
    compared = (
        f"{check.samples} samples compared with a plain one-sample gradient; worst relative error"
        f" {number(check.worst_relative_error)}"
    )
    facts: list[tuple[str, Any]] = [
        ("Made", made_words(manifest)),
        ("Command", manifest.command_line),
        ("Model", model.name),
        ("Task", model.origin.task),
        ("Adapters", ", ".join(model.origin.adapters)),
        ("Parameters", None if model.parameters is None else f"{model.parameters:,}"),
        ("Trainable parameters", None if model.trainable is None else f"{model.trainable:,}"),
        ("Checkpoint", model.checkpoint),
        ("Checkpoint SHA-256", model.sha256),
        ("Modules imported", ", ".join(model.modules_imported)),
        ("Loss", manifest.loss),
        ("Data", manifest.data.source),
        ("Data SHA-256", manifest.data.fingerprint),
        ("Device", manifest.engine.device),
        ("Arithmetic", arithmetic),
        ("Chunk size", manifest.engine.chunk_size),
        ("Self-check", compared if check.samples else None),
        ("Time", ", ".join(timings)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        # As the config names it: the page made again elsewhere is the same page.
        ("Run folder", manifest.config.get("output") or folder),
    ]
    return [(name, brief(str(value), FACT_LIMIT)) for name, value in facts if value]
