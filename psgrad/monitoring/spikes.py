"""Which rows of a batch are unlike those of the batches before: a running reference, and three tests.

- A row's loss or gradient norm is more than FACTOR times the largest of the reference.
- The losses of a batch rank too high among those of the reference: their mean rank has a normal law where
  batches are alike (Wilcoxon's rank-sum statistic), for losses of any distribution.
- A row's input has a brightness, contrast or roughness, or words of a rarity, far outside of the reference.

A threshold that follows from ranks and largest values holds while losses fall by orders of magnitude, where
one that is fitted to a mean and a deviation does not. benchmarks/monitor.py measures both kinds of errors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

# A row above so many times the largest of the reference is unlike it. Of 480,000 rows of clean training runs
# one was 5 times it, in a network that had learnt its rows, and all others less than 2.5 times.
FACTOR = 10.0
# The rank statistic from which a batch is unlike the reference: a chance of 3e-6 for a clean batch.
RANK_LIMIT = 4.5
# A spike is over after so many batches with a rank statistic below this one; momentum delays its effect.
RECOVERED, RECOVERY = 2.0, 5
# How far outside of the reference's range, as a share of it, an input's property may be.
INPUT_MARGIN = 0.5
WINDOW, FEWEST_BATCHES, FEWEST_ROWS = 64, 10, 100
_HIGH = 0.9  # rows of an unlike batch whose loss has a rank above this are named


@dataclass(frozen=True)
class NamedRow:
    """A row of a spike: its place in the batch, and why it is named."""

    place: int
    reason: str


@dataclass
class SpikeDetector:
    """Compares each batch with the batches before it, WINDOW of them at most.

    After a spike the losses of the next batches may be high because the weights are bad: no row of these is
    named for its loss or gradient, until they are as before.
    """

    _known: dict[str, np.ndarray] = field(default_factory=dict)  # name -> of all rows of its batches
    _sizes: dict[str, deque[int]] = field(default_factory=dict)  # name -> the rows of each batch
    _to_recover: int = 0  # batches

    def named_in(
        self, losses: np.ndarray, norms: np.ndarray, properties: Mapping[str, np.ndarray]
    ) -> list[NamedRow]:
        """The rows of a batch that are unlike those before, in their order; afterwards the batch is one of
        those before, without these rows. losses, norms: [k], NaN where not finite. properties: name -> [k],
        of the inputs.
        """
        finite = np.isfinite(losses) & np.isfinite(norms)
        reasons = {int(place): "its loss or gradient is not finite" for place in np.flatnonzero(~finite)}
        if self._is_known():
            ranks, statistic = self._ranks(losses)
            self._to_recover = RECOVERY if self._to_recover and statistic > RECOVERED else self._to_recover
            if not self.recovering:
                self._add_high(reasons, {"loss": losses, "gradient norm": norms}, ranks, statistic)
            self._add_inputs(reasons, properties)
        self._to_recover = RECOVERY if reasons else max(self._to_recover - 1, 0)
        kept = np.array([place not in reasons for place in range(len(losses))])
        if kept.any():
            values = {"loss": losses, "gradient norm": norms, **properties}
            self._add({name: x[kept] for name, x in values.items()})
        return [NamedRow(place, reasons[place]) for place in sorted(reasons)]

    @property
    def recovering(self) -> bool:
        """Whether the next batch is one of those after a spike."""
        return self._to_recover > 0

    def _is_known(self) -> bool:
        sizes = self._sizes.get("loss", ())
        return len(sizes) >= FEWEST_BATCHES and sum(sizes) >= FEWEST_ROWS

    def _reference(self, name: str) -> np.ndarray:
        return self._known.get(name, np.zeros(0))

    def _add(self, values: Mapping[str, np.ndarray]) -> None:
        for name, own in values.items():
            sizes = self._sizes.setdefault(name, deque())
            first = sizes.popleft() if len(sizes) == WINDOW else 0
            self._known[name] = np.concatenate([self._reference(name)[first:], own])
            sizes.append(len(own))

    def _ranks(self, losses: np.ndarray) -> tuple[np.ndarray, float]:
        """The ranks of the losses among those of the reference, from 0 to 1, and the statistic of their mean,
        which has a standard normal law where the batch is like those before.
        """
        known, losses = np.sort(self._reference("loss")), np.nan_to_num(losses, nan=-np.inf)
        ranks = np.searchsorted(known, losses) / len(known)
        deviation = np.sqrt((1 + len(losses) / len(known)) / (12 * len(losses)))
        return ranks, float((ranks.mean() - 0.5) / deviation)

    def _add_high(
        self, reasons: dict[int, str], values: Mapping[str, np.ndarray], ranks: np.ndarray, statistic: float
    ) -> None:
        """Rows whose loss or gradient is too large, and those of a batch whose losses are."""
        for name, own in values.items():
            largest = self._reference(name).max()
            for place in np.flatnonzero(own > FACTOR * largest) if largest > 0 else []:
                times = f"{own[place] / largest:.3g} times the largest of the rows before"
                reasons.setdefault(int(place), f"its {name} is {times}")
        if statistic > RANK_LIMIT:
            for place in np.flatnonzero(ranks > _HIGH):
                share = f"{ranks[place]:.0%} of the rows before"
                reasons.setdefault(int(place), f"its loss is above {share}, in a batch with high losses")

    def _add_inputs(self, reasons: dict[int, str], properties: Mapping[str, np.ndarray]) -> None:
        """Rows whose input has a property far outside of the reference's range."""
        for name, own in properties.items():
            reference = self._reference(name)
            if len(reference) < FEWEST_ROWS:
                continue
            low, high = reference.min(), reference.max()
            margin = INPUT_MARGIN * (high - low) + 1e-6 * max(abs(low), abs(high))
            for place in np.flatnonzero((own < low - margin) | (own > high + margin)):
                range_ = f"{own[place]:.3g}; the rows before have {low:.3g} to {high:.3g}"
                reasons.setdefault(int(place), f"the {name} of its input is {range_}")
