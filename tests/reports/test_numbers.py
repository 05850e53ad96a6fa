"""Each number of a report is that of its sample and its column: ranks, percentiles, losses, norms and
scores.
"""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pandas as pd

from psgrad.reports.analyze_page import input_cards, render
from psgrad.reports.analyze_plots import norm_histogram
from psgrad.reports.analyze_tables import class_statistics, sample_table
from psgrad.reports.analyze_terminal import top_table
from psgrad.reports.influence_page import self_influences
from psgrad.reports.influence_terminal import sides_table
from psgrad.reports.influence_words import examples, signed
from psgrad.reports.tables import Table
from psgrad.reports.terminal import print_table
from psgrad.reports.words import identifier, number, percent, percentile
from psgrad.run.results import AnalyzeResult
from psgrad.run.results.influence import shown_queries
from tests.reports import frames, influence_runs


def run() -> AnalyzeResult:
    """Where no column could stand for another: rank, percentile, confidence and p-value differ in
    every row.
    """
    samples = frames.classification(300)
    places = np.random.default_rng(3).permutation(300)
    return frames.result(samples.assign(p_value=places / 300 + 1e-3, outlier_score=places / 11))


def by_id(samples: pd.DataFrame) -> dict[str, dict[Any, Any]]:
    return {identifier(row["id"]): row for row in samples.to_dict("records")}


def columns(table: Table) -> list[dict[str, str]]:
    return [
        dict(zip((column.key or column.words for column in table.columns), row.cells, strict=True))
        for row in table.rows
    ]


def test_numbers_of_the_table_of_samples_are_those_of_their_columns() -> None:
    result = run()
    known, shown = by_id(result.samples), columns(sample_table(result))
    assert len(shown) > 100
    for cells in shown:
        row = known[cells["id"]]
        assert cells["rank"] == str(row["rank"])
        assert cells["percentile"] == percentile(row["percentile"])
        assert cells["confidence"] == percent(row["confidence"])
        assert (cells["loss"], cells["grad_norm"]) == (number(row["loss"]), number(row["grad_norm"]))
        assert [cells[name] for name in ("p_value", "outlier_score")] == [
            number(row[name]) for name in ("p_value", "outlier_score")
        ]
    assert [cells["rank"] for cells in shown[:3]] == ["1", "2", "3"]


def test_numbers_on_cards_and_of_classes_are_those_of_their_samples() -> None:
    result = run()
    known = by_id(result.samples)
    cards = input_cards(result)
    assert len(cards) > 10
    page = render(result, [norm_histogram(result.samples)])
    shown = page.split('<section id="inputs">')[1].split('<div class="card">')[1:]
    for place, ((row, _), card) in enumerate(zip(cards, shown, strict=False), start=1):
        expected = known[row["id"]]
        assert f"<b>{place}.</b> <bdi>{row['id']}</bdi>" in card
        assert f"norm {number(expected['grad_norm'])}<br>loss {number(expected['loss'])}<" in card
        assert f"label <b>{expected['target']}</b>" in card
        assert f">{expected['prediction']}</b>" in card
    finite = result.samples[result.samples["status"] == "ok"]
    for target, row in class_statistics(result.samples).to_dict("index").items():
        inside = finite[finite["target"] == target]
        medians = inside["grad_norm"].median(), inside["loss"].median()
        assert (row["median_norm"], row["median_loss"]) == medians
        assert row["listed"] == inside["is_outlier_issue"].sum()


def test_numbers_on_the_terminal_are_those_of_their_columns() -> None:
    result = run()
    stream = io.StringIO()
    print_table(top_table(result, 12), stream)
    heading, *lines = (line.split() for line in stream.getvalue().splitlines())
    assert heading[-1] == "percentile"
    ranked = result.samples[result.samples["rank"].notna()].sort_values("rank").head(12)
    for place, (cells, row) in enumerate(zip(lines, ranked.to_dict("records"), strict=True), start=1):
        assert cells[0] == str(place) == str(row["rank"])
        assert cells[-3:] == [number(row["loss"]), number(row["grad_norm"]), percentile(row["percentile"])]


def test_numbers_of_influence_are_those_of_their_pairs() -> None:
    found = influence_runs.result()
    query = shown_queries(found.queries, 1)[0]
    pairs = found.scores[found.scores["query_index"] == query].set_index("rank")
    for sign, side in zip((1, -1), examples(found, query, 5), strict=True):
        assert [each.rank for each in side] == [sign * place for place in range(1, 6)]
        for each in side:
            assert each.score == signed(pairs.loc[each.rank, "score"])
            assert each.id == identifier(pairs.loc[each.rank, "train_id"])
    stream = io.StringIO()
    print_table(sides_table(*examples(found, query, 5)), stream)
    assert [line.split()[0] for line in stream.getvalue().splitlines()[1:]] == ["1", "2", "3", "4", "5"]
    row = found.training.iloc[int(found.training["self_influence"].idxmax())].to_dict()
    own = columns(self_influences(found))[0]
    assert own["id"] == identifier(row["id"])
    assert (own["loss"], own["self_influence"], re.sub("<.*?>", "", own["score, mean over queries"])) == (
        number(row["loss"]),
        number(row["self_influence"]),
        signed(row["overall"]),
    )
