"""The page of an analyze run and its figures: templates/analyze.html, and what it is made of. It opens
offline, and is at most 2 MB for any number of samples.

Its one script sorts, filters and links; all that it says can be read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psgrad.reports.analyze_plots import draw_plots
from psgrad.reports.analyze_tables import (
    class_pages,
    class_statistics,
    class_table,
    finding_table,
    gate_table,
    group_table,
    issue_summary,
    layer_table,
    sample_table,
    values_table,
)
from psgrad.reports.attribution import attribution_cards
from psgrad.reports.figures import Plot
from psgrad.reports.labels import label_warning, label_words
from psgrad.reports.loss_against_norm import linked_svg
from psgrad.reports.measure_plots import measure_plots
from psgrad.reports.measures import MAX_MEASURES, measure_sections
from psgrad.reports.outliers import (
    MAX_NAMED,
    OFFER,
    OPTION,
    found_samples,
    gap_words,
    judged_by,
    listed_samples,
    nonfinite_ids,
    rankings_of,
    score_words,
)
from psgrad.reports.page import about_run, render_template, title_of
from psgrad.reports.pictures import excerpt, original_uri, picture_uri
from psgrad.reports.words import FACT_LIMIT, MISSING, brief, identifier, label, number, words_of
from psgrad.run.results import AnalyzeResult, disagrees, has_classes, top_samples
from psgrad.run.results.manifest import UNKNOWN_UNIT

# Every part of the page is bounded, so that the page is.
MAX_PICTURES = 24
PICTURE_SIDE = 96
MAX_CAVEATS = 20
MAX_WARNINGS = 20
FIGURES_ROOM = 900_000  # characters of all figures of measures together


def write_report(result: AnalyzeResult, write: Callable[[str, bytes], None]) -> None:
    """Draw the plots and the page; `write(name, data)` is called for each of plots/<name>.png and
    report.html.
    """
    plots = draw_plots(result)
    measures = list(result.measures.values())[:MAX_MEASURES]
    of_measures = {measure.name: measure_plots(result, measure) for measure in measures}
    for plot in (*plots, *(plot for each in of_measures.values() for plot in each)):
        write(f"plots/{plot.name}.png", plot.png())
    write("report.html", render(result, plots, of_measures).encode("utf-8", "replace"))


def render(
    result: AnalyzeResult, plots: Sequence[Plot], of_measures: Mapping[str, Sequence[Plot]] | None = None
) -> str:
    """The report as HTML."""
    manifest, samples, names = result.manifest, result.samples, result.class_names
    by_name, score = {plot.name: plot for plot in plots}, score_words(str(manifest.judged.score))
    classes = has_classes(samples)
    pull = "pull hardest" if score == "gradient norm" else f"are first by {score}"
    statistics = class_statistics(samples) if classes and (samples["status"] == "ok").any() else None
    scatter = by_name.get("loss_against_norm")
    cards, values = input_cards(result), values_table(result)
    return render_template(
        "analyze.html",
        **about_run(manifest, result.folder),
        **stands_out(result),
        title=title_of(manifest, f"Which training examples {pull}?"),
        score=score,
        headline=headline(result),
        partial=partial_words(result),
        plots=by_name,
        scatter=scatter and linked_svg(scatter, listed_samples(samples), names),
        samples=sample_table(result),
        issues=None if result.issue_summary is None else issue_summary(result.issue_summary),
        cards=cards,
        pictures=any(card.picture for card in cards),
        values=values,
        attribution=attribution_cards(result),
        classes=samples["target"].nunique() if classes else 0,
        by_class=None if statistics is None else class_table(result, statistics),
        class_pages=[] if statistics is None else class_pages(result, statistics),
        layers=layer_table(result.parameters, manifest.loss_unit) if len(result.parameters) else None,
        measures=list(measure_sections(result, of_measures or {}, FIGURES_ROOM)),
        unit="units of the loss" if manifest.loss_unit == UNKNOWN_UNIT else manifest.loss_unit,
    )


def stands_out(result: AnalyzeResult) -> dict[str, Any]:
    """What was found, how samples were judged, and what the gate says, by the names in the template."""
    manifest, names, check = result.manifest, result.class_names, result.check
    judged, facts, labels = manifest.judged, manifest.outliers, manifest.labels
    referenced = judged.referenced
    undecided = referenced and not judged.evaluable and brief(str(judged.why_not or ""), FACT_LIMIT)
    caveats = judged.caveats if judged.referenced else []
    return {
        "labels": "" if labels is None else label_words(labels, names),
        "label_warning": "" if labels is None else label_warning(labels, names),
        "rankings": rankings_of(judged),
        "offer": OFFER,
        "option": OPTION,
        "referenced": referenced,
        "undecided": undecided,
        "found": found_samples(result),
        "gap": gap_words(judged),
        "judged_score": words_of(judged.score),
        "nonfinite": nonfinite_ids(result.samples),
        "max_named": MAX_NAMED,
        "judged_by": [] if facts is None else judged_by(facts),
        "caveats": [brief(str(each), 400) for each in caveats][:MAX_CAVEATS],
        "groups": None if facts is None or facts.groups.by is None else group_table(facts, names),
        "check": check,
        "gate": gate_table(check) if check is not None and check.outcomes else None,
        "warnings": [] if check is None else [brief(each, 300) for each in check.warnings[:MAX_WARNINGS]],
        "findings": finding_table(check) if check is not None and check.findings else None,
    }


def headline(result: AnalyzeResult) -> list[tuple[str, str]]:
    """The figures at the top of the page: value, and what it is."""
    samples, manifest = result.samples, result.manifest
    listed = samples["is_outlier_issue"].to_numpy(bool) & (samples["status"] == "ok").to_numpy()
    rankings, error = rankings_of(manifest.judged), manifest.self_check.worst_relative_error
    which = "unlike the reference" if manifest.judged.referenced else "in the review list"
    found = [
        (f"{len(samples):,}", "samples"),
        (f"{int(listed.sum()):,}", which),
        (f"{len(nonfinite_ids(samples)):,}", "not finite"),
        *(rankings.headline if rankings else []),
    ]
    if manifest.model.trainable:
        found.append((f"{manifest.model.trainable:,}", "trainable parameters"))
    if manifest.self_check.samples:
        found.append((number(error), "worst relative error of the self-check"))
    return found


def partial_words(result: AnalyzeResult) -> str:
    """How many samples were looked at; empty for all."""
    manifest, looked_at = result.manifest, f"{len(result.samples):,}"
    if manifest.limit is None:
        return ""
    there = manifest.counts.in_dataset
    drawn = "" if manifest.sampled_by is None else ", drawn at random,"
    return f"{looked_at} of {there:,} samples{drawn}" if isinstance(there, int) else f"{looked_at} samples"


@dataclass(frozen=True)
class InputCard:
    """A sample of the first ranks with its input. sample: its row. label: empty where there is none."""

    rank: str
    id: str
    sample: int
    label: str
    prediction: str
    differs: bool
    norm: str
    loss: str
    picture: str | None
    original: str | None
    text: str | None

    @property
    def alt(self) -> str:
        """What the picture is, for readers who can't see it."""
        known = f", label {self.label}, model {self.prediction}" if self.label else ""
        return f"Input of sample {self.id}{known}, norm {self.norm}"


def input_cards(result: AnalyzeResult) -> list[InputCard]:
    """The inputs of the first ranks that are pictures or texts."""
    rows = top_samples(result.samples, max(len(result.top_inputs), MAX_PICTURES))
    known = {row["id"]: row for row in rows.assign(_differs=disagrees(rows)).to_dict("records")}
    cards = []
    for sample in result.top_inputs[:MAX_PICTURES]:
        if sample.id in known and (sample.image is not None or sample.text is not None):
            row = known[sample.id]
            truth, guess = (label(row.get(name), result.class_names) for name in ("target", "prediction"))
            cards.append(
                InputCard(
                    rank=str(row["rank"]),
                    id=identifier(row["id"]),
                    sample=int(row["index"]),
                    label="" if truth == MISSING else truth,
                    prediction=guess,
                    differs=bool(row["_differs"]),
                    norm=number(row["grad_norm"]),
                    loss=number(row["loss"]),
                    picture=picture_uri(sample, PICTURE_SIDE),
                    original=original_uri(sample, PICTURE_SIDE),
                    text=excerpt(sample.text),
                )
            )
    return cards
