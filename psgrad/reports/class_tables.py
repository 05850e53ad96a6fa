"""What the page says of each class: how many samples, their norms and losses, and which of them are worst."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from psgrad.reports.page import loss_unit
from psgrad.reports.tables import DataTable, Heading, TableRow
from psgrad.reports.words import identifier, label, number, percent
from psgrad.results import AnalyzeResult, disagrees, has_classes

MAX_CLASSES = 200
MAX_OPENED = 40
WORST = 5


@dataclass(frozen=True)
class ClassPage:
    """One class: what it is called, a sentence about it, and its worst samples."""

    title: str
    sentence: str
    worst: DataTable


def class_statistics(samples: pd.DataFrame) -> pd.DataFrame:
    """A row a class, most listed samples first: samples, listed, nonfinite, median_norm, median_loss, differs (a share)."""
    finite = samples["status"].to_numpy() != "nonfinite"
    frame = pd.DataFrame(
        {
            "target": samples["target"].to_numpy(),
            "norm": samples["grad_norm"].where(finite).to_numpy(),
            "loss": samples["loss"].where(finite).to_numpy(),
            "listed": samples["is_outlier_issue"].to_numpy(bool) & finite,
            "nonfinite": ~finite,
            "differs": disagrees(samples).to_numpy(bool),
        }
    )
    groups = frame.groupby("target", observed=True)
    found = pd.DataFrame(
        {
            "samples": groups.size(),
            "listed": groups["listed"].sum(),
            "nonfinite": groups["nonfinite"].sum(),
            "median_norm": groups["norm"].median(),
            "median_loss": groups["loss"].median(),
            "differs": groups["differs"].mean(),
        }
    )
    return found.sort_values(["listed", "median_norm"], ascending=False, kind="stable")


def class_table(result: AnalyzeResult, statistics: pd.DataFrame) -> DataTable:
    """All classes, or the first MAX_CLASSES by listed samples."""
    shown = statistics.head(MAX_CLASSES)
    unit = loss_unit(result.manifest)
    headings = [
        Heading("class", "class"),
        Heading("samples", "samples", True, "how many there are"),
        Heading("listed", "listed", True, "how many are on the review list or named as outliers", sorted=False),
        Heading("share", "listed share", True, "the same in percent of the class"),
        Heading("nonfinite", "not finite", True, "how many have a loss or gradient that is not finite"),
        Heading("differs", "prediction differs", True, "percentage of the class for which the model predicts another"),
        Heading("median_norm", "median gradient norm", True, f"{unit} per unit of parameter"),
        Heading("median_loss", "median loss", True, unit),
    ]
    rows = [
        TableRow(
            [
                name,
                f"{row['samples']:,.0f}",
                f"{row['listed']:,.0f}",
                percent(row["listed"] / row["samples"]),
                f"{row['nonfinite']:,.0f}",
                percent(row["differs"]),
                number(row["median_norm"]),
                number(row["median_loss"]),
            ],
            only=("label", name),
        )
        for name, row in ((label(target, result.class_names), row) for target, row in shown.iterrows())
    ]
    note = f"{MAX_CLASSES} of {len(statistics):,} classes are shown, most listed samples first." if len(statistics) > MAX_CLASSES else ""
    return DataTable("classes", "Samples, norms and losses of each class", headings, rows, note)


def class_pages(result: AnalyzeResult, statistics: pd.DataFrame) -> list[ClassPage]:
    """The classes with the most listed samples, each with its worst samples."""
    samples = result.samples
    shown = statistics.head(MAX_OPENED)
    place = shown.index.get_indexer(pd.Index(samples["target"].to_numpy()))
    inside = samples[(place >= 0) & samples["rank"].notna().to_numpy()]
    worst = inside.assign(_rank=inside["rank"].to_numpy(np.float64)).sort_values("_rank").groupby("target", observed=True).head(WORST)
    worst = worst.assign(_differs=disagrees(worst))
    by_class: dict[Any, pd.DataFrame] = dict(iter(worst.groupby("target", observed=True)))
    return [_page(result, place, target, row, by_class.get(target, worst.head(0))) for place, (target, row) in enumerate(shown.iterrows())]


def _page(result: AnalyzeResult, place: int, target: Any, row: pd.Series[Any], worst: pd.DataFrame) -> ClassPage:
    name = label(target, result.class_names)
    sentence = f"{row['samples']:,.0f} samples, {row['listed']:,.0f} listed, median gradient norm {number(row['median_norm'])}"
    headings = [
        Heading("rank", "rank", True, sorted=True),
        Heading("id", "id"),
        Heading("prediction", "prediction"),
        Heading("loss", "loss", True),
        Heading("grad_norm", "gradient norm", True),
    ]
    rows = [
        TableRow(
            [
                str(record["rank"]),
                identifier(record["id"]),
                label(record.get("prediction"), result.class_names),
                number(record["loss"]),
                number(record["grad_norm"]),
            ],
            sample=int(record["index"]),
            differs=frozenset([2]) if record["_differs"] else frozenset(),
        )
        for record in worst.to_dict("records")
    ]
    return ClassPage(name, sentence, DataTable(f"class-{place}", f"The worst samples of class {name}", headings, rows))


def classes_shown(result: AnalyzeResult) -> bool:
    """Whether there are classes to speak of."""
    return has_classes(result.samples)
