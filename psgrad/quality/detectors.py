"""Detectors of strange rows among projected gradients: scikit-learn's, each answering with a score for every
row, larger is stranger.

A score is no verdict. Who knows trusted rows turns scores into p-values; without them they order a review
list.

How far a norm lies from its group's middle, in robust standard deviations: a description, by which nobody is
flagged.

On raw norms the rule `z > 3.5` flags a quarter of a clean dataset, on their logarithms it misses flipped
labels: docs/explanation/outliers.md has both.

What detectors say of each sample, and what they would have said of trusted ones.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import TypeAdapter, ValidationError

from psgrad.config import AnalyzeConfig, nearest
from psgrad.config.reading import explain
from psgrad.errors import ConfigError
from psgrad.quality.references import Reference

FloatArray = np.ndarray[Any, Any]

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
    def scores(self, rows: FloatArray, reference: FloatArray | None, seed: int) -> FloatArray:
        """[n] of finite rows [n, k], by what is usual among the rows of `reference` [m, k], or among the rows
        themselves.
        """


@dataclass(frozen=True)
class IsolationForest(Detector):
    """How few random cuts along single columns set a row apart from the others: scikit-learn's
    `IsolationForest.score_samples`, with the sign turned.

    On gradients this is Outlier Gradient Analysis: a row is strange for where it points as well as for how
    long it is.

    Options:
        trees: how many; scores of few vary with the seed.
        samples_per_tree: rows that each tree is grown on, fewer where there are fewer.
        unit_length: divide each row by its length first, so that its direction alone counts. A row of zeros
            has none, and gets NaN.
    """

    trees: int = 200
    samples_per_tree: int = 256
    unit_length: bool = False

    name: ClassVar[str] = "isolation_forest"
    title: ClassVar[str] = "Isolation forest"
    unit: ClassVar[str] = "0 to 1; 0.5 where a row is set apart as late as the average one"
    source: ClassVar[str] = (
        "Liu, Ting, Zhou: Isolation Forest (2008), equation 2; on gradients Chhabra et al.: Outlier Gradient"
        " Analysis (2024), section 4"
    )

    def __post_init__(self) -> None:
        if self.trees < 1:
            raise ValueError(f"got {self.trees} trees, expected at least 1")
        if self.samples_per_tree < 2:
            raise ValueError(
                f"got {self.samples_per_tree} samples_per_tree, expected at least 2: one row is never set"
                " apart from others"
            )

    @property
    def by_direction(self) -> bool:
        return self.unit_length

    def scores(self, rows: FloatArray, reference: FloatArray | None, seed: int) -> FloatArray:
        from sklearn.ensemble import IsolationForest as Forest

        # trees take float32, and cuts are the same at any scale; a power of two costs no digits
        usual = rows if reference is None else reference
        exponent = np.frexp(max(np.abs(rows).max(), np.abs(usual).max()))[1]
        rows, usual = np.ldexp(rows, -exponent), np.ldexp(usual, -exponent)
        forest = Forest(
            n_estimators=self.trees, max_samples=min(self.samples_per_tree, len(usual)), random_state=seed
        )
        return np.asarray(-forest.fit(usual).score_samples(rows), dtype=np.float64)


@dataclass(frozen=True)
class NearestNeighbours(Detector):
    """The mean distance to the nearest rows.

    Of more than 5,000 rows to be held against, a random 5,000 are: distances then grow for all rows alike.

    Options:
        neighbours: how many; as many as there are, where there are fewer.
        metric: 'euclidean', or 'cosine', 1 less the cosine of the angle, in which the length of a row does
            not count. A row of zeros has no angle, and gets NaN.
    """

    neighbours: int = 10
    metric: Literal["euclidean", "cosine"] = "euclidean"

    name: ClassVar[str] = "nearest_neighbours"
    title: ClassVar[str] = "Distance to the nearest neighbours"
    unit: ClassVar[str] = "loss per unit of parameter (euclidean), or 0 to 2 (cosine)"
    source: ClassVar[str] = (
        "Angiulli, Pizzuti: Fast Outlier Detection in High Dimensional Spaces (2002), definition 1, divided"
        " by k"
    )

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ValueError(f"got {self.neighbours} neighbours, expected at least 1")

    @property
    def by_direction(self) -> bool:
        return self.metric == "cosine"

    def scores(self, rows: FloatArray, reference: FloatArray | None, seed: int) -> FloatArray:
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
                scores[chosen] = search.kneighbors(n_neighbors=min(self.neighbours, len(chosen) - 1))[0].mean(
                    1
                )
        if len(others):
            scores[others] = search.kneighbors(rows[others], n_neighbors=min(self.neighbours, len(chosen)))[
                0
            ].mean(1)
        return scores


DETECTORS: Mapping[str, type[Detector]] = {kind.name: kind for kind in (IsolationForest, NearestNeighbours)}


def detector_from(name: str, options: Mapping[str, Any]) -> Detector:
    """The detector of a name with its options. Raises ConfigError for a name or options that are not known,
    or can't be.
    """
    if name not in DETECTORS:
        close = nearest(name, list(DETECTORS))
        raise ConfigError(
            f"analyze.outliers.detectors: there is no detector {name!r}"
            + (f"; did you mean {close}?" if close else ""),
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


def detect(
    name: str, options: Mapping[str, Any], rows: FloatArray, reference: FloatArray | None, seed: int
) -> FloatArray:
    """How strange each row is: [n] float64, larger is stranger; NaN for a row that is not finite.

    Args:
        name, options: as of `detector_from`.
        rows: [n, k] projected gradients.
        reference: [m, k] of trusted samples, projected by the same projection, to which the detector is
            fitted; None to fit it to `rows` themselves.
        seed: of what is drawn.

    Scores of the rows that a detector was fitted to are not those of new rows of the same kind (a row is its
    own nearest neighbour, and trees have cut it off): for conformal p-values fit to one part of the trusted
    rows, and score the other part with the rows in question.

    Raises ConfigError for a wrong name or option, or a reference of another width or without finite rows.
    """
    detector = detector_from(name, options)
    rows = np.asarray(rows)
    usable = _usable(rows, detector)
    if reference is not None:
        reference = np.asarray(reference)
        if reference.shape[1:] != rows.shape[1:]:
            raise ConfigError(
                f"the detector {name}: the trusted samples have projected gradients [n,"
                f" {reference.shape[1]}], those in question [n, {rows.shape[1]}]",
                expected="the same projection (dimension, kind and seed) of the same parameters",
                cause="a reference of a run with other options of projected_gradients, or of another model",
                next_step="run the reference again with the options of this run",
            )
        reference = _prepared(reference[_usable(reference, detector)], detector)
        if not len(reference):
            raise ConfigError(
                f"the detector {name}: no row of the reference has a projected gradient that it can be"
                " fitted to",
                expected="trusted samples whose gradients are finite and not zero",
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
    """The rows, of unit length where their direction alone counts; first by their largest entry, as squares
    may vanish.
    """
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


Array = npt.NDArray[Any]

LEAST_ROWS = 30
_MEAN_TO_SIGMA = (
    1.2533  # sqrt(pi / 2): of a normal distribution, sigma is this times the mean absolute deviation
)


def robust_z(log_norms: Array, labels: Array) -> tuple[Array, dict[str, str]]:
    """([n] (x - median) / (1.4826 MAD) within each group, {group without z: why}).

    `log_norms` [n]; what is not finite has no z and does not count. Where half of a group or more are equal,
    the MAD is zero, and 1.2533 times the mean absolute deviation from the median takes its place (as in IBM's
    modified z score); where that is zero, too, the group is 'degenerate'. A group of fewer than 30 rows has
    no z.
    """
    from scipy.stats import median_abs_deviation

    found, without = np.full(len(log_norms), np.nan), {}
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
        found[mine] = away / scale
    return found, without


@dataclass(frozen=True)
class Opinion:
    """A detector's scores [n], larger is stranger, and those of trusted samples that it was not fitted to;
    None without a reference.
    """

    name: str
    title: str
    scores: Array
    reference: Reference | None


def opinions_of(
    frame: pd.DataFrame, config: AnalyzeConfig, reference: Reference | None, rows: Array | None
) -> list[Opinion]:
    """What each detector of the config says.

    A detector is fitted to one half of the trusted samples, drawn at random, and the other half is what
    scores are held against: scores of the samples that it was fitted to are not those of new ones. Without a
    reference it is fitted to the samples themselves.

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
    found = []
    for each in config.outliers.detectors:
        title = detector_from(each.name, each.options).title
        if reference is None or reference.rows is None:
            found.append(
                Opinion(each.name, title, detect(each.name, each.options, rows, None, config.seed), None)
            )
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
    numbers = [
        str(name)
        for name in frame
        if pd.api.types.is_numeric_dtype(frame[name]) and not pd.api.types.is_bool_dtype(frame[name])
    ]
    known = [name for name in [*numbers, "log_norm"] if name not in ("id", "index", "target")]
    if score not in known:
        close = nearest(score, known)
        raise ConfigError(
            f"analyze.outliers.score: the samples have no column of numbers {score!r}"
            + (f"; did you mean {close}?" if close else ""),
            expected=f"one of {', '.join(known)}",
            cause="the measure that gives this column is not in analyze.measures",
        )
