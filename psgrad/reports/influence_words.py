"""How the results of an influence run are written, on the terminal, in figures and on the page: scores and
units, queries and training examples, and what the method says of its fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from psgrad.reports.words import (
    FACT_LIMIT,
    MISSING,
    brief,
    cell,
    flat_words,
    identifier,
    label,
    number,
    percent,
)
from psgrad.run.results import TopSample, disagrees
from psgrad.run.results.influence import (
    ALL_INDEX,
    ALL_QUERIES,
    SIGN,
    InfluenceResult,
    pairs_of,
    shown_queries,
)
from psgrad.run.results.manifest import UNKNOWN_UNIT

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
    """Sentences about a run's checkpoints, damping and search, as far as they apply."""
    return list(filter(None, (agreement_words(result), damping_words(result), search_words(result))))


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


def search_words(result: InfluenceResult) -> str:
    """Which share of the strongest rows an approximate search has found; empty where all rows were read."""
    facts = result.manifest.influence.search
    if facts is None:
        return ""
    how = (
        f"{facts['probes']:,} of {facts['lists']:,} lists were searched, and {facts['rows_scored']:,} of"
        f" {facts['rows']:,} training examples scored, exactly"
    )
    if not facts["measured"]:
        return f"approximate search, recall not measured: {how}"
    return (
        f"approximate search, recall@{facts['top']} {facts['recall']:.0%}: so many of the {facts['top']}"
        " strongest of either sign were found, on average over"
        f" {facts['measured']:,} of {facts['queries']:,} queries (lowest {facts['lowest_recall']:.0%}; all"
        f" queries together {facts['recall_of_all']:.0%}); {how}"
    )


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


MAX_FACTS = 30


def fit_facts(result: InfluenceResult) -> list[tuple[str, str]]:
    """The method's facts about its fit and the checkpoints."""
    influence = result.manifest.influence
    rates = [each.get("learning_rate") for each in influence.checkpoints]
    paths = [str(each.get("path")) for each in influence.checkpoints]
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
