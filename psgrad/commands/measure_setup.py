"""The measures of a config: found by name, their options checked, and prepared for the samples at hand.

A measure of the user's own, `module:Class`: what fails in it is reported as its mistake, and its columns are
checked before they count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import torch

from psgrad.commands.checkpoints import checkpoint_models
from psgrad.commands.setup import Setup
from psgrad.config import Config, MeasureConfig
from psgrad.config.plugin_names import OWN, plugin_names
from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import ChosenRows
from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.measures.builtin.outputs import Predictions, summary_for
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, OwnPass, Setting
from psgrad.errors import ConfigError, MeasureError, PsgradError
from psgrad.plugins import MEASURES, configured, find
from psgrad.run.results.analyze import SAMPLE_COLUMNS
from psgrad.user_code import describe_failure

# The columns that every run makes by itself.
RESERVED = frozenset({*SAMPLE_COLUMNS, "ok", "rows", "token_accuracy"})
# The measure whose rows detectors judge.
PROJECTED = "projected_gradients"
_FLAGS = ("needs_factors", "needs_second_pass")
_DESCRIBED = ("name", "title", "formula", "unit", "source", "cost", "meanings", "needs")


class OwnMeasure(Measure):
    """The measure `inner`, as the config calls it: `spec`. What it raises becomes a MeasureError that names
    it, and what it returns is checked.
    """

    def __init__(self, inner: Measure, spec: str) -> None:
        self.inner, self.spec = inner, spec
        for key in (*_DESCRIBED, *_FLAGS):
            setattr(self, key, getattr(inner, key))

    def prepare(self, setting: Setting) -> None:
        self._count = len(setting)
        self._asked("prepare", setting)
        for key in _FLAGS:
            setattr(self, key, bool(getattr(self.inner, key)))

    def summary(self, output: Any, target: Any) -> Arrays:
        return self._tensors("summary", self._asked("summary", output, target))

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        return self._columns("columns", self._asked("columns", gradients), len(gradients))

    def columns_again(self, gradients: PerSampleGradients) -> Arrays:
        return self._columns("columns_again", self._asked("columns_again", gradients), len(gradients))

    def keep(self) -> None:
        self._asked("keep")

    def between(self) -> None:
        self._asked("between")

    def passes(self) -> Sequence[OwnPass]:
        def run(own: OwnPass, rows: range, chunk_size: int) -> Iterator[Columns]:
            where = f"the pass {own.name}"
            with self._errors_in(where):
                for each in own.run(rows, chunk_size):
                    values = self._columns(where, each.values, each.stop - each.start)
                    yield Columns(each.start, each.stop, values)

        with self._errors_in("passes"):
            return [OwnPass(own.name, partial(run, own)) for own in self.inner.passes()]

    def state(self) -> Arrays:
        return self._tensors("state", self._asked("state"))

    def restore(self, state: Arrays) -> None:
        self._asked("restore", state)

    def merge(self, state: Arrays) -> None:
        self._asked("merge", state)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        found: Any = self._asked("gather", rows)
        if not isinstance(found, Gathered):
            raise self._wrong("gather", f"returned {type(found).__name__}", "a Gathered")
        for name, table in found.tables.items():
            if not isinstance(table, Mapping):
                words = f"returned {type(table).__name__} as the table {name}"
                raise self._wrong("gather", words, "a dict of columns by name")
        with self._errors_in("gather"):  # what no file of the run can hold is found now
            json.dumps(dict(found.numbers))
            for table in found.tables.values():
                pa.Table.from_pandas(frame_of(table))
            self._tensors("gather", found.arrays)
            return replace(found, columns=self._columns("gather", found.columns, self._count))

    def _asked(self, method: str, *arguments: Any) -> Any:
        with self._errors_in(method):
            return getattr(self.inner, method)(*arguments)

    @contextmanager
    def _errors_in(self, where: str) -> Iterator[None]:
        try:
            yield
        except PsgradError:
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):  # fewer samples are tried
                raise
            raise MeasureError(
                f"the measure {self.spec} raised {describe_failure(error)} in {where}",
                hint="--debug shows the line; docs/reference/measures.md says what each method is asked",
            ) from error

    def _tensors(self, where: str, found: Any) -> Arrays:
        if not isinstance(found, Mapping):
            raise self._wrong(where, f"returned {type(found).__name__}", "a dict of tensors by name")
        for name, value in found.items():
            if not isinstance(name, str) or not name:
                raise self._wrong(where, f"names a tensor {name!r}", "a text that is not empty")
            if not isinstance(value, torch.Tensor):
                raise self._wrong(where, f"returned {type(value).__name__} as {name}", "a tensor")
        return dict(found)

    def _columns(self, where: str, found: Any, count: int) -> Arrays:
        """The columns, which have to be [count, ...] numbers with names of their own; halves, which no table
        knows, as float32.
        """
        for name, column in self._tensors(where, found).items():
            if name in RESERVED:
                expected = f"another name, such as {self.name}.{name}: every run has this column"
                raise self._wrong(where, f"makes a column {name}", expected)
            if column.dim() == 0 or len(column) != count:
                shape = f"{name} of shape {tuple(column.shape)} for {count} samples"
                raise self._wrong(where, f"returned {shape}", f"shape ({count},), or ({count}, ...)")
            if column.is_complex():
                raise self._wrong(where, f"returned {name} of type {column.dtype}", "real numbers")
        return {name: accumulating(column) for name, column in found.items()}

    def _wrong(self, where: str, what: str, expected: str) -> MeasureError:
        return MeasureError(f"the measure {self.spec} {what} in {where}; expected {expected}")


def frame_of(table: Mapping[str, Any]) -> pd.DataFrame:
    """A table that a measure gathered, without torch."""
    return pd.DataFrame(
        {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in table.items()}
    )


def joined_summary(measures: Sequence[Measure], output: Any, target: Any) -> Arrays:
    """What all measures keep of one sample's output. Raises MeasureError where two keep different things
    under one name.
    """
    found: Arrays = {}
    for measure in measures:
        for name, value in measure.summary(output, target).items():
            if name in found and found[name] is not value:
                raise MeasureError(
                    f"the measure {measure.name} keeps {name} of each output, and another measure keeps"
                    " something else by that name; expected names that begin with the measure's own",
                )
            found[name] = value
    return found


def joined_columns(rows: Arrays, more: Mapping[str, torch.Tensor], where: str) -> Arrays:
    """The columns of two passes. Raises MeasureError where both have one name."""
    for name in more:
        if name in rows:
            raise MeasureError(
                f"two measures make the column {name}, one of them in {where}; expected columns with"
                " different names",
                hint="rename the column of your own measure",
            )
    return {**rows, **more}


def measures_of(config: Config) -> list[Measure]:
    """The measures that a config names, and those that they and its detectors need, each behind those that it
    needs.

    Raises ConfigError for names or options that are not known.
    """
    found: dict[str, Measure] = {}
    own, known = OWN["measures"], plugin_names("measures")
    for each in config.analyze.measures:
        measure = measure_from(each, config.base)
        same = next((name for name, other in found.items() if other.name == measure.name), None)
        if same is not None or (measure.name in own and each.name not in own):
            raise ConfigError(
                f"analyze.measures: {each.name} calls itself {measure.name}, and so does"
                f" {same or 'a measure of psgrad'}",
                hint="give your measure another `name`",
            )
        found[each.name] = measure
    waiting = [name for measure in found.values() for name in measure.needs]
    needed: dict[str, Measure] = {}
    if config.analyze.outliers.detectors and PROJECTED not in found:
        from psgrad.engine.measures.builtin.projected_gradients import GradientProjection

        needed[PROJECTED] = GradientProjection(save=True)  # what later runs may be compared with
    while waiting:
        name = waiting.pop()
        if name not in found and name not in needed:
            if name not in known:
                raise ConfigError(
                    f"analyze.measures: a measure needs {name}, which is none; expected some of"
                    f" {', '.join(known)}",
                )
            needed[name] = find(MEASURES, name, config.base)()
            waiting += needed[name].needs
    return _in_order({**needed, **found})


def _in_order(measures: Mapping[str, Measure]) -> list[Measure]:
    """Each measure behind those that it needs, otherwise in their order."""
    placed: dict[str, Measure] = {}

    def place(name: str) -> None:
        for needed in measures[name].needs:
            place(needed)
        placed.setdefault(name, measures[name])

    for name in measures:
        place(name)
    return [*placed.values()]


def measure_from(config: MeasureConfig, base: Path) -> Measure:
    """One measure with its options. Raises ConfigError for a name or options that are not known, or
    can't be.
    """
    measure: Measure = configured(MEASURES, config.name, config.options, base)
    if config.name in OWN["measures"]:
        return measure
    kind = type(measure)
    kind.name = kind.name or kind.__name__.lower()
    if not re.fullmatch(r"[a-z0-9_]+", str(kind.name)):
        raise ConfigError(
            f"analyze.measures: {config.name} calls itself {kind.name!r}; expected lower-case letters,"
            " digits and _",
        )
    return OwnMeasure(measure, config.name)


def prepare(
    setup: Setup, measures: list[Measure], count: int, say: Callable[[str], None]
) -> tuple[Setting, list[Measure]]:
    """(what is measured, all measures of the run); the model's summary is what all of them keep of an output.

    `count` rows from the first one on. Raises MeasureError where a measure does not go with the model, the
    loss or the data.
    """
    summary = summary_for(setup.criterion.kind, setup.criterion.ignore_index)
    every = [GradientNorms(), Predictions(summary), *measures]
    objective = setup.objective.with_summary(partial(joined_summary, every))
    targets = setup.reader.samples.targets
    setting = Setting(
        examples=Examples(objective, ChosenRows(setup.reader, range(count)), setup.stream_options(say)),
        kind=setup.criterion.kind,
        targets=(
            torch.as_tensor(targets[:count]) if targets is not None and targets.dtype.kind == "i" else None
        ),
        classes=setup.reader.classes,
        ignore_index=setup.criterion.ignore_index,
        checkpoints=checkpoint_models(setup),
        seed=setup.config.analyze.seed,
        shows_inputs=setup.config.report.include_inputs,
        say=say,
    )
    for measure in every:
        measure.prepare(setting)
    _require_one_draw(setup, every)
    return setting, every


def require_mergeable(measures: Sequence[Measure]) -> None:
    """Raises MeasureError for a measure that gathers over the samples and can't add what another process
    gathered; before the first pass, at whose end that is done.
    """
    for each in measures:
        kind = type(each.inner if isinstance(each, OwnMeasure) else each)
        if kind.state is not Measure.state and kind.merge is Measure.merge:
            raise each.without_merge()


def _require_one_draw(setup: Setup, measures: list[Measure]) -> None:
    """Raises MeasureError for measures that ask more than once for a gradient of a model that draws at
    random.

    A second pass would see another gradient, and checkpoints would differ by the draws.
    """
    twice = [
        each.name
        for each in measures
        if each.needs_second_pass or each.name == "vog" or "moments" in each.needs
    ]
    if twice and setup.draws_at_random():
        raise MeasureError(
            f"{', '.join(twice)} {'asks' if len(twice) == 1 else 'ask'} for a sample's gradient more than"
            " once, and the model draws at random: each time it would be another gradient; expected a"
            " model that gives the same output each time",
            hint=(
                "model.mode: train, with dropout in the model; set model.mode to eval; or take these"
                " measures out of analyze.measures (noise_scale with resamples: 0 looks once)"
            ),
        )
