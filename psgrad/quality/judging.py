"""Outliers: a verdict against trusted samples, or a review list without them, and the order in which samples
are reviewed. docs/explanation/outliers.md has the rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.config import AnalyzeConfig, did_you_mean
from psgrad.errors import ConfigError
from psgrad.quality.conformal import (
    caveats_of,
    grouped_p_values,
    q_values,
    resolution,
    resolution_words,
    why_not_evaluable,
)
from psgrad.quality.gates import share_of
from psgrad.quality.references import Reference, join_small, joined, labels_of
from psgrad.run.results import SAMPLE_COLUMNS
from psgrad.run.results.manifest import (
    GroupFacts,
    Groups,
    LossAgreement,
    OutlierCounts,
    OutlierFacts,
    ReferenceFacts,
)
from psgrad.wording import correlation

Array = npt.NDArray[Any]
NORMS = ("grad_norm", "log_norm")


def rank_samples(
    frame: pd.DataFrame,
    review_fraction: float,
    score: str = "grad_norm",
    tail: str = "upper",
    labels: Array | None = None,
    ignored: Array | None = None,
) -> pd.DataFrame:
    """Add what the scores say about each other: log_norm, rank, percentile, is_outlier_issue, reasons and
    status.

    `score` is a column, `tail` its suspect end. Rows whose loss or norm is not finite are 'nonfinite', those
    without a score, without a position that counts (a length of 0), or `ignored` by the loss [n], 'skipped'.
    Both are unranked, and nonfinite rows are always in the review list. The rest of the list are the
    ceil(review_fraction * ranked rows) most suspect, so it is never empty on a healthy model: a list to look
    at, not a verdict. Samples with a gradient of exactly zero are named, but never reviewed for a large norm.
    Ties are ranked in dataset order; `percentile` is the percentage of ranked rows that are not more suspect.

    With `labels` [n], a group a row, a row is compared within its group: percentile is that of the group, and
    rank goes by the place in the group as a share of it, so that each group is in the review list in
    proportion to its size.

    Columns come back in the order of SAMPLE_COLUMNS, unknown ones last.
    """
    norm = frame["grad_norm"].astype("float64")
    finite = np.isfinite(norm) & np.isfinite(frame["loss"].astype("float64"))
    if "status" in frame:
        finite &= frame["status"] == "ok"
    with np.errstate(divide="ignore"):
        log_norm = norm.where(finite).map(np.log10)
    counts = finite & (frame["length"] > 0 if "length" in frame else True)
    ignored = np.zeros(len(frame), bool) if ignored is None else ignored
    counts &= ~ignored
    suspect = (log_norm if score == "log_norm" else frame[score].astype("float64")).where(counts) * (
        1 if tail == "upper" else -1
    )
    group = suspect.groupby(np.full(len(frame), "") if labels is None else labels)
    # The place in the group as a share of it; where there is one group the order is that of the score.
    place = (group.rank(ascending=False, method="first") - 0.5) / group.transform("count")
    rank = place.rank(method="first")
    ranked = rank.notna()
    in_review = rank <= math.ceil(share_of(review_fraction, int(ranked.sum())))
    if score in NORMS and tail == "upper":
        in_review &= norm > 0
    end, of = ("largest" if tail == "upper" else "smallest"), ("gradient norms" if score in NORMS else score)
    reasons = np.select(
        [~finite, ignored, ~counts, ~ranked, in_review, norm == 0],
        [
            "loss or gradient is not finite",
            "not judged: the loss ignores its label",
            "not judged: no position of it counts in the loss",
            f"not judged: {score} is undefined",
            f"among the {end} {100 * review_fraction:.3g} % of {of}",
            "gradient is exactly zero",
        ],
        default="",
    )
    result = frame.assign(
        log_norm=log_norm,
        rank=rank.astype("Int64"),
        percentile=100 * group.rank(method="max", pct=True),
        is_outlier_issue=in_review | ~finite,
        reasons=reasons,
        status=np.select([~finite, ~ranked], ["nonfinite", "skipped"], default="ok"),
    )
    return _in_order(result)


def _in_order(samples: pd.DataFrame) -> pd.DataFrame:
    """The table with SAMPLE_COLUMNS first."""
    columns = [column for column in SAMPLE_COLUMNS if column in samples]
    return samples[columns + [column for column in samples if column not in SAMPLE_COLUMNS]]


@dataclass(frozen=True)
class OutlierTable:
    """frame: the table of samples, SAMPLE_COLUMNS first. facts: its part of manifest.json."""

    frame: pd.DataFrame
    facts: OutlierFacts


def judge(
    frame: pd.DataFrame,
    config: AnalyzeConfig,
    reference: Reference | None = None,
    ignored: Array | None = None,
) -> OutlierTable:
    """Rank all samples, and decide which are outliers.

    With a reference these are the samples whose q-value, by conformal p-values against the trusted samples of
    their group, is at most `outliers.fdr`; without one the review list. Rows that are not finite are always
    among them, and never tested. A sample that is in the reference itself is trusted, and not tested.

    Args:
        frame: one row for each sample, with `loss` and `grad_norm`, and the columns that score and groups
            name.
        reference: of trusted samples, with the scores that `outliers.score` names.
        ignored: [n] bool, the samples whose label the loss ignores; None for none.

    Raises ConfigError for a missing score or group.
    """
    outliers = config.outliers
    _require_score(frame, outliers.score)
    labels, small = labels_of(frame, outliers.group_by), set[str]()
    if outliers.group_by is not None:
        counted = labels if reference is None else reference.labels
        labels, small = join_small(labels, counted, outliers.min_group)
    ranked = rank_samples(frame, config.review_fraction, outliers.score, outliers.tail, labels, ignored)
    scores = np.where(ranked["status"] == "ok", _numbers(ranked, outliers.score), np.nan)
    in_both, none = np.zeros(len(frame), bool), np.full(len(frame), np.nan)
    if reference is None:
        suspect = pd.Series(scores * (1 if outliers.tail == "upper" else -1))
        score = suspect.groupby(labels).rank(ascending=False, method="max", pct=True).to_numpy("float64")
        p = q = none
    else:
        reference = replace(reference, labels=joined(reference.labels, small))
        if "fingerprint" in ranked:
            in_both = reference.holds(ranked["fingerprint"].to_numpy(), _numbers(ranked, outliers.score))
        p = grouped_p_values(scores, labels, reference.scores, reference.labels, outliers.tail)
        q, score = q_values(np.where(in_both, np.nan, p)), p
        ranked["is_outlier_issue"] = (q <= outliers.fdr) | (ranked["status"] == "nonfinite")
    ranked = ranked.assign(
        p_value=p,
        q_value=q,
        outlier_score=np.where(ranked["status"] == "nonfinite", 0.0, score),
        group=labels,
    )
    if reference is not None:
        ranked["reasons"] = _reasons(ranked, reference, in_both)
    return OutlierTable(_in_order(ranked), _facts(ranked, config, reference, in_both, small))


def _require_score(frame: pd.DataFrame, score: str) -> None:
    """Raises ConfigError if samples can't be judged by this column."""
    numbers = [
        str(name)
        for name in frame
        if pd.api.types.is_numeric_dtype(frame[name]) and not pd.api.types.is_bool_dtype(frame[name])
    ]
    columns = [name for name in [*numbers, "log_norm"] if name not in ("id", "index", "target")]
    if score not in columns:
        raise ConfigError(
            "analyze.outliers.score: the samples have no column of numbers"
            f" {score!r}{did_you_mean(score, columns)}; expected one of {', '.join(columns)}",
            hint="the measure that gives this column is not in analyze.measures",
        )


