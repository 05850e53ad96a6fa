"""The reference that samples are judged against, found or measured, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from psgrad.commands.analyze_passes import Measured, Passes
from psgrad.commands.analyze_tables import about_rows, content_of_made
from psgrad.commands.class_names import errors_about
from psgrad.commands.measure_setup import PROJECTED, measures_of, prepare
from psgrad.commands.run_identity import measure_specs
from psgrad.commands.setup import Setup
from psgrad.config import Config, nearest
from psgrad.config.plugin_names import OWN
from psgrad.data.derived import DrawnSamples
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.measures.measure import Measure
from psgrad.errors import ConfigError, DataError, one_line
from psgrad.quality.detector import detector_from
from psgrad.quality.gates import read_baseline, read_reference
from psgrad.quality.judging import OutlierTable, judge
from psgrad.quality.references import Reference, measured_as, reference_of, require_comparable, scored_by
from psgrad.run import RunFolder
from psgrad.run.finished import finished_manifest, load_run
from psgrad.run.progress import read_ahead
from psgrad.run.results import SAMPLE_COLUMNS, Progress, Say
from psgrad.run.results.manifest import ModelFacts, RunManifest

_PREFIX = "reference-"
_REFERENCE = "the reference"  # whose rows a message is about
# Measures whose numbers depend on the other samples, in addition to those with a second pass.
_RELATIVE = ("neighbour_distance",)
# Columns of other measures whose numbers depend on the other samples.
_RELATIVE_COLUMNS = ("vog_z",)


class OutlierRule:
    """Decides which samples of a run are outliers, by its config.

    Everything is checked when the object is made, before anything is measured. Raises ConfigError and
    DataError: for a reference that does not exist or was measured with something else, a score or a group
    that will not be a column, and a name that is not a detector.
    """

    def __init__(self, run: Setup, measures: Sequence[Measure]) -> None:
        self._run, self._measures = run, measures
        self._outliers = run.config.analyze.outliers
        for each in self._outliers.detectors:
            detector_from(each.name, each.options, run.config.base)
        self._scored_by = scored_by(self._outliers.score, [each.name for each in self._outliers.detectors])
        self._require_known()
        self._of_data = self._column_of_data()
        self._units: np.ndarray[Any, Any] | None = None  # what that column says of each sample of the run
        if self._of_data is not None:
            self._units = run.more_samples(run.config.data, self._of_data).units
            if self._units is not None and isinstance(run.samples, DrawnSamples):
                self._units = self._units[run.samples.rows]
        self._found = self._find()
        self._trusted = self._load_trusted()

    def identity(self, all_rows: bool) -> dict[str, Any]:
        """What a dataset as the reference adds to the identity of a run: rows of it are kept as those of the
        run are. all_rows: see psgrad.commands.run_identity.
        """
        source = self._outliers.reference
        if self._trusted is None or source is None or source.data is None:
            return {}
        described = source.data.model_dump(mode="json", exclude={"class_names"})
        samples = self._trusted.samples
        return {
            "reference": described,
            "reference (its content)": samples.content() if all_rows else samples.fingerprint,
            "score": self._outliers.score,
        }

    def reference(self, folder: RunFolder, say: Say, processes: Processes, identity: str) -> Reference | None:
        """The trusted samples with their scores; None where there are none, and on all ranks but the first.
        A dataset is measured now, and what is finished of it is kept in the run's folder, as the run's own
        rows are.
        """
        if self._trusted is None:
            return self._found
        return self._measure(self._trusted, folder, say, processes, identity)

    def read_ahead(self, say: Say) -> None:
        """Read the rows of a dataset as the reference, where code makes them."""
        if self._trusted is not None:
            read_ahead(self._trusted.samples, len(self._trusted.samples), say)

    def judge(self, measured: Measured, reference: Reference | None) -> OutlierTable:
        """The verdict on what was measured, against the trusted samples."""
        frame = measured.table
        if self._of_data is not None and self._units is not None:
            frame = frame.assign(**{self._of_data: self._units[: len(frame)]})
        relative = [each for each in self._measures if each.needs_second_pass or each.name in _RELATIVE]
        is_relative = self._outliers.score in _RELATIVE_COLUMNS or any(
            _gives(each, self._outliers.score) for each in relative
        )
        if reference is not None and is_relative:
            said = (
                f"{self._outliers.score} of a sample depends on the other samples of its run: it is not quite"
                " the same score in two runs"
            )
            reference = replace(reference, caveats=(*reference.caveats, said))
        config = self._run.config
        ignored = None
        if self._run.criterion.kind == "class" and "target" in frame:
            ignored = frame["target"].to_numpy() == self._run.criterion.ignore_index
        return judge(frame, config.analyze, reference, _rows_of(measured), config.base, ignored)

    def _require_known(self) -> None:
        """Raises ConfigError for a score or a group that no column will be; columns that a measure does not
        tell are found later.
        """
        outliers = self._outliers
        if outliers.group_by == "length" and self._run.criterion.kind != "token":
            raise ConfigError(
                "analyze.outliers.group_by: length counts positions, and the loss"
                f" {self._run.config.loss.name} has none; expected length with token_cross_entropy; or"
                " class, or a column",
            )
        known = ["grad_norm", "log_norm", "loss", "confidence", "prediction", "token_accuracy", "length"]
        known += [column for measure in self._measures for column in measure.meanings]
        known += [f"{each.name}_score" for each in outliers.detectors]
        unsaid = [
            measure
            for measure in self._measures
            if not measure.meanings and measure.name not in OWN["measures"]
        ]
        if (
            outliers.score not in known
            and not unsaid
            and not any(_gives(measure, outliers.score) for measure in self._measures)
        ):
            close = nearest(outliers.score, known)
            raise ConfigError(
                one_line(
                    f"analyze.outliers.score: there is no column {outliers.score!r}"
                    + (f"; did you mean {close}?" if close else ""),
                    f"expected one of {', '.join(known)}",
                ),
                hint="the measure that gives this column is not in analyze.measures",
            )

    def _column_of_data(self) -> str | None:
        """The column that groups samples, where it is one of the dataset and none of what is measured."""
        by = self._outliers.group_by
        known = (
            by is None
            or by in {"class", "length", *SAMPLE_COLUMNS}
            or any(_gives(measure, by) for measure in self._measures)
        )
        return None if known else by

    def _find(self) -> Reference | None:
        """The reference where it is measured already."""
        source, outliers, base = self._outliers.reference, self._outliers, self._run.config.base
        if source is None or source.data is not None:
            return None
        ours = measured_as(_described(self._run))
        if source.baseline is not None:
            saved = read_baseline(base / source.baseline).reference
            if saved is None:
                raise DataError(
                    f"the baseline {source.baseline} holds no scores, by which others could be judged;"
                    " expected a baseline of a finished psgrad analyze",
                    hint="save the baseline again",
                )
            caveats = require_comparable(
                ours, saved.get("measured_as", {}), outliers.score, str(source.baseline)
            )
            found = read_reference(saved, str(source.baseline), self._scored_by, outliers.group_by)
        else:
            path = base / str(source.run)
            manifest = finished_manifest(path)
            caveats = require_comparable(ours, measured_as(manifest), outliers.score, str(source.run))
            finished = load_run(path)
            rows = (
                finished.measures[PROJECTED].arrays.get(PROJECTED) if PROJECTED in finished.measures else None
            )
            found = reference_of(
                finished.samples, self._scored_by, outliers.group_by, "run", str(source.run), rows
            )
        return replace(found, caveats=(*found.caveats, *caveats))

    def _load_trusted(self) -> Setup | None:
        """The run's model and loss with the trusted dataset, where that is the reference."""
        source, run = self._outliers.reference, self._run
        if source is None or source.data is None:
            return None
        config = run.config.model_copy(update={"data": source.data})
        with errors_about(_REFERENCE):
            trusted = run.more_samples(source.data, self._of_data)
            return replace(run, config=config, samples=trusted).with_rows_described()

    def _measure(
        self, trusted: Setup, folder: RunFolder, say: Say, processes: Processes, identity: str
    ) -> Reference | None:
        """The trusted dataset, measured as the samples are: what the score, the groups and the detectors
        need.
        """
        outliers, count = self._outliers, len(trusted.samples)
        setting, every = prepare(
            trusted,
            measures_of(_only_needed(trusted.config, self._measures)),
            count,
            lambda message: say(Progress(0, 0, "reference", message)),
        )
        passes = Passes(
            setting,
            every,
            about_rows(trusted),
            folder,
            say,
            processes,
            identity,
            _PREFIX,
            content_of_made(trusted.samples),
        )
        with errors_about(_REFERENCE):
            measured = passes.run()
        if measured is None:
            return None
        frame = measured.table
        if self._of_data is not None and trusted.samples.units is not None:
            frame = frame.assign(**{self._of_data: trusted.samples.units})
        source = str(trusted.config.data.path or trusted.config.data.factory)
        with np.errstate(divide="ignore"):
            frame = frame.assign(log_norm=np.log10(frame["grad_norm"].to_numpy("float64")))
        return reference_of(frame, self._scored_by, outliers.group_by, "data", source, _rows_of(measured))


