"""References and groups. A reference is the scores of trusted samples, with their origin and the runs that
may be compared with them. Samples are compared within groups, by class, by length or by a column; small
groups are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.config import did_you_mean
from psgrad.errors import ConfigError
from psgrad.run.identity import require_same
from psgrad.run.results.manifest import RunManifest

Labels = npt.NDArray[Any]
Array = npt.NDArray[Any]


# In brackets, so that they are no group of the data.
ALL, OTHER, MISSING = "all", "(other)", "(missing)"


def labels_of(frame: pd.DataFrame, by: str | None) -> Labels:
    """[n] text: the group of each row, before small groups are joined.

    `by` is None (all rows are one group), 'class' (the target), 'length' (in classes of 2 to 3, 4 to 7, 8 to
    15, ...: the same in every run), or a column. Raises ConfigError for a column that is not there, or that
    holds real numbers.
    """
    if by is None:
        return np.full(len(frame), ALL, dtype=object)
    column = {"class": "target"}.get(by, by)
    if column not in frame:
        known = ["class", "length", *map(str, frame)]
        raise ConfigError(
            f"analyze.outliers.group_by: the samples have no column {column!r}{did_you_mean(by, known)};"
            f" expected one of {', '.join(known)}"
        )
    values = frame[column]
    if not all(np.ndim(value) == 0 for value in values.head(100)):
        raise ConfigError(
            f"analyze.outliers.group_by: {by} has more than one value a sample; expected a column of one"
            " value a sample",
        )
    if pd.api.types.is_float_dtype(values) and not (values.dropna() % 1 == 0).all():
        raise ConfigError(
            f"analyze.outliers.group_by: {by} holds real numbers, and samples of one group have one value;"
            " expected whole numbers or texts, each of which occurs often",
        )
    if by == "length":
        return _length_classes(values)
    whole = pd.api.types.is_float_dtype(values)
    return np.array(
        [MISSING if pd.isna(value) else str(int(value) if whole else value) for value in values], dtype=object
    )


def join_small(labels: Labels, counted: Labels, least: int) -> tuple[Labels, set[str]]:
    """(the labels, with '(other)' for groups with fewer than `least` rows among `counted`; the joined
    groups).

    Small groups are joined with each other, not with everything: a sound sample of a rare kind, unlike the
    rest, would stand out among all.
    """
    sizes = pd.Series(counted, dtype=object).value_counts()
    small = {str(label) for label in {*labels.tolist(), *counted.tolist()} if sizes.get(label, 0) < least}
    return joined(labels, small), small


def joined(labels: Labels, small: set[str]) -> Labels:
    """The labels, with '(other)' for those of small groups."""
    return np.array([OTHER if label in small else label for label in labels], dtype=object)


def _length_classes(values: pd.Series[Any]) -> Labels:
    lowest = 2 ** np.floor(np.log2(np.maximum(values.fillna(0).to_numpy("float64"), 1))).astype("int64")
    names = {low: f"{low} to {2 * low - 1}" if low > 1 else "0 to 1" for low in np.unique(lowest).tolist()}
    return np.array([names[low] for low in lowest.tolist()], dtype=object)


# Fingerprints are digests: of these many digits, two of a million samples agree by chance once in 10^7 runs.
DIGITS = 16


def scored_by(score: str, detectors: Iterable[str]) -> str:
    """The column of the trusted samples' scores; the norm where a detector's scores are computed anew."""
    return "grad_norm" if score in {f"{name}_score" for name in detectors} else score


@dataclass(frozen=True)
class Reference:
    """Trusted samples, a row each.

    Attributes:
        kind: 'baseline' or 'run'.
        source: the file or folder, as the config names it.
        scores: [n] float64, NaN where a sample has none.
        labels: [n] text, its group, before small groups are joined.
        fingerprints: [n] text.
        rows: [n, k], what detectors look at; None where that is not at hand.
        caveats: what a reader of the verdict must know of it.
    """

    kind: str
    source: str
    scores: Array
    labels: Array
    fingerprints: Array
    rows: Array | None = None
    caveats: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.scores)

    def holds(self, fingerprints: Array, scores: Array) -> npt.NDArray[np.bool_]:
        """[m] bool: which samples are in the reference themselves: the same fingerprint, and the same score
        up to rounding.

        A fingerprint is that of the id if there is one: a sample that was changed since has its old id and
        another score.
        """
        own_scores = pd.Series(self.scores, index=[str(each)[:DIGITS] for each in self.fingerprints])
        own_scores = own_scores[~own_scores.index.duplicated() & (own_scores.index != "")]
        mine = own_scores.reindex([str(each)[:DIGITS] for each in fingerprints]).to_numpy("float64")
        same: npt.NDArray[np.bool_] = np.isclose(mine, scores.astype("float64"), rtol=1e-4, atol=0.0)
        return same


def reference_of(
    samples: pd.DataFrame, score: str, by: str | None, kind: str, source: str, rows: Array | None = None
) -> Reference:
    """The reference from a table of samples. Raises ConfigError if it lacks the score or the groups."""
    if score not in samples:
        raise ConfigError(
            f"the reference {source} has no column {score!r}, by which samples are judged"
            f" (analyze.outliers.score); expected one of its columns: {', '.join(map(str, samples))}",
            hint="run psgrad analyze on the reference again, with the measure that gives this column",
        )
    finite = np.isfinite(samples["loss"].to_numpy("float64")) & np.isfinite(
        samples["grad_norm"].to_numpy("float64")
    )
    scores = np.where(finite, samples[score].to_numpy("float64", na_value=np.nan), np.nan)
    prints = samples["fingerprint"].to_numpy(str) if "fingerprint" in samples else np.full(len(samples), "")
    return Reference(kind, source, scores, labels_of(samples, by), prints, rows)


CLASSES = "classes"
"""Of `measured_as`: the names of the classes 0, 1, 2, ...; None where labels are numbers without names."""


def measured_as(run: RunManifest) -> dict[str, Any]:
    """The part of a run's manifest that scores depend on: two runs can be compared if it is the same."""
    model, analyze = run.config.get("model", {}), run.config.get("analyze", {})
    loss, code = run.config.get("loss") or {}, run.hashes.get("code", {})
    specs = [
        model.get("factory"),
        loss.get("name"),
        *(each.get("name") for each in analyze.get("measures", [])),
    ]
    return {
        "checkpoint": run.model.sha256,
        "weights": run.hashes.get("weights"),
        "modules": run.hashes.get("modules"),
        "code": {file: digest for spec in specs for file, digest in code.get(spec, {}).items()},
        # The folder is left out: configs in different places write the path of one file differently.
        "model": str(model.get("factory")).rpartition("/")[2],
        "kwargs": model.get("kwargs", {}),
        "mode": model.get("mode"),
        "trainable": run.model.trainable,
        "loss": run.config.get("loss"),
        CLASSES: run.setting("data", "class_names"),
        "dtype": run.setting("engine", "dtype"),
        "measures": analyze.get("measures", []),
        "checkpoints": analyze.get("checkpoints"),
        "seed": analyze.get("seed"),
    }


