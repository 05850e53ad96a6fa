"""Tables of an influence run, on the page and on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup

from psgrad.reports.influence_words import Example, signed
from psgrad.reports.tables import Table, TableColumn, Writer, column, number_column, table
from psgrad.reports.words import MISSING, count, identifier, label, percent, shorten_middle
from psgrad.run.results import disagrees, has_classes
from psgrad.run.results.influence import ALL_INDEX, InfluenceResult
from psgrad.run.results.influence_details import TokenPair

MAX_ROWS = 20
STRONGEST = 10  # pairs of tokens in a table


def check_table(result: InfluenceResult) -> Table:
    """The removals that were checked: the training example, on what, the change that is predicted, and the
    one that was found, as far as one was.
    """
    check = result.check
    assert check is not None
    whole = "predicted" if check.at_minimum else "predicted, at no minimum"
    columns = [
        TableColumn("without", lambda each: identifier(each.train_id), key="id"),
        TableColumn(
            "change of",
            lambda each: "itself" if each.query_index is None else identifier(each.query_id),
            key="id",
        ),
        TableColumn(whole, lambda each: signed(each.predicted), True),
    ]
    if check.at_minimum and check.share < 1:
        part = f"for {check.share:.3g} of a step"
        columns.append(TableColumn(part, lambda each: signed(check.share * each.predicted), True))
    if check.at_minimum:
        columns.append(TableColumn("found", lambda each: signed(each.found), True))
    title = "Largest changes, predicted and found" if check.at_minimum else "Largest changes, predicted"
    return table("", title, columns, check.removals)


def example_table(shown: Sequence[Example], sign: str) -> Table:
    """A row an example of one sign."""
    columns = [
        TableColumn("rank", lambda each: str(each.rank), True),
        TableColumn("score", lambda each: _styled("span", each.score, sign), True),
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
    return table("", f"{sign.capitalize()} most", columns, shown)


def self_influences(result: InfluenceResult) -> Table:
    """The training examples with the largest influence on themselves."""
    if "self_influence" not in result.training:
        return table("", "", [], [])
    largest = result.training[result.training["status"] == "ok"].nlargest(MAX_ROWS, "self_influence")
    names = result.class_names

    def mean(row: Mapping[Any, Any]) -> str:
        score = signed(row.get("overall", float("nan")))
        return _styled("span", score, "hurts" if score.startswith("-") else "helps")

    columns = [column("id", "id", identifier)]
    if has_classes(result.training):
        columns += [
            TableColumn("label", lambda row: label(row.get("target"), names)),
            TableColumn("prediction", lambda row: _bold(label(row.get("prediction"), names), row["differs"])),
        ]
    columns += [
        number_column("loss", "loss"),
        number_column("self_influence", "self-influence"),
        TableColumn("score, mean over queries", mean, True),
    ]
    rows = largest.assign(differs=disagrees(largest)).to_dict("records")
    return table("", f"The {len(rows)} largest as a table", columns, rows)


def _bold(words: str, bold: bool) -> str:
    return _styled("b", words) if bold else words


def _styled(tag: str, words: str, style: str = "") -> str:
    """Words in an element of the page."""
    css = Markup(' class="{}"').format(style) if style else ""
    return Markup("<{0}{1}>{2}</{0}>").format(tag, css, words)


def part_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """How much of each part of the model scores are about."""
    columns = [
        column("part", "part"),
        TableColumn("parameters", lambda row: f"{row['parameters']:,}", True),
        TableColumn("covered", lambda row: percent(row["covered"] / max(1, row["parameters"])), True),
    ]
    if any(row["blocks"] for row in rows):
        columns.append(
            column(
                "blocks",
                "blocks of the curvature",
                lambda blocks: ", ".join(f"{n:,} {kind}" for kind, n in blocks.items()),
            )
        )
    return table("coverage", "The parts of the model", columns, rows)


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
    """A row a group of training examples."""
    columns = [
        TableColumn("group", lambda row: identifier(row["group"]), key="id"),
        number_column("rows", "rows", write=lambda n: f"{n:,}"),
        number_column("score", "score, summed", write=signed),
        TableColumn("mean of a row", lambda row: signed(row["score"] / row["rows"]), True),
    ]
    return table("", title, columns, rows.to_dict("records"))


def contrast_table(title: str, rows: pd.DataFrame) -> Table:
    """The examples that help the first query more, then those that help the second one more."""
    first, second = (str(rows[name].iloc[0]) for name in ("first", "second"))
    columns = [
        number_column("rank", "rank", write=str),
        TableColumn("id", lambda row: identifier(row["train_id"]), key="id"),
        number_column("score", "difference", write=signed),
        number_column("score_first", f"for {shorten_middle(first, 24)}", write=signed),
        number_column("score_second", f"for {shorten_middle(second, 24)}", write=signed),
    ]
    of_either_sign = rows[rows["rank"].abs() <= MAX_ROWS // 2]
    return table("", title, columns, of_either_sign.to_dict("records"))


def token_table(pair: TokenPair) -> Table:
    """The strongest pairs of tokens."""

    def token(side: str) -> Writer:
        return lambda row: f"{row[f'{side}_token']}: {row[f'{side}_text'] or MISSING}"

    columns = [
        TableColumn("query token", token("query")),
        TableColumn("training token", token("train")),
        TableColumn("score", lambda row: signed(row["score"]), True),
    ]
    rows = pair.table().head(STRONGEST).to_dict("records")
    return table("", "The strongest pairs of tokens", columns, rows)
