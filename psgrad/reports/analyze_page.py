"""The page of an analyze run: it needs nothing else, opens offline, and is at most 2 MB for any number of
samples.

Its one script sorts, filters and links; all that it says can be read without it.

What the page says of the gate: its verdict, rule by rule, and the findings behind it.

All files of a report, handed to whoever stores them.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pandas as pd
from markupsafe import Markup

from psgrad.reports.attribution import ATTRIBUTION_NOTE, attribution_cards
from psgrad.reports.attribution_plots import attribution_plots
from psgrad.reports.drawing import Plot
from psgrad.reports.measures import MAX_MEASURES, MeasureSection, measure_plots, measure_sections
from psgrad.reports.outlier_sections import (
    OFFER,
    OPTION,
    Judgement,
    Rankings,
    class_pages,
    class_statistics,
    class_table,
    classes_shown,
    findings_sentences,
    judgement,
    nonfinite_samples,
    rankings_of,
    score_words,
)
from psgrad.reports.page import (
    FACT_LIMIT,
    DataTable,
    Heading,
    TableRow,
    at,
    cell,
    excerpt,
    facts_of,
    loss_unit,
    made_words,
    notes_of,
    picture_uri,
    plot_uri,
    templates,
    title_of,
)
from psgrad.reports.plots import MAX_PICTURES, PICTURE_NOTE, draw_plots
from psgrad.reports.sample_table import linked_svg, listed_samples, sample_table, values_table
from psgrad.reports.words import MISSING, brief, identifier, label, number, percent
from psgrad.results import AnalyzeResult, TopSample, disagrees, has_classes, top_samples
from psgrad.results.findings import RULES, CheckResult
from psgrad.wording import common_prefix, parameter_names, prefix_note

MAX_FINDINGS = 100


def gate_table(check: CheckResult | None) -> DataTable | None:
    """A row a rule of the gate; None where none was asked."""
    if check is None or not check.outcomes:
        return None
    headings = [
        Heading("rule", "rule"),
        Heading("outcome", "outcome"),
        Heading("found", "found", True),
        Heading("limit", "limit", True),
        Heading("message", "what it says"),
    ]
    rows = [
        TableRow(
            [
                brief(each.rule, 60),
                each.outcome,
                cell(each.found),
                cell(each.limit),
                brief(each.message, FACT_LIMIT),
            ],
            differs=frozenset() if each.outcome == "passed" else frozenset([1]),
        )
        for each in check.outcomes
    ]
    return DataTable("gate", "What each rule of the gate says", headings, rows)


def finding_table(check: CheckResult | None) -> DataTable | None:
    """The gravest findings; None where there are none."""
    if check is None or not check.findings:
        return None
    headings = [
        Heading("rule", "rule", meaning="; ".join(f"{rule}: {meaning}" for rule, meaning in RULES.items())),
        Heading("level", "level", meaning="how grave: error, warning or note"),
        Heading("id", "id"),
        Heading("state", "state", meaning="new; known, in the baseline; or ignored, with the reason"),
        Heading("message", "what was found"),
    ]
    rows = [
        TableRow(
            [
                each.rule,
                each.level,
                identifier(each.id),
                f"ignored: {brief(each.ignored_because, 80)}" if each.ignored_because else each.state,
                brief(each.message, FACT_LIMIT),
            ],
            sample=each.index,
        )
        for each in check.findings[:MAX_FINDINGS]
    ]
    counts = Counter(each.rule for each in check.findings)
    note = ", ".join(f"{counts[rule]:,} {rule}" for rule in RULES if counts[rule])
    more = len(check.findings) - MAX_FINDINGS
    note = f"In all: {note}." + (f" {more:,} more are in findings.jsonl." if more > 0 else "")
    return DataTable("findings", "Findings, the gravest first", headings, rows, note)


def gate_sentence(check: CheckResult | None) -> str:
    """The verdict in a sentence; empty where there is no gate."""
    if check is None or not check.outcomes:
        return ""
    return {0: "The gate passed.", 1: "The gate failed.", 4: "The gate could not be evaluated."}.get(
        check.exit_code, ""
    )


# Every part of the page is bounded, so that the page is.
PICTURE_SIDE = 96
MAX_PARAMETER_ROWS = 300
FIGURES_ROOM = 900_000  # characters of all figures of measures together
NAME_LIMIT = 100


@dataclass(frozen=True)
class Card:
    """The input of a top sample: a picture as data URI, or text."""

    sample: int
    rank: str
    id: str
    label: str
    prediction: str
    loss: str
    norm: str
    disagrees: bool
    picture: str | None
    text: str | None

    @property
    def alt(self) -> str:
        """What the picture is, for who can't see it."""
        known = f", label {self.label}, model {self.prediction}" if self.label != MISSING else ""
        return f"Input of sample {self.id}{known}, norm {self.norm}"


