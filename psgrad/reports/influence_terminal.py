"""The end of an influence run on a terminal."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import zip_longest
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from psgrad.reports.influence_words import Example, beyond_note, checked_rows, examples, header, query_title, reported_queries
from psgrad.reports.planning import amount
from psgrad.reports.terminal import print_table
from psgrad.reports.words import MISSING, count
from psgrad.results import SIGN, IndexResult, InfluenceResult

SHOWN_QUERIES = 3


def write_influence(result: InfluenceResult, top: int, style: str, stream: TextIO) -> None:
    """style: 'terminal', the sign, the unit, the strongest `top` examples of either sign for all queries together and for each of the first
    few, and the folder; or 'json', one object with all that is ranked."""
    if style == "json":
        json.dump(influence_content(result), stream, indent=2, allow_nan=False, default=str)
        stream.write("\n")
        return
    stream.write(header(result) + "\n")
    if note := beyond_note(result):
        stream.write(note + "\n")
    if result.check is not None:
        stream.write("\nLargest changes, predicted and found\n")
        print_table(check_table(result), stream)
        stream.write(result.check.words + "\n")
    for query in reported_queries(result, SHOWN_QUERIES):
        stream.write(f"\n{query_title(result, query)}\n")
        print_table(sides_table(*examples(result, query, top)), stream)
    stream.write(f"{result.folder}\n")


def influence_content(result: InfluenceResult) -> dict[str, Any]:
    """What is ranked, with its sign and unit, as JSON can hold it; numbers that are not finite are null."""
    scores = result.scores.astype(object).where(result.scores.notna(), None)
    return {
        "method": result.method,
        "sign": SIGN,
        "unit": result.unit,
        "predicts_removal": result.predicts_removal,
        "measurement": result.measurement,
        "check": None if result.check is None else {**asdict(result.check), "words": result.check.words},
        "warnings": result.warnings,
        "folder": str(result.folder),
        "scores": scores.to_dict("records"),
    }


def check_table(result: InfluenceResult) -> Table:
    """The removals that were checked, a row each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("without", "change of"):
        table.add_column(heading, overflow="fold")
    for heading in ("predicted", "found"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in checked_rows(result):
        table.add_row(*map(Text, row))
    return table


def sides_table(proponents: list[Example], opponents: list[Example]) -> Table:
    """Proponents and opponents side by side, a row a rank."""
    both = [*proponents, *opponents]
    spread = any(each.spread for each in both)
    classes = any(each.label != MISSING for each in both)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right", no_wrap=True)
    for heading in ("helps", "hurts"):
        table.add_column(heading, justify="right", no_wrap=True)
        for other in [*(["±"] if spread else []), "id", *(["label", "model"] if classes else [])]:
            table.add_column(other, overflow="fold")  # in a narrow terminal ids are broken, and never numbers
    for rank, pair in enumerate(zip_longest(proponents, opponents), start=1):
        # Text objects: an id such as "[red]" is no markup here.
        table.add_row(str(rank), *(Text(cell) for each in pair for cell in _cells(each, spread, classes)))
    return table


def summary(result: InfluenceResult) -> str:
    """What was done, in a line."""
    training, queries = result.training, result.queries
    said = [f"{count(len(training), 'training example')} scored for {_queries(len(queries))}"]
    examples_gone, queries_gone = (int((frame["status"] != "ok").sum()) for frame in (training, queries))
    if examples_gone:
        said.append(f"{count(examples_gone, 'training example')} excluded, whose loss or gradient is not finite")
    if queries_gone:
        said.append(f"{_queries(queries_gone)} excluded, whose loss or gradient is not finite")
    return "; ".join(said)


def index_summary(result: IndexResult) -> str:
    """What an index holds, in a line."""
    return (
        f"{count(result.rows, 'training example')}, {count(result.columns, 'number')} each at {count(result.checkpoints, 'checkpoint')}: "
        f"{amount(result.size)}"
    )


def _queries(n: int) -> str:
    return f"{n:,} {'query' if n == 1 else 'queries'}"


def _cells(example: Example | None, spread: bool, classes: bool) -> list[str]:
    if example is None:
        return [""] * (2 + spread + 2 * classes)
    words = [example.label, example.prediction] if classes else []
    return [example.score, *([example.spread.removeprefix("± ")] if spread else []), example.id, *words]
