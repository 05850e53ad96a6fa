"""Scores of the config's detectors, for each sample and for trusted samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from psgrad.config import AnalyzeConfig
from psgrad.errors import ConfigError
from psgrad.quality.detector import detect, detector_from
from psgrad.quality.references import Reference

Array = npt.NDArray[Any]


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
