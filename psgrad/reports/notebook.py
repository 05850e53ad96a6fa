"""Results as notebooks show them: lines with the verdict, a small table with pictures of the inputs, and the
figures of the report as matplotlib's. All texts are escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import Any, Self

from matplotlib.figure import Figure

from psgrad.reports.analyze_plots import draw_plots
from psgrad.reports.figures import Plot
from psgrad.reports.influence_plots import draw_influence_plots
from psgrad.reports.measure_plots import measure_plots
from psgrad.reports.pictures import picture_uri, shown_text
from psgrad.reports.words import identifier, label, printable
from psgrad.run.results import AnalyzeResult, TopSample, top_samples
from psgrad.run.results.influence import SIGN, InfluenceResult

ROWS = 10
SIDE = 48  # pixels of a picture

_COLUMNS = ("rank", "id", "target", "prediction", "loss", "grad_norm", "reasons")


class Plots:
    """The figures of a report, each a method with the name of its file: `run.plot.norms_per_class()`."""

    def __init__(self, plots: Iterable[Plot]) -> None:
        for plot in plots:
            setattr(self, plot.name, partial(_figure, plot))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no plot {name!r} of this run; it has {', '.join(vars(self))}")


def _figure(plot: Plot) -> Figure:
    return plot.figure


class AnalyzeRun(AnalyzeResult):
    """A result of `psgrad.analyze`, as a notebook shows it."""

    @classmethod
    def of(cls, result: AnalyzeResult) -> Self:
        """The same result."""
        return cls(**{each.name: getattr(result, each.name) for each in fields(result)})

    @cached_property
    def plot(self) -> Plots:
        """The figures that this run has the data for."""
        of_measures = (measure_plots(self, measure) for measure in self.measures.values())
        return Plots([*draw_plots(self), *(plot for plots in of_measures for plot in plots)])

    def _repr_html_(self) -> str:
        """The gate's verdict, and the samples of the first ranks."""
        found, outcomes = self.samples, () if self.check is None else self.check.outcomes
        listed = f"{self.manifest.judged.listed:,}"
        what = "unlike the reference" if self.manifest.judged.referenced else "in the review list"
        lines = [f"{len(found):,} samples, {listed} {what}; {self.folder}"]
        if self.manifest.partial:
            lines.append(f"PARTIAL: the run {self.manifest.partial}")
        lines += [f"gate.{each.rule}: {each.outcome}; {each.message}" for each in outcomes]
        shown = [name for name in _COLUMNS if name in found and found[name].notna().any()]
        names = dict.fromkeys(("target", "prediction"), self.class_names)
        inputs = {sample.id: seen(sample) for sample in self.top_inputs[:ROWS]}
        top = top_samples(found, ROWS).to_dict("records")
        rows = [[cell(row[name], names.get(name)) for name in shown] for row in top]
        if inputs:  # beside the id, where a narrow page shows it, too
            place = shown.index("id") + 1
            shown.insert(place, "input")
            for row, cells in zip(top, rows, strict=True):
                cells.insert(place, inputs.get(row["id"], ""))
        return page(lines, shown, rows)


class InfluenceRun(InfluenceResult):
    """A result of `psgrad.influence`, as a notebook shows it."""

    @classmethod
    def of(cls, result: InfluenceResult) -> Self:
        """The same result."""
        return cls(**{each.name: getattr(result, each.name) for each in fields(result)})

    @cached_property
    def plot(self) -> Plots:
        """The figures that this run has the data for."""
        return Plots(draw_influence_plots(self))

    def _repr_html_(self) -> str:
        """What a score is, and the strongest training examples of the first queries."""
        queries = f"{len(self.queries):,} {'query' if len(self.queries) == 1 else 'queries'}"
        size = f"{len(self.training):,} training examples, {queries}"
        lines = [f"{size}; {self.folder}", f"scores of {self.method}, {self.unit}; {SIGN}"]
        lines += [] if self.check is None else [self.check.words]
        lines += [f"warning: {each}" for each in self.warnings]
        headings = ("query", "rank", "helps", "score", "hurts", "score")
        return page(lines, headings, self._strongest())

    def _strongest(self) -> list[list[str]]:
        """The first three ranks of the first three queries, as cells."""
        # All queries together are the one, where there is one.
        scores = self.scores[self.scores["query_index"] >= 0] if len(self.queries) == 1 else self.scores
        asked = scores["query_index"].drop_duplicates().head(3)
        pairs = scores[scores["query_index"].isin(asked) & scores["rank"].between(-3, 3)]
        sides: dict[tuple[int, int], dict[bool, list[str]]] = {}
        for row in pairs.to_dict("records"):
            rows = sides.setdefault((row["query_index"], abs(row["rank"])), {})
            query = _with_picture(row["query_id"], self.query_inputs, row["query_index"])
            example = _with_picture(row["train_id"], self.training_inputs, row["train_index"])
            rows[row["rank"] > 0] = [query, example, cell(row["score"])]
        return [
            [next(iter(both.values()))[0], str(rank)]
            + [each for helps in (True, False) for each in both.get(helps, ["", "", ""])[1:]]
            for (_, rank), both in sides.items()
        ]


def seen(sample: TopSample) -> str:
    """The input of a sample as a cell: its picture, or the beginning of its text or values."""
    uri = picture_uri(sample, SIDE)
    if uri is None:
        return cell(shown_text(sample) or None)
    return f'<img src="{uri}" alt="input" height="{SIDE}" style="image-rendering:pixelated"/>'


def _with_picture(name: Any, inputs: Mapping[int, TopSample], row: int) -> str:
    """The id of an example, with its picture where it has one."""
    sample = inputs.get(row)
    return cell(name) + (f" {seen(sample)}" if sample is not None and sample.image is not None else "")


def cell(value: Any, names: Sequence[str] | None = None) -> str:
    """A value as text of HTML: a class by its name, numbers with four digits, a long text cut."""
    return html.escape(identifier(value) if isinstance(value, str) else label(value, names))


def page(lines: Iterable[str], headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of text, and below them a table of cells that are HTML already."""
    said = "".join(f"<div>{html.escape(printable(line))}</div>" for line in lines)
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{each}</td>' for each in row)}</tr>" for row in rows)
    return f"<div>{said}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
