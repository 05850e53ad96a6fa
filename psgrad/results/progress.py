"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far one phase of a run has come: `done` of `total` units (total 0: not known).

    `message` is a line for people; with a total of 0 it is that alone, and the phase that is shown goes on. `unit` is what is counted,
    `detail` what is shown beside the count: a number that goes with it.
    """

    done: int
    total: int
    phase: str
    message: str | None = None
    unit: str = "sample"
    detail: str = ""
