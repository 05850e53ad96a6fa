"""The data flow of `psgrad validate`: all mistakes of a config, then the first of what it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psgrad.config import Config, is_callable_spec, read_config
from psgrad.errors import EXIT_OK, EXIT_USAGE, ConfigError, PsgradError
from psgrad.run import RunFolder
from psgrad.run.folders import manifest_of

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from psgrad.commands.setup import Setup

Say = Callable[[str], None]


@dataclass(frozen=True)
class Problem:
    """where: the config's key, dotted; empty for the config as a whole."""

    where: str
    error: PsgradError


@dataclass
class Validation:
    """The problems of a config, the facts that were found, by subject, and further notes."""

    config: str
    problems: list[Problem] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def problems_at(self, where: str) -> Iterator[None]:
        """What is raised inside is a problem of the config's key `where`."""
        try:
            yield
        except PsgradError as error:
            self.problems.append(Problem(where, error))

    @property
    def exit_code(self) -> int:
        """0; 2 where the config is wrong; 3 where it is the files that it names."""
        codes = [problem.error.exit_code for problem in self.problems]
        return EXIT_USAGE if EXIT_USAGE in codes else max(codes, default=EXIT_OK)

    def content(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        problems = [
            {"where": each.where, **each.error.parts(), "exit_code": each.error.exit_code}
            for each in self.problems
        ]
        return {
            "schema_version": 1,
            "config": self.config,
            "facts": self.facts,
            "notes": self.notes,
            "valid": not self.problems,
            "problems": problems,
        }


def validate(path: Path, settings: list[str] | None = None, *, say: Say = lambda _: None) -> Validation:
    """All problems of a config file. Where it has none, what it names is loaded, a few rows go through the
    model, and the first problem on the way is found. Raises ConfigError for a file that holds no config.

    say: gets the messages of the loading.
    """
    reading = read_config(path, settings or [])
    found = Validation(str(path), [Problem("", ConfigError(problem)) for problem in reading.problems])
    config = reading.config
    if config is None:
        return found
    _look_at_output(config.output, found)
    trusted = _look_at_stored(config, found)
    if found.problems:
        return found

    from psgrad.commands.completion import completed_for_analyze
    from psgrad.commands.setup import set_up
    from psgrad.user_code import importing_beside

    _make_plugins(config, found)
    if found.problems:
        return found
    with found.problems_at(""), importing_beside(config.base):
        run = set_up(completed_for_analyze(config))
        parameters = run.objective.params.values()
        numbers = sum(parameter.numel() for parameter in parameters)
        found.facts["model"] = (
            f"{numbers:,} trained numbers in {len(parameters):,} parameters, on {run.device}"
        )
        found.facts["data"] = f"{config.data.source}: {len(run.samples.ids):,} rows"
        _load_queries(config, run)
        columns = _few_rows(run, say)
        found.facts["losses"] = _loss_words(columns["loss"].to_numpy())
        _compare_labels(run, columns, found)
        check = run.self_check(run.stream(say))
        found.facts["self-check"] = (
            "left out, as the model draws at random"
            if check is None
            else f"worst relative error {check.worst:.2g}, against a plain one-sample gradient"
        )
        _look_at_gate_limits(config, len(run.samples), trusted, found)
    return found


def _look_at_output(output: Path, found: Validation) -> None:
    """Find a folder of somebody else; note a run that is there already."""
    found.facts["output"] = str(output)
    earlier = manifest_of(output)
    with found.problems_at("output"):
        RunFolder.require_free(output, overwrite=earlier is not None)
    if earlier is not None:
        finished = earlier.get("state") == "finished"
        way = "--overwrite replaces it" if finished else "--resume goes on with it, --overwrite replaces it"
        found.notes.append(
            f"{output} holds a run of psgrad {earlier.get('command', '')} ({earlier.get('state')}): {way}"
        )


def _look_at_stored(config: Config, found: Validation) -> int | None:
    """Read baselines, ignore lists and the reference run. Returns the number of samples of that run."""
    gate, reference = config.gate, config.analyze.outliers.reference
    baselines = {"gate.baseline": gate.baseline}
    is_run = reference is not None and reference.suffix != ".json"
    if gate.baseline is not None and not (config.base / gate.baseline).exists():
        del baselines["gate.baseline"]
        found.notes.append(
            f"there is no baseline {config.base / gate.baseline} yet: all findings will be new"
        )
    if reference is not None and not is_run:
        baselines["analyze.outliers.reference"] = reference
    for where, path in baselines.items():
        if path is not None:
            from psgrad.quality.gates import read_baseline

            with found.problems_at(where):
                read_baseline(config.base / path)
    if gate.ignore is not None:
        from psgrad.quality.findings import read_ignore_list

        with found.problems_at("gate.ignore"):
            read_ignore_list(config.base / gate.ignore)
    if reference is not None and is_run:
        from psgrad.run.finished import finished_manifest

        with found.problems_at("analyze.outliers.reference"):
            return finished_manifest(config.base / reference).counts.samples
    return None


def _make_plugins(config: Config, found: Validation) -> None:
    """Make the measures, detectors and methods with their options, import the code of one's own, and see that
    all checkpoints and libraries are there. What a config does not name is not imported.
    """
    analyze, influence, base = config.analyze, config.influence, config.base
    if analyze.measures:
        from psgrad.commands.measure_setup import measures_of

        with found.problems_at("analyze.measures"):
            measures_of(config)
    for detector in analyze.outliers.detectors:
        from psgrad.quality.detector import detector_from

        with found.problems_at("analyze.outliers.detectors"):
            detector_from(detector.name, detector.options, base)
    if "influence" in config.model_fields_set:
        from psgrad.commands.influence_setup import method_from

        for method in (influence.method, *influence.evaluate.methods):
            with found.problems_at("influence"):
                method_from(method, base)
    for where, spec in _code_of(config).items():
        from psgrad.user_code import resolve

        with found.problems_at(where):
            resolve(spec, base)
    for path in [*(analyze.checkpoints or []), *(each.path for each in influence.checkpoints or [])]:
        from psgrad.models.checkpoint_files import require_checkpoint

        with found.problems_at("checkpoints"):
            require_checkpoint(base / path)


def _code_of(config: Config) -> dict[str, str]:
    """key -> module:callable, of the code that a config names besides factories and plugins."""
    influence = config.influence
    named = {
        "loss": config.loss.name,
        "influence.measurement": influence.measurement.name,
        "influence.evaluate.train": influence.evaluate.train.function,
    }
    return {where: spec for where, spec in named.items() if spec is not None and is_callable_spec(spec)}


def _load_queries(config: Config, run: Setup) -> None:
    """Load the queries' own dataset, where they have one."""
    from psgrad.commands.class_names import errors_about

    queries = config.influence.queries
    own = None if queries is None else queries.own_data
    if own is not None:
        with errors_about("influence.queries"):
            run.more_samples(own.model_copy(update={"weight": None}), weighted=False)


# Rows whose loss is taken, from all over the dataset; the second number where they have classes.
_ROWS = (32, 128)


def _few_rows(run: Setup, say: Say) -> pd.DataFrame:
    """Loss and label, and what the model says, of some rows from all over the dataset."""
    import numpy as np
    import pandas as pd
    import torch

    from psgrad.commands.influence_inputs import chosen_rows
    from psgrad.data.reader import CheckedReader
    from psgrad.engine.execution.examples import Examples
    from psgrad.engine.execution.ranks import spread_rows

    criterion = run.criterion
    lengths = criterion.kind == "token"
    reader = CheckedReader(run.samples, criterion, run.reader.classes, with_lengths=lengths)
    rows = np.array(spread_rows(len(run.samples), _ROWS[criterion.kind in ("class", "binary")]))
    examples = Examples(run.objective, chosen_rows(reader, rows), len(rows), run.stream_options(say))
    chunks = [chunk for _, chunk in examples.losses()]
    columns = {name: torch.cat([chunk[name] for chunk in chunks]).cpu().numpy() for name in chunks[0]}
    targets = reader.targets_at(rows)
    columns |= {} if targets is None else {"target": targets}
    columns |= {} if reader.lengths is None else {"length": reader.lengths[rows]}
    return pd.DataFrame(columns)


def _loss_words(losses: np.ndarray[Any, Any]) -> str:
    import numpy as np

    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return f"none of {len(losses)} is finite"
    words = f"{finite.min():.4g} to {finite.max():.4g} over {len(losses)} rows"
    missing = len(losses) - len(finite)
    return words + (f", {missing} of them not finite" if missing else "")


def _compare_labels(run: Setup, columns: pd.DataFrame, found: Validation) -> None:
    """Note how many labels the model agrees with, and a sign that classes are in another order."""
    from psgrad.commands.class_names import label_facts_of
    from psgrad.reports.labels import label_warning, label_words

    names = run.config.data.class_names
    labels = label_facts_of(run.criterion, columns, names)
    if labels is not None and (words := label_words(labels, names)):
        found.facts["labels"] = words
    if labels is not None and (warning := label_warning(labels, names)):
        found.notes.append(warning)


def _look_at_gate_limits(config: Config, rows: int, trusted: int | None, found: Validation) -> None:
    """Note what the gate could not decide. Samples of a baseline are not tested when they come again, so
    nothing is known there.
    """
    from psgrad.quality.gate_limits import undecided_rules

    outliers, gate = config.analyze.outliers, config.gate
    limited = gate.max_outliers is not None or gate.max_fraction is not None
    if limited and (outliers.reference is None or trusted is not None):
        found.notes += undecided_rules(gate, outliers, rows, trusted)
