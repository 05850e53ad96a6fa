"""Detectors of unusual rows among projected gradients: a score for each row, larger is more unusual.

A score is not a verdict. With trusted rows scores become p-values; without them they order a review list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from psgrad.config import AnalyzeConfig
from psgrad.errors import ConfigError
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
    if reference is not None:
        if reference.shape[1:] != rows.shape[1:]:
            raise ConfigError(
                f"the detector {detector.name}: the trusted samples have projected gradients [n,"
                f" {reference.shape[1]}], those in question [n, {rows.shape[1]}]; expected the same"
                " projection (dimension, kind and seed) of the same parameters",
                hint="run the reference again with this run's model and options of projected_gradients",
            )
        reference = reference[np.isfinite(reference).all(1)]
        if not len(reference):
            raise ConfigError(
                f"the detector {detector.name}: no row of the reference has a projected gradient that it"
                " can be fitted to; expected trusted samples whose gradients are finite",
            )
    usable, scores = np.isfinite(rows).all(1), np.full(len(rows), np.nan)
    if usable.any():
        scores[usable] = detector.scores(rows[usable], reference, seed)
    return scores


def detector_scores(
    config: AnalyzeConfig, reference: Reference | None, rows: FloatArray | None, base: Path = Path()
) -> tuple[dict[str, FloatArray], Reference | None]:
    """(column -> [n], the scores of each detector of the config, larger is more unusual; the trusted samples
    with their scores by the detector that decides, where one does). `base`: what files of detectors are
    relative to.

    A detector is fitted to one half of the trusted samples, drawn at random, and the other half is what
    samples are compared with: scores of the samples that it was fitted to are not those of new ones. Without
    a reference it is fitted to the samples themselves.

    Raises ConfigError where there are no projected gradients of the samples, or of the reference.
    """
    detectors = [detector_from(each.name, each.options, base) for each in config.outliers.detectors]
    if not detectors:
        return {}, reference
    if rows is None:
        raise ConfigError(
            "analyze.outliers.detectors: detectors look at projected gradients, and none are measured",
            hint="add projected_gradients to analyze.measures",
        )
    names = [f"{each.name}_score" for each in config.outliers.detectors]
    if reference is None:
        found = [detect(each, rows, None, config.seed) for each in detectors]
        return dict(zip(names, found, strict=True)), None
    if reference.rows is None:
        raise ConfigError(
            f"analyze.outliers.detectors: the reference {reference.source} has no projected gradients",
            hint="use a run with the measure projected_gradients; a baseline has scores only",
        )
    shuffled, half = np.random.default_rng(config.seed).permutation(len(reference)), len(reference) // 2
    fitted, held = np.sort(shuffled[:half]), np.sort(shuffled[half:])
    both = np.concatenate([rows, reference.rows[held]])
    scores = {
        name: detect(each, both, reference.rows[fitted], config.seed)
        for name, each in zip(names, detectors, strict=True)
    }
    if (decides := scores.get(config.outliers.score)) is not None:
        labels, prints = reference.labels[held], reference.fingerprints[held]
        reference = replace(reference, scores=decides[len(rows) :], labels=labels, fingerprints=prints)
    return {name: each[: len(rows)] for name, each in scores.items()}, reference