def _only_needed(config: Config, measures: Sequence[Measure]) -> Config:
    """The config with those measures alone that the verdict needs; with all where none is known to give the
    score.
    """
    outliers = config.analyze.outliers
    wanted = {column for column in (outliers.score, outliers.group_by) if column is not None} - set(
        SAMPLE_COLUMNS
    )
    wanted -= {"length", "class", *(f"{each.name}_score" for each in outliers.detectors)}
    giving = {column: [measure.name for measure in measures if _gives(measure, column)] for column in wanted}
    if giving.get(outliers.score) == []:
        return config
    needed = {name for names in giving.values() for name in names} | (
        {PROJECTED} if outliers.detectors else set()
    )
    kept = [each for each in config.analyze.measures if each.name in needed]
    return config.model_copy(update={"analyze": config.analyze.model_copy(update={"measures": kept})})


def _gives(measure: Measure, column: str) -> bool:
    """Whether a measure says that this column is its own; `layer_norm.<layer>` stands for a column a
    layer.
    """
    return any(
        column == name or ("<" in name and column.startswith(name.partition("<")[0]))
        for name in measure.meanings
    )


def _rows_of(measured: Measured) -> npt.NDArray[Any] | None:
    return measured.rows[PROJECTED].numpy() if PROJECTED in measured.rows else None


def _described(run: Setup) -> RunManifest:
    """The parts of a run's manifest that scores depend on."""
    trainable = sum(
        parameter.numel() for parameter in run.loaded.model.parameters() if parameter.requires_grad
    )
    return RunManifest(
        config=run.config.model_dump(mode="json"),
        model=ModelFacts(sha256=run.loaded.sha256, trainable=trainable),
        hashes=run.hashes(measure_specs(run.config)),
    )
