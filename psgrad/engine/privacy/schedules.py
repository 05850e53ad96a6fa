"""How the noise multiplier changes from step to step. A schedule follows from the config alone, never from the data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from psgrad.errors import ConfigError

Kind = Literal["constant", "step", "exponential", "list"]

# What each kind is made of: all of it is needed, and nothing else may be given.
FIELDS: dict[Kind, tuple[str, ...]] = {
    "constant": (),
    "step": ("every", "factor"),
    "exponential": ("factor",),
    "list": ("multipliers",),
}


@dataclass(frozen=True)
class Schedule:
    """The noise multiplier of step t = 0, 1, ..., as a multiple of a base.

        constant     1
        step         factor ^ (t // every)
        exponential  factor ^ t
        list         multipliers[t]: the multipliers themselves, with a base of 1

    Raises ConfigError where a number is missing, is out of range, or belongs to another kind.
    """

    kind: Kind = "constant"
    every: int | None = None
    factor: float | None = None
    multipliers: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"the schedule's kind is {self.kind!r}", expected=f"one of {', '.join(get_args(Kind))}")
        for name in ("every", "factor", "multipliers"):
            needed = name in FIELDS[self.kind]
            if (getattr(self, name) is not None) != needed:
                said = f"needs {name}" if needed else f"takes no {name}"
                raise ConfigError(f"a schedule of kind {self.kind} {said}", expected=", ".join(FIELDS[self.kind]) or "no number")
        if self.every is not None and (isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1):
            raise ConfigError(f"the schedule's `every` is {self.every!r}", expected="a whole number of steps, at least 1")
        if self.factor is not None and not 0 < self.factor < math.inf:
            raise ConfigError(f"the schedule's factor is {self.factor!r}", expected="a positive number")
        if self.multipliers is not None:
            object.__setattr__(self, "multipliers", tuple(self.multipliers))
            for multiplier in self.multipliers:
                if not 0 < multiplier < math.inf:
                    raise ConfigError(f"the schedule lists the multiplier {multiplier!r}", expected="positive numbers")

    def multiplier(self, base: float, step: int) -> float:
        """The noise multiplier of a step, counted from 0. Raises ConfigError for a step that a list does not reach."""
        if self.kind == "list":
            assert self.multipliers is not None
            if step >= len(self.multipliers):
                raise ConfigError(
                    f"the schedule lists {len(self.multipliers)} multipliers, and step number {step + 1} was asked for",
                    expected="one multiplier for each planned step",
                )
            return base * self.multipliers[step]
        if self.kind == "constant":
            return base
        assert self.factor is not None
        exponent = step if self.every is None else step // self.every
        try:
            scaled = base * self.factor**exponent
        except OverflowError:
            scaled = math.inf
        if base > 0 and not 0 < scaled < math.inf:
            raise ConfigError(
                f"the schedule's factor {self.factor!r} makes the noise multiplier of step number {step + 1} {scaled!r}",
                expected="a factor near 1: it is raised to a power that grows with the steps",
            )
        return scaled

    def runs(self, base: float, steps: int) -> list[tuple[float, int]]:
        """(noise multiplier, for how many steps), in order, of the first so many steps."""
        if self.kind == "constant":
            return [(base, steps)] if steps else []
        runs: list[tuple[float, int]] = []
        for step in range(steps):
            multiplier = self.multiplier(base, step)
            if runs and runs[-1][0] == multiplier:
                runs[-1] = (multiplier, runs[-1][1] + 1)
            else:
                runs.append((multiplier, 1))
        return runs

    def describe(self) -> dict[str, Any]:
        """The kind and its numbers as plain JSON; `Schedule(**described)` gives the same again."""
        numbers = {name: getattr(self, name) for name in FIELDS[self.kind]}
        if self.multipliers is not None:
            numbers["multipliers"] = list(self.multipliers)
        return {"kind": self.kind, **numbers}