def render(
    result: AnalyzeResult, plots: Sequence[Plot], of_measures: dict[str, list[Plot]] | None = None
) -> str:
    """The report as HTML. All text from the config, the data and the model is escaped. Figures are changed:
    their files come first.
    """
    samples, manifest = result.samples, result.manifest
    finite = bool((samples["status"] == "ok").any())
    listed = listed_samples(samples)
    statistics = class_statistics(samples) if finite and classes_shown(result) else None
    limit = at(manifest, "limit")
    how = judgement(result)
    rankings = rankings_of(at(manifest, "outliers"))
    scatter = next((plot for plot in plots if plot.name == "loss_against_norm"), None)
    cards, values, attribution = _cards(result), values_table(result), attribution_cards(result)
    sections = measure_sections(result, of_measures or {}, FIGURES_ROOM)
    script, policy = _script()
    return templates.get_template("report.html").render(
        title=title_of(manifest, "Which training examples pull hardest?"),
        headline=_headline(result, how, rankings),
        rankings=rankings,
        offer=OFFER,
        option=OPTION,
        ranked_by=score_words(how.score),
        partial=None if limit is None else _partial_words(result),
        how=how,
        findings=findings_sentences(samples, how),
        gate=gate_table(result.check),
        verdict=gate_sentence(result.check),
        gate_warnings=[brief(each, 300) for each in result.check.warnings[:20]] if result.check else [],
        found=finding_table(result.check),
        table=sample_table(result) if len(listed) else None,
        cards=cards,
        values=values,
        picture_note=PICTURE_NOTE,
        classes=has_classes(samples),
        scatter=scatter and (scatter, Markup(linked_svg(scatter, listed, result.class_names))),
        figures={
            plot.name: (plot, plot_uri(plot))
            for plot in plots
            if plot.name not in ("top_sheet", "loss_against_norm")
        },
        class_table=None if statistics is None else class_table(result, statistics),
        class_pages=[] if statistics is None else class_pages(result, statistics),
        class_count=0 if statistics is None else len(statistics),
        layers=_layers(result.parameters, loss_unit(manifest)),
        measures=sections,
        attribution=attribution,
        attribution_note=ATTRIBUTION_NOTE,
        nonfinite=nonfinite_samples(samples),
        facts=facts_of(manifest, result.folder),
        made=made_words(manifest),
        loss_unit=loss_unit(manifest),
        notes=notes_of(manifest),
        contents=_contents(
            {
                "inputs": bool(cards) or values is not None,
                "attribution": bool(attribution),
                "by-class": statistics is not None,
                "by-layer": len(result.parameters) > 0,
            },
            sections,
        ),
        script=Markup(script),
        script_policy=Markup(policy),
    )


@cache
def _script() -> tuple[str, str]:
    """The page's script, and by which a browser knows it: the policy lets no other one run."""
    environment = templates
    assert environment.loader is not None
    source, _, _ = environment.loader.get_source(environment, "page.js")
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode("ascii")
    return source, f"; script-src 'sha256-{digest}'"


def _cards(result: AnalyzeResult) -> list[Card]:
    wanted = result.top_inputs[:MAX_PICTURES]
    rows = top_samples(result.samples, max(len(result.top_inputs), MAX_PICTURES))
    known = {row["id"]: row for row in rows.assign(_differs=disagrees(rows)).to_dict("records")}
    shown = [
        sample
        for sample in wanted
        if sample.id in known and (sample.image is not None or sample.text is not None)
    ]
    return [_card(sample, known[sample.id], result.class_names) for sample in shown]


def _card(sample: TopSample, row: dict[Any, Any], class_names: list[str] | None) -> Card:
    return Card(
        sample=int(row["index"]),
        rank=str(row["rank"]),
        id=identifier(row["id"]),
        label=label(row.get("target"), class_names),
        prediction=label(row.get("prediction"), class_names),
        loss=number(row["loss"]),
        norm=number(row["grad_norm"]),
        disagrees=bool(row["_differs"]),
        picture=picture_uri(sample, PICTURE_SIDE),
        text=excerpt(sample.text),
    )


