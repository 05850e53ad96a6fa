"""What was known of a run at some time: the findings that are accepted, and the scores that later samples may be judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from psgrad.results.short_repr import ShortRepr


@dataclass(frozen=True)
class Known:
    """A finding that a baseline holds: as `Finding` has them."""

    fingerprint: str
    rule: str
    id: str


@dataclass(frozen=True, repr=False)
class Baseline(ShortRepr):
    """Attributes:

    findings: those that were accepted. run: of which run: psgrad's version, the data's fingerprint, how many samples.
    reference: the scores of that run's samples, as psgrad/quality/references.py has them; None where there are none.
    """

    findings: tuple[Known, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] | None = None


@dataclass(frozen=True, repr=False)
class BaselineChange(ShortRepr):
    """What saving did to a baseline.

    Attributes:
        baseline: as it is now. path: of its file.
        dropped: entries that the run no longer finds. taken: findings that were taken in.
        refused: findings that were not, as a baseline only shrinks unless it is told to grow.
        first: whether there was none before. reference_kept: whether the scores are those of an earlier run.
    """

    baseline: Baseline
    path: str
    dropped: int
    taken: int
    refused: int
    first: bool
    reference_kept: bool
