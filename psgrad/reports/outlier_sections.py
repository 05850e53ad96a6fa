"""What the page says of outliers: by what samples were judged, against whom, what that can't tell, and what
was found.

What the page says of each class: how many samples, their norms and losses, and which of them are worst.

Whether the score and the loss name the same samples first, said where a report begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from psgrad.reports.page import FACT_LIMIT, DataTable, Heading, TableRow, at, cell, loss_unit, words_of
from psgrad.reports.words import brief, count, group_words, identifier, label, number, percent
from psgrad.results import AnalyzeResult, disagrees, has_classes
from psgrad.wording import correlation

SCORE_WORDS = {"grad_norm": "gradient norm", "log_norm": "gradient norm"}
OFFER = "The loss can be the score, too. It costs nothing more and often finds more wrong labels"
OPTION = "--set analyze.outliers.score=loss"

_ALIKE = 0.9  # of the tops in common: below it the two disagree
_NEARLY_ONE = 0.9


@dataclass(frozen=True)
class Rankings:
    """Two orders of the same samples. top: how many first ranks are compared. offers_loss: whether the loss
    is not the score yet. disagree: whether their tops do.
    """

    sentence: str
    top: int
    offers_loss: bool
    disagree: bool
    headline: list[tuple[str, str]]


def rankings_of(outliers: Mapping[str, Any] | None) -> Rankings | None:
    """From what manifest.json says under `outliers`; None where the two can't be compared, or an older run
    did not.
    """
    facts = outliers or {}
    agreement = facts.get("loss_agreement") or {}
    rho, top, shared = (agreement.get(key) for key in ("spearman", "top", "shared"))
    if rho is None or not top or shared is None:
        return None
    score, other = (
        score_words(str(facts.get("score", "grad_norm"))),
        score_words(str(agreement.get("other", "loss"))),
    )
    disagree = shared / top < _ALIKE
    order = f"the rank correlation over all samples is {correlation(rho)}"
    both = f"{score[:1].upper()}{score[1:]} and {other}"
    if disagree:
        although = "although" if rho >= _NEARLY_ONE else "and"
        sentence = (
            f"{both} disagree about which samples to look at first:"
            f" {_overlap(shared, top, score, other, 'only ')}, {although} {order}."
        )
    else:
        sentence = f"{both} agree: {_overlap(shared, top, score, other)}, and {order}."
    headline = [
        (f"{shared:,} of {top:,}", f"first by {score} are also first by {other}"),
        (correlation(rho), f"rank correlation of {score} and {other}"),
    ]
    return Rankings(sentence, top, other == "loss", disagree, headline)


def _overlap(shared: int, top: int, score: str, other: str, only: str = "") -> str:
    """How many of the first by the score are first by the other one, too."""
    if top == 1:
        return f"the first by {score} is {'' if shared else 'not '}the first by {other}"
    if not shared:
        return f"none of the first {top:,} by {score} is among the first {top:,} by {other}"
    are = "is" if shared == 1 else "are"
    return (
        f"{only}{shared:,} of the first {top:,} by {score} {are} among the first {top:,} by {other}"
        f" ({percent(shared / top, 0)})"
    )


def score_words(score: str) -> str:
    """A score's name in words."""
    return SCORE_WORDS.get(score, words_of(score))


MAX_NAMED = 20
MAX_GROUPS = 200
MAX_CAVEATS = 20


@dataclass(frozen=True)
class Judgement:
    """How samples were judged. referenced: against trusted ones; undecided: why finding nothing would say
    nothing, with a reference. compared: how many first ranks the page's first sentence compares with the
    loss; 0 where it does not.
    """

    referenced: bool
    score: str
    facts: list[tuple[str, str]]
    undecided: str
    caveats: list[str]
    groups: DataTable | None
    compared: int = 0