def _headline(result: AnalyzeResult, how: Judgement, rankings: Rankings | None) -> list[tuple[str, str]]:
    """The figures at the top of the page: value, and what it is."""
    samples, manifest = result.samples, result.manifest
    ok = (samples["status"] == "ok").to_numpy()
    what = "unlike the reference" if how.referenced else "in the review list"
    headline = [
        (f"{len(samples):,}", "samples"),
        (f"{int((samples['is_outlier_issue'].to_numpy(bool) & ok).sum()):,}", what),
        (f"{nonfinite_samples(samples)[0]:,}", "not finite"),
        *(rankings.headline if rankings else []),
    ]
    if at(manifest, "model", "trainable"):
        headline.append((f"{at(manifest, 'model', 'trainable'):,}", "trainable parameters"))
    if at(manifest, "self_check", "samples"):
        headline.append(
            (
                number(at(manifest, "self_check", "worst_relative_error")),
                "worst relative error of the self-check",
            )
        )
    return headline


def _partial_words(result: AnalyzeResult) -> str:
    there = at(result.manifest, "counts", "in_dataset")
    return (
        f"{len(result.samples):,} of {there:,} samples"
        if isinstance(there, int)
        else f"{len(result.samples):,} samples"
    )


def _layers(parameters: pd.DataFrame, unit_of_loss: str) -> DataTable | None:
    """A row a parameter, in the order of the model where all are shown."""
    unit = f"{unit_of_loss} per unit of parameter"
    if not len(parameters):
        return None
    shown = parameters
    if len(parameters) > MAX_PARAMETER_ROWS:
        shown = parameters.loc[parameters["share"].fillna(0).nlargest(MAX_PARAMETER_ROWS).index.sort_values()]
    prefix = common_prefix(list(map(str, parameters["parameter"])))
    names = parameter_names(list(map(str, shown["parameter"])), NAME_LIMIT, prefix)
    headings = [
        Heading("parameter", "parameter"),
        Heading("shape", "shape"),
        Heading(
            "mean_norm",
            "mean norm",
            True,
            f"mean over samples of the norm of this parameter's gradient ({unit})",
        ),
        Heading("std_norm", "standard deviation", True, f"over samples ({unit})"),
        Heading("median", "median", True, unit),
        Heading("max_norm", "largest", True, unit),
        Heading("share", "share", True, "mean squared norm, divided by that of all parameters together (%)"),
        Heading("computed_as", "computed as", meaning="the terms whose sum the gradient is"),
    ]
    rows = [
        TableRow(
            [
                name,
                brief(str(row["shape"]), NAME_LIMIT),
                *(number(row[column]) for column in ("mean_norm", "std_norm", "median", "max_norm")),
                MISSING if pd.isna(row["share"]) else percent(row["share"]),
                brief(str(row["computed_as"]), NAME_LIMIT),
            ]
        )
        for row, name in zip(shown.to_dict("records"), names, strict=True)
    ]
    note = (
        f"{len(shown)} of {len(parameters):,} parameters are shown, those with the largest share."
        if len(shown) < len(parameters)
        else ""
    )
    note = ". ".join(part for part in (prefix_note(prefix), note) if part)
    return DataTable("layers", "Gradient norms of each parameter", headings, rows, note)


def _contents(there: dict[str, bool], sections: Sequence[MeasureSection]) -> list[tuple[str, str]]:
    """Where to find what: (anchor, words). there: which of the sections that not every run has are on the
    page.
    """
    parts = [
        ("stands-out", "What stands out"),
        ("look-first", "Samples to look at first"),
        ("inputs", "Inputs"),
        ("attribution", "What the model looks at"),
        ("norms", "Norms"),
        ("by-class", "Classes"),
        ("by-layer", "Layers"),
    ]
    found = [(anchor, words) for anchor, words in parts if there.get(anchor, True)]
    return [
        *found,
        *((section.anchor, section.title) for section in sections),
        ("meaning", "What the numbers mean"),
    ]


def write_report(result: AnalyzeResult, write: Callable[[str, bytes], None]) -> None:
    """Draw the plots and the page; `write(name, data)` is called for each of plots/<name>.png and
    report.html.
    """
    plots = draw_plots(result)
    of_measures = {
        measure.name: measure_plots(result, measure)
        for measure in list(result.measures.values())[:MAX_MEASURES]
    }
    for plot in (
        *plots,
        *(plot for drawn in of_measures.values() for plot in drawn),
        *attribution_plots(result),
    ):
        write(f"plots/{plot.name}.png", plot.png())
    write("report.html", render(result, plots, of_measures).encode("utf-8", "replace"))
