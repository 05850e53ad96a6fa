"""Outliers in words, on the page and on the terminal: the score, the reference, and the findings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from psgrad.reports.words import FACT_LIMIT, brief, count, number, percent, words_of
from psgrad.run.results import AnalyzeResult, disagrees, has_classes
from psgrad.run.results.manifest import OutlierFacts
from psgrad.wording import correlation

# The names of the samples in orange: the first ranks, or those that differ from a reference.
LISTED, UNLIKE = "review list", "unlike the reference"

SCORE_WORDS = {"grad_norm": "gradient norm", "log_norm": "gradient norm"}
OFFER = "The loss can be the score, too. It costs nothing more and often finds more wrong labels"
OPTION = "--set analyze.outliers.score=loss"
MAX_NAMED = 20
MAX_SAMPLES = 200
_ALIKE = 0.9  # of the tops in common: below it the two disagree
_NEARLY_ONE = 0.9
_FEW = 10  # first ranks, fewer than which say nothing about two orders


def score_words(score: str) -> str:
    """A score's name in words."""
    return SCORE_WORDS.get(score, words_of(score))


def listed_words(result: AnalyzeResult) -> str:
    """What the samples in orange are called."""
    return UNLIKE if result.manifest.judged.referenced else LISTED


@dataclass(frozen=True)
class RankingComparison:
    """Two orders of the same samples. top: how many first ranks are compared. offers_loss: whether the loss
    is not the score yet. disagree: whether their tops do, more than their rank correlation makes expected.
    """

    sentence: str
    top: int
    offers_loss: bool
    disagree: bool
    headline: list[tuple[str, str]]


def rankings_of(facts: OutlierFacts) -> RankingComparison | None:
    """Whether the score and the loss name the same samples first; None where that is not known."""
    rho, top, shared = facts.loss_agreement.spearman, facts.loss_agreement.top, facts.loss_agreement.shared
    if rho is None or not top or shared is None:
        return None
    score, other = score_words(str(facts.score)), score_words(str(facts.loss_agreement.other))
    differ, expected = shared / top < _ALIKE, facts.loss_agreement.expected
    disagree = differ and expected is not None and _beyond_chance(shared, expected, top)
    order = f"the rank correlation over all samples is {correlation(rho)}"
    if differ and expected is not None:
        order += f", at which {expected:.1f} are expected"
    both = f"{score[:1].upper()}{score[1:]} and {other}"
    if disagree:
        although = "although" if rho >= _NEARLY_ONE else "and"
        sentence = (
            f"{both} disagree about which samples to look at first:"
            f" {_overlap(shared, top, score, other, 'only ')}, {although} {order}."
        )
    elif differ:
        sentence = f"{both}: {_overlap(shared, top, score, other)}, and {order}."
    else:
        sentence = f"{both} agree: {_overlap(shared, top, score, other)}, and {order}."
    headline = [
        (f"{shared:,} of {top:,}", f"first by {score} are also first by {other}"),
        (correlation(rho), f"rank correlation of {score} and {other}"),
    ]
    return RankingComparison(sentence, top, other == "loss", disagree, headline if top >= _FEW else [])


def _beyond_chance(shared: int, expected: float, top: int) -> bool:
    """Whether fewer are shared than expected, by more than three standard deviations. Of a few never."""
    return top >= _FEW and expected - shared > 3 * math.sqrt(expected * (1 - expected / top))


def gap_words(facts: OutlierFacts) -> str | None:
    """How many samples stand out by their score; None where there is no gap."""
    if facts.gap.rows is None or facts.gap.factor is None:
        return None
    stand = "sample stands" if facts.gap.rows == 1 else "samples stand"
    return (
        f"{facts.gap.rows:,} {stand} out by {score_words(facts.score)}: the next is"
        f" {facts.gap.factor:.1f} times smaller"
    )


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


@dataclass(frozen=True)
class Found:
    """How many finite samples are listed, and what speaks for that and against it. also_by_loss: of them also
    among as many first by loss; None where the page's first sentence says it. wrong, wrong_listed: for which
    the prediction differs from the label; None without classes.
    """

    finite: int
    listed: int
    also_by_loss: int | None
    wrong: int | None
    wrong_listed: int | None
    zero: int
    skipped: int


def found_samples(result: AnalyzeResult) -> Found:
    """What stands out among the samples, in numbers."""
    samples, facts = result.samples, result.manifest.judged
    finite = samples[(samples["status"] == "ok").to_numpy()]
    listed = finite[finite["is_outlier_issue"].to_numpy(bool)]
    ranks, rankings = finite["loss"].rank(ascending=False, method="first"), rankings_of(facts)
    is_said = facts.score == "loss" or (rankings is not None and len(listed) == rankings.top)
    wrong = disagrees(finite) if has_classes(samples) and "prediction" in samples else None
    return Found(
        finite=len(finite),
        listed=len(listed),
        also_by_loss=None if is_said else int((ranks[listed.index] <= len(listed)).sum()),
        wrong=None if wrong is None else int(wrong.sum()),
        wrong_listed=None if wrong is None else int(wrong[listed.index].sum()),
        zero=int((finite["grad_norm"] == 0).sum()),
        skipped=int((samples["status"] == "skipped").sum()),
    )


def nonfinite_ids(samples: pd.DataFrame) -> list[Any]:
    """The ids of the samples that are not finite."""
    return samples.loc[(samples["status"] == "nonfinite").to_numpy(), "id"].tolist()


def listed_samples(samples: pd.DataFrame) -> pd.DataFrame:
    """The samples to look at: those on the review list or named as outliers first, then by rank; unranked
    ones never appear.
    """
    ranked = samples[samples["rank"].notna().to_numpy()]
    issue = ranked["is_outlier_issue"].to_numpy(bool)
    issues = ranked[issue].nsmallest(MAX_SAMPLES, "rank")
    others = ranked[~issue].nsmallest(MAX_SAMPLES - len(issues), "rank")
    return pd.concat([issues, others]).sort_values("rank", kind="stable")


def judged_by(facts: OutlierFacts) -> list[tuple[str, str]]:
    """How samples were judged: by which score, and against which reference."""
    return [(brief(name, 80), brief(words, FACT_LIMIT)) for name, words in _judged_by(facts) if words]


def _judged_by(facts: OutlierFacts) -> Iterator[tuple[str, str]]:
    """(name, words), empty where nothing is known."""
    tail = "smallest" if facts.tail == "lower" else "largest"
    yield "Judged by", f"{score_words(str(facts.score))}, the {tail} first"
    if facts.referenced:
        reference = facts.reference
        trusted = count(int(reference.size), "trusted sample")
        yield "Reference", f"{reference.source} ({reference.kind}), {trusted}"
        rate = "the share of false names among those named that is accepted, on average"
        yield "False discovery rate", f"{number(facts.fdr)}: {rate}"
        yield "Resolution limit", str(facts.resolution or "")
    elif isinstance(facts.review_fraction, float):
        yield "Review list", f"the first {100 * facts.review_fraction:.3g} % of the samples"
    if rankings_of(facts) is None:  # else that is the page's first sentence
        yield "Agreement", str(facts.loss_agreement.words)
    yield "Separability", facts.separability.words or ""
    for name, detector in facts.detectors.items():
        flagged = "" if detector.flagged is None else f"; it would name {detector.flagged:,}"
        yield str(detector.title or name), f"{detector.meaning}{flagged}"
