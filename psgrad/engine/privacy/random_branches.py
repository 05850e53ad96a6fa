"""Whether a model's course depends on its own random draws: layers that are left out at random, a coin that is tossed in Python.

Records of a batch that disagree on a branch are computed again, each outcome's by themselves, with draws of their own. Where the branch was
taken on a draw, which draws are kept then depends on who else is in the batch: records that agree at once keep a common outcome, and
others toss again. The masks of two records are no longer independent, and a third one's coming changes how they go together. Branches on
what is in a record do no such harm, as the draws that are thrown away had no say in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from psgrad.engine.gradients.per_sample import Pass
from psgrad.engine.objective import Objective
from psgrad.engine.transforms.branching import Divergence

# Copies of a row that are computed together, and how often: a layer that is left out once in ten times goes unnoticed once in a thousand.
_COPIES, _TIMES = 4, 16


def branches_on_a_draw(objective: Objective, inputs: Sequence[Tensor], target: Tensor | None) -> str | None:
    """Where copies of one row, which differ in what is drawn for them alone, part ways; None where they were not seen to.

    inputs, target: one row, [1, ...] each. PyTorch's generators are left as they were.
    """
    device = inputs[0].device
    copies = tuple(x.expand(_COPIES, *x.shape[1:]).clone() for x in inputs)
    targets = None if target is None else target.expand(_COPIES, *target.shape[1:]).clone()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(_TIMES):
            job = Pass(objective.loss, objective.params, (copies, targets), (0, None if target is None else 0), True, "different")
            try:
                job.run(lambda name, gradient: None)
            except Divergence as divergence:
                return divergence.where
    return None