def judgement(result: AnalyzeResult) -> Judgement:
    """From the manifest; of an older run, which does not say it, from the columns that are there."""
    facts = at(result.manifest, "outliers")
    if not isinstance(facts, dict):
        known = "q_value" in result.samples and bool(result.samples["q_value"].notna().any())
        return Judgement(known, "grad_norm", [], "", [], None)
    referenced = facts.get("decided_by") == "reference"
    undecided = (
        brief(str(facts.get("why_not") or ""), FACT_LIMIT)
        if referenced and not facts.get("evaluable", True)
        else ""
    )
    caveats = (
        [brief(str(each), 400) for each in facts.get("caveats") or []][:MAX_CAVEATS] if referenced else []
    )
    return Judgement(
        referenced,
        str(facts.get("score", "grad_norm")),
        _facts(facts, referenced),
        undecided,
        caveats,
        _groups(facts, referenced, result.class_names),
        rankings.top if (rankings := rankings_of(facts)) else 0,
    )


def findings_sentences(samples: pd.DataFrame, how: Judgement) -> list[str]:
    """Plain sentences about those that are listed, with what speaks for it and what against."""
    finite = samples[(samples["status"] == "ok").to_numpy()]
    listed = finite[finite["is_outlier_issue"].to_numpy(bool)]
    found = []
    if len(listed):
        ranks = finite["loss"].rank(ascending=False, method="first")
        also_by_loss = int((ranks[listed.index] <= len(listed)).sum())
        what = "Unlike the reference:" if how.referenced else "The review list has"
        said = how.score == "loss" or len(listed) == how.compared
        also = (
            "" if said else f"; {also_by_loss:,} of them are also among the {len(listed):,} largest by loss"
        )
        found.append(f"{what} {count(len(listed))}{also}.")
        if has_classes(samples) and "prediction" in samples:
            wrong = disagrees(finite)
            found.append(
                f"The model's prediction differs from the label for {int(wrong[listed.index].sum()):,} of"
                f" them, and for {int(wrong.sum()):,} of all {count(len(finite))} that are finite."
            )
    elif how.referenced and len(finite) and not how.undecided:
        found.append("No sample is unlike the reference at the false discovery rate that was asked for.")
    zero = int((finite["grad_norm"] == 0).sum())
    if zero and (len(listed) or how.referenced):
        found.append(f"Gradients of exactly zero: {count(zero)}. They would not move the model at all.")
    skipped = int((samples["status"] == "skipped").sum())
    if skipped:
        found.append(f"Not judged, as they have no {words_of(how.score)}: {count(skipped)}.")
    return found


def nonfinite_samples(samples: pd.DataFrame) -> tuple[int, list[str]]:
    """How many samples are not finite, and the first of them."""
    bad = samples.loc[(samples["status"] == "nonfinite").to_numpy(), "id"]
    return len(bad), [identifier(each) for each in bad.head(MAX_NAMED)]


def _facts(facts: Mapping[str, Any], referenced: bool) -> list[tuple[str, str]]:
    score = str(facts.get("score", "grad_norm"))
    tail = "smallest" if facts.get("tail") == "lower" else "largest"
    pairs = [("Judged by", f"{score_words(score)}, the {tail} first")]
    if referenced:
        reference = facts.get("reference") or {}
        pairs += [
            (
                "Reference",
                (
                    f"{reference.get('source')} ({reference.get('kind')}),"
                    f" {count(int(reference.get('size', 0)), 'trusted sample')}"
                ),
            ),
            (
                "False discovery rate",
                (
                    f"{number(facts.get('fdr'))}: the share of false names among those named that is"
                    " accepted, on average"
                ),
            ),
            ("Resolution limit", str(facts.get("resolution") or "")),
        ]
    else:
        fraction = facts.get("review_fraction")
        pairs.append(
            (
                "Review list",
                f"the first {100 * fraction:.3g} % of the samples" if isinstance(fraction, float) else "",
            )
        )
    # Where the two orders are compared, that is the page's first sentence.
    shown = {"Agreement": None if rankings_of(facts) else "loss_agreement", "Separability": "separability"}
    pairs += [(title, str(at(dict(facts), key, "words") or "")) for title, key in shown.items() if key]
    for name, said in (facts.get("detectors") or {}).items():
        flagged = said.get("flagged")
        pairs.append(
            (
                str(said.get("title") or name),
                f"{said.get('meaning')}" + ("" if flagged is None else f"; it would name {flagged:,}"),
            )
        )
    return [(brief(name, 80), brief(words, FACT_LIMIT)) for name, words in pairs if words]


