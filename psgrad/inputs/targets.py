"""Checks the targets of a dataset: whether a loss can be computed for each of them."""

from __future__ import annotations

import torch
from torch import Tensor

from psgrad.errors import DataError
from psgrad.inputs.loss import Criterion


def check_targets(
    criterion: Criterion, target: Tensor | None, num_classes: int | None, first_row: int = 0
) -> None:
    """Raises DataError unless the loss can be computed for every one of the targets [n, ...].

    `num_classes` is the size of the model's class axis, None where it isn't known; `first_row` is the
    dataset's row that `target[0]` belongs to. A NaN is no error: its sample's loss is NaN, and the row is
    reported as such.
    """
    if criterion.kind == "custom":
        return
    if target is None:
        raise DataError(
            f"the loss {criterion.name} needs a target, and the data has none",
            next_step="name the column in data.target",
        )
    if criterion.kind in ("class", "token") and not (
        criterion.name != "nll" and target.is_floating_point() and target.ndim > 1
    ):
        _check_labels(criterion, target, num_classes, first_row)
    if criterion.kind == "binary" or (criterion.kind in ("class", "token") and target.is_floating_point()):
        _check_probabilities(criterion, target, first_row)


def _check_labels(criterion: Criterion, target: Tensor, num_classes: int | None, first_row: int) -> None:
    if target.is_floating_point() or target.dtype == torch.bool or target.is_complex():
        raise DataError(
            f"the targets are of type {target.dtype}; row {first_row} holds {_first(target)}",
            expected=f"whole numbers, one per label, for the loss {criterion.name}",
            next_step=(
                "save the target column as integers, or choose a loss for values, such as mse or"
                " bce_with_logits"
            ),
        )
    wrong = (target < 0) if num_classes is None else (target < 0) | (target >= num_classes)
    wrong &= target != criterion.ignore_index
    if not wrong.any():
        return
    row, label = _first_wrong(target, wrong)
    upper = "" if num_classes is None else f" to {num_classes - 1}"
    counts_from_one = num_classes is not None and int(target.max()) == num_classes and int(target.min()) >= 1
    raise DataError(
        f"row {first_row + row} has the label {int(label)} ({int(_rows(wrong).sum())} of {len(target)} rows"
        " are out of range)",
        expected=f"labels from 0{upper}, or {criterion.ignore_index} for those to ignore",
        cause="labels that count from 1" if counts_from_one else None,
    )


def _check_probabilities(criterion: Criterion, target: Tensor, first_row: int) -> None:
    wrong = (target < 0) | (target > 1)
    if wrong.any():
        row, value = _first_wrong(target, wrong)
        raise DataError(
            f"row {first_row + row} has the target {value.item():g}",
            expected=f"probabilities from 0 to 1 for the loss {criterion.name}",
        )


def _first(target: Tensor) -> object:
    return target.flatten()[0].item() if target.numel() else "nothing"


def _rows(wrong: Tensor) -> Tensor:
    return wrong.reshape(len(wrong), -1).any(dim=1)


def _first_wrong(target: Tensor, wrong: Tensor) -> tuple[int, Tensor]:
    row = int(_rows(wrong).nonzero()[0])
    return row, target[row][wrong[row]].flatten()[0]
