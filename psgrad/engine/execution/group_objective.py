"""The loss of a group of rows as one sample: the sum of the losses of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from psgrad.engine.execution.objective import Criterion, Objective, Summary
from psgrad.engine.transforms import vmap


class GroupObjective(Objective):
    """`loss(params, inputs, target)` of one group of k rows, from the objective of one row.

    Inputs and target are [k, ...]. The rows are one more axis of the same batched kernels: the deferred
    gradient of a weight has them among its positions. A row has its own weight, if there are weights. A group
    has no summary, as rows have a prediction each.
    """

    def __init__(self, row: Objective) -> None:
        self.__dict__.update(vars(row))
        self.row = row
        self.summary = None
        self.weighted = False  # each row's loss has its weight already
        self.criterion = self._summed

    def with_scalar(self, criterion: Criterion, summary: Summary | None = None) -> Objective:
        return GroupObjective(self.row.with_scalar(criterion))

    def with_model(self, model: nn.Module) -> Objective:
        return GroupObjective(self.row.with_model(model))

    def with_summary(self, summary: Summary | None) -> Objective:
        return self

    def predict(self, params: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> Any:
        """[k, ...]: the model's outputs for the rows of a group."""
        return self._over_rows(lambda *row: self.row.predict(params, row), *inputs)

    def loss(
        self, params: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None
    ) -> Any:
        if target is None:
            losses = self._over_rows(lambda *row: self.row.loss(params, row, None)[0], *inputs)
        else:
            losses = self._over_rows(
                lambda target, *row: self.row.loss(params, row, target)[0], target, *inputs
            )
        return losses.sum(), {}

    def plain_loss(self, inputs: Sequence[torch.Tensor], target: torch.Tensor | None) -> torch.Tensor:
        """The rows one after another, without psgrad's transforms."""
        count = inputs[0].shape[1]
        losses = [
            self.row.plain_loss([x[:, place] for x in inputs], None if target is None else target[:, place])
            for place in range(count)
        ]
        return torch.stack(losses).sum()

    def _summed(self, output: Any, target: torch.Tensor | None, *columns: torch.Tensor) -> torch.Tensor:
        """The sum of the rows' losses, without weights, from their outputs [k, ...]."""
        criterion = self.row.criterion
        if target is None:
            losses = self._over_rows(lambda output, *own: criterion(output, None, *own), output, *columns)
        else:
            losses = self._over_rows(criterion, output, target, *columns)
        total: torch.Tensor = losses.sum()
        return total

    def _over_rows(self, function: Callable[..., Any], *rows: Any) -> Any:
        randomness = "different" if self.model.training else "error"
        return vmap(function, randomness=randomness)(*rows)
