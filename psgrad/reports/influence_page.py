"""The page of an influence run: which sections it has, in order. It is at most 2 MB for any number of
examples and queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from psgrad.reports.drawing import Plot
from psgrad.reports.influence_plots import draw_influence_plots
from psgrad.reports.influence_sections import coverage_sections, next_step, question_sections, token_sections
from psgrad.reports.influence_words import (
    Example,
    beyond_note,
    check_table,
    differs_note,
    examples,
    fit_facts,
    is_uncalibrated,
    method_words,
    query_example,
    query_title,
    reported_queries,
    run_words,
    signed,
    unit_words,
)
from psgrad.reports.pictures import PICTURE_NOTE, excerpt, original_uri, picture_uri, shown_text
from psgrad.reports.sections import (
    Beside,
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
    render,
    this_run,
    title_of,
)
from psgrad.reports.tables import Table, TableColumn, table
from psgrad.reports.words import FACT_LIMIT, MISSING, brief, count, identifier, label, number, plural
from psgrad.run.results import ALL_INDEX, SIGN, InfluenceResult, disagrees, has_classes

# Every part of the page is bounded, so that the page is: 90 pictures of noise are about 1.5 MB.
PICTURE_SIDE = 64
MAX_ROWS = 20
MAX_CARDS = 6  # queries that are shown
PER_SIDE = 6  # training examples of either sign, beside each
MAX_WARNINGS = 20


def write_influence_report(result: InfluenceResult, write: Callable[[str, bytes], None]) -> None:
    """Draw the plots and the page; `write(name, data)` is called for each of plots/<name>.png and
    report.html.
    """
    plots = draw_influence_plots(result)
    for plot in plots:
        write(f"plots/{plot.name}.png", plot.png())
    write("report.html", render_influence(result, plots).encode("utf-8", "replace"))


def render_influence(result: InfluenceResult, plots: Sequence[Plot]) -> str:
    """The report as HTML."""
    manifest = result.manifest
    return render(
        Page(
            title=title_of(manifest, "Which training examples made the model do this?"),
            what=(
                "Of every query this page shows the training examples that help it most, and those that hurt"
                " it most."
            ),
            private=(
                "Scores of single training examples reveal who is in the training set, and their inputs are"
                " shown."
            ),
            headline=headline(result),
            sections=[
                asked(result),
                *cards(result),
                *question_sections(result),
                *token_sections(result),
                *(figure(result, plot) for plot in plots),
                meaning(result),
                *coverage_sections(result),
                next_step(result),
                this_run(manifest, result.folder, fit_facts(result)),
            ],
            made=made_words(manifest),
        )
    )


def headline(result: InfluenceResult) -> list[tuple[str, str]]:
    """The figures at the top of the page: value, and what it is."""
    gone = sum(int((frame["status"] != "ok").sum()) for frame in (result.training, result.queries))
    found = [
        (f"{len(result.training):,}", "training examples"),
        (f"{len(result.queries):,}", plural(len(result.queries), "query")),
        (f"{gone:,}", "excluded, not finite"),
    ]
    if len(result.facts) > 1:
        found.append((f"{len(result.facts):,}", "checkpoints"))
        if "agreement" in result.queries and result.queries["agreement"].notna().any():
            found.append((f"{result.queries['agreement'].median():.2f}", "correlation of two checkpoints"))
    if has_classes(result.queries) and (wrong := int(disagrees(result.queries).sum())):
        found.append((f"{wrong:,}", f"{plural(wrong, 'query')} the model gets wrong"))
    return found


def asked(result: InfluenceResult) -> Section:
    """What was asked: measurement, method, sign, unit, and all that limits the answer."""
    unit = unit_words(result)
    how = Markup(
        "How the model’s <b>{}</b> on each query depends on each training example, by the method <b>{}</b>."
    )
    sign = Markup("<b>Sign.</b> {}.<br><b>Unit of a score.</b> {}.")
    parts: list[Part] = [
        Text(how.format(brief(result.measurement, 60), method_words(result.method))),
        Text(sign.format(SIGN.capitalize(), unit[:1].upper() + unit[1:])),
    ]
    if not result.predicts_removal:
        no_removal = (
            "This method predicts no retraining: its scores rank examples, and a score of 0.01 is no 0.01 of"
            " any loss after removal."
        )
        parts.append(Text(no_removal, "quiet"))
    for words in run_words(result):
        parts.append(Text(f"{words[:1].upper()}{words[1:]}."))
    if result.check is not None and result.check.removals:
        checked = replace(check_table(result), tall=False, note=result.check.words)
        parts += [Subtitle(checked.caption), checked]
    parts += [Text(brief(str(warning), FACT_LIMIT), "differs") for warning in result.warnings[:MAX_WARNINGS]]
    if (more := len(result.warnings) - MAX_WARNINGS) > 0:
        parts.append(Text(f"{more} more warnings are in manifest.json.", "quiet"))
    parts += _excluded(result.training, "training example", "self_influence")
    parts += _excluded(result.queries, "query", "queries")
    return Section("What was asked", parts)


def _excluded(frame: pd.DataFrame, noun: str, file: str) -> Iterator[Part]:
    """Rows without scores, counted and named; noun: of one of them; file: the name of their file."""
    gone = frame.loc[frame["status"] != "ok", "id"]
    if len(gone):
        words = f"{count(len(gone), noun)} excluded: loss or gradient not finite."
        others = f", … (the others are in {file}.parquet, status “nonfinite”)" if len(gone) > MAX_ROWS else ""
        yield Text(words, "differs")
        yield Text(", ".join(map(identifier, gone.head(MAX_ROWS))) + others, "quiet")


def cards(result: InfluenceResult) -> Iterator[Section | Text]:
    """The examples that help and hurt most: for all queries together, and for each of the first few."""
    shown = reported_queries(result, MAX_CARDS)
    made = {query: query_parts(result, query) for query in shown}
    pictures = any(map(_has_pictures, made.values()))
    notes = " ".join(
        filter(None, (differs_note(result), beyond_note(result), PICTURE_NOTE if pictures else ""))
    )
    for place, (query, parts) in enumerate(made.items()):
        ranked = "Ranked by the mean of the scores over all queries. " if query == ALL_INDEX else ""
        first: list[Part] = [] if place else [Text(ranked + notes, "quiet")]
        yield Section(query_title(result, query), [*first, *parts])
    single, scored = len(shown) - (ALL_INDEX in shown), int((result.queries["status"] == "ok").sum())
    if scored > single:
        wrong_first = "the worst of those that the model gets wrong, then the worst of the others"
        order = wrong_first if has_classes(result.training) else "the worst"
        words = f"{single} of {scored:,} queries are shown: {order}."
        yield Text(f"{words} All are in scores.parquet and scores.csv beside this page.", "quiet")


def _has_pictures(parts: Sequence[Part]) -> bool:
    return any(isinstance(each, Beside) or (isinstance(each, Cards) and each.pictures) for each in parts)


def query_parts(result: InfluenceResult, query_index: int) -> list[Part]:
    """A query beside its strongest proponents and opponents."""
    both = examples(result, query_index, PER_SIDE)
    parts = [
        *side(both[0], "helps", "No training example has a positive score."),
        *side(both[1], "hurts", "No training example has a negative score."),
    ]
    if query_index == ALL_INDEX:
        return parts
    query = example_card(query_example(result, query_index))
    if query.picture:
        return [Beside([Subtitle("The query", "quiet"), query], parts)]
    return parts if query.text is None else [Subtitle("The query", "quiet"), query, *parts]


def side(shown: Sequence[Example], sign: str, otherwise: str) -> Iterator[Part]:
    """The examples of one sign, as cards where their inputs can be looked at, else as a table."""
    yield Subtitle(f"{sign.capitalize()} most", sign)
    cards = [example_card(each, sign) for each in shown]
    if not shown:
        yield Text(otherwise, "quiet")
    elif any(card.picture or card.text is not None for card in cards):
        yield Cards(cards)
    else:
        yield example_table(shown, sign)


def example_card(example: Example, sign: str = "") -> Card:
    """A query (without a sign) or a training example: its input and its words."""
    words = Markup()
    if sign:
        words += Markup('<b class="{}">{}</b>').format(sign, example.score)
        words += Markup(' <span class="quiet">{}</span>').format(example.spread) if example.spread else ""
        if example.stability:
            words += Markup(' <span class="quiet">stable {}</span>').format(example.stability)
        words += Markup("<br>\n")
    words += Markup("<bdi>{}</bdi>").format(example.id)
    if example.label != MISSING:
        guess = example.prediction != MISSING
        known = Markup('<span class="unit">label {}{}</span>').format(example.label, "," if guess else "")
        if guess:
            known += Markup(' <span class="unit">model {}</span>').format(example.prediction)
        words += Markup("\n<br>") + (Markup("<b>{}</b>").format(known) if example.differs else known)
    if example.input is None:
        return Card(words)
    picture, text = picture_uri(example.input, PICTURE_SIDE), excerpt(shown_text(example.input))
    original = original_uri(example.input, PICTURE_SIDE)
    return Card(words, picture, f"Input of {example.id}", text, original=original)


def _bold(words: str, bold: bool) -> str:
    return Markup("<b>{}</b>").format(words) if bold else words


def _coloured(score: str, sign: str) -> str:
    return Markup('<span class="{}">{}</span>').format(sign, score)


def example_table(shown: Sequence[Example], sign: str) -> Table:
    """A row an example of one sign."""
    columns = [
        TableColumn("rank", lambda each: str(each.rank), True),
        TableColumn("score", lambda each: _coloured(each.score, sign), True),
    ]
    if any(each.spread for each in shown):
        columns.append(TableColumn("over checkpoints", lambda each: each.spread))
    if any(each.stability for each in shown):
        columns.append(TableColumn("stable", lambda each: each.stability, True))
    columns.append(TableColumn("id", lambda each: each.id, key="id"))
    if any(each.label != MISSING for each in shown):
        columns += [
            TableColumn("label", lambda each: each.label),
            TableColumn("prediction", lambda each: _bold(each.prediction, each.differs)),
        ]
    return table("", f"{sign.capitalize()} most", columns, shown, tall=False)


def figure(result: InfluenceResult, plot: Plot) -> Section:
    """A figure, and below that of self-influence the largest as a table."""
    drawn = replace(image(plot), title="", alt=f"{plot.title}: {plot.caption}")
    parts: list[Part] = [drawn]
    if plot.name == "self_influence" and "self_influence" in result.training:
        own = self_influences(result)
        if own.rows:
            parts.append(Fold(own.caption, [own]))
    return Section(plot.title, parts)


def self_influences(result: InfluenceResult) -> Table:
    """The training examples with the largest influence on themselves."""
    largest = result.training[result.training["status"] == "ok"].nlargest(MAX_ROWS, "self_influence")
    names = result.class_names

    def mean(row: Mapping[Any, Any]) -> str:
        score = signed(row.get("overall", float("nan")))
        return _coloured(score, "hurts" if score.startswith("-") else "helps")

    columns = [TableColumn("id", lambda row: identifier(row["id"]), key="id")]
    if has_classes(result.training):
        columns += [
            TableColumn("label", lambda row: label(row.get("target"), names)),
            TableColumn("prediction", lambda row: _bold(label(row.get("prediction"), names), row["differs"])),
        ]
    columns += [
        TableColumn("loss", lambda row: number(row["loss"]), True),
        TableColumn("self-influence", lambda row: number(row["self_influence"]), True),
        TableColumn("score, mean over queries", mean, True),
    ]
    rows = largest.assign(differs=disagrees(largest)).to_dict("records")
    return table("", f"The {len(rows)} largest as a table", columns, rows, tall=False)


def meaning(result: InfluenceResult) -> Section:
    """What scores mean; of a method that predicts no removal, that they only rank."""
    items: list[str] = []
    if result.predicts_removal:
        uncalibrated = is_uncalibrated(result)
        items.append(
            f"A score of +0.01 {'predicts' if uncalibrated else 'says'}: had the model been trained to the"
            f" end without this example, then its {brief(result.measurement, 60)} on the query would be worse"
            " by 0.01, to first order about this checkpoint, and with the curvature and damping named below."
        )
        for facts in result.facts[:1]:
            if "calibrated_because" in facts:
                rely = "Such amounts are uncalibrated, so rely on their order:"
                amounts = rely if uncalibrated else "These are amounts:"
                items.append(f"{amounts} {facts['calibrated_because']}.")
        items += _PREDICTED
    else:
        items += _RANKED
    if len(result.facts) == 1 and "(uncalibrated)" in result.unit:
        items.append(_ONE_CHECKPOINT)
    if damping := _damping(result):
        items.append(_DAMPING.format(damping))
    return Section("What the scores mean, and what they do not", [Bullets([*items, *_LIMITS])])


_ONE_CHECKPOINT = Markup(
    "These are scores of one checkpoint. Those of several checkpoints of the same training run, put on one"
    " scale and averaged, agreed better with retraining in our measurements."
    " <code>psgrad.RunCheckpoints</code> saves them from a training loop, and"
    " <code>influence.checkpoints: run/*.safetensors</code> names them."
)
_PREDICTED = (
    "For a convex model that is what retraining shows, with a little less than the full effect for examples"
    " that the model leans on. A network with hidden layers ends elsewhere after each training run, and"
    " leaving one example out changes a single query less than another seed does: no method predicts that"
    " from one model. Trust groups and ranks rather than single scores there, and average over models.",
    "Scores of several examples add up to first order only: removing similar examples together often has a"
    " larger effect than their sum.",
)
_RANKED = (
    "Scores of this method rank training examples. Their size follows its own unit, and is not comparable"
    " with that of other methods.",
    "For a single network with hidden layers no method predicts what leaving one example out will do: trust"
    " groups and ranks rather than single scores, and average over models.",
)
_DAMPING = Markup(
    "Each eigenvalue of the curvature was raised by a damping of {}. A larger one makes scores smaller and"
    " changes their ranks little. Keep it unless <code>psgrad influence --evaluate lds</code> with"
    " <code>evaluate.tuning</code> finds a better one; for amounts of a convex model give the"
    " <code>weight_decay</code> of training and no damping."
)
_LIMITS = (
    "An opponent is no bad example by itself: a rightly labelled example of a class nearby hurts a query,"
    " too.",
    "Large self-influence marks wrong labels and rare examples. Loss, and the confidence of models that have"
    " not seen the example, often find wrong labels as well or better. No influence score finds anomalies"
    " that the model fits well.",
    Markup(
        "Whether the ranking is any good for this model and data can be measured: <code>psgrad influence"
        " --evaluate lds</code> retrains on subsets and compares, with plain controls beside it."
    ),
)


def _damping(result: InfluenceResult) -> str:
    """What was added to the curvature, as a multiple of its mean eigenvalue where there is one number for
    all; empty without any.
    """
    facts = result.facts[0] if result.facts else {}
    damping, mean = facts.get("damping"), facts.get("mean_eigenvalue")
    if not isinstance(damping, float) or not isinstance(mean, float) or not damping or not mean:
        return ""
    return f"{number(damping)} ({number(damping / mean)} × the mean eigenvalue)"
