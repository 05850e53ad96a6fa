"""The page of a review, and what the terminal shows of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from psgrad.reports.ci import verdict_lines
from psgrad.reports.page import about_run, render_template
from psgrad.reports.pictures import shown_input
from psgrad.reports.tables import Table, TableColumn, Writer, column, number_column, table
from psgrad.reports.terminal import print_table
from psgrad.reports.words import MISSING, brief, count, duration, identifier, number, percent
from psgrad.run.results.review import SUSPECT, GroupChange, ReviewResult

_CARDS, _QUERIES, _TERMINAL_ROWS = 30, 30, 10
_SIDE = 96  # pixels of a picture


@dataclass(frozen=True)
class RowCard:
    """A changed row on the page: what was done, what it does, and its input before and after."""

    id: str
    words: str
    before: Any
    after: Any
    reasons: str


def write_report(result: ReviewResult, write: Callable[[str, bytes], None]) -> None:
    """Write report.html; `write(name, data)` writes a file."""
    write("report.html", render(result).encode("utf-8", "replace"))


def render(result: ReviewResult) -> str:
    """The page as HTML."""
    overall, trust = result.totals[0], result.trust
    suspects = int((result.changes["suspect"] >= SUSPECT).sum())
    headline = [
        (f"{len(result.changes):,}", "rows changed"),
        (_signed(overall.predicted), f"predicted change of the mean loss of {overall.queries:,} queries"),
        (_signed(overall.margin_predicted), "predicted change of their mean margin"),
        (f"{suspects:,}", "added rows look wrong by themselves"),
    ]
    return render_template(
        "review.html",
        **about_run(result.manifest, result.folder),
        title="What will this change of the training data do?",
        headline=[each for each in headline if each[0] != MISSING],
        counts=counts_words(result),
        outcomes=verdict_lines(result.check),
        totals=totals_table(result.totals, result.unit),
        trust=trust,
        trust_words=trust_words(result),
        cards=[_card(result, place) for place in range(min(len(result.changes), _CARDS))],
        more=max(0, len(result.changes) - _CARDS),
        queries=queries_table(result.queries),
        warnings=list(result.notes),
        unit=result.unit,
    )


def counts_words(result: ReviewResult) -> str:
    """3 rows added, 2 removed, 1 changed."""
    parts = [f"{value:,} {kind}" for kind, value in result.counts.items() if value]
    return ", ".join(parts) or "no row added, removed or changed"


def trust_words(result: ReviewResult) -> str:
    """How the prediction was made, and how far what was measured agrees with it."""
    trust = result.trust
    if trust.exact:
        steps = count(trust.steps, "Newton step")
        made = f"The model is affine in its parameters: {steps} lead to the minimum of the changed objective."
    elif trust.index is not None:
        made = (
            f"The prediction is one step of the curvature that the index {trust.index} holds, with the rows"
            " that changed, to first order in the parameters; no other training row was computed. It ranks,"
            " and is no amount by itself."
        )
    else:
        made = (
            "The prediction is one step of the curvature of the changed data, to first order in the"
            " parameters. Of a network it ranks, and is no amount by itself."
        )
    if not trust.tried:
        return f"{made} It was not checked by training: {trust.why_not}."
    how = "to the minimum" if trust.epochs is None else f"for {count(trust.epochs, 'epoch')}"
    agreement = MISSING if trust.agreement is None else f"{trust.agreement:.2f}"
    slope = MISSING if trust.slope is None else f"{trust.slope:.3g}"
    return (
        f"{made} Training went on {how}, with and without the change, in {duration(trust.seconds or 0)}. Over"
        f" the queries the rank agreement of the predicted and the measured change of the {trust.scalar} is"
        f" {agreement}, and {slope} was measured for each unit that was predicted"
        f"{'; predictions are multiplied by that' if trust.scaled else ''}."
    )


def totals_table(totals: tuple[GroupChange, ...], unit: str) -> Table:
    """A row for all queries, and one for each class and group."""

    def figure(words: str, write: Writer, meaning: str) -> TableColumn:
        return TableColumn(words, write, numeric=True, meaning=meaning)

    columns = [
        TableColumn("queries", lambda each: each.name or "all", key="name"),
        figure("rows", lambda each: f"{each.queries:,}", ""),
        figure("loss now", lambda each: number(each.now), f"mean loss, in {unit}"),
        figure("predicted", lambda each: _signed(each.predicted), "change of the mean loss"),
        figure("interval", _interval, "90 %, over checkpoints or parts of the data"),
        figure("measured", lambda each: _signed(each.measured), "by training that went on"),
    ]
    if totals[0].margin_now is not None:
        margin = "change of the mean margin, in nats; a fall is harm"
        columns += [
            figure("margin", lambda each: _signed(each.margin_predicted), margin),
            figure(
                "margin, measured", lambda each: _signed(each.margin_measured), "by training that went on"
            ),
            figure("right now", lambda each: _share(each.accuracy_now), "share of right predictions"),
            figure("right then", lambda each: _share(each.accuracy_then), "the same after the change"),
        ]
    return table("totals", "What the change does to the queries", columns, totals)


def queries_table(queries: pd.DataFrame) -> Table:
    """The queries that the change harms most."""
    margins = "predicted_change_margin" in queries
    order = queries["predicted_change_margin"] if margins else -queries["predicted_change"]
    worst = queries.loc[order.sort_values(kind="stable").index[:_QUERIES]]
    columns = [
        column("query_id", "query", lambda value: identifier(value)),
        number_column("loss", "loss now"),
        number_column("predicted_change", "predicted change", write=_signed),
    ]
    if margins:
        columns.append(number_column("predicted_change_margin", "of the margin", write=_signed))
    if "measured_change" in queries:
        columns.append(number_column("measured_change", "measured change", write=_signed))
    return table("queries", "The queries that the change harms most", columns, worst.to_dict("records"))


def terminal_text(result: ReviewResult) -> str:
    """What was found, for a terminal."""
    lines = io.StringIO()
    lines.write(f"{counts_words(result)}\n\n")
    print_table(totals_table(result.totals[:1] + _worst_sets(result), result.unit), lines)
    lines.write(f"\n{trust_words(result)}\n")
    if len(result.changes):
        columns = [
            TableColumn("row", lambda row: identifier(row.id)),
            TableColumn("change", lambda row: " ".join(part for part in (row.kind, row.what) if part)),
            TableColumn("effect", lambda row: _signed(row.predicted_effect), numeric=True),
            TableColumn(
                "suspect", lambda row: MISSING if pd.isna(row.suspect) else f"{row.suspect:.2f}", numeric=True
            ),
            TableColumn("reasons", lambda row: brief(row.reasons, 90)),
        ]
        shown = [*result.changes.head(_TERMINAL_ROWS).itertuples()]
        lines.write("\nThe changed rows, those that look wrong first, then by their effects:\n")
        print_table(table("", "Changed rows", columns, shown), lines)
    return lines.getvalue()


def _worst_sets(result: ReviewResult) -> tuple[GroupChange, ...]:
    rest = sorted(result.totals[1:], key=lambda each: -each.predicted)
    return tuple(rest[:5])


def _card(result: ReviewResult, place: int) -> RowCard:
    row = result.changes.iloc[place]
    what = f" ({row['what']})" if row["what"] else ""
    effect, query = _signed(row["predicted_effect"]), identifier(row["worst_query"])
    words = f"{row['kind']}{what}; effect {effect}, most on {query}"
    before, after = (
        None if each is None else shown_input(each, _SIDE) for each in result.inputs.get(place, (None, None))
    )
    return RowCard(identifier(row["id"]), words, before, after, brief(row["reasons"], 300))


def _interval(each: GroupChange) -> str:
    if each.low is None or each.high is None:
        return MISSING
    return f"{_signed(each.low)} to {_signed(each.high)}"


def _signed(value: float | None) -> str:
    return MISSING if value is None or pd.isna(value) else f"{'+' if value > 0 else ''}{number(value)}"


def _share(value: float | None) -> str:
    return MISSING if value is None else percent(value)
