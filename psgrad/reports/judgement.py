"""What the page says of outliers: by what samples were judged, against whom, what that can't tell, and what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from psgrad.reports.page import FACT_LIMIT, at
from psgrad.reports.rankings import rankings_of, score_words
from psgrad.reports.tables import DataTable, Heading, TableRow, cell, words_of
from psgrad.reports.words import brief, count, group_words, identifier, number
from psgrad.results import AnalyzeResult, disagrees, has_classes

MAX_NAMED = 20
MAX_GROUPS = 200
MAX_CAVEATS = 20


@dataclass(frozen=True)
class Judgement:
    """How samples were judged. referenced: against trusted ones; undecided: why finding nothing would say nothing, with a reference.
    compared: how many first ranks the page's first sentence compares with the loss; 0 where it does not.
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
    undecided = brief(str(facts.get("why_not") or ""), FACT_LIMIT) if referenced and not facts.get("evaluable", True) else ""
    caveats = [brief(str(each), 400) for each in facts.get("caveats") or []][:MAX_CAVEATS] if referenced else []
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
        also = "" if said else f"; {also_by_loss:,} of them are also among the {len(listed):,} largest by loss"
        found.append(f"{what} {count(len(listed))}{also}.")
        if has_classes(samples) and "prediction" in samples:
            wrong = disagrees(finite)
            found.append(
                f"The model's prediction differs from the label for {int(wrong[listed.index].sum()):,} of them, "
                f"and for {int(wrong.sum()):,} of all {count(len(finite))} that are finite."
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
            ("Reference", f"{reference.get('source')} ({reference.get('kind')}), {count(int(reference.get('size', 0)), 'trusted sample')}"),
            (
                "False discovery rate",
                f"{number(facts.get('fdr'))}: the share of false names among those named that is accepted, on average",
            ),
            ("Resolution limit", str(facts.get("resolution") or "")),
        ]
    else:
        fraction = facts.get("review_fraction")
        pairs.append(("Review list", f"the first {100 * fraction:.3g} % of the samples" if isinstance(fraction, float) else ""))
    # Where the two orders are compared, that is the page's first sentence.
    shown = {"Agreement": None if rankings_of(facts) else "loss_agreement", "Separability": "separability"}
    pairs += [(title, str(at(dict(facts), key, "words") or "")) for title, key in shown.items() if key]
    for name, said in (facts.get("detectors") or {}).items():
        flagged = said.get("flagged")
        pairs.append(
            (str(said.get("title") or name), f"{said.get('meaning')}" + ("" if flagged is None else f"; it would name {flagged:,}"))
        )
    return [(brief(name, 80), brief(words, FACT_LIMIT)) for name, words in pairs if words]


def _groups(facts: Mapping[str, Any], referenced: bool, class_names: Sequence[str] | None) -> DataTable | None:
    """A row a group, where samples were compared within groups."""
    by, each = at(dict(facts), "groups", "by"), at(dict(facts), "groups", "each")
    if by is None or not isinstance(each, dict):
        return None
    headings = [Heading("group", "group"), Heading("samples", "samples", True)]
    columns = ["samples"]
    if referenced:
        headings += [
            Heading("reference", "trusted samples", True),
            Heading("smallest_p", "smallest p-value", True, "the least that this group's reference can give (probability)"),
            Heading("smallest_flaggable", "smallest number that can be named", True, "fewer outliers than that can't be told (samples)"),
            Heading("evaluable", "evaluable", meaning="whether any sample of the group could be named"),
        ]
        columns += ["reference", "smallest_p", "smallest_flaggable", "evaluable"]
    rows = [
        TableRow([name, *(cell(said.get(column)) for column in columns)], only=("group", name))
        for name, said in [(group_words(group, by, class_names), said) for group, said in list(each.items())[:MAX_GROUPS]]
    ]
    note = f"{MAX_GROUPS} of {len(each):,} groups are shown." if len(each) > MAX_GROUPS else ""
    return DataTable("groups", f"Groups by {words_of(by)}", headings, rows, note)
