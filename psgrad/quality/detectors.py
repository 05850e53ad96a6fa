"""Detectors of strange rows among projected gradients: scikit-learn's, each answering with a score for every row, larger is stranger.

A score is no verdict. Who knows trusted rows turns scores into p-values; without them they order a review list.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from psgrad.config import nearest
from psgrad.config.reading import explain
from psgrad.errors import ConfigError

Array = np.ndarray[Any, Any]

# Rows that others are held against at once: a distance to each is computed for every row.
LARGEST_REFERENCE = 5_000


class Detector(ABC):
    """One way to tell how strange a row is. A subclass is a frozen dataclass whose fields are its options.

    Class attributes, for documentation: name, as in the config; title; unit of the score; source.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[str]
    source: ClassVar[str]

    @property
    @abstractmethod
    def by_direction(self) -> bool:
        """Whether the length of a row does not count."""

    @abstractmethod
    def scores(self, rows: Array, reference: Array | None, seed: int) -> Array:
        """[n] of finite rows [n, k], by what is usual among the rows of `reference` [m, k], or among the rows themselves."""


@dataclass(frozen=True)
class IsolationForest(Detector):
    """How few random cuts along single columns set a row apart from the others: scikit-learn's `IsolationForest.score_samples`, with
    the sign turned.

    On gradients this is Outlier Gradient Analysis: a row is strange for where it points as well as for how long it is.

    Options:
        trees: how many; scores of few vary with the seed.
        samples_per_tree: rows that each tree is grown on, fewer where there are fewer.
        unit_length: divide each row by its length first, so that its direction alone counts. A row of zeros has none, and gets NaN.
    """

    trees: int = 200
    samples_per_tree: int = 256
    unit_length: bool = False

    name: ClassVar[str] = "isolation_forest"
    title: ClassVar[str] = "Isolation forest"
    unit: ClassVar[str] = "0 to 1; 0.5 where a row is set apart as late as the average one"
    source: ClassVar[str] = (
        "Liu, Ting, Zhou: Isolation Forest (2008), equation 2; on gradients Chhabra et al.: Outlier Gradient Analysis (2024), section 4"
    )

    def __post_init__(self) -> None:
        if self.trees < 1:
            raise ValueError(f"got {self.trees} trees, expected at least 1")
        if self.samples_per_tree < 2:
            raise ValueError(f"got {self.samples_per_tree} samples_per_tree, expected at least 2: one row is never set apart from others")

    @property
    def by_direction(self) -> bool:
        return self.unit_length

    def scores(self, rows: Array, reference: Array | None, seed: int) -> Array:
        from sklearn.ensemble import IsolationForest as Forest

        # trees take float32, and cuts are the same at any scale; a power of two costs no digits
        usual = rows if reference is None else reference
        exponent = np.frexp(max(np.abs(rows).max(), np.abs(usual).max()))[1]
        rows, usual = np.ldexp(rows, -exponent), np.ldexp(usual, -exponent)
        forest = Forest(n_estimators=self.trees, max_samples=min(self.samples_per_tree, len(usual)), random_state=seed)
        return np.asarray(-forest.fit(usual).score_samples(rows), dtype=np.float64)


@dataclass(frozen=True)
class NearestNeighbours(Detector):
    """The mean distance to the nearest rows.

    Of more than 5,000 rows to be held against, a random 5,000 are: distances then grow for all rows alike.

    Options:
        neighbours: how many; as many as there are, where there are fewer.
        metric: 'euclidean', or 'cosine', 1 less the cosine of the angle, in which the length of a row does not count. A row of zeros has
            no angle, and gets NaN.
    """

    neighbours: int = 10
    metric: Literal["euclidean", "cosine"] = "euclidean"

    name: ClassVar[str] = "nearest_neighbours"
    title: ClassVar[str] = "Distance to the nearest neighbours"
    unit: ClassVar[str] = "loss per unit of parameter (euclidean), or 0 to 2 (cosine)"
    source: ClassVar[str] = "Angiulli, Pizzuti: Fast Outlier Detection in High Dimensional Spaces (2002), definition 1, divided by k"

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ValueError(f"got {self.neighbours} neighbours, expected at least 1")

    @property
    def by_direction(self) -> bool:
        return self.metric == "cosine"

    def scores(self, rows: Array, reference: Array | None, seed: int) -> Array:
        from sklearn.neighbors import NearestNeighbors as Search

        usual = rows if reference is None else reference
        chosen = np.arange(len(usual))
        if len(usual) > LARGEST_REFERENCE:
            chosen = np.sort(np.random.default_rng(seed).choice(len(usual), LARGEST_REFERENCE, replace=False))
        search = Search(algorithm="brute", metric=self.metric).fit(usual[chosen])
        scores = np.full(len(rows), np.nan)
        others = np.arange(len(rows))
        if reference is None:  # no row is its own neighbour
            others = np.setdiff1d(others, chosen)
            if len(chosen) > 1:
                scores[chosen] = search.kneighbors(n_neighbors=min(self.neighbours, len(chosen) - 1))[0].mean(1)
        if len(others):
            scores[others] = search.kneighbors(rows[others], n_neighbors=min(self.neighbours, len(chosen)))[0].mean(1)
        return scores


