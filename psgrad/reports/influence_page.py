"""The page of an influence run and its figures: templates/influence.html, and what it is made of. It is at
most 2 MB for any number of examples and queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from psgrad.reports.attribution import Passage
from psgrad.reports.figures import Plot
from psgrad.reports.influence_plots import draw_influence_plots
from psgrad.reports.influence_words import (
    MAX_ROWS,
    Example,
    beyond_note,
    bold,
    check_table,
    example_table,
    examples,
    is_uncalibrated,
    method_words,
    query_example,
    query_title,
    question_tables,
    reported_queries,
    run_words,
    signed,
    styled,
    token_table,
    unit_words,
)
from psgrad.reports.page import about_run, render_template, title_of
from psgrad.reports.pictures import shown_input
from psgrad.reports.spans import spans_of
from psgrad.reports.tables import Table, TableColumn, column, number_column, table
from psgrad.reports.words import (
    FACT_LIMIT,
    MISSING,
    brief,
    cell,
    flat_words,
    identifier,
    label,
    number,
    plural,
)
from psgrad.run.results import disagrees, has_classes
from psgrad.run.results.influence import ALL_INDEX, SIGN, InfluenceResult, harmful_rows
from psgrad.run.results.influence_details import Array, TokenPair, TokenText
from psgrad.wording import listed_names

# Every part of the page is bounded, so that the page is: 90 pictures of noise are about 1.5 MB.
PICTURE_SIDE = 64
MAX_CARDS = 6  # queries that are shown
PER_SIDE = 6  # training examples of either sign, beside each
MAX_NAMED = 8  # parameters
PAIRS = 4  # of texts, of each query
REMOVED_SHARE = 0.01  # of the rows, that the next step is about


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
    manifest, facts = result.manifest, result.facts[0] if result.facts else {}
    queries = [shown_query(result, query) for query in reported_queries(result, MAX_CARDS)]
    return render_template(
        "influence.html",
        **about_run(manifest, result.folder),
        facts=fit_facts(result),
        **hint(result),
        title=title_of(manifest, "Which training examples made the model do this?"),
        result=result,
        headline=headline(result),
        measurement=brief(result.measurement, 60),
        method=method_words(result.method),
        sign=SIGN,
        unit=unit_words(result),
        uncalibrated=is_uncalibrated(result),
        calibrated_because=facts.get("calibrated_because"),
        damping=damping_of(facts),
        run_words=run_words(result),
        check=check_table(result) if result.check is not None and result.check.removals else None,
        training_gone=result.training.loc[result.training["status"] != "ok", "id"].tolist(),
        queries_gone=result.queries.loc[result.queries["status"] != "ok", "id"].tolist(),
        queries=queries,
        classes=has_classes(result.training),
        beyond=beyond_note(result),
        pictures=any(side["pictures"] for each in queries for side in each["sides"]),
        missing=MISSING,
        scored=int((result.queries["status"] == "ok").sum()),
        questions=list(question_tables(result)),
        tokens=list(token_pairs(result)),
        plots=plots,
        own=self_influences(result),
        left_out=listed_names(manifest.influence.coverage.left_out, MAX_NAMED),
        one_checkpoint=len(result.facts) == 1,
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


def shown_query(result: InfluenceResult, query_index: int) -> dict[str, Any]:
    """What the page shows of a query, or of all together: title; all, whether it is these; query, itself
    beside its input, where that can be looked at; and the sides `helps` and `hurts`.
    """
    query = None
    if query_index != ALL_INDEX:
        asked = query_example(result, query_index)
        shown = shown_input(asked.input, PICTURE_SIDE)
        query = (asked, shown) if _is_seen(shown) else None
    helping, hurting = examples(result, query_index, PER_SIDE)
    return {
        "title": query_title(result, query_index),
        "all": query_index == ALL_INDEX,
        "query": query,
        "sides": [side(helping, "helps"), side(hurting, "hurts")],
    }


def side(found: Sequence[Example], sign: str) -> dict[str, Any]:
    """The examples of one sign beside their inputs, as cards where these can be looked at, else a table."""
    shown = [(each, shown_input(each.input, PICTURE_SIDE)) for each in found]
    cards = any(_is_seen(each) for _, each in shown)
    return {
        "sign": sign,
        "examples": shown,
        "table": None if cards or not found else example_table(found, sign),
        "pictures": any(each["picture"] for _, each in shown),
    }


def _is_seen(shown: Mapping[str, str | None]) -> bool:
    return bool(shown["picture"]) or shown["text"] is not None


def damping_of(facts: Mapping[str, Any]) -> tuple[float, float] | None:
    """(what was added to the curvature, the same as a multiple of its mean eigenvalue), where there is one
    number for all.
    """
    damping, mean = facts.get("damping"), facts.get("mean_eigenvalue")
    if not isinstance(damping, float) or not isinstance(mean, float) or not damping or not mean:
        return None
    return damping, damping / mean


def hint(result: InfluenceResult) -> dict[str, Any]:
    """Which rows can be removed, what that is predicted to change, and what was measured about such
    predictions, by the names in the template.
    """
    harmful = harmful_rows(result.training)
    remove = min(max(1, round(REMOVED_SHARE * len(result.training))), len(harmful))
    total = float(harmful["predicted_change"].iloc[remove - 1]) if remove else 0.0
    measured = []
    removals = [] if result.check is None else result.check.removals
    signs = [each.predicted * each.found > 0 for each in removals if each.found is not None]
    if signs:
        measured.append(f"{sum(signs)} of {len(signs)} checked removals had the predicted sign")
    return {
        "harmful": len(harmful),
        "remove": remove,
        "total": signed(total),
        "change": f"{abs(total):.3g}",
        "measured": measured,
    }


def token_pairs(result: InfluenceResult) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(a query's title, its strongest pairs token by token); nothing where samples were asked for."""
    for query, pairs in groupby(result.tokens, key=lambda pair: pair.query_index):
        strongest = sorted(pairs, key=lambda pair: -abs(float(pair.scores.sum())))[:PAIRS]
        yield query_title(result, query), [_shown_pair(pair) for pair in strongest]


