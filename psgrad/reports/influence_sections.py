"""Sections of the page of an influence run: which parameters scores are about, questions about several rows,
and pairs of texts token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import pandas as pd
from markupsafe import Markup

from psgrad.reports.influence_words import is_uncalibrated, query_title, signed
from psgrad.reports.sections import Bullets, Fold, Part, Section, Subtitle, Text
from psgrad.reports.tables import Table, TableColumn, table
from psgrad.reports.words import (
    FACT_LIMIT,
    MISSING,
    brief,
    count,
    identifier,
    number,
    percent,
    shorten_middle,
)
from psgrad.run.results import ALL_INDEX, InfluenceResult
from psgrad.run.results.influence import harmful_rows
from psgrad.run.results.influence_details import Array, TokenPair, TokenText
from psgrad.wording import listed_names

# Parameters that are named.
_NAMED = 8


def coverage_words(rows: list[dict[str, Any]]) -> str:
    """How many of the parameters scores are about, and which they are not."""
    whole, covered = (sum(row[key] for row in rows) for key in ("parameters", "covered"))
    share = percent(covered / whole)
    if covered == whole:
        return f"Scores are about all {whole:,} parameters."
    names = [name for row in rows for name in row["left_out"]]
    return (
        f"Scores are about {covered:,} of {whole:,} parameters ({share}). Left out, as frozen"
        f" or not named by influence.parameters: {listed_names(names, _NAMED)}."
    )


def coverage_sections(result: InfluenceResult) -> Iterator[Section]:
    """The section, where a run has said which parameters it covers."""
    rows = result.manifest.influence.coverage
    if not rows:
        return
    parts: list[Part] = [Text(brief(coverage_words(rows), 2 * FACT_LIMIT))]
    if len(rows) > 1:
        columns = [
            TableColumn("part", lambda row: row["part"]),
            TableColumn("parameters", lambda row: f"{row['parameters']:,}", True),
            TableColumn("covered", lambda row: percent(row["covered"] / max(1, row["parameters"])), True),
        ]
        if any(row["blocks"] for row in rows):
            columns.append(TableColumn("blocks of the curvature", _blocks))
        parts.append(table("coverage", "The parts of the model", columns, rows, tall=False))
    yield Section("Which parameters", parts)


def _blocks(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in row["blocks"].items())


MAX_ROWS = 20
SHARE = 0.01  # of the rows, that the next step is about
HARMFUL_FILE = "harmful.csv"
Row = Mapping[Any, Any]


def question_tables(result: InfluenceResult) -> Iterator[tuple[str, list[Table]]]:
    """(what was asked, its tables), of each question of the config."""
    found = result.questions
    if len(found.groups):
        whole = found.groups[found.groups["query_index"] == ALL_INDEX]
        both = (whole[whole["rank"] > 0].head(MAX_ROWS), whole[whole["rank"] < 0].head(MAX_ROWS))
        words = f"{count(len(whole), 'group')} of training examples with a score, for all queries together"
        names = ("Groups that help most", "Groups that hurt most")
        yield words, [group_table(name, each) for name, each in zip(names, both, strict=True) if len(each)]
    if len(found.contrasts):
        pairs = found.contrasts.groupby(["first", "second"], sort=False)
        tables = [
            contrast_table(f"{identifier(first)} minus {identifier(second)}", rows)
            for (first, second), rows in pairs
        ]
        yield "What distinguishes two queries", tables[:MAX_ROWS]


def group_table(title: str, rows: pd.DataFrame) -> Table:
    columns = [
        TableColumn("group", lambda row: identifier(row["group"]), key="id"),
        TableColumn("rows", lambda row: f"{row['rows']:,}", True),
        TableColumn("score, summed", lambda row: signed(row["score"]), True),
        TableColumn("mean of a row", lambda row: signed(row["score"] / row["rows"]), True),
    ]
    return table("", title, columns, rows.to_dict("records"), tall=False)


def contrast_table(title: str, rows: pd.DataFrame) -> Table:
    """The examples that help the first query more, then those that help the second one more."""
    first, second = (str(rows[name].iloc[0]) for name in ("first", "second"))
    columns = [
        TableColumn("rank", lambda row: str(row["rank"]), True),
        TableColumn("id", lambda row: identifier(row["train_id"]), key="id"),
        TableColumn("difference", lambda row: signed(row["score"]), True),
        TableColumn(f"for {shorten_middle(first, 24)}", lambda row: signed(row["score_first"]), True),
        TableColumn(f"for {shorten_middle(second, 24)}", lambda row: signed(row["score_second"]), True),
    ]
    return table("", title, columns, _first_of_either_sign(rows), tall=False)


def _first_of_either_sign(rows: pd.DataFrame) -> list[dict[Any, Any]]:
    half = MAX_ROWS // 2
    return rows[rows["rank"].abs() <= half].to_dict("records")


def question_sections(result: InfluenceResult) -> Iterator[Section]:
    """The answers on the page; the first table of each open, more of them folded."""
    for words, tables in question_tables(result):
        shown: list[Part] = [Fold(each.caption, [each]) for each in tables]
        yield Section(words, shown)


# -- what to do next -----------------------------------------------------------------------------------------


def next_step(result: InfluenceResult) -> Section:
    """What can be done now: rows to remove with the predicted change, how far that can be trusted, the list,
    and the commands that measure more.
    """
    return Section("What to do next", [Bullets(list(next_steps(result))), Text(_NOT_ALONE, "quiet")])


_NOT_ALONE = "Look at the rows before you remove them: a rightly labelled rare example hurts queries, too."


def next_steps(result: InfluenceResult) -> Iterator[str]:
    """The steps in words, with markup for commands."""
    harmful = harmful_rows(result.training)
    if not len(harmful):
        yield "No training example hurts the queries as a whole: there is nothing to remove."
    else:
        amount = min(max(1, round(SHARE * len(result.training))), len(harmful))
        total = float(harmful["predicted_change"].iloc[amount - 1])
        rows = (
            f"the {amount:,} training examples that hurt" if amount > 1 else "the training example that hurts"
        )
        yield Markup("Remove {} all queries most: {}. {}").format(
            rows, predicted_words(result, total), trust_words(result, amount)
        )
        yield Markup(
            "The list: <code>{}</code> has {}, the worst first, with labels and predicted changes."
        ).format(result.folder / HARMFUL_FILE, count(len(harmful), "row"))
    yield Markup(
        "Measure how far to trust sums of scores: <code>psgrad influence CONFIG --evaluate lds</code> trains"
        " again on random subsets of the rows."
    )
    if len(result.facts) == 1:
        yield Markup(
            "More checkpoints of the same run rank better: save them with <code>psgrad.RunCheckpoints</code>,"
            " then <code>psgrad influence CONFIG --set 'influence.checkpoints=run/*.safetensors'</code>."
        )


def predicted_words(result: InfluenceResult, total: float) -> str:
    """The predicted change of the measurement, of a sum of scores."""
    measured = brief(result.measurement, 40)
    if not result.predicts_removal:
        return f"their scores add up to {signed(total)}, which ranks and predicts no amount"
    better = "lower" if result.larger_is_worse else "higher"
    sure = " (uncalibrated)" if is_uncalibrated(result) else ""
    return f"the mean {measured} of the queries is predicted to be {abs(total):.3g} {better}{sure}"


def trust_words(result: InfluenceResult, amount: int) -> str:
    """What was measured about such predictions; that nothing was, where nothing was."""
    said = []
    removals = [] if result.check is None else result.check.removals
    signs = [each.predicted * each.found > 0 for each in removals if each.found is not None]
    if signs:
        said.append(f"{sum(signs)} of {len(signs)} checked removals had the predicted sign")
    lds = result.evaluations.get("lds")
    if lds is not None:
        best = lds.get("ceiling")
        of = "" if best is None else f" of at most {best:.2f}"
        said.append(f"sums of scores rank retrained models with a correlation of {lds['mean']:.2f}{of}")
    if said:
        return f"Measured: {'; '.join(said)}."
    return "How far to trust that was not measured for this model: the command below does."


PAIRS = 4  # of each query
STRONGEST = 10  # pairs of tokens in a table
_NOTE = (
    "Each token has the sum of its scores with all tokens of the other text. Orange: it helps; blue: it"
    " hurts; grey: it has no loss of its own. In a language model the score of a token is that of predicting"
    " it."
)


def token_sections(result: InfluenceResult) -> Iterator[Section]:
    """A section a query, with its strongest pairs; none where scores of tokens were not asked for."""
    for query, pairs in groupby(result.tokens, key=lambda pair: pair.query_index):
        strongest = sorted(pairs, key=lambda pair: -abs(float(pair.scores.sum())))[:PAIRS]
        parts: list[Part] = [Text(_NOTE, "quiet")]
        for pair in strongest:
            total = signed(float(pair.scores.sum()))
            parts.append(Subtitle(f"{identifier(pair.train_id)}, {total}", "quiet"))
            parts += [_coloured("Query", pair.query, pair.scores.sum(1))]
            parts += [_coloured("Training example", pair.train, pair.scores.sum(0))]
            parts.append(strongest_tokens(pair))
        yield Section(f"Token by token. {query_title(result, query)}", parts)


def _coloured(name: str, text: TokenText, values: Array) -> Text:
    from psgrad.reports.attribution_section import (  # they need matplotlib, a terminal does not
        Passage,
        spans_of,
    )

    weights = text.spread(values)
    counted = text.spread(values * 0 + 1).astype(bool)
    words = dict(zip(text.ids.tolist(), text.pieces, strict=False))
    spans, scale, note = spans_of(text.ids, weights, None, words, None, counted)
    passage = Passage("", spans, "", note)
    said = Markup("<b>{}</b> (full colour: {}) {}").format(name, number(scale), passage.html)
    return Text(said + (Markup(' <span class="quiet">{}</span>').format(note) if note else Markup()))


def strongest_tokens(pair: TokenPair) -> Table:
    """The strongest pairs of tokens."""
    columns = [
        TableColumn("query token", lambda row: f"{row['query_token']}: {row['query_text'] or MISSING}"),
        TableColumn("training token", lambda row: f"{row['train_token']}: {row['train_text'] or MISSING}"),
        TableColumn("score", lambda row: signed(row["score"]), True),
    ]
    rows = pair.table().head(STRONGEST).to_dict("records")
    return table("", "The strongest pairs of tokens", columns, rows, tall=False)
