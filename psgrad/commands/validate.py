"""`psgrad validate`: everything about a config that can be known without running it, and without torch."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from psgrad.commands.validation import DataChecks, Problem, Validation
from psgrad.config import (
    MEASUREMENTS,
    Config,
    DataConfig,
    ModelConfig,
    is_callable_spec,
    read_config,
)
from psgrad.config.plugin_options import installed_plugins, own_plugins, plugin_names
from psgrad.config.values import NamedSection, did_you_mean
from psgrad.errors import (
    CheckpointError,
    ConfigError,
    LossError,
    ModelError,
    OutputError,
    PsgradError,
)
from psgrad.models.checkpoint_headers import TensorHeader
from psgrad.models.pretrained_checks import (
    adapter_facts,
    checkpoint_tensors,
    library_problems,
    pretrained_facts,
)
from psgrad.plugins import MEASURES, METHODS, PluginKind
from psgrad.run import RunFolder
from psgrad.run.code_checks import spec_problems
from psgrad.run.folders import manifest_of
from psgrad.run.row_lists import require_faiss
from psgrad.wording import first_of

_BYTES_A_ROW = 1000  # of samples.parquet and .csv and their shards, about
_BYTES_A_RUN = 20 << 20  # of the report and the other tables, about


def validate(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    deep: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Validation:
    """Check a config and all that it names: the whole of `psgrad validate`. Raises ConfigError for a file
    that holds no config at all.

    `deep` also loads the model and the data, and takes the loss and the gradients of a few rows.
    """
    reading = read_config(path, list(overrides))
    found = Validation(str(path), [Problem("", ConfigError(problem)) for problem in reading.problems])
    checks = _Checks(found, path.parent, reading.sections, deep)
    checks.all()
    rows = checks.rows
    if deep and not found.problems and reading.config is not None:
        from psgrad.commands.validate_deep import validate_deep

        rows = validate_deep(reading.config, found, say)
    elif reading.config is not None and not deep:
        found.notes.append(
            "not looked at without --deep: whether the weights fit the model, labels are in range, and a row"
            " goes through"
        )
    if reading.config is not None and rows and not found.problems:
        checks.gate_limits(reading.config, rows)
    return found


class _Checks:
    """The checks, each of which adds to what was found.

    Attributes:
        sections: those that could be read.
        deep: whether the model and all rows are loaded afterwards.
        rows, trusted: how many rows the data and the reference have, as far as headers tell.
    """

    def __init__(self, found: Validation, base: Path, sections: Mapping[str, Any], deep: bool) -> None:
        self.found, self.base, self.sections, self.deep = found, base, sections, deep
        self.data = DataChecks(found, base, sections, deep)
        self.rows: int | None = None
        self.trusted: int | None = None

    def all(self) -> None:
        self._model()
        self._data()
        self._loss()
        self._analyze()
        self._influence()
        self._privacy()
        self._gate()
        self._output()

    def _code(
        self, where: str, spec: str, raises: type[PsgradError], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.found.add(where, spec_problems(spec, self.base, kwargs, raises))

    def _model(self) -> None:
        model = self.sections.get("model")
        if model is None:
            return
        if model.factory is not None:
            self._code("model.factory", model.factory, ModelError, model.kwargs)
            self.found.facts["model"] = model.factory
        else:
            self._foreign_model(model)
        weights = None
        if model.checkpoint is not None:
            weights = self._weights("model.checkpoint", model.checkpoint, model.state_dict_key)
        for section in ("analyze", "influence"):
            listed = getattr(self.sections.get(section), "checkpoints", None) or []
            for place, each in enumerate(listed):
                where = f"{section}.checkpoints.{place}"
                path = getattr(each, "path", each)
                ours = self._weights(where, path, model.state_dict_key)
                if ours is not None and weights is not None:
                    self.found.add(where, _unlike(ours, weights, path))
                weights = weights or ours

    def _foreign_model(self, model: ModelConfig) -> None:
        """Check that a library's model exists, and note the facts in its files."""
        self.found.add("model", library_problems(model))
        if model.timm is not None:
            self.found.facts["model"] = f"timm's {model.timm}"
            return
        self.found.facts["model"] = str(model.pretrained)
        allowed = self.sections.get("allow_download") is True
        problems = len(self.found.problems)
        with self.found.problems_at("model.pretrained"):
            self.found.facts["model"] = pretrained_facts(model, self.base, allow_download=allowed)
        if problems == len(self.found.problems):
            with self.found.problems_at("model.adapter"):
                for words, notes in adapter_facts(model, self.base, allow_download=allowed):
                    self.found.facts["model.adapter"] = words
                    self.found.notes += notes

    def _weights(self, where: str, path: Path, key: str | None) -> dict[str, TensorHeader] | None:
        with self.found.problems_at(where):
            header = checkpoint_tensors(
                self.base / path,
                key if path.suffix != ".safetensors" or where == "model.checkpoint" else None,
            )
            if header is None:
                self.found.facts[where] = str(path)
                if not self.deep:
                    self.found.notes.append(f"what {path} holds is checked with --deep")
                return None
            numbers = sum(math.prod(tensor.shape) for tensor in header.values())
            self.found.facts[where] = f"{path}: {len(header):,} tensors, {numbers:,} numbers"
            return header
        return None

    def _data(self) -> None:
        data, privacy = self.sections.get("data"), self.sections.get("privacy")
        unit = None if privacy is None or privacy.unit is None else privacy.unit.column
        if data is not None:
            self.rows = self.data.dataset("data", data, unit)
        queries = getattr(self.sections.get("influence"), "queries", None)
        for data in () if queries is None else (queries.own_data, queries.contrast_data):
            if data is not None:
                self.data.dataset("influence.queries", data)

    def _loss(self) -> None:
        loss = self.sections.get("loss")
        if loss is not None and is_callable_spec(loss.name):
            self._code("loss.name", loss.name, LossError)

    def _analyze(self) -> None:
        analyze = self.sections.get("analyze")
        if analyze is None:
            return
        for measure in analyze.measures:
            self._named("analyze.measures", MEASURES, measure)
        if analyze.outliers.detectors:
            from psgrad.quality.detector import detector_from

            for detector in analyze.outliers.detectors:
                with self.found.problems_at("analyze.outliers.detectors"):
                    detector_from(detector.name, detector.options, self.base)
        if analyze.measures:
            self.found.facts["analyze.measures"] = ", ".join(measure.name for measure in analyze.measures)
        self._reference(analyze.outliers.reference)

    def _reference(self, reference: Any) -> None:
        where = "analyze.outliers.reference"
        if reference is None:
            return
        if reference.data is not None:
            data = self.sections.get("data")
            given = reference.data.model_dump(exclude_unset=True)
            kept = (
                {}
                if data is None
                else data.model_dump(exclude_unset=True, exclude={"path", "factory", "kwargs"})
            )
            with self.found.problems_at(f"{where}.data"):
                self.trusted = self.data.dataset(
                    f"{where}.data", DataConfig.model_validate({**kept, **given})
                )
        if reference.baseline is not None:
            self._baseline(f"{where}.baseline", reference.baseline)
        if reference.run is not None:
            from psgrad.run.finished import finished_manifest

            with self.found.problems_at(f"{where}.run"):
                manifest = finished_manifest(self.base / reference.run)
                self.trusted = manifest.counts.samples

    def _baseline(self, where: str, path: Path) -> None:
        from psgrad.quality.gates import read_baseline

        with self.found.problems_at(where):
            found = read_baseline(self.base / path)
            self.found.facts[where] = f"{path}: {len(found.findings):,} findings"

    def _influence(self) -> None:
        influence = self.sections.get("influence")
        if influence is None:
            return
        for where, method in [
            ("influence.method", influence.method),
            *(("influence.evaluate.methods", m) for m in influence.evaluate.methods),
        ]:
            self._named(where, METHODS, method)
        if influence.measurement.name not in MEASUREMENTS:
            self._code("influence.measurement", influence.measurement.name, ConfigError)
        if influence.index_search.approximate:
            with self.found.problems_at("influence.index_search"):
                require_faiss()
        if influence.evaluate.train.function is not None:
            self._code("influence.evaluate.train.function", influence.evaluate.train.function, ConfigError)
        if influence.training is not None:
            for key, spec in influence.training.code.items():
                self._code(f"influence.training.{key}", spec, ConfigError)

    def _named(self, where: str, kind: PluginKind, section: NamedSection) -> None:
        """The name and the options' names of a measure or method; values are checked with --deep, by the
        thing itself.
        """
        if is_callable_spec(section.name):
            self._code(where, section.name, ConfigError)
            return
        own = own_plugins(kind.group).get(section.name)
        if own is None and section.name not in installed_plugins(kind.group):
            known = plugin_names(kind.group)
            said = f"there is no {kind.word} {section.name!r}{did_you_mean(section.name, known)}"
            self.found.add(where, [ConfigError(said, expected=f"one of {', '.join(known)}; or module:Class")])
        takes = list(own.options) if own is not None else list(section.options)
        for option in section.options:
            if option not in takes:
                said = f"{option}: unknown option of {section.name}{did_you_mean(option, takes)}"
                expected = f"one of {', '.join(takes)}" if takes else "it takes none"
                self.found.add(where, [ConfigError(said, expected=expected)])

    def _privacy(self) -> None:
        privacy = self.sections.get("privacy")
        if privacy is not None and privacy.augmentation is not None:
            self._code("privacy.augmentation.function", privacy.augmentation.function, ConfigError)

    def _gate(self) -> None:
        gate = self.sections.get("gate")
        if gate is None:
            return
        if gate.baseline is not None and (self.base / gate.baseline).exists():
            self._baseline("gate.baseline", gate.baseline)
        elif gate.baseline is not None:
            self.found.notes.append(
                f"there is no baseline {self.base / gate.baseline} yet: all findings will be new"
            )
        if gate.ignore is not None:
            from psgrad.quality.findings import read_ignore_list

            with self.found.problems_at("gate.ignore"):
                self.found.facts["gate.ignore"] = (
                    f"{gate.ignore}: {len(read_ignore_list(self.base / gate.ignore)):,} entries"
                )

    def gate_limits(self, config: Config, rows: int) -> None:
        """Note what the gate could not decide. Samples of a baseline are not tested when they come again, so
        nothing is known there.
        """
        outliers, gate = config.analyze.outliers, config.gate
        if gate.max_outliers is None and gate.max_fraction is None:
            return
        if outliers.reference is None or self.trusted is not None:
            from psgrad.quality.gate_limits import undecided_rules

            self.found.notes += undecided_rules(gate, outliers, rows, self.trusted)

    def _output(self) -> None:
        output: Path | None = self.sections.get("output")
        if output is None:
            return
        self.found.facts["output"] = str(output)
        earlier = manifest_of(output)
        with self.found.problems_at("output"):
            RunFolder.require_free(output, overwrite=earlier is not None)
        if earlier is not None:
            state = earlier.get("state")
            way = (
                "--overwrite replaces it"
                if state == "finished"
                else "--resume goes on with it, --overwrite replaces it"
            )
            self.found.notes.append(
                f"{output} holds a run of psgrad {earlier.get('command') or ''} ({state}): {way}".replace(
                    "  ", " "
                )
            )
        needed = _BYTES_A_RUN + _BYTES_A_ROW * (self.rows or 0)
        with self.found.problems_at("output"):
            free = _free_bytes(output)
            if free is not None and free < needed:
                raise OutputError(
                    f"the disk of {output} has {free:,} bytes left",
                    expected=f"about {needed:,} for a run of {self.rows or 0:,} rows",
                    next_step="free some space, or choose an --output on another disk",
                )


def _unlike(
    ours: Mapping[str, TensorHeader], first: Mapping[str, TensorHeader], path: Path
) -> Iterable[CheckpointError]:
    """What distinguishes a checkpoint from the first one of the config."""
    missing = [name for name in first if name not in ours]
    more = [name for name in ours if name not in first]
    other = [
        f"{name} {list(ours[name].shape)} instead of {list(first[name].shape)}"
        for name in first
        if name in ours and ours[name].shape != first[name].shape
    ]
    for words, names in (("lacks", missing), ("also has", more), ("has", other)):
        if names:
            yield CheckpointError(
                f"{path} {words} {first_of(names, 5)}",
                expected="the tensors of the config's first checkpoint, checkpoints of one training",
            )


def _free_bytes(output: Path) -> int | None:
    """Free bytes of the disk that the output would be on; None where they are not known."""
    for folder in (output, *output.absolute().parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None
