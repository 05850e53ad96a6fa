"""Outliers: a verdict against trusted samples, or a review list without them, and the order in which samples
are reviewed. docs/explanation/outliers.md has the rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
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
    separability,
    why_not_evaluable,
)
from psgrad.quality.detector import DetectorScores, detector_scores
from psgrad.quality.gates import share_of
from psgrad.quality.references import Reference, join_small, joined, labels_of, robust_z, scored_by
from psgrad.quality.score_order import loss_agreement, score_gap
from psgrad.run.results import SAMPLE_COLUMNS
from psgrad.run.results.manifest import (
    DetectorFacts,
    GroupFacts,
    Groups,
    OutlierCounts,
    OutlierFacts,
    ReferenceFacts,
    ScoreGap,
)

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
    rows: Array | None = None,
    base: Path = Path(),
    ignored: Array | None = None,
) -> OutlierTable:
    """Rank all samples, and decide which are outliers.

    With a reference these are the samples whose q-value, by conformal p-values against the trusted samples of
    their group, is at most `outliers.fdr`; without one the review list. Rows that are not finite are always
    among them, and never tested. A sample that is in the reference itself is trusted, and not tested. One
    score decides, `outliers.score`; detectors only inform, so that nothing is tested twice.

    Args:
        frame: one row for each sample, with `loss` and `grad_norm`, and the columns that score and groups
            name.
        reference: of trusted samples, with the scores that `outliers.score` names.
        rows: [n, k] projected gradients, if there are detectors.
        base: the folder that the files of detectors are relative to.
        ignored: [n] bool, the samples whose label the loss ignores; None for none.

    Raises ConfigError for a missing score or group, or a detector without its rows.
    """
    outliers = config.outliers
    detected = detector_scores(config, reference, rows, base)
    frame = frame.assign(**{f"{each.name}_score": each.scores for each in detected})
    _require_score(frame, outliers.score)
    whole = reference
    decides = next((each for each in detected if outliers.score == f"{each.name}_score"), None)
    if decides is not None:
        reference = decides.reference
    labels, small = labels_of(frame, outliers.group_by), set[str]()
    if outliers.group_by is not None:
        counted = labels if reference is None else reference.labels
        labels, small = join_small(labels, counted, outliers.min_group)
    ranked = rank_samples(frame, config.review_fraction, outliers.score, outliers.tail, labels, ignored)
    z, without_z = robust_z(ranked["log_norm"].to_numpy("float64"), labels)
    ok = (ranked["status"] == "ok").to_numpy(bool)
    in_both = np.zeros(len(frame), bool)
    if whole is not None and "fingerprint" in ranked:
        known_by = scored_by(outliers.score, [each.name for each in outliers.detectors])
        in_both = whole.holds(ranked["fingerprint"].to_numpy(), _scores(ranked, known_by))
    scores = np.where(ok, _scores(ranked, outliers.score), np.nan)
    if reference is None:
        suspect = pd.Series(scores * (1 if outliers.tail == "upper" else -1))
        ahead = suspect.groupby(labels).rank(ascending=False, method="max", pct=True)
        none = np.full(len(frame), np.nan)
        verdict = _Verdict(none, none, ahead.to_numpy("float64"), in_both)
    else:
        reference = replace(reference, labels=joined(reference.labels, small))
        p = grouped_p_values(scores, labels, reference.scores, reference.labels, outliers.tail)
        verdict = _Verdict(p, q_values(np.where(in_both, np.nan, p)), p, in_both)
        ranked["is_outlier_issue"] = (verdict.q <= outliers.fdr) | (ranked["status"] == "nonfinite")
        ranked["reasons"] = _reasons(ranked, verdict, reference, labels)
    ranked = ranked.assign(
        robust_z=z,
        p_value=verdict.p,
        q_value=verdict.q,
        outlier_score=np.where(ranked["status"] == "nonfinite", 0.0, verdict.score),
        group=labels,
    )
    for each in detected:
        ranked = ranked.assign(**_detector_values(each, labels, small, verdict))
    facts = _facts(ranked, config, reference, verdict, small)
    detectors = {each.name: _detector_facts(each, ranked, outliers.fdr) for each in detected}
    facts = replace(facts, robust_z={"groups_without": without_z}, detectors=detectors)
    return OutlierTable(_in_order(ranked), facts)


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


@dataclass(frozen=True)
class _Verdict:
    """The verdicts on n samples, [n] each: p- and q-value, the outlier score, and whether the sample is in
    the reference.
    """

    p: Array
    q: Array
    score: Array
    in_both: Array


def _scores(frame: pd.DataFrame, name: str) -> Array:
    return frame[name].to_numpy("float64", na_value=np.nan)


def _reasons(ranked: pd.DataFrame, verdict: _Verdict, reference: Reference, labels: Array) -> Array:
    """The texts of `reasons`, where a reference decides: the review list is not mentioned."""
    reasons = np.where(ranked["grad_norm"] == 0, "gradient is exactly zero", "").astype(object)
    unjudged = (ranked["status"] != "ok").to_numpy(bool)
    reasons[unjudged] = ranked.loc[unjudged, "reasons"]
    sizes = pd.Series(reference.labels, dtype=object).value_counts()
    flagged = ranked["is_outlier_issue"].to_numpy(bool) & ~unjudged
    for row in np.flatnonzero(flagged | verdict.in_both):
        words = "in the reference itself, and not tested"
        if not verdict.in_both[row]:
            numbers = f"p = {verdict.p[row]:.2g}, q = {verdict.q[row]:.2g}"
            words = f"{numbers} against {sizes[labels[row]]:,} trusted samples"
        reasons[row] = "; ".join(filter(None, [words, reasons[row]]))
    return reasons


def _detector_values(
    scores: DetectorScores, labels: Array, small: set[str], verdict: _Verdict
) -> dict[str, Array]:
    """A detector's p- and q-values; none without a reference."""
    if scores.reference is None:
        return {}
    trusted = joined(scores.reference.labels, small)
    p = grouped_p_values(scores.scores, labels, scores.reference.scores, trusted)
    return {f"{scores.name}_p": p, f"{scores.name}_q": q_values(np.where(verdict.in_both, np.nan, p))}