_OF_MEASURES = ("measures", "checkpoints", "seed")
# Differences that only need a caveat: edited code, or a newer PyTorch with one attribute more, may well
# compute the same.
_OF_CODE = ("modules", "code")
_OF_MODEL = ("grad_norm", "log_norm", "loss", "confidence")


def require_comparable(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], score: str, source: str
) -> tuple[str, ...]:
    """Caveats, where scores of a reference can be compared with ours; both as `measured_as` gives them.

    Raises ConfigError with every difference where they can't.
    """
    keys = [
        key
        for key in changed_keys(theirs, ours)
        if key not in _OF_CODE and (key not in _OF_MEASURES or score not in _OF_MODEL)
    ]
    require_same(
        {key: theirs.get(key) for key in keys},
        {key: ours[key] for key in keys},
        f"the reference {source} was measured with something else, and its scores can't be compared with"
        " these",
        hint="run psgrad analyze on the trusted samples again",
    )
    return tuple(
        f"the reference was measured with other code: {words}" for words in code_changes(theirs, ours)
    )


def changed_keys(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """The keys in which two `measured_as` differ. A checkpoint that was saved again with the same weights is
    no difference; nor is that one of the two has no names of its classes.
    """
    weights = theirs.get("weights")
    unasked = {"checkpoint"} if weights and weights == ours.get("weights") else set()
    if not (theirs.get(CLASSES) and ours.get(CLASSES)):
        unasked.add(CLASSES)
    return [key for key in ours if key not in unasked and theirs.get(key) != ours[key]]


def code_changes(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """The code, and the model's modules, that differ between two `measured_as`, in words."""
    changed, before, after = changed_keys(theirs, ours), theirs.get("code", {}), ours["code"]
    files = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    modules = ["classes or attributes of the model's modules"] if "modules" in changed else []
    return [*([", ".join(files)] if files else []), *modules]
