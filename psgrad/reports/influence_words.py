"""What the terminal, the figures and the page of an influence run share: scores, units, queries and training
examples in words, and tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from psgrad.reports.tables import Table, TableColumn, Writer, column, number_column, table
from psgrad.reports.words import (
    MISSING,
    brief,
    count,
    identifier,
    label,
    number,
    percent,
    shorten_middle,
)
from psgrad.run.results import TopSample, disagrees, has_classes
from psgrad.run.results.influence import (
    ALL_INDEX,
    ALL_QUERIES,
    SIGN,
    InfluenceResult,
    pairs_of,
    shown_queries,
)
from psgrad.run.results.influence_details import TokenPair
from psgrad.run.results.manifest import UNKNOWN_UNIT

UNIT_LIMIT = 260
MAX_ROWS = 20
STRONGEST = 10  # pairs of tokens in a table

BEYOND = "!"
BEYOND_NOTE = (
    "!: the score predicts that the loss falls by more than it is, which it cannot. It ranks, and is no"
    " amount."
)

_METHODS = {
    "influence": "influence function",
    "gradient_dot": "gradient dot product",
    "gradient_cosine": "gradient cosine",
    "tracin": "TracInCP",
    "ekfac": "influence function by EK-FAC",
    "trak": "TRAK",
}


@dataclass(frozen=True)
class Example:
    """A query, or a training example beside it.

    score: as text, with a ! behind it where it is beyond what the query's loss can fall by; empty for a
    query. spread: its standard deviation over checkpoints, "± 0.002"; empty where there is none. stability:
    the share of the checkpoints that rank it among the strongest, "80%"; empty where there is one. differs:
    whether the model's prediction is another class than the label.
    """

    rank: int
    score: str
    spread: str
    id: str
    label: str
    prediction: str
    differs: bool
    input: TopSample | None
    stability: str = ""


def signed(score: float) -> str:
    """Three significant digits, with its sign: +0.0123."""
    return MISSING if pd.isna(score) else f"{score:+#.3g}".removesuffix(".")


def method_words(method: str) -> str:
    return _METHODS.get(method, method)


def unit_words(result: InfluenceResult) -> str:
    return brief(result.unit, UNIT_LIMIT)


def own_words(result: InfluenceResult) -> str:
    """The unit of an example's influence on itself, which is on its own loss whatever is asked of queries."""
    if not result.predicts_removal:
        return unit_words(result).replace("the query's", "its own")
    unit = result.manifest.loss_unit
    nats = "" if unit == UNKNOWN_UNIT else f", in {unit}"
    return (
        f"predicted rise of its own loss{nats}{' (uncalibrated)' if is_uncalibrated(result) else ''}, if it"
        " were removed"
    )


def is_uncalibrated(result: InfluenceResult) -> bool:
    """Whether the unit says that the sizes of scores are not calibrated."""
    return "(uncalibrated)" in result.unit


def header(result: InfluenceResult) -> str:
    """What stands above every list of scores: the method, the unit and the sign."""
    return f"{method_words(result.method)}; {SIGN}\nunit: {unit_words(result)}"


def beyond_note(result: InfluenceResult) -> str:
    """What the mark of a score beyond the query's loss says; empty where no ranked score has it."""
    scores = result.scores
    return BEYOND_NOTE if "beyond_loss" in scores and bool(scores["beyond_loss"].any()) else ""


def run_words(result: InfluenceResult) -> list[str]:
    """Sentences about a run's checkpoints and damping, as far as they apply."""
    return list(filter(None, (agreement_words(result), damping_words(result))))


def agreement_words(result: InfluenceResult) -> str:
    """How far the checkpoints agree; empty of one checkpoint."""
    if "agreement" not in result.queries:
        return ""
    known = result.queries["agreement"].dropna()
    middle = f"{known.median():.2f}" if len(known) else MISSING
    words = (
        f"rank stability over {len(result.facts)} checkpoints: the scores of two of them correlate by"
        f" {middle} (median over queries)"
    )
    pairs = result.scores[result.scores["query_index"] != ALL_INDEX]
    if "rank_stability" in pairs and len(pairs):
        words += (
            f"; a ranked example is among the strongest of {pairs['rank_stability'].mean():.0%} of them by"
            " themselves (column stable)"
        )
    return words


