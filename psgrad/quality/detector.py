"""Detectors of unusual rows among projected gradients: a score for each row, larger is more unusual.

A score is not a verdict. With trusted rows scores become p-values; without them they order a review list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from psgrad.config import AnalyzeConfig
from psgrad.errors import ConfigError, one_line
from psgrad.plugins import DETECTORS, configured
from psgrad.quality.references import Reference

FloatArray = np.ndarray[Any, Any]


class Detector(ABC):
    """A score of how unusual a row is. A subclass is a frozen dataclass whose fields are its options.

    Class attributes, for documentation: name, as in the config; title; unit of the score; source.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[str]
    source: ClassVar[str]

    @property
    @abstractmethod
    def by_direction(self) -> bool:
        """Whether only the direction of a row matters, not its length."""

    @abstractmethod
    def scores(self, rows: FloatArray, reference: FloatArray | None, seed: int) -> FloatArray:
        """[n] of finite rows [n, k], compared with `reference` [m, k], or with the rows themselves."""


def detector_from(name: str, options: Mapping[str, Any], base: Path = Path()) -> Detector:
    """The detector of a name with its options. Raises ConfigError for what is unknown or not allowed."""
    detector: Detector = configured(DETECTORS, name, options, base)
    return detector


def detect(detector: Detector, rows: FloatArray, reference: FloatArray | None, seed: int) -> FloatArray:
    """How unusual each row is: [n] float64, larger is more unusual; NaN for a row that is not finite.

    Args:
        detector: with its options.
        rows: [n, k] projected gradients.
        reference: [m, k] of trusted samples, projected by the same projection, to which the detector is
            fitted; None to fit it to `rows` themselves.
        seed: of random draws.

    Scores of the rows that a detector was fitted to are not those of new rows of the same kind (a row is its
    own nearest neighbour, and trees have isolated it): for conformal p-values fit to one part of the trusted
    rows, and score the other part with the rows to be judged.

    Raises ConfigError for a reference of another width or without finite rows.
    """
    rows = np.asarray(rows)
    usable = _usable(rows, detector)
    if reference is not None:
        reference = np.asarray(reference)
        if reference.shape[1:] != rows.shape[1:]:
            raise ConfigError(
                f"the detector {detector.name}: the trusted samples have projected gradients [n,"
                f" {reference.shape[1]}], those in question [n, {rows.shape[1]}]; expected the same"
                " projection (dimension, kind and seed) of the same parameters",
                hint=(
                    "a reference of a run with other options of projected_gradients, or of another"
                    " model; run the reference again with the options of this run"
                ),
            )
        reference = _prepared(reference[_usable(reference, detector)], detector)
        if not len(reference):
            raise ConfigError(
                f"the detector {detector.name}: no row of the reference has a projected gradient that it"
                " can be fitted to; expected trusted samples whose gradients are finite and not zero",
            )
    scores = np.full(len(rows), np.nan)
    if usable.any():
        scores[usable] = detector.scores(_prepared(rows[usable], detector), reference, seed)
    return scores


def _usable(rows: FloatArray, detector: Detector) -> FloatArray:
    """[n]: which rows are finite, and have a direction where one is needed."""
    usable = np.isfinite(rows).all(1)
    return np.asarray(usable & rows.any(1) if detector.by_direction else usable)


def _prepared(rows: FloatArray, detector: Detector) -> FloatArray:
    """The rows, of unit length where directions matter; by their maximum first, as squares may vanish."""
    if not detector.by_direction or not len(rows):
        return rows
    scaled = rows / np.abs(rows).max(1, keepdims=True)
    return np.asarray(scaled / np.linalg.norm(scaled, axis=1, keepdims=True))


@dataclass(frozen=True)
class DetectorScores:
    """A detector's scores [n], larger is more unusual, and those of trusted samples that it was not fitted
    to; None without a reference.
    """

    name: str
    title: str
    scores: FloatArray
    reference: Reference | None


def detector_scores(
    config: AnalyzeConfig, reference: Reference | None, rows: FloatArray | None, base: Path = Path()
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
            hint="add projected_gradients to analyze.measures",
        )
    if reference is not None and reference.rows is None:
        raise ConfigError(
            f"analyze.outliers.detectors: the reference {reference.source} has no projected gradients",
            hint=(
                one_line(
                    "a baseline keeps scores only"
                    if reference.kind == "baseline"
                    else "projected_gradients was not measured there",
                    "use a run with the measure projected_gradients, or a dataset, as the reference",
                )
            ),
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
