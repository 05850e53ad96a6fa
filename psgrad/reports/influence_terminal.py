"""The end of an influence run on a terminal."""

from __future__ import annotations

from dataclasses import asdict
from itertools import zip_longest
from typing import Any, TextIO

import pandas as pd

from psgrad.reports.influence_words import (
    Example,
    beyond_note,
    check_table,
    examples,
    header,
    query_title,
    question_tables,
    reported_queries,
    run_words,
)
from psgrad.reports.tables import Table, TableColumn, Writer, table
from psgrad.reports.terminal import print_table, write_json
from psgrad.reports.words import MISSING, amount, brief, count
from psgrad.run.results import TopSample
from psgrad.run.results.influence import ALL_INDEX, SIGN, IndexResult, InfluenceResult

SHOWN_QUERIES = 3
TEXT_LIMIT = 40  # characters of a text that are shown


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
    for words in run_words(result):
        stream.write(words + "\n")
    if result.check is not None:
        checked = check_table(result)
        stream.write(f"\n{checked.caption}\n")
        print_table(checked, stream)
        stream.write(result.check.words + "\n")
    for query in reported_queries(result, SHOWN_QUERIES):
        stream.write(f"\n{query_title(result, query)}\n")
        if text := _beginning(result.query_inputs.get(query)):
            stream.write(f"  {text}\n")
        print_table(sides_table(*examples(result, query, top)), stream)
    for words, tables in question_tables(result):
        stream.write(f"\n{words}\n")
        for each in tables[:SHOWN_QUERIES]:
            stream.write(f"{each.caption}\n")
            print_table(each, stream)
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
        **{
            name.removesuffix(".parquet"): frame.to_dict("records")
            for name, frame in result.questions.files().items()
        },
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
    texts = any(_beginning(each.input) for each in both)
    spread, classes = any(each.spread for each in both), any(each.label != MISSING for each in both)
    stability = any(each.stability for each in both)
    columns = [TableColumn("rank", lambda pair: str(pair[0]), True)]
    for place, heading in ((1, "helps"), (2, "hurts")):
        columns.append(TableColumn(heading, _of(place, "score"), True))
        columns += [TableColumn("±", _of(place, "spread"))] if spread else []
        columns += [TableColumn("stable", _of(place, "stability"), True)] if stability else []
        columns.append(TableColumn("id", _of(place, "id")))
        columns += [
            TableColumn("label", _of(place, "label")),
            TableColumn("model", _of(place, "prediction")),
        ] * classes
        columns += [TableColumn("text", _text_of(place))] if texts else []
    pairs = enumerate(zip_longest(proponents, opponents), start=1)
    return table("", "Helps and hurts most", columns, [(rank, *pair) for rank, pair in pairs])


def _beginning(sample: TopSample | None) -> str:
    """The beginning of a text, on one line; empty where there is none."""
    text = None if sample is None else sample.text
    return brief(" ".join((text or "")[: 4 * TEXT_LIMIT].split()), TEXT_LIMIT)


def _text_of(place: int) -> Writer:
    return lambda pair: "" if pair[place] is None else _beginning(pair[place].input)


def _of(place: int, name: str) -> Writer:
    """A field of the example at a place; empty where there is none."""

    def write(pair: tuple[Any, ...]) -> str:
        words: str = getattr(pair[place], name, "")
        return words.removeprefix("± ") if name == "spread" else words

    return write


def summary(result: InfluenceResult) -> str:
    """What was done, in a line."""
    training, queries = result.training, result.queries
    said = [f"{count(len(training), 'training example')} scored for {count(len(queries), 'query')}"]
    examples_gone, queries_gone = (int((frame["status"] != "ok").sum()) for frame in (training, queries))
    if examples_gone:
        said.append(
            f"{count(examples_gone, 'training example')} excluded, whose loss or gradient is not finite"
        )
    if queries_gone:
        said.append(f"{count(queries_gone, 'query')} excluded, whose loss or gradient is not finite")
    return "; ".join(said)


def index_summary(result: IndexResult) -> str:
    """What an index holds, in a line."""
    return (
        f"{count(result.rows, 'training example')}, {count(result.columns, 'number')} each at"
        f" {count(result.checkpoints, 'checkpoint')}: {amount(result.size)}"
    )
