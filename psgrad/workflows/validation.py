"""The result of `psgrad validate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from psgrad.errors import EXIT_OK, EXIT_USAGE, PsgradError


@dataclass(frozen=True)
class Problem:
    """where: the config's key, dotted; empty for the config as a whole."""

    where: str
    error: PsgradError


@dataclass
class Validation:
    """What is wrong with a config, all of it; what was found out of it, by what it is about; and what is good
    to know besides.
    """

    config: str
    problems: list[Problem] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, where: str, errors: Iterable[PsgradError]) -> None:
        """These errors are problems of the config's key `where`."""
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
