"""The sections of `psgrad analyze`: what is measured of each sample, which samples are outliers, and what may
pass a gate; and that of `psgrad review`.

The options of a measure are its own, and checked where the measure is known: see psgrad/engine/measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from psgrad.config.checkpoint_lists import listed_paths
from psgrad.config.plugin_names import Group
from psgrad.config.values import ConfigSection, FilePath, Finite, NamedSection, ParameterPatterns, first_twice


class MeasureConfig(NamedSection):
    """A measure by name, a file of `psgrad/engine/measures/builtin` or `module:Class`, with its options."""

    group: ClassVar[Group] = "measures"


class DetectorConfig(NamedSection):
    """A detector of outliers among projected gradients, by name, with its options."""

    group: ClassVar[Group] = "detectors"


def _reference(value: object) -> object:
    if isinstance(value, Mapping):
        raise ValueError(
            "got a group of keys, expected the path of a baseline or a run folder; measure trusted data in a"
            " run of their own: psgrad analyze CONFIG --set data.path=TRUSTED --output runs/trusted"
        )
    return value


class OutlierConfig(ConfigSection):
    """Who is an outlier. Without a reference there is a review list only, never a verdict."""

    score: str = "grad_norm"
    """The column by which samples are judged: a column of samples.parquet with one number for each sample."""
    tail: Literal["upper", "lower"] = "upper"
    """Which end of the score is suspect."""
    reference: Annotated[FilePath | None, BeforeValidator(_reference)] = None
    """Trusted samples that others are compared with: a baseline (.json) or the folder of a finished run,
    relative to this config; without them there is only a review list.
    """
    fdr: Annotated[Finite, Field(gt=0, lt=1)] = 0.1
    """The share of false discoveries among the outliers that is accepted, on average."""
    group_by: str | None = None
    """Samples are compared within their group: class, length, or a column of samples.parquet or of the
    dataset.
    """
    min_group: Annotated[int, Field(ge=2)] = 50
    """Groups of fewer samples (of trusted ones, if there is a reference) are joined, and judged as one group.
    """
    detectors: list[DetectorConfig] = Field(default_factory=list)
    """Detectors of outliers among projected gradients; only `score` decides, which may be a detector's."""

    @model_validator(mode="after")
    def _each_detector_once(self) -> OutlierConfig:
        twice = first_twice(detector.name for detector in self.detectors)
        if twice is not None:
            raise ValueError(f"the detector {twice} is listed twice")
        return self


class AnalyzeConfig(ConfigSection):
    """`psgrad analyze`: what is measured, how many samples are shown, and who is put on the review list."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "reference": "a trusted set is analyze.outliers.reference",
        "max_outliers": "what may pass is gate.max_outliers",
    }

    top: Annotated[int, Field(ge=1)] = 20
    """How many samples are shown."""
    review_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Share of the samples on the review list if there is no reference."""
    measures: list[MeasureConfig] = Field(default_factory=list)
    """What is computed besides norm, loss and prediction; docs/reference/measures.md lists the measures."""
    trainable: ParameterPatterns = None
    """Patterns of parameter names whose gradients are measured; null for all trainable ones."""
    checkpoints: Annotated[
        list[FilePath] | None, BeforeValidator(listed_paths, json_schema_input_type=str | list[str] | None)
    ] = None
    """Checkpoints of one training run, in order, or a pattern such as run/checkpoint-*, for the measures that
    follow samples through training.
    """
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the random numbers of measures."""
    probabilities: str | None = None
    """Column of the dataset with a list of the probabilities of all classes, by models that were not trained
    on the row (cross-validation): label issues are found by them.
    """
    folds: Annotated[int, Field(ge=2)] | None = None
    """In place of a column: this many models, each trained without its share of the rows, as
    influence.evaluate.train says.
    """
    outliers: OutlierConfig = Field(default_factory=OutlierConfig)
    """Which samples are outliers."""

    @model_validator(mode="after")
    def _each_once(self) -> AnalyzeConfig:
        for what, names in (
            ("measure", [m.name for m in self.measures]),
            ("checkpoint", [str(path) for path in self.checkpoints or []]),
        ):
            twice = first_twice(names)
            if twice is not None:
                raise ValueError(f"the {what} {twice} is listed twice")
        if self.checkpoints is not None and not self.checkpoints:
            raise ValueError("checkpoints is an empty list; leave it out to use model.checkpoint")
        if self.folds is not None and self.probabilities is not None:
            raise ValueError("both folds and probabilities are given; expected one of them")
        return self


class GateConfig(ConfigSection):
    """What a run may hold and still pass: `psgrad check`, and `psgrad analyze --check`."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "new_only": "leave it out: findings of gate.baseline are not counted"
    }

    max_outliers: Annotated[int, Field(ge=0)] | None = None
    """The largest number of outliers that passes; null for any number."""
    max_fraction: Annotated[Finite, Field(ge=0, le=1)] | None = None
    """The largest share of outliers that passes; null for any share."""
    max_leaks: Annotated[int, Field(ge=0)] | None = None
    """The largest number of leaks of evaluation data (influence.queries) that passes; null for any number."""
    nonfinite: Literal["error", "warning", "ignore"] = "error"
    """The level of a loss or gradient that is NaN or infinite."""
    baseline: FilePath | None = None
    """Findings that are not counted: a file of `psgrad baseline save`, relative to this config."""
    ignore: FilePath | None = None
    """Findings that a person has accepted, each with a reason: a YAML file, relative to this config."""

    @property
    def new_only(self) -> bool:
        """Whether only findings count that are not in the baseline."""
        return self.baseline is not None


Level = Literal["overall", "class", "group"]
_Limits = dict[Level, Annotated[Finite, Field(ge=0)]]


class ReviewConfig(ConfigSection):
    """`psgrad review`: what a change of the training data may do and still pass."""

    max_increase: _Limits = Field(default_factory=dict)
    """The largest rise of the mean loss of the queries that passes, overall, of a class, of a group."""
    max_margin_fall: _Limits = Field(default_factory=dict)
    """The largest fall of their mean margin: that tells harm where the loss is hidden by the seed."""
    max_suspect: Annotated[int, Field(ge=0)] | None = None
    """How many added rows may look wrong by themselves; null for any number."""
    group: str | None = None
    """The column of the queries whose values are groups."""
    seconds: Annotated[Finite, Field(ge=0)] = 60.0
    """The time for training on with and without the change, which checks the prediction; 0 for no check."""
