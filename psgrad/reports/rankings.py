"""Whether the score and the loss name the same samples first, said where a report begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psgrad.reports.tables import words_of
from psgrad.reports.words import percent
from psgrad.wording import correlation

SCORE_WORDS = {"grad_norm": "gradient norm", "log_norm": "gradient norm"}
OFFER = "The loss can be the score, too. It costs nothing more and often finds more wrong labels"
OPTION = "--set analyze.outliers.score=loss"

_ALIKE = 0.9  # of the tops in common: below it the two disagree
_NEARLY_ONE = 0.9


@dataclass(frozen=True)
class Rankings:
    """Two orders of the same samples. top: how many first ranks are compared. offers_loss: whether the loss is not the score yet. disagree:
    whether their tops do."""

    sentence: str
    top: int
    offers_loss: bool
    disagree: bool
    headline: list[tuple[str, str]]


def rankings_of(outliers: Mapping[str, Any] | None) -> Rankings | None:
    """From what manifest.json says under `outliers`; None where the two can't be compared, or an older run did not."""
    facts = outliers or {}
    agreement = facts.get("loss_agreement") or {}
    rho, top, shared = (agreement.get(key) for key in ("spearman", "top", "shared"))
    if rho is None or not top or shared is None:
        return None
    score, other = score_words(str(facts.get("score", "grad_norm"))), score_words(str(agreement.get("other", "loss")))
    disagree = shared / top < _ALIKE
    order = f"the rank correlation over all samples is {correlation(rho)}"
    both = f"{score[:1].upper()}{score[1:]} and {other}"
    if disagree:
        although = "although" if rho >= _NEARLY_ONE else "and"
        sentence = (
            f"{both} disagree about which samples to look at first: {_overlap(shared, top, score, other, 'only ')}, {although} {order}."
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
    return f"{only}{shared:,} of the first {top:,} by {score} {are} among the first {top:,} by {other} ({percent(shared / top, 0)})"


def score_words(score: str) -> str:
    """A score's name in words."""
    return SCORE_WORDS.get(score, words_of(score))