def _detector_facts(scores: DetectorScores, ranked: pd.DataFrame, fdr: float) -> DetectorFacts:
    q = f"{scores.name}_q"
    return DetectorFacts(
        title=scores.title,
        flagged=int((ranked[q] <= fdr).sum()) if q in ranked else None,
        reference=None if scores.reference is None else len(scores.reference),
        meaning="information; only analyze.outliers.score decides",
    )


def _facts(
    ranked: pd.DataFrame,
    config: AnalyzeConfig,
    reference: Reference | None,
    verdict: _Verdict,
    small: set[str],
) -> OutlierFacts:
    """All but robust_z and detectors."""
    outliers, fraction = config.outliers, config.review_fraction
    status, labels = ranked["status"], ranked["group"]
    ok = (status == "ok").to_numpy(bool)
    tests = ok & ~verdict.in_both if reference is not None else np.zeros(len(ranked), bool)
    tested, in_both = int(tests.sum()), int(verdict.in_both.sum())
    groups = sorted(set(labels))
    sizes, of_group = labels.value_counts(), labels[tests].value_counts()
    counted = {} if reference is None else pd.Series(reference.labels, dtype=object).value_counts().to_dict()
    trusted = {str(group): int(count) for group, count in counted.items()}
    limit = resolution({group: int(of_group.get(group, 0)) for group in groups}, trusted, outliers.fdr)
    each = {
        group: GroupFacts(
            samples=int(sizes[group]),
            tested=int(of_group.get(group, 0)),
            reference=None if reference is None else trusted.get(group, 0),
            smallest_p=limit.smallest_p.get(group),
            smallest_flaggable=limit.smallest_of.get(group),
            evaluable=reference is not None
            and (group not in limit.smallest_of or limit.smallest_of[group] is not None),
        )
        for group in groups
    }
    issues = int((ranked["is_outlier_issue"].to_numpy(bool) & ok).sum())
    size = _scores(ranked, "grad_norm" if outliers.score in NORMS else outliers.score)
    compared = outliers.tail == "upper" and len(groups) == 1  # else a ratio of two scores says nothing
    why_not = why_not_evaluable(reference, each, tested, outliers.fdr, in_both)
    counts = OutlierCounts(
        samples=len(ranked),
        ok=int(ok.sum()),
        nonfinite=int((status == "nonfinite").sum()),
        skipped=int((status == "skipped").sum()),
        zero_gradients=int((ok & (ranked["grad_norm"] == 0)).sum()),
        tested=tested,
        outliers=0 if reference is None else issues,
        review=issues if reference is None else math.ceil(share_of(fraction, int(ok.sum()))),
    )
    facts = OutlierFacts(
        score=outliers.score,
        tail=outliers.tail,
        fdr=outliers.fdr,
        review_fraction=fraction,
        decided_by="review list",
        groups=Groups(outliers.group_by, outliers.min_group, sorted(small), each),
        evaluable=why_not is None,
        why_not=why_not,
        smallest_flaggable=limit.smallest,
        resolution=resolution_words(
            limit.smallest, None if reference is None else len(reference), tested, outliers.fdr, len(groups)
        ),
        counts=counts,
        loss_agreement=loss_agreement(ranked[ok], outliers.score, outliers.tail, fraction),
        gap=score_gap(size[ok]) if compared else ScoreGap(),
        caveats=caveats_of(reference, verdict.p[tests], in_both, small),
    )
    if reference is None:
        return facts
    missing = int(np.isnan(reference.scores).sum())
    return replace(
        facts,
        decided_by="reference",
        reference=ReferenceFacts(reference.kind, reference.source, len(reference), missing, in_both),
        separability=separability(verdict.p[tests], len(reference), issues, limit.smallest),
    )