def _numbers(frame: pd.DataFrame, name: str) -> Array:
    return frame[name].to_numpy("float64", na_value=np.nan)


def _reasons(ranked: pd.DataFrame, reference: Reference, in_both: Array) -> Array:
    """The texts of `reasons`, where a reference decides: the review list is not mentioned."""
    reasons = np.where(ranked["grad_norm"] == 0, "gradient is exactly zero", "").astype(object)
    unjudged = (ranked["status"] != "ok").to_numpy(bool)
    reasons[unjudged] = ranked.loc[unjudged, "reasons"]
    sizes = pd.Series(reference.labels, dtype=object).value_counts()
    flagged = ranked["is_outlier_issue"].to_numpy(bool) & ~unjudged
    p, q, groups = (ranked[name].to_numpy() for name in ("p_value", "q_value", "group"))
    for row in np.flatnonzero(flagged | in_both):
        words = f"p = {p[row]:.2g}, q = {q[row]:.2g} against {sizes[groups[row]]:,} trusted samples"
        if in_both[row]:
            words = "in the reference itself, and not tested"
        reasons[row] = "; ".join(filter(None, [words, reasons[row]]))
    return reasons


def _facts(
    ranked: pd.DataFrame,
    config: AnalyzeConfig,
    reference: Reference | None,
    in_both: Array,
    small: set[str],
) -> OutlierFacts:
    outliers, labels = config.outliers, ranked["group"]
    ok = (ranked["status"] == "ok").to_numpy(bool)
    tests = ok & ~in_both if reference is not None else np.zeros(len(ranked), bool)
    tested, shared = int(tests.sum()), int(in_both.sum())
    sizes, of_group = labels.value_counts(), labels[tests].value_counts()
    groups = {group: int(of_group.get(group, 0)) for group in sorted(set(labels))}
    trusted: dict[str, int] = {}
    if reference is not None:
        trusted = {
            str(group): int(n)
            for group, n in pd.Series(reference.labels, dtype=object).value_counts().items()
        }
    limit = resolution(groups, trusted, outliers.fdr)
    each = {
        group: GroupFacts(
            samples=int(sizes[group]),
            tested=count,
            reference=None if reference is None else trusted.get(group, 0),
            smallest_p=limit.smallest_p.get(group),
            smallest_flaggable=limit.smallest_of.get(group),
            evaluable=reference is not None
            and (group not in limit.smallest_of or limit.smallest_of[group] is not None),
        )
        for group, count in groups.items()
    }
    issues = int((ranked["is_outlier_issue"].to_numpy(bool) & ok).sum())
    why_not = why_not_evaluable(reference, each, tested, outliers.fdr, shared)
    size = None if reference is None else len(reference)
    facts = OutlierFacts(
        score=outliers.score,
        tail=outliers.tail,
        fdr=outliers.fdr,
        review_fraction=config.review_fraction,
        decided_by="review list" if reference is None else "reference",
        groups=Groups(outliers.group_by, outliers.min_group, sorted(small), each),
        evaluable=why_not is None,
        why_not=why_not,
        smallest_flaggable=limit.smallest,
        resolution=resolution_words(limit.smallest, size, tested, outliers.fdr, len(groups)),
        counts=OutlierCounts(
            samples=len(ranked),
            ok=int(ok.sum()),
            nonfinite=int((ranked["status"] == "nonfinite").sum()),
            skipped=int((ranked["status"] == "skipped").sum()),
            zero_gradients=int((ok & (ranked["grad_norm"] == 0)).sum()),
            tested=tested,
            outliers=0 if reference is None else issues,
            review=issues
            if reference is None
            else math.ceil(share_of(config.review_fraction, int(ok.sum()))),
        ),
        loss_agreement=loss_agreement(ranked[ok], outliers.score, outliers.tail, config.review_fraction),
        caveats=caveats_of(reference, ranked["p_value"].to_numpy()[tests], shared, small),
    )
    if reference is None:
        return facts
    missing = int(np.isnan(reference.scores).sum())
    about = ReferenceFacts(reference.kind, reference.source, len(reference), missing, shared)
    return replace(facts, reference=about)


