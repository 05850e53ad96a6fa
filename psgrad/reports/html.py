"""One page that needs nothing else: no script, no network, at most 2 MB for any number of samples."""

from __future__ import annotations

import base64
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import pandas as pd

from psgrad.reports.drawing import Plot
from psgrad.reports.pictures import thumbnail, to_png
from psgrad.reports.plots import MAX_PICTURES, PICTURE_NOTE
from psgrad.reports.words import MISSING, brief, count, identifier, label, number, percentile
from psgrad.results import AnalyzeResult, TopSample, disagrees, has_classes, top_samples

# Every part of the page is bounded, so that the page is: at worst (pictures of noise) these add up to about 1.5 MB.
MAX_ROWS = 20
PICTURE_SIDE = 112
TEXT_LIMIT = 400
TEXT_LINES = 8
FACT_LIMIT = 300
MAX_NOTES = 20
MAX_PARAMETER_ROWS = 60

_templates = jinja2.Environment(
    loader=jinja2.PackageLoader("psgrad.reports", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters["number"] = number


@dataclass(frozen=True)
class Row:
    """One sample in the words of the page."""

    rank: str
    id: str
    label: str
    prediction: str
    confidence: str
    loss: str
    norm: str
    percentile: str
    disagrees: bool


@dataclass(frozen=True)
class Card:
    """The input of a top sample: a picture as data URI, or text."""

    row: Row
    picture: str | None
    text: str | None


def render(result: AnalyzeResult, plots: Sequence[Plot]) -> str:
    """The report as HTML. All text from the config, the data and the model is escaped."""
    top = top_samples(result.samples, _wanted_rows(result))
    rows = {record["id"]: _row(record, result.class_names) for record in top.assign(disagrees=disagrees(top)).to_dict("records")}
    return _templates.get_template("report.html").render(
        title=_title(result.manifest),
        headline=_headline(result),
        findings=_findings(result.samples),
        figures=[(plot, _data_uri(plot)) for plot in plots if plot.name != "top_sheet"],
        rows=list(rows.values())[:MAX_ROWS],
        classes=has_classes(result.samples),
        cards=[_card(sample, rows[sample.id]) for sample in result.top_inputs[:MAX_PICTURES] if sample.id in rows],
        picture_note=PICTURE_NOTE,
        nonfinite=_nonfinite(result.samples),
        parameters=result.parameters.nlargest(MAX_PARAMETER_ROWS, "share").to_dict("records"),
        parameter_count=len(result.parameters),
        facts=_facts(result),
        notes=[brief(str(note), FACT_LIMIT) for note in _at(result.manifest, "model", "notes") or []][:MAX_NOTES],
    )


def _wanted_rows(result: AnalyzeResult) -> int:
    return max(MAX_ROWS, min(len(result.top_inputs), MAX_PICTURES))


def _row(record: dict[Hashable, Any], class_names: list[str] | None) -> Row:
    confidence = record.get("confidence")
    return Row(
        rank=str(record["rank"]),
        id=identifier(record["id"]),
        label=label(record.get("target"), class_names),
        prediction=label(record.get("prediction"), class_names),
        confidence=MISSING if confidence is None or pd.isna(confidence) else f"{confidence:.1%}",
        loss=number(record["loss"]),
        norm=number(record["grad_norm"]),
        percentile=percentile(record["percentile"]),
        disagrees=record["disagrees"],
    )


def _card(sample: TopSample, row: Row) -> Card:
    picture = None if sample.image is None else _uri("image/png", to_png(thumbnail(sample.image, PICTURE_SIDE)))
    return Card(row, picture, None if sample.text is None else _excerpt(sample.text))


def _excerpt(text: str) -> str:
    start = brief(text, TEXT_LIMIT, keep="\n\t")
    lines = start.split("\n")
    return start if len(lines) <= TEXT_LINES else "\n".join([*lines[:TEXT_LINES], "…"])


def _data_uri(plot: Plot) -> str:
    # As an image a figure is closed: nothing inside it reaches the page.
    return _uri("image/svg+xml", plot.svg()) if plot.vector else _uri("image/png", plot.png(dpi=130))


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _title(manifest: dict[str, Any]) -> str:
    title = _at(manifest, "config", "report", "title")
    return brief(str(title), 120) if title else "Which training examples pull hardest?"


def _headline(result: AnalyzeResult) -> list[tuple[str, str]]:
    """The figures at the top of the page: value, and what it is."""
    samples, manifest = result.samples, result.manifest
    headline = [
        (f"{len(samples):,}", "samples"),
        (f"{int((samples['is_outlier_issue'] & (samples['status'] == 'ok')).sum()):,}", "in the review list"),
        (f"{int((samples['status'] != 'ok').sum()):,}", "not finite"),
    ]
    if _at(manifest, "model", "trainable"):
        headline.append((f"{_at(manifest, 'model', 'trainable'):,}", "trainable parameters"))
    if _at(manifest, "self_check", "samples"):
        headline.append((number(_at(manifest, "self_check", "worst_relative_error")), "worst error of the self-check"))
    return headline


def _findings(samples: pd.DataFrame) -> list[str]:
    """Plain sentences about the review list, with what speaks for it and what against."""
    finite = samples[samples["status"] == "ok"]
    review = finite[finite["is_outlier_issue"]]
    if not len(review):
        return []
    also_by_loss = int((finite["loss"].rank(ascending=False, method="first")[review.index] <= len(review)).sum())
    findings = [f"The review list has {count(len(review))}; {also_by_loss:,} of them are also among the {len(review):,} largest by loss."]
    if has_classes(samples) and "prediction" in samples:
        wrong = disagrees(finite)
        findings.append(
            f"The model's prediction differs from the label for {int(wrong[review.index].sum()):,} of them, "
            f"and for {int(wrong.sum()):,} of all {count(len(finite))} that are finite."
        )
    zero = int((finite["grad_norm"] == 0).sum())
    if zero:
        findings.append(f"Gradients of exactly zero: {count(zero)}. They would not move the model at all.")
    return findings


def _nonfinite(samples: pd.DataFrame) -> tuple[int, list[str]]:
    bad = samples.loc[samples["status"] != "ok", "id"]
    return len(bad), [identifier(each) for each in bad.head(MAX_ROWS)]


def _facts(result: AnalyzeResult) -> list[tuple[str, str]]:
    """Where the numbers come from. What the manifest does not hold is left out."""
    manifest = result.manifest
    versions = _at(manifest, "versions") or {}
    timings = _at(manifest, "timings") or {}
    check = _at(manifest, "self_check") or {}
    loss = _at(manifest, "config", "loss")
    candidates = [
        ("Model", _at(manifest, "model", "factory")),
        ("Parameters", _counted(_at(manifest, "model", "parameters"))),
        ("Trainable parameters", _counted(_at(manifest, "model", "trainable"))),
        ("Checkpoint", _at(manifest, "model", "checkpoint")),
        ("Checkpoint SHA-256", _at(manifest, "model", "sha256")),
        ("Modules imported", ", ".join(_at(manifest, "model", "modules_imported") or [])),
        ("Loss", loss.get("name") if isinstance(loss, dict) else loss),
        ("Data", _at(manifest, "data", "source")),
        ("Data SHA-256", _at(manifest, "data", "fingerprint")),
        ("Device", _at(manifest, "engine", "device")),
        ("Arithmetic", _at(manifest, "engine", "dtype")),
        ("Chunk size", _at(manifest, "engine", "chunk_size")),
        ("Self-check", _check_words(check)),
        ("Time", ", ".join(f"{phase} {number(seconds)} s" for phase, seconds in timings.items())),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Run folder", result.folder),
    ]
    return [(name, brief(str(value), FACT_LIMIT)) for name, value in candidates if value]


def _check_words(check: dict[str, Any]) -> str | None:
    if not check.get("samples"):
        return None
    return (
        f"{check['samples']} samples compared with a plain one-sample gradient; "
        f"worst relative error {number(check.get('worst_relative_error'))}"
    )


def _counted(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _at(content: Any, *keys: str) -> Any:
    """The value at a path in nested dicts, or None where the path ends early."""
    for key in keys:
        if not isinstance(content, dict):
            return None
        content = content.get(key)
    return content
