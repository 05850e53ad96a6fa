"""The page of an analyze run: which sections it has, in order. It opens offline, and is at most 2 MB for any
number of samples.

Its one script sorts, filters and links; all that it says can be read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from psgrad.reports.analyze_plots import MAX_PICTURES, draw_plots
from psgrad.reports.analyze_sections import (
    class_parts,
    gate_parts,
    listed_samples,
    sample_table,
    values_table,
    verdict_parts,
)
from psgrad.reports.attribution_plots import attribution_plots
from psgrad.reports.attribution_section import ATTRIBUTION_NOTE, AttributionCard, attribution_cards
from psgrad.reports.drawing import Plot
from psgrad.reports.labels import label_warning, label_words
from psgrad.reports.loss_against_norm import linked_image
from psgrad.reports.measure_plots import measure_plots
from psgrad.reports.measures import MAX_MEASURES, measure_sections
from psgrad.reports.outliers import (
    found_parts,
    is_referenced,
    judged_parts,
    nonfinite_ids,
    rankings_of,
    rankings_parts,
    score_words,
)
from psgrad.reports.pictures import PICTURE_NOTE, excerpt, original_uri, picture_uri
from psgrad.reports.sections import (
    Bullets,
    Card,
    Cards,
    Fold,
    Page,
    Part,
    Section,
    Subtitle,
    Text,
    image,
    made_words,
    this_run,
    title_of,
)
from psgrad.reports.sections import render as render_page
from psgrad.reports.tables import Table, TableColumn, table
from psgrad.reports.words import MISSING, brief, identifier, label, number, percent
from psgrad.run.results import AnalyzeResult, TopSample, disagrees, has_classes, top_samples
from psgrad.run.results.manifest import UNKNOWN_UNIT
from psgrad.wording import common_prefix, parameter_names, prefix_note

# Every part of the page is bounded, so that the page is.
PICTURE_SIDE = 96
MAX_PARAMETER_ROWS = 300
FIGURES_ROOM = 900_000  # characters of all figures of measures together
NAME_LIMIT = 100


def write_report(result: AnalyzeResult, write: Callable[[str, bytes], None]) -> None:
    """Draw the plots and the page; `write(name, data)` is called for each of plots/<name>.png and
    report.html.
    """
    plots = draw_plots(result)
    measures = list(result.measures.values())[:MAX_MEASURES]
    of_measures = {measure.name: measure_plots(result, measure) for measure in measures}
    drawn = (plot for each in of_measures.values() for plot in each)
    for plot in (*plots, *drawn, *attribution_plots(result)):
        write(f"plots/{plot.name}.png", plot.png())
    write("report.html", render(result, plots, of_measures).encode("utf-8", "replace"))


def render(
    result: AnalyzeResult, plots: Sequence[Plot], of_measures: dict[str, list[Plot]] | None = None
) -> str:
    """The report as HTML. It changes the figures, so their files are written before."""
    manifest, by_name = result.manifest, {plot.name: plot for plot in plots}
    sections = [
        stands_out(result),
        look_first(result, by_name.get("loss_against_norm")),
        *inputs(result),
        *attribution(attribution_cards(result)),
        Section(
            "How large the gradients are",
            [image(by_name[name]) for name in ("norm_histogram", "norm_against_length") if name in by_name],
            "norms",
            "Norms",
        ),
        *by_class(result, by_name.get("norms_per_class")),
        *by_layer(result, by_name.get("norms_per_layer")),
        *measure_sections(result, of_measures or {}, FIGURES_ROOM),
        meaning(manifest.loss_unit),
        this_run(manifest, result.folder),
    ]
    score = score_words(str(manifest.judged.score))
    ranked = "how large it is" if score == "gradient norm" else f"another score, the {score}"
    pull = "pull hardest" if score == "gradient norm" else f"are first by {score}"
    what = "Every training example has a gradient of its own. This report ranks the examples by"
    return render_page(
        Page(
            title=title_of(manifest, f"Which training examples {pull}?"),
            what=f"{what} {ranked}.",
            private="Norms and losses of single samples reveal who is in the training set.",
            headline=headline(result),
            sections=sections,
            made=made_words(manifest),
            partial=_partial_words(result),
            interactive=True,
        )
    )


def headline(result: AnalyzeResult) -> list[tuple[str, str]]:
    """The figures at the top of the page: value, and what it is."""
    samples, manifest = result.samples, result.manifest
    listed = samples["is_outlier_issue"].to_numpy(bool) & (samples["status"] == "ok").to_numpy()
    rankings, error = rankings_of(manifest.judged), manifest.self_check.worst_relative_error
    found = [
        (f"{len(samples):,}", "samples"),
        (f"{int(listed.sum()):,}", "unlike the reference" if is_referenced(result) else "in the review list"),
        (f"{len(nonfinite_ids(samples)):,}", "not finite"),
        *(rankings.headline if rankings else []),
    ]
    if manifest.model.trainable:
        found.append((f"{manifest.model.trainable:,}", "trainable parameters"))
    if manifest.self_check.samples:
        found.append((number(error), "worst relative error of the self-check"))
    return found


def _partial_words(result: AnalyzeResult) -> str:
    """How many samples were looked at; empty for all."""
    manifest, looked_at = result.manifest, f"{len(result.samples):,}"
    if manifest.limit is None:
        return ""
    there = manifest.counts.in_dataset
    drawn = "" if manifest.sampled_by is None else ", drawn at random,"
    return f"{looked_at} of {there:,} samples{drawn}" if isinstance(there, int) else f"{looked_at} samples"


def stands_out(result: AnalyzeResult) -> Section:
    """What was found, how samples were judged, and what the gate says."""
    parts = [
        *label_parts(result),
        *rankings_parts(result.manifest.judged),
        *verdict_parts(result.check),
        *found_parts(result),
        *judged_parts(result),
        *gate_parts(result.check),
    ]
    return Section("What stands out", parts, "stands-out", "What stands out")


def label_parts(result: AnalyzeResult) -> Iterator[Part]:
    """What labels mean, and how many of them the model agrees with; what is odd about that."""
    facts = result.manifest.labels
    if facts is not None and (words := label_words(facts, result.class_names)):
        yield Text(f"Labels: {words}.", id="labels")
    if facts is not None and (warning := label_warning(facts, result.class_names)):
        yield Text(f"{warning[:1].upper()}{warning[1:]}.", "loud")


def look_first(result: AnalyzeResult, scatter: Plot | None) -> Section:
    """Loss against norm, and the table of samples."""
    listed = listed_samples(result.samples)
    parts: list[Part] = [] if scatter is None else [linked_image(scatter, listed, result.class_names)]
    if len(listed):
        samples, one = sample_table(result), len(listed) == 1
        score = score_words(str(result.manifest.judged.score))
        which = f"of the first ranks by {score}"
        if score == "gradient norm":
            which = f"that {'pulls' if one else 'pull'} hardest"
        all_samples = "All samples are in samples.parquet and samples.csv beside this page."
        note = all_samples + _orange_note(result)
        parts += [
            Subtitle(f"The {len(listed)} {'sample' if one else 'samples'} {which}"),
            replace(samples, note=note),
        ]
    return Section("Samples to look at first", parts, "look-first", "Samples to look at first")


def _orange_note(result: AnalyzeResult) -> str:
    orange = " Where the model’s prediction differs from the label, it is set in orange."
    return orange if has_classes(result.samples) else ""


def inputs(result: AnalyzeResult) -> Iterator[Section]:
    """The inputs of the first ranks: pictures, texts, or rows of a table."""
    cards, values = Cards(input_cards(result)), values_table(result)
    if cards.cards:
        note = f" {PICTURE_NOTE}" if cards.pictures else ""
        words = Text(f"In the order of the ranks.{_orange_note(result)}{note}", "quiet")
        yield Section("The top samples", [words, cards], "inputs", "Inputs")
    if values is not None:
        words = Text("In the order of the ranks: what the model was given.", "quiet")
        where = ("", "") if cards.cards else ("inputs", "Inputs")
        yield Section(values.caption, [words, values], *where)


def input_cards(result: AnalyzeResult) -> list[Card]:
    """The inputs of the first ranks that are pictures or texts."""
    rows = top_samples(result.samples, max(len(result.top_inputs), MAX_PICTURES))
    known = {row["id"]: row for row in rows.assign(_differs=disagrees(rows)).to_dict("records")}
    return [
        _input_card(sample, known[sample.id], result.class_names)
        for sample in result.top_inputs[:MAX_PICTURES]
        if sample.id in known and (sample.image is not None or sample.text is not None)
    ]


def _input_card(sample: TopSample, row: dict[Any, Any], class_names: list[str] | None) -> Card:
    name, norm, loss = identifier(row["id"]), number(row["grad_norm"]), number(row["loss"])
    truth, guess = (label(row.get(column), class_names) for column in ("target", "prediction"))
    words, known = Markup("<b>{}.</b> <bdi>{}</bdi><br>\n").format(row["rank"], name), ""
    if truth != MISSING:
        known = f", label {truth}, model {guess}"
        differs = Markup(' class="differs"') if row["_differs"] else ""
        words += Markup("label <b>{}</b>, model <b{}>{}</b><br>\n").format(truth, differs, guess)
    words += Markup('<span class="quiet">norm {}<br>loss {}</span>').format(norm, loss)
    alt = f"Input of sample {name}{known}, norm {norm}"
    picture, original = picture_uri(sample, PICTURE_SIDE), original_uri(sample, PICTURE_SIDE)
    return Card(words, picture, alt, excerpt(sample.text), int(row["index"]), original)


def attribution(cards: Sequence[AttributionCard]) -> Iterator[Section]:
    """Each shown input under the colours of what it is attributed."""
    parts: list[Part] = [Text(ATTRIBUTION_NOTE, "quiet")]
    for card in cards:
        parts.append(Subtitle(Markup("{}. <bdi>{}</bdi>").format(card.rank, card.id)))
        if card.picture:
            words = Markup('{}<br><span class="quiet">{}</span>')
            overlays = [
                Card(words.format(each.title, each.scale), each.uri, each.alt) for each in card.overlays
            ]
            parts.append(Cards([Card("the input", card.picture, f"Input of sample {card.id}"), *overlays]))
        for passage in card.passages:
            note = f"; {passage.note}" if passage.note else ""
            parts.append(Text(f"{passage.title}; {passage.scale}{note}", "quiet"))
            parts.append(Card(text=passage.html))
    if cards:
        yield Section("What the model looks at", parts, "attribution", "What the model looks at")


def by_class(result: AnalyzeResult, plot: Plot | None) -> Iterator[Section]:
    """The norms of each class, as a figure and as tables."""
    if has_classes(result.samples) and (result.samples["status"] == "ok").any():
        figures = [] if plot is None else [image(plot)]
        yield Section("Class by class", [*figures, *class_parts(result)], "by-class", "Classes")


def by_layer(result: AnalyzeResult, plot: Plot | None) -> Iterator[Section]:
    """The norms of each parameter's gradient, as a figure and as a table."""
    if len(result.parameters):
        layers = layer_table(result.parameters, result.manifest.loss_unit)
        parts: list[Part] = [] if plot is None else [image(plot)]
        parts.append(Fold("The same as a table, a row a parameter", [layers]))
        yield Section("Layer by layer", parts, "by-layer", "Layers")