def _shown_pair(pair: TokenPair) -> dict[str, Any]:
    """A pair of texts, each token under the colour of its sum."""
    return {
        "title": f"{identifier(pair.train_id)}, {signed(float(pair.scores.sum()))}",
        "query": passage(pair.query, pair.scores.sum(1)),
        "train": passage(pair.train, pair.scores.sum(0)),
        "strongest": token_table(pair),
    }


def passage(text: TokenText, values: Array) -> Passage:
    """A text under the colours of its tokens' values."""
    counted = text.spread(values * 0 + 1).astype(bool)
    words = dict(zip(text.ids.tolist(), text.pieces, strict=False))
    spans, scale, note = spans_of(text.ids, text.spread(values), None, words, None, counted)
    return Passage("", spans, number(scale), note)


MAX_FACTS = 30


def fit_facts(result: InfluenceResult) -> list[tuple[str, str]]:
    """The method's facts about its fit and the checkpoints."""
    influence = result.manifest.influence
    rates = [each.learning_rate for each in influence.checkpoints]
    paths = [str(each.path) for each in influence.checkpoints]
    known = any(rate is not None for rate in rates)
    found: list[tuple[str, Any]] = [
        ("Method", method_words(result.method)),
        ("Measurement", result.measurement),
        ("Normalised by", None if influence.normalize == "none" else influence.normalize),
        ("Checkpoints", ", ".join(paths) if len(paths) > 1 else None),
        ("Learning rates", ", ".join(map(cell, rates)) if known else None),
    ]
    each = [dict(flat_words(facts, FACT_LIMIT)) for facts in result.facts]
    for name in dict.fromkeys(name for facts in each for name in facts):
        values = [facts.get(name, MISSING) for facts in each]
        found.append((_NAMES.get(name, name), values[0] if len(set(values)) == 1 else ", ".join(values)))
    return [(brief(name, 60), brief(str(value), FACT_LIMIT)) for name, value in found if value][:MAX_FACTS]


_NAMES = {
    "Solver because": "Why this solver",
    "Calibrated because": "Why, or why not",
    "Leverage": "Leverage correction",
}


def self_influences(result: InfluenceResult) -> Table:
    """The training examples with the largest influence on themselves."""
    if "self_influence" not in result.training:
        return table("", "", [], [])
    largest = result.training[result.training["status"] == "ok"].nlargest(MAX_ROWS, "self_influence")
    names = result.class_names

    def mean(row: Mapping[Any, Any]) -> str:
        score = signed(row.get("overall", float("nan")))
        return styled("span", score, "hurts" if score.startswith("-") else "helps")

    columns = [column("id", "id", identifier)]
    if has_classes(result.training):
        columns += [
            TableColumn("label", lambda row: label(row.get("target"), names)),
            TableColumn("prediction", lambda row: bold(label(row.get("prediction"), names), row["differs"])),
        ]
    columns += [
        number_column("loss", "loss"),
        number_column("self_influence", "self-influence"),
        TableColumn("score, mean over queries", mean, True),
    ]
    rows = largest.assign(differs=disagrees(largest)).to_dict("records")
    return table("", f"The {len(rows)} largest as a table", columns, rows)
