"""The rule by which the samples of a run are judged, with its stored reference; and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from psgrad.commands.analyze_passes import Measured
from psgrad.commands.measure_setup import PROJECTED
from psgrad.commands.run_manifest import measure_specs
from psgrad.commands.setup import Setup
from psgrad.config import did_you_mean
from psgrad.config.plugin_names import OWN
from psgrad.data.derived import DrawnSamples
from psgrad.engine.measures.measure import Measure
from psgrad.errors import ConfigError, DataError
from psgrad.quality.detector import detector_from
from psgrad.quality.judging import OutlierTable, judge
from psgrad.quality.references import Reference, measured_as, reference_of, require_comparable, scored_by
from psgrad.run.finished import finished_manifest, load_run
from psgrad.run.results import SAMPLE_COLUMNS
from psgrad.run.results.manifest import ModelFacts, RunManifest

# Scores of a sample that depend on the other samples, in addition to those with a second pass: a measure, and
# a column of another one.
_RELATIVE, _RELATIVE_COLUMN = "neighbour_distance", "vog_z"


@dataclass(frozen=True)
class OutlierRule:
    """Which samples of a run are outliers, by its config.

    column: of the dataset, by which samples are grouped, with what it says of each sample [n]; None where
    they are not. reference: trusted samples with their scores; None for a review list alone.
    """

    setup: Setup
    column: tuple[str, npt.NDArray[Any]] | None
    reference: Reference | None

    def judge(self, measured: Measured) -> OutlierTable:
        """The verdict on what was measured."""
        frame, setup = measured.table, self.setup
        if self.column is not None:
            name, values = self.column
            frame = frame.assign(**{name: values[: len(frame)]})
        ignored = None
        if setup.criterion.kind == "class" and "target" in frame:
            ignored = frame["target"].to_numpy() == setup.criterion.ignore_index
        rows = measured.rows[PROJECTED].numpy() if PROJECTED in measured.rows else None
        return judge(frame, setup.config.analyze, self.reference, rows, setup.config.base, ignored)


def outlier_rule(setup: Setup, measures: Sequence[Measure]) -> OutlierRule:
    """The rule of a run's config; all that it names is checked and read, before anything is measured.

    Raises ConfigError and DataError: for a reference that does not exist or was measured with something else,
    a score or a group that will not be a column, and a name that is not a detector.
    """
    outliers = setup.config.analyze.outliers
    for each in outliers.detectors:
        detector_from(each.name, each.options, setup.config.base)
    if outliers.group_by == "length" and setup.criterion.kind != "token":
        raise ConfigError(
            "analyze.outliers.group_by: length counts positions, and the loss"
            f" {setup.config.loss.name} has none; expected class, or a column"
        )
    _require_column(setup, measures)
    return OutlierRule(setup, _column_of_data(setup, measures), _stored_reference(setup, measures))


def _require_column(setup: Setup, measures: Sequence[Measure]) -> None:
    """Raises ConfigError for a score that will be no column; columns that a measure does not tell are found
    later.
    """
    outliers = setup.config.analyze.outliers
    known = ["grad_norm", "log_norm", "loss", "confidence", "prediction", "token_accuracy", "length"]
    known += [column for measure in measures for column in measure.meanings]
    known += [f"{each.name}_score" for each in outliers.detectors]
    untold = any(not each.meanings and each.name not in OWN["measures"] for each in measures)
    if outliers.score not in known and not untold and not _giving(measures, outliers.score):
        raise ConfigError(
            f"analyze.outliers.score: there is no column {outliers.score!r}"
            f"{did_you_mean(outliers.score, known)}; expected one of {', '.join(known)}",
            hint="the measure that gives this column is not in analyze.measures",
        )


def _column_of_data(setup: Setup, measures: Sequence[Measure]) -> tuple[str, npt.NDArray[Any]] | None:
    """The column that groups samples, where it is one of the dataset and none of what is measured."""
    by = setup.config.analyze.outliers.group_by
    if by is None or by in {"class", "length", *SAMPLE_COLUMNS} or _giving(measures, by):
        return None
    units = setup.other_samples(setup.config.data, by).units
    if units is None:
        return None
    return by, units[setup.samples.rows] if isinstance(setup.samples, DrawnSamples) else units


def _stored_reference(setup: Setup, measures: Sequence[Measure]) -> Reference | None:
    """The samples of a finished run, or of a baseline, with their scores."""
    outliers = setup.config.analyze.outliers
    if outliers.reference is None:
        return None
    path, source = setup.config.base / outliers.reference, str(outliers.reference)
    column, ours = scored_by(outliers.score, [each.name for each in outliers.detectors]), _measured_as(setup)
    if path.suffix == ".json":
        from psgrad.quality.baselines import read_baseline, read_reference

        saved = read_baseline(path).reference
        if saved is None:
            raise DataError(
                f"the baseline {source} holds no scores, by which others could be judged",
                hint="save the baseline again, of a finished psgrad analyze",
            )
        caveats = require_comparable(ours, saved.get("measured_as", {}), outliers.score, source)
        found = read_reference(saved, source, column, outliers.group_by)
    else:
        caveats = require_comparable(ours, measured_as(finished_manifest(path)), outliers.score, source)
        finished = load_run(path)
        projected = finished.measures.get(PROJECTED)
        rows = None if projected is None else projected.arrays.get(PROJECTED)
        found = reference_of(finished.samples, column, outliers.group_by, "run", source, rows)
    giving = _giving(measures, outliers.score)
    if outliers.score == _RELATIVE_COLUMN or any(
        each.needs_second_pass or each.name == _RELATIVE for each in giving
    ):
        caveats = (
            f"{outliers.score} of a sample depends on the other samples of its run: it is not quite the same"
            " score in two runs",
            *caveats,
        )
    return replace(found, caveats=(*found.caveats, *caveats))


def _giving(measures: Sequence[Measure], column: str) -> list[Measure]:
    """The measures that say that this column is their own; `layer_norm.<layer>` stands for a column a
    layer.
    """
    return [
        measure
        for measure in measures
        if any(
            column == name or ("<" in name and column.startswith(name.partition("<")[0]))
            for name in measure.meanings
        )
    ]


def _measured_as(setup: Setup) -> dict[str, Any]:
    """What the scores of the run depend on; see psgrad.quality.references."""
    parameters = setup.loaded.model.parameters()
    return measured_as(
        RunManifest(
            config=setup.config.model_dump(mode="json"),
            model=ModelFacts(
                sha256=setup.loaded.sha256, trainable=sum(p.numel() for p in parameters if p.requires_grad)
            ),
            hashes=setup.hashes(measure_specs(setup.config)),
        )
    )
