"""The page of an analyze run and its figures: templates/analyze.html, and what it is made of. It opens
offline, and is at most 2 MB for any number of samples.

Its one script sorts and filters tables; all that it says can be read without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from psgrad.reports.analyze_plots import draw_plots
from psgrad.reports.analyze_tables import (
    class_statistics,
    nonfinite_ids,
    sample_table,
    score_words,
    shown_parameters,
    values_table,
)
from psgrad.reports.attribution import attribution_cards
from psgrad.reports.figures import Plot
from psgrad.reports.labels import label_warning, label_words
from psgrad.reports.measure_plots import measure_plots
from psgrad.reports.measures import MAX_MEASURES, measure_sections
from psgrad.reports.page import about_run, render_template, title_of
from psgrad.reports.pictures import shown_input
from psgrad.reports.words import group_words
from psgrad.run.results import RULES, AnalyzeResult, disagrees, has_classes, top_samples
from psgrad.run.results.manifest import UNKNOWN_UNIT
from psgrad.wording import prefix_note

# Every part of the page is bounded, so that the page is.
MAX_PICTURES = 24
PICTURE_SIDE = 96
MAX_CLASSES = MAX_GROUPS = 200
MAX_FINDINGS = MAX_TWINS = 100
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
    manifest, samples, names, check = result.manifest, result.samples, result.class_names, result.check
    judged, labels = manifest.judged, manifest.labels
    score, by = score_words(judged), judged.groups.by
    pull = "pull hardest" if score == "gradient norm" else f"are first by {score}"
    by_class = class_statistics(samples) if has_classes(samples) else samples.head(0)
    parameters, prefix = shown_parameters(result.parameters)
    cards, groups = input_cards(result), list(judged.groups.each.items())
    return render_template(
        "analyze.html",
        **about_run(manifest, result.folder),
        title=title_of(manifest, f"Which training examples {pull}?"),
        score=score,
        total=len(samples),
        partial=manifest.limit is not None,
        labels="" if labels is None else label_words(labels, names),
        label_warning="" if labels is None else label_warning(labels, names),
        judged=judged,
        wrong=wrong_predictions(samples),
        nonfinite=nonfinite_ids(samples),
        groups=[(group_words(name, by, names), about) for name, about in groups[:MAX_GROUPS]],
        check=check,
        rules=RULES,
        counts=Counter(finding.rule for finding in check.findings) if check else {},
        max_findings=MAX_FINDINGS,
        plots={plot.name: plot for plot in plots},
        samples=sample_table(result),
        issues=[] if result.issue_summary is None else result.issue_summary.to_dict("records"),
        twins=twins(result.issues),
        cards=cards,
        names=names,
        values=values_table(result),
        attribution=attribution_cards(result),
        by_class=by_class.head(MAX_CLASSES).to_dict("index"),
        classes=len(by_class),
        parameters=parameters,
        all_parameters=len(result.parameters),
        prefix=prefix_note(prefix),
        measures=list(measure_sections(result, of_measures or {}, FIGURES_ROOM)),
        unit=manifest.loss_unit,
        unit_in_words="units of the loss" if manifest.loss_unit == UNKNOWN_UNIT else manifest.loss_unit,
    )


def wrong_predictions(samples: pd.DataFrame) -> tuple[int, int] | None:
    """For how many of the finite samples, and of those of them that are listed, the prediction differs from
    the label; None without classes.
    """
    if not has_classes(samples) or "prediction" not in samples:
        return None
    wrong = disagrees(samples) & (samples["status"] == "ok")
    return int(wrong.sum()), int((wrong & samples["is_outlier_issue"]).sum())


def twins(issues: pd.DataFrame | None) -> list[dict[Hashable, Any]]:
    """Near duplicates with different labels, set by set, the first MAX_TWINS."""
    if issues is None or "near_duplicate_labels_differ" not in issues:
        return []
    differ = issues[issues["near_duplicate_labels_differ"]]
    return differ.sort_values("near_duplicate_set", kind="stable").head(MAX_TWINS).to_dict("records")


def input_cards(result: AnalyzeResult) -> list[tuple[dict[Hashable, Any], dict[str, str | None]]]:
    """The samples of the first ranks whose inputs are pictures or texts: (its row, its input)."""
    rows = top_samples(result.samples, max(len(result.top_inputs), MAX_PICTURES))
    known = {row["id"]: row for row in rows.assign(differs=disagrees(rows)).to_dict("records")}
    seen = [
        each for each in result.top_inputs[:MAX_PICTURES] if each.image is not None or each.text is not None
    ]
    return [(known[each.id], shown_input(each, PICTURE_SIDE)) for each in seen if each.id in known]
