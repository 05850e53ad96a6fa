"""Whether a model heeds its mask: whether the loss of a row stays the same where the row is padded."""

from __future__ import annotations

from dataclasses import replace

import torch

from psgrad.engine.execution.loading import to_device
from psgrad.engine.execution.objective import Objective
from psgrad.inputs.rows import Samples

_ROWS = 64  # of which the shortest one is padded to the longest one
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
_OF_AUTOCAST = 2e-2
NOTE = "padding changes this model's loss: only rows of equal length are computed together"


def check_padding(objective: Objective, samples: Samples, ignored: int) -> None:
    """Has only rows of equal length computed together, with a note, where padding changes the model's loss of
    a row; see RaggedAxes.masked.

    A model that draws at random (in train mode) can't be asked.
    """
    if samples.ragged is None or not samples.ragged.masked or objective.model.training:
        return
    block = samples.read(0, min(_ROWS, len(samples)))
    if block.lengths is None:
        return
    total = block.lengths.sum(1)
    if block.target is not None:  # where no position counts, padding can't change anything
        counts = (block.target != ignored).flatten(1).any(1) if block.target.dim() > 1 else total >= 0
        total = total.where(counts, total.max() + 1)
    row = slice(int(total.argmin()), int(total.argmin()) + 1)
    alone = block.at(row)  # padded no further than to its own end
    within = (tuple(x[row] for x in block.inputs), None if block.target is None else block.target[row])
    try:
        with torch.no_grad():
            loss, padded = _loss(objective, alone.inputs, alone.target), _loss(objective, *within)
    except Exception:  # whatever it is, it is told where the row itself is computed
        ignores = False
    else:
        exact = _TOLERANCES.get(loss.dtype, _OF_AUTOCAST)
        tolerance = exact if objective.autocast is None else _OF_AUTOCAST
        ignores = bool(torch.isclose(loss, padded, rtol=tolerance, atol=tolerance, equal_nan=True))
    if not ignores:
        samples.ragged = replace(samples.ragged, masked=False)
        samples.notes = (*samples.notes, NOTE)


def _loss(
    objective: Objective, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None
) -> torch.Tensor:
    """Of a batch of one row."""
    parameter = next(iter(objective.params.values()))
    placed, wanted = to_device(inputs, target, parameter.device, parameter.dtype)
    value: torch.Tensor = objective.loss(
        objective.params, tuple(x[0] for x in placed), None if wanted is None else wanted[0]
    )[0]
    return value
