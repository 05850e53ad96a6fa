"""Forgetting: how often a sample that was learnt is got wrong at a later checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from psgrad.engine.measures.measure import Gathered, Measure, Setting
from psgrad.engine.measures.moments import History, require_labels, require_moments


@dataclass
class Forgetting(Measure):
    """Forgetting events between the checkpoints; events between two neighbouring checkpoints are missed."""

    name: ClassVar[str] = "forgetting"
    title: ClassVar[str] = "Forgetting events"
    formula: ClassVar[str] = "sum_t max(0, r_t - r_t+1), r_t = 1 if the prediction at checkpoint t is right, else 0"
    unit: ClassVar[str] = "events"
    source: ClassVar[str] = (
        "Toneva et al.: An Empirical Study of Example Forgetting during Deep Neural Network Learning (ICLR 2019), section 3; "
        "there r_t is computed at each step that uses the sample, here at the checkpoints"
    )
    cost: ClassVar[str] = "one pass of norms for each checkpoint, shared with the other measures over checkpoints"
    meanings: ClassVar[dict[str, str]] = {
        "forgetting_events": (
            "how often it changed from right to wrong between two checkpoints; T, the number of checkpoints, for a sample that was never "
            "right (it sorts above all others, which have at most T/2). With positions: r_t is the share of positions that are right, and "
            "the events are the sum of the shares that were lost (events)"
        ),
        "never_learnt": "1 if the prediction was right at no checkpoint (in no position), else 0",
        "unforgettable": "1 if it was learnt and not lost afterwards, else 0",
        "first_learnt": "the first checkpoint, counted from 1, whose prediction was right (in some position); NaN if there is none",
    }
    needs: ClassVar[tuple[str, ...]] = ("moments",)

    def prepare(self, setting: Setting) -> None:
        require_labels(self, setting)
        require_moments(self, setting, 2, "nothing is forgotten at one")
        self._setting = setting

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        names = [moment.name for moment in self._setting.moments]
        right = History.of(names, rows).whole("right")  # [n, T]
        known = torch.isfinite(right).all(1)
        learnt = (right > 0).any(1)
        lost = (right[:, :-1] - right[:, 1:]).clamp(min=0).sum(1)
        found = {
            "forgetting_events": lost.where(learnt, float(len(names))),
            "never_learnt": (~learnt).double(),
            "unforgettable": (learnt & (lost == 0)).double(),
            "first_learnt": (right > 0).double().argmax(1).double().add(1).where(learnt, torch.nan),
        }
        columns = {name: column.where(known, torch.nan) for name, column in found.items()}
        counts = torch.bincount(lost[known & learnt].ceil().long()).tolist()
        numbers = {
            "checkpoints": names,
            "counts": {str(events): count for events, count in enumerate(counts) if count},
            "never_learnt": int((known & ~learnt).sum()),
            "unforgettable": int((known & learnt & (lost == 0)).sum()),
            "not_finite": int((~known).sum()),
        }
        return Gathered(columns, numbers)