def layer_table(parameters: pd.DataFrame, unit_of_loss: str) -> Table:
    """One row for each parameter, in the order of the model."""
    shown = parameters
    if len(parameters) > MAX_PARAMETER_ROWS:
        shown = parameters.loc[parameters["share"].fillna(0).nlargest(MAX_PARAMETER_ROWS).index.sort_values()]
    prefix = common_prefix(list(map(str, parameters["parameter"])))
    names = parameter_names(list(map(str, shown["parameter"])), NAME_LIMIT, prefix)
    unit = f"{unit_of_loss} per unit of parameter"

    def text(key: str, words: str, meaning: str = "") -> TableColumn:
        return TableColumn(words, lambda row: brief(str(row[key]), NAME_LIMIT), key=key, meaning=meaning)

    def norm(key: str, words: str, meaning: str) -> TableColumn:
        return TableColumn(words, lambda row: number(row[key]), True, key, meaning)

    def share(row: dict[str, Any]) -> str:
        return MISSING if pd.isna(row["share"]) else percent(row["share"])

    mean = f"mean over samples of the norm of this parameter's gradient ({unit})"
    share_meaning = "mean squared norm, divided by that of all parameters together (%)"
    columns = [
        TableColumn("parameter", lambda row: row["_name"], key="parameter"),
        text("shape", "shape"),
        norm("mean_norm", "mean norm", mean),
        norm("std_norm", "standard deviation", f"over samples ({unit})"),
        norm("median", "median", unit),
        norm("max_norm", "largest", unit),
        TableColumn("share", share, True, "share", share_meaning),
        text("computed_as", "computed as", "the terms whose sum the gradient is"),
    ]
    left_out = (
        f"{len(shown)} of {len(parameters):,} parameters are shown, those with the largest share."
        if len(shown) < len(parameters)
        else ""
    )
    note = ". ".join(part for part in (prefix_note(prefix), left_out) if part)
    rows = shown.assign(_name=names).to_dict("records")
    return table("layers", "Gradient norms of each parameter", columns, rows, note=note, explained=True)