def loss_agreement(frame: pd.DataFrame, score: str, tail: str, fraction: float) -> LossAgreement:
    """How similarly the score and the loss order samples: Spearman's correlation, and the overlap of their
    first samples.

    `frame` has the ranked samples; a score that is the loss is compared with the gradient norm. None if it is
    undefined.
    """
    other = "grad_norm" if score == "loss" else "loss"
    mine = frame[score].to_numpy("float64", na_value=np.nan) * (1 if tail == "upper" else -1)
    theirs = frame[other].to_numpy("float64")
    if len(frame) < 3 or np.ptp(mine) == 0 or np.ptp(theirs) == 0:
        return LossAgreement(other, words="they can't be compared here")
    count = math.ceil(share_of(fraction, len(frame)))
    first, others = (set(np.argsort(-each, kind="stable")[:count].tolist()) for each in (mine, theirs))
    # A score of -inf is the logarithm of a gradient of zero, and has a rank like any other.
    rho = float(np.corrcoef(pd.Series(mine).rank(), pd.Series(theirs).rank())[0, 1])
    shared = len(first & others)
    overlap = f"{shared:,} of the first {count:,} by the one are so by the other"
    words = f"rank correlation of {score} and {other} {correlation(rho)}; {overlap}"
    return LossAgreement(other, rho, count, shared, shared / count, words)
