"""What every page shares: its template's environment, its pictures and texts, all bounded, and what it says of the run."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import jinja2

from psgrad.reports.drawing import Plot
from psgrad.reports.pictures import thumbnail, to_png
from psgrad.reports.words import brief, number, values_line
from psgrad.results import TopSample
from psgrad.wording import LOSSES_IN_NATS

TEXT_LIMIT = 400
TEXT_LINES = 8
FACT_LIMIT = 300
MAX_NOTES = 20

templates = jinja2.Environment(
    loader=jinja2.PackageLoader("psgrad.reports", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
templates.filters["number"] = number


def picture_uri(sample: TopSample, side: int) -> str | None:
    """A sample's picture, no side longer than `side` pixels; None where it is none."""
    return None if sample.image is None else data_uri("image/png", to_png(thumbnail(sample.image, side)))


def plot_uri(plot: Plot) -> str:
    """A figure, closed as an image: nothing inside it reaches the page."""
    return data_uri("image/svg+xml", plot.adaptive_svg()) if plot.vector else data_uri("image/png", plot.png(dpi=130, titled=False))


def shown_text(sample: TopSample) -> str | None:
    """A sample's text, or the values of its row on a line; None for a picture."""
    return sample.text if sample.text is not None else values_line(sample.values)


def excerpt(text: str | None) -> str | None:
    """The beginning of a sample's text."""
    if text is None:
        return None
    start = brief(text, TEXT_LIMIT, keep="\n\t")
    lines = start.split("\n")
    return start if len(lines) <= TEXT_LINES else "\n".join([*lines[:TEXT_LINES], "…"])


def title_of(manifest: dict[str, Any], otherwise: str) -> str:
    """The title that the config gives the report."""
    title = at(manifest, "config", "report", "title")
    return brief(str(title), 120) if title else otherwise


def notes_of(manifest: dict[str, Any]) -> list[str]:
    """What was noted when the model was loaded."""
    return [brief(str(note), FACT_LIMIT) for note in at(manifest, "model", "notes") or []][:MAX_NOTES]


def facts_of(manifest: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Where the numbers come from. What the manifest does not hold is left out."""
    versions = at(manifest, "versions") or {}
    timings = at(manifest, "timings") or {}
    check = at(manifest, "self_check") or {}
    loss = at(manifest, "config", "loss")
    revision = at(manifest, "revision")
    candidates = [
        ("Made", made_words(manifest)),
        ("Command", at(manifest, "command_line")),
        ("Revision", revision and f"{revision}, the commit in the config's folder; changes that are not committed are not seen"),
        ("Model", at(manifest, "model", "factory")),
        ("Parameters", _counted(at(manifest, "model", "parameters"))),
        ("Trainable parameters", _counted(at(manifest, "model", "trainable"))),
        ("Checkpoint", at(manifest, "model", "checkpoint")),
        ("Checkpoint SHA-256", at(manifest, "model", "sha256")),
        ("Modules imported", ", ".join(at(manifest, "model", "modules_imported") or [])),
        ("Loss", loss.get("name") if isinstance(loss, dict) else loss),
        ("Data", at(manifest, "data", "source")),
        ("Data SHA-256", at(manifest, "data", "fingerprint")),
        ("Device", at(manifest, "engine", "device")),
        ("Arithmetic", at(manifest, "engine", "dtype")),
        ("Chunk size", at(manifest, "engine", "chunk_size")),
        ("Self-check", _check_words(check)),
        # How long the page itself takes is not known when it is made.
        ("Time", ", ".join(f"{phase} {number(seconds)} s" for phase, seconds in timings.items() if phase != "report")),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        # As the config names it: the page made again elsewhere is the same page.
        ("Run folder", at(manifest, "config", "output") or folder),
    ]
    return [(name, brief(str(value), FACT_LIMIT)) for name, value in candidates if value]


def made_words(manifest: dict[str, Any]) -> str:
    """When the run was made and by which version: 2025-11-22 10:31 UTC by psgrad 0.1.0; empty where neither is known."""
    created, version = at(manifest, "created"), at(manifest, "versions", "psgrad")
    when = brief(str(created), 40).replace("T", " ").replace("+00:00", " UTC") if created else ""
    return " ".join(part for part in (when, brief(f"by psgrad {version}", 60) if version else "") if part)


UNKNOWN_UNIT = "unit of the loss"


def loss_unit(manifest: dict[str, Any]) -> str:
    """The unit of a loss: nats for psgrad's own cross-entropies; of any other one the unit is not known."""
    loss = at(manifest, "config", "loss")
    name = loss.get("name") if isinstance(loss, dict) else loss
    return "nats" if name in LOSSES_IN_NATS else UNKNOWN_UNIT


def _check_words(check: dict[str, Any]) -> str | None:
    if not check.get("samples"):
        return None
    return (
        f"{check['samples']} samples compared with a plain one-sample gradient; "
        f"worst relative error {number(check.get('worst_relative_error'))}"
    )


def _counted(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def at(content: Any, *keys: str) -> Any:
    """The value at a path in nested dicts, or None where the path ends early."""
    for key in keys:
        if not isinstance(content, dict):
            return None
        content = content.get(key)
    return content


def data_uri(kind: str, data: bytes) -> str:
    """Bytes of a file, to stand where a page names one."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