def meaning(loss_unit: str) -> Section:
    """What the numbers of the page mean."""
    unit = "units of the loss" if loss_unit == UNKNOWN_UNIT else loss_unit
    parts: list[Part] = [Text(_MEANING.format(unit)), Bullets(_MEANINGS)]
    return Section("What the numbers mean, and what they do not", parts, "meaning", "What the numbers mean")


_MEANING = Markup(
    '<b>Gradient norm</b> of sample n: <span class="formula">‖∇<sub>θ</sub> ℓ(f(x<sub>n</sub>; θ),'
    " y<sub>n</sub>)‖<sub>2</sub></span>, over all trainable parameters θ, at the checkpoint as it is; in {}"
    " per unit of parameter. <b>Loss</b>: that sample’s own ℓ, with nothing averaged over the batch."
    " <b>Share</b> of a parameter: the mean over samples of its squared norm, divided by that of all"
    " parameters together. <b>Percentile</b>: the percentage of samples that are not more suspect."
)
_MEANINGS = (
    "A large norm says: one step on this sample alone would change the parameters most. Wrong labels do that;"
    " so do rare, hard, and plainly good examples.",
    "A small norm does not say that a sample is clean. A network that has memorised a wrong label has a small"
    " gradient there.",
    "Loss often finds wrong labels as well as the norm does, or better. Compare the two before you trust"
    " either.",
    "Norms depend on the parametrisation and on training time: compare them within one run, not between"
    " models.",
    "A norm is no influence: it has no sign, and does not tell which predictions a sample changed.",
)