def damping_words(result: InfluenceResult) -> str:
    """The damping that a run chose itself, or why it kept the default; empty where the config names one."""
    facts = result.facts[0] if len(result.facts) == 1 else {}
    tried = facts.get("damping_agreement")
    if not tried:
        return f"damping: {facts['damping_because']}" if "damping_because" in facts else ""
    relative = number(float(facts["relative_damping"]))
    curve = ", ".join(f"{number(agreement)} with {multiple}" for multiple, agreement in tried.items())
    return (
        f"damping: {relative} mean eigenvalue{'s' if relative != '1' else ''} of the curvature,"
        f" {facts['damping_because']}; correlations: {curve}"
    )


def examples(result: InfluenceResult, query_index: int, k: int) -> tuple[list[Example], list[Example]]:
    """The k strongest proponents and opponents of a query, or of all queries."""
    sides = pairs_of(result.scores, query_index, k)
    wanted = {int(row) for side in sides for row in side["train_index"]}
    known = _described(result.training, wanted)
    first, second = ([_example(result, pair, known) for pair in side.to_dict("records")] for side in sides)
    return first, second


def query_example(result: InfluenceResult, query_index: int) -> Example:
    """The query itself."""
    row = _described(result.queries, {query_index})[query_index]
    names = result.class_names
    shown = label(row.get("target"), names), label(row.get("prediction"), names)
    return Example(
        0, "", "", identifier(row["id"]), *shown, row["differs"], result.query_inputs.get(query_index)
    )


def query_title(result: InfluenceResult, query_index: int) -> str:
    """Query test-17: label 3, model 5 (61.2%), loss 0.9312."""
    if query_index == ALL_INDEX:
        scored = int((result.queries["status"] == "ok").sum())
        return f"All {scored:,} queries"
    row = _described(result.queries, {query_index})[query_index]
    parts = []
    if (truth := label(row.get("target"), result.class_names)) != MISSING:
        parts.append(f"label {truth}")
    if (guess := label(row.get("prediction"), result.class_names)) != MISSING:
        sure = row.get("confidence")
        parts.append(f"model {guess}" + ("" if sure is None or pd.isna(sure) else f" ({percent(sure)})"))
    if row.get("measurement") is not None:
        parts.append(f"{brief(result.measurement, 40)} {number(row['measurement'])}")
    return f"Query {identifier(row['id'])}" + (f": {', '.join(parts)}" if parts else "")


def reported_queries(result: InfluenceResult, most: int) -> list[int]:
    """What is reported of: all queries together, unless there is but one, and each of a few, as
    `shown_queries` chooses them.
    """
    first = shown_queries(result.queries, most, result.larger_is_worse)
    return first if (result.queries["status"] == "ok").sum() == 1 else [ALL_INDEX, *first]


def query_name(result: InfluenceResult, query_index: int) -> str:
    return ALL_QUERIES if query_index == ALL_INDEX else query_example(result, query_index).id


def _described(frame: pd.DataFrame, rows: set[int]) -> dict[int, dict[Any, Any]]:
    """Row number -> the columns of that row, and `differs`."""
    found = frame[frame["index"].isin(rows)]
    return {int(row["index"]): row for row in found.assign(differs=disagrees(found)).to_dict("records")}


def _example(result: InfluenceResult, pair: dict[Any, Any], known: dict[int, dict[Any, Any]]) -> Example:
    index = int(pair["train_index"])
    row = known[index]
    spread, stability = pair.get("score_std"), pair.get("rank_stability")
    return Example(
        rank=int(pair["rank"]),
        score=signed(pair["score"]) + (BEYOND if pair.get("beyond_loss") is True else ""),
        spread="" if spread is None or pd.isna(spread) else f"± {spread:.2g}",
        id=identifier(pair["train_id"]),
        label=label(row.get("target"), result.class_names),
        prediction=label(row.get("prediction"), result.class_names),
        differs=row["differs"],
        input=result.training_inputs.get(index),
        stability="" if stability is None or pd.isna(stability) else f"{stability:.0%}",
    )


# -- tables --------------------------------------------------------------------------------------------------


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
