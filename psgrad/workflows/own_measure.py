"""A measure of the user's own, `module:Class`: what fails in it is told as its mistake, and its columns are checked before they count."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pandas as pd
import pyarrow as pa
import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.memory import is_out_of_memory
from psgrad.engine.gradients.streaming import Columns
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, OwnPass, Setting
from psgrad.engine.transforms.watch import NotCapturable
from psgrad.errors import MeasureError, PsgradError
from psgrad.inputs.imports import describe_failure
from psgrad.results.analyze import SAMPLE_COLUMNS

# The columns that every run makes by itself.
RESERVED = frozenset({*SAMPLE_COLUMNS, "ok", "token_accuracy"})
_DESCRIBED = ("name", "title", "formula", "unit", "source", "cost", "meanings", "needs")


class OwnMeasure(Measure):
    """The measure `inner`, as the config calls it: `spec`."""

    def __init__(self, inner: Measure, spec: str) -> None:
        self.inner, self.spec = inner, spec
        for key in _DESCRIBED:
            setattr(self, key, getattr(inner, key))
        self._look()

    def _look(self) -> None:
        self.needs_factors, self.looks_twice = bool(self.inner.needs_factors), bool(self.inner.looks_twice)

    def prepare(self, setting: Setting) -> None:
        self._count = len(setting)
        with self._told("prepare"):
            self.inner.prepare(setting)
        self._look()

    def summary(self, output: Any, target: Any) -> Arrays:
        with self._told("summary"):
            found = self.inner.summary(output, target)
        return self._named(found, "summary")

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        with self._told("columns"):
            found = self.inner.columns(gradients)
        return self._checked(found, len(gradients), "columns")

    def columns_again(self, gradients: PerSampleGradients) -> Arrays:
        with self._told("columns_again"):
            found = self.inner.columns_again(gradients)
        return self._checked(found, len(gradients), "columns_again")

    def keep(self) -> None:
        with self._told("keep"):
            self.inner.keep()

    def between(self) -> None:
        with self._told("between"):
            self.inner.between()

    def passes(self) -> Sequence[OwnPass]:
        with self._told("passes"):
            found = list(self.inner.passes())
        for own in found:
            if not isinstance(own, OwnPass):
                raise self._wrong("passes", f"returned a list with {type(own).__name__}", "a list of OwnPass")

        def run(own: OwnPass, start: int, chunk_size: int) -> Iterator[Columns]:
            with self._told(f"the pass {own.name}"):
                for each in own.run(start, chunk_size):
                    values = self._checked(each.values, each.stop - each.start, f"the pass {own.name}")
                    yield Columns(each.start, each.stop, values)

        return [OwnPass(own.name, lambda start, size, own=own: run(own, start, size)) for own in found]  # type: ignore[misc]

    def state(self) -> Arrays:
        with self._told("state"):
            found = self.inner.state()
        return self._named(found, "state")

    def restore(self, state: Arrays) -> None:
        with self._told("restore"):
            self.inner.restore(state)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        with self._told("gather"):
            found = self.inner.gather(rows)
        if not isinstance(found, Gathered):
            raise self._wrong("gather", f"returned {type(found).__name__}", "a Gathered")
        self._require_keepable(found)
        return replace(found, columns=self._checked(found.columns, self._count, "gather"))

    def _require_keepable(self, found: Gathered) -> None:
        """Raises MeasureError for what no file of the run takes, before it is lost on the way there."""
        self._named(found.arrays, "gather")
        with self._told("the numbers of gather"):
            json.dumps(dict(found.numbers))
        for name, table in found.tables.items():
            if not isinstance(name, str) or not isinstance(table, Mapping):
                raise self._wrong("gather", f"returned {type(table).__name__} as the table {name}", "a dict of columns by name")
            with self._told(f"the table {name} of gather"):
                pa.Table.from_pandas(frame_of(table))

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        try:
            yield
        except (PsgradError, NotCapturable):
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):  # fewer samples are tried
                raise
            raise MeasureError(
                f"the measure {self.spec} raised {describe_failure(error)} in {where}",
                cause="a mistake in the measure",
                next_step="--debug shows the line; docs/reference/measures.md says what each method is asked",
            ) from error

    def _named(self, found: Any, where: str) -> Arrays:
        if not isinstance(found, Mapping):
            raise self._wrong(where, f"returned {type(found).__name__}", "a dict of tensors by name")
        for name, value in found.items():
            if not isinstance(name, str) or not name:
                raise self._wrong(where, f"names a tensor {name!r}", "a text that is not empty")
            if not isinstance(value, torch.Tensor):
                raise self._wrong(where, f"returned {type(value).__name__} as {name}", "a tensor")
        return dict(found)

    def _checked(self, found: Any, count: int, where: str) -> Arrays:
        """The columns, which have to be [count, ...] numbers with names of their own; halves, which no table knows, as float32."""
        for name, column in self._named(found, where).items():
            if name in RESERVED:
                expected = f"a name of its own, such as {self.name}.{name}: {name} is a column that every run has"
                raise self._wrong(where, f"makes a column {name}", expected)
            if column.dim() == 0 or len(column) != count:
                shape = f"of shape {tuple(column.shape)} for {count} samples"
                raise self._wrong(where, f"returned {name} {shape}", f"shape ({count},), one number a sample, or ({count}, ...)")
            if column.is_complex():
                raise self._wrong(where, f"returned {name} of type {column.dtype}", "real numbers")
        return {name: accumulating(column) for name, column in found.items()}

    def _wrong(self, where: str, what: str, expected: str) -> MeasureError:
        return MeasureError(f"the measure {self.spec} {what} in {where}", expected=expected, cause="a mistake in the measure")


def frame_of(table: Mapping[str, Any]) -> pd.DataFrame:
    """A table that a measure gathered, without torch."""
    return pd.DataFrame({key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in table.items()})


def joined_summary(measures: Sequence[Measure], output: Any, target: Any) -> Arrays:
    """What all measures keep of one sample's output. Raises MeasureError where two keep different things under one name."""
    found: Arrays = {}
    for measure in measures:
        for name, value in measure.summary(output, target).items():
            if name in found and found[name] is not value:
                raise MeasureError(
                    f"the measure {measure.name} keeps {name} of each output, and another measure keeps something else by that name",
                    expected="names that begin with the measure's own",
                )
            found[name] = value
    return found


def joined_columns(rows: Arrays, more: Mapping[str, torch.Tensor], where: str) -> Arrays:
    """The columns of two passes. Raises MeasureError where both have one name."""
    for name in more:
        if name in rows:
            raise MeasureError(
                f"two measures make the column {name}, one of them in {where}",
                expected="columns with different names",
                next_step="rename the column of your own measure",
            )
    return {**rows, **more}
