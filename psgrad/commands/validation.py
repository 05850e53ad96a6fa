"""The result of `psgrad validate`, and its checks of datasets: the headers of their files, and their first
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psgrad.config import (
    DataConfig,
    is_callable_spec,
)
from psgrad.data.sources.file_checks import input_names, target_names
from psgrad.data.sources.headers import headers_of
from psgrad.data.sources.source import DataHeader, header_problems, joined_header, with_rows
from psgrad.errors import EXIT_OK, EXIT_USAGE, DataError, PsgradError
from psgrad.run.code_checks import spec_problems


@dataclass(frozen=True)
class Problem:
    """where: the config's key, dotted; empty for the config as a whole."""

    where: str
    error: PsgradError


@dataclass
class Validation:
    """All problems of a config, the facts that were found, by subject, and further notes."""

    config: str
    problems: list[Problem] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, where: str, errors: Iterable[PsgradError]) -> None:
        """Add these errors as problems of the config's key `where`."""
        self.problems += [Problem(where, error) for error in errors]

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
        parts = ("arrived", "expected", "cause", "next_step", "exit_code")
        problems = [
            {"where": each.where, **{part: getattr(each.error, part) for part in parts}}
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


_CLASS_LOSSES = ("cross_entropy", "token_cross_entropy", "nll")
_LABEL_LOSSES = (*_CLASS_LOSSES, "bce_with_logits")  # whose targets may be names of classes


class DataChecks:
    """The checks of one dataset after another, each of which adds to what was found."""

    def __init__(self, found: Validation, base: Path, sections: Mapping[str, Any], deep: bool) -> None:
        self.found, self.base, self.sections, self.deep = found, base, sections, deep

    def dataset(self, where: str, data: DataConfig, unit: str | None = None) -> int | None:
        """Check a dataset. Returns its number of rows; None where that is not known."""
        if data.factory is not None:
            self.found.add(f"{where}.factory", spec_problems(data.factory, self.base, data.kwargs, DataError))
            self.found.facts[where] = data.factory
            return None
        if data.streaming and not (self.base / str(data.dataset)).is_dir():
            self.found.facts[where] = f"{data.dataset}, streamed when it is read"
            return None
        with self.found.problems_at(f"{where}.{data.sources_given[0]}"):
            data, headers = headers_of(data, self.base)
            headers = with_rows(headers)
            loss = self.sections.get("loss")
            labels = loss is not None and (loss.name in _LABEL_LOSSES or is_callable_spec(loss.name))
            problems = [list(header_problems(each, data, unit, labels=labels)) for each in headers]
            self.found.add(where, next(filter(None, problems), []))
            if loss is not None and loss.columns:
                of_loss = [list(header_problems(each, data.with_inputs(loss.columns))) for each in headers]
                self.found.add(f"loss.columns in {where}", next(filter(None, of_loss), []))
            header = joined_header(headers)
            self._labels(where, header, data)
            self.found.facts[where] = _described(header, data, counted=self.deep)
            self._rows_of_pretrained(where, data)
            return header.rows
        return None

    def _rows_of_pretrained(self, where: str, data: DataConfig) -> None:
        """Columns of text, and images, for a pretrained model, looked at where nothing is wrong by now."""
        model = self.sections.get("model")
        if model is None or model.pretrained is None or self.found.problems:
            return
        if data.text or data.prompt or data.messages:
            from psgrad.data.sources.load import text_facts

            self.found.facts[f"{where} (texts)"] = text_facts(model, data, self.base)
        if data.image:
            from psgrad.data.sources.load import image_facts

            self.found.facts[f"{where} (images)"], notes = image_facts(model, data, self.base)
            self.found.notes += notes

    def _labels(self, where: str, header: DataHeader, data: DataConfig) -> None:
        loss = self.sections.get("loss")
        column = header.columns.get(next(iter(target_names(data)), ""))
        if loss is None or column is None or loss.name != "nll" or column.kind != "fraction":
            return  # other losses take probabilities of the classes, and whole fractions are labels
        if column.shape is None or len(column.shape) == 1:
            return
        error = DataError(
            f"the targets {data.target!r} are of type {column.dtype}",
            expected=f"whole numbers, one per label, for the loss {loss.name}",
            next_step=(
                "save the target column as integers, or choose a loss for values, such as mse or"
                " bce_with_logits"
            ),
        )
        self.found.add(f"{where}.target", [error])


def _described(header: DataHeader, data: DataConfig, counted: bool) -> str:
    """Rows and columns in words. counted: whether rows that the header does not tell are counted later."""
    rows = "" if counted else "rows not counted"
    if header.rows is not None:
        rows = f"{header.rows:,} rows"
    names = input_names(data)
    words = []
    texts = [data.text] if isinstance(data.text, str) else data.text or []
    made_of = [*texts, data.prompt, data.completion, data.messages, data.image]
    shown = [*names[:4], *(name for name in made_of if name), *target_names(data)]
    for name in dict.fromkeys([*shown, *([data.id] if data.id else [])]):
        column = header.columns.get(name)
        if column is not None:
            words.append(
                f"{name} {column.dtype}"
                + (f" {list(column.shape[1:])}" if column.shape and len(column.shape) > 1 else "")
            )
    more = f" and {len(names) - 4} more inputs" if len(names) > 4 else ""
    return f"{data.source}: {'; '.join(filter(None, [rows, ', '.join(words)]))}{more}"
