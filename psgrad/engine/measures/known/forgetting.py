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
    """Forgetting events between the checkpoints; what happens between two of them is not seen."""

    name: ClassVar[str] = "forgetting"
    title: ClassVar[str] = "Forgetting events"
    formula: ClassVar[str] = "sum_t max(0, r_t - r_t+1), r_t = 1 where the prediction at checkpoint t is right, else 0"
    unit: ClassVar[str] = "events"
    source: ClassVar[str] = (
        "Toneva et al.: An Empirical Study of Example Forgetting during Deep Neural Network Learning (ICLR 2019), section 3; "
        "there r_t is taken at each step that sees the sample, here at the checkpoints"
    )
    cost: ClassVar[str] = "a pass of norms a checkpoint, shared with the other measures over checkpoints"
    meanings: ClassVar[dict[str, str]] = {
        "forgetting_events": (
            "how often it went from right to wrong between two checkpoints; T, the number of checkpoints, for a sample that was never "
            "right (it sorts above all that were, who have T/2 at most). With positions: r_t is the share of positions that are right, and "
            "the events are the shares lost, added up (events)"
        ),
        "never_learnt": "1 where no checkpoint was right about it (in no position), else 0",
        "unforgettable": "1 where it was learnt and nothing of it was lost afterwards, else 0",
        "first_learnt": "the first checkpoint, counted from 1, that was right about it (in some position); NaN if none was",
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
