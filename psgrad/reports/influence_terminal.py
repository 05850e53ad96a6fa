"""How scores, queries and training examples are written, on the terminal, in figures and on the page, and the
end of an influence run on a terminal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, TextIO

import pandas as pd

from psgrad.reports.tables import Column, Table, Writer, table
from psgrad.reports.terminal import print_table, write_json
from psgrad.reports.words import MISSING, amount, brief, count, identifier, label, number, percent
from psgrad.results import (
    ALL_INDEX,
    ALL_QUERIES,
    SIGN,
    IndexResult,
    InfluenceResult,
    TopSample,
    disagrees,
    pairs_of,
    shown_queries,
)
from psgrad.results.manifest import UNKNOWN_UNIT, read_manifest

UNIT_LIMIT = 260

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
    "datainf": "DataInf",
    "trak": "TRAK",
}


@dataclass(frozen=True)
class Example:
    """A query, or a training example beside it.

    score: written out, with a ! behind it where it is beyond what the query's loss can fall by; empty for a
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
    unit = read_manifest(result.manifest).loss_unit
    nats = "" if unit == UNKNOWN_UNIT else f", in {unit}"
    return (
        f"predicted rise of its own loss{nats}{' (uncalibrated)' if is_uncalibrated(result) else ''}, if it"
        " were removed"
    )


def is_uncalibrated(result: InfluenceResult) -> bool:
    """Whether the unit says that nothing vouches for the sizes of scores."""
    return "(uncalibrated)" in result.unit


def header(result: InfluenceResult) -> str:
    """What stands above every list of scores: the method, the unit and the sign."""
    return f"{method_words(result.method)}; {SIGN}\nunit: {unit_words(result)}"


def beyond_note(result: InfluenceResult) -> str:
    """What the mark of a score beyond the query's loss says; empty where no ranked score has it."""
    scores = result.scores
    return BEYOND_NOTE if "beyond_loss" in scores and bool(scores["beyond_loss"].any()) else ""


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


def check_table(result: InfluenceResult) -> Table:
    """The removals that were checked: the training example, on what, the change that is predicted, and the
    one that was found.
    """
    columns = [
        Column("without", lambda each: identifier(each.train_id), key="id"),
        Column(
            "change of",
            lambda each: "itself" if each.query_index is None else identifier(each.query_id),
            key="id",
        ),
        Column("predicted", lambda each: signed(each.predicted), True),
        Column("found", lambda each: signed(each.found), True),
    ]
    removals = [] if result.check is None else result.check.removals
    return table("", "The largest changes, predicted and found", columns, removals)


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


def reported_queries(result: InfluenceResult, count: int) -> list[int]:
    """What is reported of: all queries together, unless there is but one, and each of a few, as
    `shown_queries` chooses them.
    """
    first = shown_queries(result.queries, count, result.larger_is_worse)
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


SHOWN_QUERIES = 3


def write_influence(result: InfluenceResult, top: int, style: str, stream: TextIO) -> None:
    """style: 'terminal', the sign, the unit, the strongest `top` examples of either sign for all queries
    together and for each of the first few, and the folder; or 'json', one object with all that is ranked.
    """
    if style == "json":
        write_json(influence_content(result), stream)
        return
    stream.write(header(result) + "\n")
    if note := beyond_note(result):
        stream.write(note + "\n")
    if words := agreement_words(result):
        stream.write(words + "\n")
    if result.check is not None:
        stream.write("\nLargest changes, predicted and found\n")
        print_table(check_table(result), stream)
        stream.write(result.check.words + "\n")
    for query in reported_queries(result, SHOWN_QUERIES):
        stream.write(f"\n{query_title(result, query)}\n")
        print_table(sides_table(*examples(result, query, top)), stream)
    stream.write(f"{result.folder}\n")


def influence_content(result: InfluenceResult) -> dict[str, Any]:
    """What is ranked, with its sign and unit."""
    scores = result.scores.astype(object).where(result.scores.notna(), None)
    return {
        "method": result.method,
        "sign": SIGN,
        "unit": result.unit,
        "predicts_removal": result.predicts_removal,
        "measurement": result.measurement,
        "rank_stability": stability_numbers(result),
        "check": None if result.check is None else {**asdict(result.check), "words": result.check.words},
        "warnings": result.warnings,
        "folder": result.folder,
        "scores": scores.to_dict("records"),
    }


def stability_numbers(result: InfluenceResult) -> dict[str, float | None] | None:
    """Medians and means of `agreement` and `rank_stability` over the queries; None of one checkpoint."""
    if "agreement" not in result.queries:
        return None
    pairs = result.scores[result.scores["query_index"] != ALL_INDEX]
    among = pairs["rank_stability"].mean() if "rank_stability" in pairs else float("nan")
    found = {"agreement": result.queries["agreement"].median(), "among_strongest": among}
    return {name: None if pd.isna(value) else float(value) for name, value in found.items()}


def sides_table(proponents: list[Example], opponents: list[Example]) -> Table:
    """Proponents and opponents side by side, a row a rank."""
    both = [*proponents, *opponents]
    spread, classes = any(each.spread for each in both), any(each.label != MISSING for each in both)
    stability = any(each.stability for each in both)
    columns = [Column("rank", lambda pair: str(pair[0]), True)]
    for place, heading in ((1, "helps"), (2, "hurts")):
        columns.append(Column(heading, _of(place, "score"), True))
        columns += [Column("±", _of(place, "spread"))] if spread else []
        columns += [Column("stable", _of(place, "stability"), True)] if stability else []
        columns.append(Column("id", _of(place, "id")))
        columns += [Column("label", _of(place, "label")), Column("model", _of(place, "prediction"))] * classes
    pairs = enumerate(zip_longest(proponents, opponents), start=1)
    return table("", "Helps and hurts most", columns, [(rank, *pair) for rank, pair in pairs])


def _of(place: int, name: str) -> Writer:
    """A field of the example at a place; empty where there is none."""

    def write(pair: tuple[Any, ...]) -> str:
        words: str = getattr(pair[place], name, "")
        return words.removeprefix("± ") if name == "spread" else words

    return write


def summary(result: InfluenceResult) -> str:
    """What was done, in a line."""
    training, queries = result.training, result.queries
    said = [f"{count(len(training), 'training example')} scored for {_queries(len(queries))}"]
    examples_gone, queries_gone = (int((frame["status"] != "ok").sum()) for frame in (training, queries))
    if examples_gone:
        said.append(
            f"{count(examples_gone, 'training example')} excluded, whose loss or gradient is not finite"
        )
    if queries_gone:
        said.append(f"{_queries(queries_gone)} excluded, whose loss or gradient is not finite")
    return "; ".join(said)


def index_summary(result: IndexResult) -> str:
    """What an index holds, in a line."""
    return (
        f"{count(result.rows, 'training example')}, {count(result.columns, 'number')} each at"
        f" {count(result.checkpoints, 'checkpoint')}: {amount(result.size)}"
    )


def _queries(n: int) -> str:
    return f"{n:,} {'query' if n == 1 else 'queries'}"
