"""Scores of detectors for each sample and for trusted samples; and robust standard deviations of norms.

On raw norms the rule `z > 3.5` flags a quarter of a clean dataset, on their logarithms it misses flipped
labels: docs/explanation/outliers.md has both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.config import AnalyzeConfig, nearest
from psgrad.errors import ConfigError
from psgrad.quality.detector import detect, detector_from
from psgrad.quality.references import Reference

Array = npt.NDArray[Any]

LEAST_ROWS = 30
# sqrt(pi / 2): of a normal distribution, sigma is this times the mean absolute deviation
_MEAN_TO_SIGMA = 1.2533


def robust_z(log_norms: Array, labels: Array) -> tuple[Array, dict[str, str]]:
    """([n] (x - median) / (1.4826 MAD) within each group, {group without z: why}).

    `log_norms` [n]; what is not finite has no z and does not count. Where half of a group or more are equal,
    the MAD is zero, and 1.2533 times the mean absolute deviation from the median takes its place (as in IBM's
    modified z score); where that is zero, too, the group is 'degenerate'. A group of fewer than 30 rows has
    no z.
    """
    from scipy.stats import median_abs_deviation

    z, without = np.full(len(log_norms), np.nan), {}
    for label in np.unique(labels):
        mine = (labels == label) & np.isfinite(log_norms)
        values = log_norms[mine].astype("float64")
        if len(values) < LEAST_ROWS:
            without[str(label)] = f"fewer than {LEAST_ROWS} rows"
            continue
        away = values - np.median(values)
        scale = float(median_abs_deviation(values, scale="normal")) or _MEAN_TO_SIGMA * float(
            np.abs(away).mean()
        )
        if scale == 0:
            without[str(label)] = "degenerate"
            continue
        z[mine] = away / scale
    return z, without


@dataclass(frozen=True)
class DetectorScores:
    """A detector's scores [n], larger is more unusual, and those of trusted samples that it was not fitted
    to; None without a reference.
    """

    name: str
    title: str
    scores: Array
    reference: Reference | None


def detector_scores(
    config: AnalyzeConfig, reference: Reference | None, rows: Array | None, base: Path = Path()
) -> list[DetectorScores]:
    """The scores of each detector of the config, whose own files are relative to `base`.

    A detector is fitted to one half of the trusted samples, drawn at random, and the other half is what
    samples are compared with: scores of the samples that it was fitted to are not those of new ones. Without
    a reference it is fitted to the samples themselves.

    Raises ConfigError where there are no projected gradients of the samples, or of the reference.
    """
    if not config.outliers.detectors:
        return []
    if rows is None:
        raise ConfigError(
            "analyze.outliers.detectors: detectors look at projected gradients, and none are measured",
            next_step="add projected_gradients to analyze.measures",
        )
    if reference is not None and reference.rows is None:
        raise ConfigError(
            f"analyze.outliers.detectors: the reference {reference.source} has no projected gradients",
            cause=(
                "a baseline keeps scores only"
                if reference.kind == "baseline"
                else "projected_gradients was not measured there"
            ),
            next_step="use a run with the measure projected_gradients, or a dataset, as the reference",
        )
    result = []
    for each in config.outliers.detectors:
        detector = detector_from(each.name, each.options, base)
        if reference is None or reference.rows is None:
            scores = detect(detector, rows, None, config.seed)
            result.append(DetectorScores(each.name, detector.title, scores, None))
            continue
        shuffled = np.random.default_rng(config.seed).permutation(len(reference))
        fitted, held = np.sort(shuffled[: len(shuffled) // 2]), np.sort(shuffled[len(shuffled) // 2 :])
        both = np.concatenate([rows, reference.rows[held]])
        scores = detect(detector, both, reference.rows[fitted], config.seed)
        rest = replace(
            reference,
            scores=scores[len(rows) :],
            labels=reference.labels[held],
            fingerprints=reference.fingerprints[held],
            rows=None,
        )
        result.append(DetectorScores(each.name, detector.title, scores[: len(rows)], rest))
    return result


def require_score(frame: pd.DataFrame, score: str) -> None:
    """Raises ConfigError if samples can't be judged by this column."""
    numbers = [
        str(name)
        for name in frame
        if pd.api.types.is_numeric_dtype(frame[name]) and not pd.api.types.is_bool_dtype(frame[name])
    ]
    columns = [name for name in [*numbers, "log_norm"] if name not in ("id", "index", "target")]
    if score not in columns:
        close = nearest(score, columns)
        raise ConfigError(
            f"analyze.outliers.score: the samples have no column of numbers {score!r}"
            + (f"; did you mean {close}?" if close else ""),
            expected=f"one of {', '.join(columns)}",
            cause="the measure that gives this column is not in analyze.measures",
        )
