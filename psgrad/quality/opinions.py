"""What detectors say of each sample, and what they would have said of trusted ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.config import AnalyzeConfig, nearest
from psgrad.errors import ConfigError
from psgrad.quality.detectors import detect, detector_from
from psgrad.quality.references import Reference

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Opinion:
    """A detector's scores [n], larger is stranger, and those of trusted samples that it was not fitted to; None without a reference."""

    name: str
    title: str
    scores: Array
    reference: Reference | None


def opinions_of(frame: pd.DataFrame, config: AnalyzeConfig, reference: Reference | None, rows: Array | None) -> list[Opinion]:
    """What each detector of the config says.

    A detector is fitted to one half of the trusted samples, drawn at random, and the other half is what scores are held against: scores of
    the samples that it was fitted to are not those of new ones. Without a reference it is fitted to the samples themselves.

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
            cause="a baseline keeps scores only" if reference.kind == "baseline" else "projected_gradients was not measured there",
            next_step="use a run with the measure projected_gradients, or a dataset, as the reference",
        )
    found = []
    for each in config.outliers.detectors:
        title = detector_from(each.name, each.options).title
        if reference is None or reference.rows is None:
            found.append(Opinion(each.name, title, detect(each.name, each.options, rows, None, config.seed), None))
            continue
        shuffled = np.random.default_rng(config.seed).permutation(len(reference))
        fitted, held = np.sort(shuffled[: len(shuffled) // 2]), np.sort(shuffled[len(shuffled) // 2 :])
        both = np.concatenate([rows, reference.rows[held]])
        scores = detect(each.name, each.options, both, reference.rows[fitted], config.seed)
        rest = replace(
            reference,
            scores=scores[len(rows) :],
            labels=reference.labels[held],
            fingerprints=reference.fingerprints[held],
            rows=None,
        )
        found.append(Opinion(each.name, title, scores[: len(rows)], rest))
    return found


def require_score(frame: pd.DataFrame, score: str) -> None:
    """Raises ConfigError where samples can't be judged by this column."""
    numbers = [str(name) for name in frame if pd.api.types.is_numeric_dtype(frame[name]) and not pd.api.types.is_bool_dtype(frame[name])]
    known = [name for name in [*numbers, "log_norm"] if name not in ("id", "index", "target")]
    if score not in known:
        close = nearest(score, known)
        raise ConfigError(
            f"analyze.outliers.score: the samples have no column of numbers {score!r}" + (f"; did you mean {close}?" if close else ""),
            expected=f"one of {', '.join(known)}",
            cause="the measure that gives this column is not in analyze.measures",
        )