DETECTORS: Mapping[str, type[Detector]] = {kind.name: kind for kind in (IsolationForest, NearestNeighbours)}


def detector_from(name: str, options: Mapping[str, Any]) -> Detector:
    """The detector of a name with its options. Raises ConfigError for a name or options that are not known, or can't be."""
    if name not in DETECTORS:
        close = nearest(name, list(DETECTORS))
        raise ConfigError(
            f"analyze.outliers.detectors: there is no detector {name!r}" + (f"; did you mean {close}?" if close else ""),
            expected=f"some of {', '.join(DETECTORS)}",
        )
    kind: Any = DETECTORS[name]
    known = [each.name for each in fields(kind)]
    problems = [_unknown(option, known, name) for option in options if option not in known]
    if not problems:
        try:
            detector: Detector = TypeAdapter(kind).validate_json(json.dumps(dict(options)), strict=True)
            return detector
        except ValidationError as error:
            problems = [
                f"analyze.outliers.detectors: {'.'.join([name, *map(str, each['loc'])])}: {explain(each)}"
                for each in error.errors(include_url=False)
            ]
    raise ConfigError("\n  ".join([f"the detector {name} does not take these options:", *problems]))


def detect(name: str, options: Mapping[str, Any], rows: Array, reference: Array | None, seed: int) -> Array:
    """How strange each row is: [n] float64, larger is stranger; NaN for a row that is not finite.

    Args:
        name, options: as of `detector_from`.
        rows: [n, k] projected gradients.
        reference: [m, k] of trusted samples, projected by the same projection, to which the detector is fitted; None to fit it to
            `rows` themselves.
        seed: of what is drawn.

    Scores of the rows that a detector was fitted to are not those of new rows of the same kind (a row is its own nearest neighbour, and
    trees have cut it off): for conformal p-values fit to one part of the trusted rows, and score the other part with the rows in question.

    Raises ConfigError for a wrong name or option, or a reference of another width or without finite rows.
    """
    detector = detector_from(name, options)
    rows = np.asarray(rows)
    usable = _usable(rows, detector)
    if reference is not None:
        reference = np.asarray(reference)
        if reference.shape[1:] != rows.shape[1:]:
            raise ConfigError(
                f"the detector {name}: the trusted samples have projected gradients [n, {reference.shape[1]}], those in question "
                f"[n, {rows.shape[1]}]",
                expected="the same projection (dimension, kind and seed) of the same parameters",
                cause="a reference of a run with other options of projected_gradients, or of another model",
                next_step="run the reference again with the options of this run",
            )
        reference = _prepared(reference[_usable(reference, detector)], detector)
        if not len(reference):
            raise ConfigError(
                f"the detector {name}: no row of the reference has a projected gradient that it can be fitted to",
                expected="trusted samples whose gradients are finite and not zero",
            )
    scores = np.full(len(rows), np.nan)
    if usable.any():
        scores[usable] = detector.scores(_prepared(rows[usable], detector), reference, seed)
    return scores


def _usable(rows: Array, detector: Detector) -> Array:
    """[n]: which rows are finite, and have a direction where one is needed."""
    usable = np.isfinite(rows).all(1)
    return np.asarray(usable & rows.any(1) if detector.by_direction else usable)


def _prepared(rows: Array, detector: Detector) -> Array:
    """The rows, of unit length where their direction alone counts; first by their largest entry, as squares may vanish."""
    if not detector.by_direction or not len(rows):
        return rows
    scaled = rows / np.abs(rows).max(1, keepdims=True)
    return np.asarray(scaled / np.linalg.norm(scaled, axis=1, keepdims=True))


def _unknown(option: str, known: list[str], name: str) -> str:
    close = nearest(option, known)
    said = f"analyze.outliers.detectors: {option}: unknown option of {name}; "
    if option == "contamination":
        return said + "how many samples are outliers is no option: a verdict needs analyze.outliers.reference"
    return said + (f"did you mean {close}? " if close else "") + f"it takes {', '.join(known)}"
