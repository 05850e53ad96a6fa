"""One page that needs nothing else: no script, no network, at most 2 MB for any number of samples."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from psgrad.reports.drawing import Plot
from psgrad.reports.page import at, excerpt, facts_of, notes_of, picture_uri, plot_uri, templates, title_of
from psgrad.reports.plots import MAX_PICTURES, PICTURE_NOTE
from psgrad.reports.words import MISSING, count, identifier, label, number, percentile
from psgrad.results import AnalyzeResult, TopSample, disagrees, has_classes, top_samples

# Every part of the page is bounded, so that the page is: at worst (pictures of noise) these add up to about 1.5 MB.
MAX_ROWS = 20
PICTURE_SIDE = 112
MAX_PARAMETER_ROWS = 60


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
    return templates.get_template("report.html").render(
        title=title_of(result.manifest, "Which training examples pull hardest?"),
        headline=_headline(result),
        findings=_findings(result.samples),
        figures=[(plot, plot_uri(plot)) for plot in plots if plot.name != "top_sheet"],
        rows=list(rows.values())[:MAX_ROWS],
        classes=has_classes(result.samples),
        cards=[_card(sample, rows[sample.id]) for sample in result.top_inputs[:MAX_PICTURES] if sample.id in rows],
        picture_note=PICTURE_NOTE,
        nonfinite=_nonfinite(result.samples),
        parameters=result.parameters.nlargest(MAX_PARAMETER_ROWS, "share").to_dict("records"),
        parameter_count=len(result.parameters),
        facts=facts_of(result.manifest, result.folder),
        notes=notes_of(result.manifest),
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
    return Card(row, picture_uri(sample, PICTURE_SIDE), excerpt(sample.text))


def _headline(result: AnalyzeResult) -> list[tuple[str, str]]:
    """The figures at the top of the page: value, and what it is."""
    samples, manifest = result.samples, result.manifest
    headline = [
        (f"{len(samples):,}", "samples"),
        (f"{int((samples['is_outlier_issue'] & (samples['status'] == 'ok')).sum()):,}", "in the review list"),
        (f"{int((samples['status'] != 'ok').sum()):,}", "not finite"),
    ]
    if at(manifest, "model", "trainable"):
        headline.append((f"{at(manifest, 'model', 'trainable'):,}", "trainable parameters"))
    if at(manifest, "self_check", "samples"):
        headline.append((number(at(manifest, "self_check", "worst_relative_error")), "worst error of the self-check"))
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