def _groups(
    facts: Mapping[str, Any], referenced: bool, class_names: Sequence[str] | None
) -> DataTable | None:
    """A row a group, where samples were compared within groups."""
    by, each = at(dict(facts), "groups", "by"), at(dict(facts), "groups", "each")
    if by is None or not isinstance(each, dict):
        return None
    headings = [Heading("group", "group"), Heading("samples", "samples", True)]
    columns = ["samples"]
    if referenced:
        headings += [
            Heading("reference", "trusted samples", True),
            Heading(
                "smallest_p",
                "smallest p-value",
                True,
                "the least that this group's reference can give (probability)",
            ),
            Heading(
                "smallest_flaggable",
                "smallest number that can be named",
                True,
                "fewer outliers than that can't be told (samples)",
            ),
            Heading("evaluable", "evaluable", meaning="whether any sample of the group could be named"),
        ]
        columns += ["reference", "smallest_p", "smallest_flaggable", "evaluable"]
    rows = [
        TableRow([name, *(cell(said.get(column)) for column in columns)], only=("group", name))
        for name, said in [
            (group_words(group, by, class_names), said) for group, said in list(each.items())[:MAX_GROUPS]
        ]
    ]
    note = f"{MAX_GROUPS} of {len(each):,} groups are shown." if len(each) > MAX_GROUPS else ""
    return DataTable("groups", f"Groups by {words_of(by)}", headings, rows, note)


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
    """A row a class, most listed samples first: samples, listed, nonfinite, median_norm, median_loss, differs
    (a share).
    """
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
        Heading(
            "listed", "listed", True, "how many are on the review list or named as outliers", sorted=False
        ),
        Heading("share", "listed share", True, "the same in percent of the class"),
        Heading("nonfinite", "not finite", True, "how many have a loss or gradient that is not finite"),
        Heading(
            "differs",
            "prediction differs",
            True,
            "percentage of the class for which the model predicts another",
        ),
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
    note = (
        f"{MAX_CLASSES} of {len(statistics):,} classes are shown, most listed samples first."
        if len(statistics) > MAX_CLASSES
        else ""
    )
    return DataTable("classes", "Samples, norms and losses of each class", headings, rows, note)


def class_pages(result: AnalyzeResult, statistics: pd.DataFrame) -> list[ClassPage]:
    """The classes with the most listed samples, each with its worst samples."""
    samples = result.samples
    shown = statistics.head(MAX_OPENED)
    place = shown.index.get_indexer(pd.Index(samples["target"].to_numpy()))
    inside = samples[(place >= 0) & samples["rank"].notna().to_numpy()]
    worst = (
        inside.assign(_rank=inside["rank"].to_numpy(np.float64))
        .sort_values("_rank")
        .groupby("target", observed=True)
        .head(WORST)
    )
    worst = worst.assign(_differs=disagrees(worst))
    by_class: dict[Any, pd.DataFrame] = dict(iter(worst.groupby("target", observed=True)))
    return [
        _page(result, place, target, row, by_class.get(target, worst.head(0)))
        for place, (target, row) in enumerate(shown.iterrows())
    ]


def _page(
    result: AnalyzeResult, place: int, target: Any, row: pd.Series[Any], worst: pd.DataFrame
) -> ClassPage:
    name = label(target, result.class_names)
    sentence = (
        f"{row['samples']:,.0f} samples, {row['listed']:,.0f} listed, median gradient norm"
        f" {number(row['median_norm'])}"
    )
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
    return ClassPage(
        name, sentence, DataTable(f"class-{place}", f"The worst samples of class {name}", headings, rows)
    )


def classes_shown(result: AnalyzeResult) -> bool:
    """Whether there are classes to speak of."""
    return has_classes(result.samples)
