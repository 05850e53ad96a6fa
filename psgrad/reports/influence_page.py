"""The page of an influence run: it needs nothing else, and is at most 2 MB for any number of examples and
queries.

All files of an influence report, handed to whoever stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from psgrad.reports.drawing import Plot
from psgrad.reports.influence_plots import DIFFERS_NOTE, MAX_SHEETS, PER_SIDE, draw_influence_plots
from psgrad.reports.influence_terminal import (
    Example,
    beyond_note,
    checked_rows,
    examples,
    is_uncalibrated,
    method_words,
    query_example,
    query_title,
    reported_queries,
    signed,
    unit_words,
)
from psgrad.reports.page import (
    FACT_LIMIT,
    at,
    excerpt,
    facts_of,
    made_words,
    notes_of,
    picture_uri,
    plot_uri,
    shown_text,
    templates,
    title_of,
)
from psgrad.reports.plots import PICTURE_NOTE
from psgrad.reports.words import brief, identifier, label, number
from psgrad.results import ALL_INDEX, SIGN, InfluenceResult, disagrees, has_classes

# Every part of the page is bounded, so that the page is: 90 pictures of noise are about 1.5 MB.
PICTURE_SIDE = 64
MAX_ROWS = 20
MAX_FACTS = 30
MAX_WARNINGS = 20


@dataclass(frozen=True)
class Card:
    """A query or a training example: its words, and a picture as data URI or a text where there is one."""

    words: Example
    picture: str | None
    text: str | None


@dataclass(frozen=True)
class Sheet:
    """A query, or all of them, with its strongest proponents and opponents."""

    title: str
    query: Card | None
    proponents: list[Card]
    opponents: list[Card]

    @property
    def cards(self) -> list[Card]:
        return [*([self.query] if self.query else []), *self.proponents, *self.opponents]

    @property
    def pictures(self) -> bool:
        return any(card.picture for card in self.cards)

    @property
    def texts(self) -> bool:
        return any(card.text for card in self.cards)

    @property
    def spreads(self) -> bool:
        return any(card.words.spread for card in self.cards)

    @property
    def labels(self) -> bool:
        return any(card.words.label != "–" for card in self.cards)


def render_influence(result: InfluenceResult, plots: Sequence[Plot]) -> str:
    """The report as HTML. All text from the config, the data and the model is escaped."""
    training, queries = result.training, result.queries
    sheets = [_sheet(result, query) for query in reported_queries(result, MAX_SHEETS)]
    return templates.get_template("influence.html").render(
        title=title_of(result.manifest, "Which training examples made the model do this?"),
        headline=_headline(result),
        method=method_words(result.method),
        unit=unit_words(result),
        sign=SIGN,
        predicts_removal=result.predicts_removal,
        measurement=brief(result.measurement, 60),
        warnings=[brief(str(warning), FACT_LIMIT) for warning in result.warnings[:MAX_WARNINGS]],
        warning_count=len(result.warnings),
        sheets=sheets,
        single=sum(sheet.query is not None for sheet in sheets),
        scored=int((queries["status"] == "ok").sum()),
        notes_on_sheets=_notes(result, sheets),
        check=result.check,
        checked=checked_rows(result),
        damping=_damping(result),
        amounts=[facts["calibrated_because"] for facts in result.facts[:1] if "calibrated_because" in facts],
        uncalibrated=is_uncalibrated(result),
        figures=[(plot, plot_uri(plot)) for plot in plots if not plot.name.endswith("_sheet")],
        own=_self_influences(result),
        classes=has_classes(training),
        excluded=[
            (what, *_excluded(frame)) for what, frame in (("training example", training), ("query", queries))
        ],
        made=made_words(result.manifest),
        facts=[*_fit(result), *facts_of(result.manifest, result.folder)],
        notes=notes_of(result.manifest),
    )


def _sheet(result: InfluenceResult, query_index: int) -> Sheet:
    query = None if query_index == ALL_INDEX else _card(query_example(result, query_index))
    proponents, opponents = (
        [_card(each) for each in side] for side in examples(result, query_index, PER_SIDE)
    )
    return Sheet(query_title(result, query_index), query, proponents, opponents)


def _card(example: Example) -> Card:
    if example.input is None:
        return Card(example, None, None)
    return Card(example, picture_uri(example.input, PICTURE_SIDE), excerpt(shown_text(example.input)))


def _notes(result: InfluenceResult, sheets: Sequence[Sheet]) -> str:
    pictures = any(sheet.pictures for sheet in sheets)
    return " ".join(filter(None, (DIFFERS_NOTE, beyond_note(result), PICTURE_NOTE if pictures else "")))


def _headline(result: InfluenceResult) -> list[tuple[str, str]]:
    """The figures at the top of the page: value, and what it is."""
    gone = sum(int((frame["status"] != "ok").sum()) for frame in (result.training, result.queries))
    headline = [
        (f"{len(result.training):,}", "training examples"),
        (f"{len(result.queries):,}", "queries" if len(result.queries) != 1 else "query"),
        (f"{gone:,}", "excluded, not finite"),
    ]
    if len(result.facts) > 1:
        headline.append((f"{len(result.facts):,}", "checkpoints"))
    if has_classes(result.queries) and (wrong := int(disagrees(result.queries).sum())):
        headline.append(
            (f"{wrong:,}", "queries the model gets wrong" if wrong != 1 else "query the model gets wrong")
        )
    return headline


def _damping(result: InfluenceResult) -> str:
    """What was added to the curvature, as a multiple of its mean eigenvalue where there is one number for
    all; empty without any.
    """
    facts = result.facts[0] if result.facts else {}
    damping, mean = facts.get("damping"), facts.get("mean_eigenvalue")
    if not isinstance(damping, float) or not isinstance(mean, float) or not damping or not mean:
        return ""
    return f"{number(damping)} ({number(damping / mean)} × the mean eigenvalue)"


def _self_influences(result: InfluenceResult) -> list[dict[str, Any]]:
    """The training examples with the largest influence on themselves."""
    if "self_influence" not in result.training:
        return []
    largest = result.training[result.training["status"] == "ok"].nlargest(MAX_ROWS, "self_influence")
    return [
        _own(row, result.class_names) for row in largest.assign(differs=disagrees(largest)).to_dict("records")
    ]


def _own(row: Mapping[Hashable, Any], class_names: list[str] | None) -> dict[str, Any]:
    return {
        "id": identifier(row["id"]),
        "label": label(row.get("target"), class_names),
        "prediction": label(row.get("prediction"), class_names),
        "differs": row["differs"],
        "loss": number(row["loss"]),
        "self_influence": number(row["self_influence"]),
        "overall": signed(row.get("overall", float("nan"))),
    }


def _excluded(frame: pd.DataFrame) -> tuple[int, list[str]]:
    gone = frame.loc[frame["status"] != "ok", "id"]
    return len(gone), [identifier(each) for each in gone.head(MAX_ROWS)]


def _fit(result: InfluenceResult) -> list[tuple[str, str]]:
    """What the method says of its fit, and the checkpoints."""
    checkpoints = at(result.manifest, "influence", "checkpoints") or []
    rates = [checkpoint.get("learning_rate") for checkpoint in checkpoints]
    found = [
        ("Method", method_words(result.method)),
        ("Measurement", result.measurement),
        (
            "Normalised by",
            {"none": None}.get(normalize := at(result.manifest, "influence", "normalize"), normalize),
        ),
        (
            "Checkpoints",
            (
                ", ".join(str(checkpoint.get("path")) for checkpoint in checkpoints)
                if len(checkpoints) > 1
                else None
            ),
        ),
        (
            "Learning rates",
            ", ".join(map(_plain, rates)) if any(rate is not None for rate in rates) else None,
        ),
    ]
    each = [flattened(facts) for facts in result.facts]
    for name in dict.fromkeys(name for facts in each for name in facts):
        values = [_plain(facts.get(name)) for facts in each]
        found.append((_NAMES.get(name, name), values[0] if len(set(values)) == 1 else ", ".join(values)))
    return [(brief(name, 60), brief(str(value), FACT_LIMIT)) for name, value in found if value][:MAX_FACTS]


_NAMES = {
    "Solver because": "Why this solver",
    "Calibrated because": "Why, or why not",
    "Leverage": "Leverage correction",
}


def flattened(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested facts as one dict whose names are sentences' beginnings: {"spectrum": {"largest": 3}} is
    {"Spectrum largest": 3}.
    """
    found: dict[str, Any] = {}
    for key, value in facts.items():
        name = f"{before} {key}".strip() if before else str(key).replace("_", " ").capitalize()
        if isinstance(value, Mapping):
            found |= flattened(value, name)
        elif value is not None:
            found[name] = value
    return found


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value[:MAX_ROWS]))
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def write_influence_report(result: InfluenceResult, write: Callable[[str, bytes], None]) -> None:
    """Draw the plots and the page; `write(name, data)` is called for each of plots/<name>.png and
    report.html.
    """
    plots = draw_influence_plots(result)
    for plot in plots:
        write(f"plots/{plot.name}.png", plot.png())
    write("report.html", render_influence(result, plots).encode("utf-8", "replace"))
