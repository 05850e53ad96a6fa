"""The models of several checkpoints, all of them in memory where they fit there."""

from __future__ import annotations

from collections.abc import Sequence

from psgrad.engine.examples import Examples
from psgrad.engine.gradients.memory import chunk_budget
from psgrad.engine.measures.measure import Moment
from psgrad.engine.objective import Objective


class Resident:
    """The moments' objectives; loaded once where all of them fit the budget of a chunk, else each time they are asked for.

    Attributes:
        stay: whether they stay in memory.
    """

    def __init__(self, moments: Sequence[Moment], examples: Examples) -> None:
        self._moments = moments
        model = examples.objective.model
        size = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
        self.stay = size * len(moments) <= chunk_budget(examples.device, examples.options.get("memory"))
        self._loaded: dict[int, Objective] = {}

    def at(self, t: int) -> Objective:
        """The model and loss at checkpoint t, counted from 0."""
        if t not in self._loaded:
            if not self.stay:
                self._loaded.clear()
            self._loaded[t] = self._moments[t].objective()
        return self._loaded[t]
