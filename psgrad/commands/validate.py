"""The data flow of `psgrad validate`: all mistakes of a config, then the first of what it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psgrad.config import Config, is_callable_spec, read_config
from psgrad.errors import EXIT_OK, EXIT_USAGE, ConfigError, PsgradError
from psgrad.run import RunFolder

if TYPE_CHECKING:
    import pandas as pd

    from psgrad.commands.setup import Setup

SayText = Callable[[str], None]
# Rows whose loss is taken, from all over the dataset; the second number where they have classes.
_ROWS = (32, 128)


@dataclass(frozen=True)
class Validation:
    """The problems of a config, the facts that were found, by subject, and further notes."""

    config: str
    problems: list[PsgradError]
    facts: dict[str, str]
    notes: list[str]

    @property
    def exit_code(self) -> int:
        """0; 2 where the config is wrong; 3 where it is the files that it names."""
        codes = [problem.exit_code for problem in self.problems]
        return EXIT_USAGE if EXIT_USAGE in codes else max(codes, default=EXIT_OK)

    def content(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        problems = [{**each.parts(), "exit_code": each.exit_code} for each in self.problems]
        about = {"schema_version": 1, "valid": not self.problems, "problems": problems}
        return {"config": self.config, "facts": self.facts, "notes": self.notes, **about}


def validate(path: Path, settings: list[str] | None = None, *, say: SayText = lambda _: None) -> Validation:
    """All problems of a config file. Where it has none, what it names is loaded, a few rows go through the
    model, and the first problem on the way is found. Raises ConfigError for a file that holds no config.

    say: gets the messages of the loading.
    """
    reading = read_config(path, settings or [])
    problems: list[PsgradError] = [ConfigError(problem) for problem in reading.problems]
    found = Validation(str(path), problems, {}, [])
    if reading.config is not None:
        from psgrad.user_code import importing_beside

        try:
            with importing_beside(reading.config.base):
                _look_at(reading.config, found, say)
        except PsgradError as error:
            found.problems.append(error)
    return found


def _look_at(config: Config, found: Validation, say: SayText) -> None:
    """Load what a config names, and add what there is to know about it. Raises PsgradError for the first
    problem.
    """
    found.facts["output"] = str(config.output)
    found.notes.extend(_notes_on_output(config.output))
    trusted = _stored_samples(config, found)

    from psgrad.commands.class_names import errors_about, label_facts_of
    from psgrad.commands.completion import completed_for_analyze
    from psgrad.commands.setup import set_up
    from psgrad.reports.labels import label_warning, label_words

    _make_plugins(config)
    setup = set_up(completed_for_analyze(config))
    parameters = setup.objective.params.values()
    numbers = sum(parameter.numel() for parameter in parameters)
    found.facts["model"] = f"{numbers:,} trained numbers in {len(parameters):,} parameters, on {setup.device}"
    found.facts["data"] = f"{config.data.source}: {len(setup.samples.ids):,} rows"
    queries = config.influence.queries
    if queries is not None and queries.own_data is not None:
        with errors_about("influence.queries"):
            setup.other_samples(queries.own_data, weighted=False)
    columns = _few_rows(setup, say)
    found.facts["losses"] = _loss_words(columns["loss"])
    names = setup.config.data.class_names
    labels = label_facts_of(setup.criterion, columns, names)
    if labels is not None and (words := label_words(labels, names)):
        found.facts["labels"] = words
    if labels is not None and (warning := label_warning(labels, names)):
        found.notes.append(warning)
    check = setup.self_check(setup.stream(say))
    found.facts["self-check"] = (
        "left out, as the model draws at random"
        if check is None
        else f"worst relative error {check.worst:.2g}, against a plain one-sample gradient"
    )
    gate, outliers = config.gate, config.analyze.outliers
    limited = gate.max_outliers is not None or gate.max_fraction is not None
    # Samples of a baseline are not tested when they come again, so nothing is known of one.
    if limited and (outliers.reference is None or trusted is not None):
        from psgrad.quality.gates import undecided_rules

        found.notes.extend(undecided_rules(gate, outliers, len(setup.samples), trusted))


def _notes_on_output(output: Path) -> list[str]:
    """A note on a run that is there already. Raises OutputExistsError for a folder of somebody else."""
    earlier = RunFolder.manifest_of(output)
    RunFolder.require_free(output, overwrite=earlier is not None)
    if earlier is None:
        return []
    replaced = "--overwrite replaces it"
    options = replaced if earlier.get("state") == "finished" else f"--resume goes on with it, {replaced}"
    return [
        f"{output} holds a run of psgrad {earlier.get('command', '')} ({earlier.get('state')}): {options}"
    ]


def _stored_samples(config: Config, found: Validation) -> int | None:
    """Reads the files that the gate names, and the reference. Returns the number of samples of a reference
    run.
    """
    from psgrad.commands.check import gate_files
    from psgrad.quality.baselines import read_baseline
    from psgrad.run.finished import finished_manifest

    reference = config.analyze.outliers.reference
    found.notes.extend(gate_files(config.gate, config.base).warnings)
    if reference is None:
        return None
    if reference.suffix == ".json":
        read_baseline(config.base / reference)
        return None
    return finished_manifest(config.base / reference).counts.samples


def _make_plugins(config: Config) -> None:
    """Makes the measures, detectors and methods with their options, imports the code of one's own, and sees
    that all checkpoints and libraries are there. What a config does not name is not imported.
    """
    analyze, influence, base = config.analyze, config.influence, config.base
    if analyze.measures:
        from psgrad.commands.measure_setup import measures_of

        measures_of(config)
    for detector in analyze.outliers.detectors:
        from psgrad.quality.detector import detector_from

        detector_from(detector.name, detector.options, base)
    if "influence" in config.model_fields_set:
        from psgrad.commands.influence_setup import method_from

        for method in (influence.method, *influence.evaluate.methods):
            method_from(method, base)
    for spec in (config.loss.name, influence.measurement.name, influence.evaluate.train.function):
        if spec is not None and is_callable_spec(spec):
            from psgrad.user_code import resolve

            resolve(spec, base)
    for path in [*(analyze.checkpoints or []), *(each.path for each in influence.checkpoints or [])]:
        from psgrad.models.checkpoint_files import require_checkpoint

        require_checkpoint(base / path)


def _few_rows(setup: Setup, say: SayText) -> pd.DataFrame:
    """Loss and label, and what the model says, of some rows from all over the dataset."""
    import numpy as np
    import pandas as pd

    from psgrad.commands.influence_inputs import losses_of
    from psgrad.data.reader import CheckedReader
    from psgrad.engine.execution.ranks import spread_rows

    kind = setup.criterion.kind
    reader = CheckedReader(setup.samples, setup.criterion, setup.reader.classes, with_lengths=kind == "token")
    rows = np.array(spread_rows(len(setup.samples), _ROWS[kind in ("class", "binary")]))
    columns = losses_of(setup, reader, rows, say)
    targets = reader.targets_at(rows)
    columns |= {} if targets is None else {"target": targets}
    columns |= {} if reader.lengths is None else {"length": reader.lengths[rows]}
    return pd.DataFrame(columns)


def _loss_words(losses: pd.Series[Any]) -> str:
    import numpy as np

    finite = losses[np.isfinite(losses)]
    if finite.empty:
        return f"none of {len(losses)} is finite"
    words = f"{finite.min():.4g} to {finite.max():.4g} over {len(losses)} rows"
    missing = len(losses) - len(finite)
    return words + (f", {missing} of them not finite" if missing else "")
