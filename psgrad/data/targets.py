"""The targets of a dataset: names of classes, truth values and whole fractions become labels, and each target
is checked: whether a loss can be computed for it. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from psgrad.config import did_you_mean
from psgrad.data.columns import not_numbers
from psgrad.data.loss import Criterion
from psgrad.errors import DataError
from psgrad.wording import first_of

Array = npt.NDArray[Any]
_SHOWN = 20
_CLASSES = ("class", "token")


@dataclass(frozen=True)
class Encoded:
    """Targets as numbers.

    class_names: of the labels 0, 1, 2, ..., where the targets were names; else None. found: see
    Samples.names_found. note: what was done, for the manifest; empty where nothing was.
    """

    values: Array
    class_names: tuple[str, ...] | None = None
    found: str = ""
    note: str = ""


@dataclass(frozen=True)
class Labels:
    """How targets become what a loss compares with.

    Attributes:
        kind: what the targets of the loss are: class, token, binary, value or custom.
        ignore_index: the label that does not count.
        names: of the classes 0, 1, 2, ..., where they are known.
    """

    kind: str = "custom"
    ignore_index: int = -100
    names: tuple[str, ...] | None = None

    @property
    def padding(self) -> int:
        """What stands after the targets of a row that is shorter than others."""
        return self.ignore_index if self.kind == "token" else 0

    def encoded(
        self, values: Array, column: str, row_name: Callable[[int], str] = lambda row: f"row {row}"
    ) -> Encoded:
        """The targets [n] of a column: numbers, truth values, or names of classes.

        Names are numbered as in `names`, or in sorted order; truth values are 0 and 1; fractions that are
        whole are labels for a loss of classes. `row_name` names a row in messages. Raises DataError.
        """
        if values.dtype.kind in "OUST":
            return self._of_names(values, column, row_name)
        if values.dtype.kind == "b" and self.kind in (*_CLASSES, "binary"):
            kind = np.float32 if self.kind == "binary" else np.int64
            return Encoded(values.astype(kind), note=f"{column}: false is 0, true is 1")
        whole = values.dtype.kind == "f" and (np.isfinite(values) & (values == np.round(values))).all()
        if whole and self.kind in _CLASSES:
            if (beyond := np.abs(values) >= 2**63).any():
                row = int(beyond.argmax())
                raise DataError(
                    f"the label {column!r} is {values[row]:g} in {row_name(row)}; expected whole numbers"
                    " from 0, one for each class",
                )
            return Encoded(values.astype(np.int64), note=f"{column}: fractions that are whole are labels")
        return Encoded(values)

    def _of_names(self, values: Array, column: str, row_name: Callable[[int], str]) -> Encoded:
        texts = [isinstance(value, str) for value in values.tolist()]
        if not all(texts):
            row = texts.index(False)
            value = values[row]
            raise DataError(
                f"the label {column!r} is {'missing' if value is None or value != value else repr(value)}"
                f" in {row_name(row)}; expected the name of a class in each row",
            )
        if self.kind == "value":
            raise not_numbers(column, "text", f"{row_name(0)} holds {values[0]!r}")
        names = sorted(set(values.tolist())) if self.names is None else list(self.names)
        if self.kind == "binary" and len(names) != 2:
            raise DataError(
                f"the labels {column!r} have {len(names)} names: {first_of(names, _SHOWN)}; expected two"
                " for a loss of probabilities, of which the second is 1",
            )
        numbers = {name: number for number, name in enumerate(names)}
        found = np.array([numbers.get(value, -1) for value in values.tolist()])
        if (found < 0).any():
            row = int(np.argmax(found < 0))
            count = int((found < 0).sum()), len(found)
            raise unknown_label(values[row], row_name(row), count, names)
        order = "in sorted order" if self.names is None else "as the classes are known"
        listed = first_of([f"{number} {name}" for number, name in enumerate(names)], _SHOWN)
        kind = np.float32 if self.kind == "binary" else np.int64
        note = f"{column}: labels {order}: {listed}"
        return Encoded(found.astype(kind), tuple(names), "sorted" if self.names is None else "", note)


def unknown_label(value: object, where: str, count: tuple[int, int], names: Sequence[str]) -> DataError:
    """What is said of a label that is no class: where it is, in how many of how many rows there is such a
    label, and the nearest of the names.
    """
    among = f", {count[0]:,} of {count[1]:,} rows," if count[1] > 1 else ""
    return DataError(
        f"the label {str(value)!r} in {where}{among} is no class{did_you_mean(str(value), names)};"
        f" expected one of {first_of(names, _SHOWN)}",
    )


def check_targets(
    criterion: Criterion,
    target: Tensor | None,
    num_classes: int | None,
    row_name: Callable[[int], str] = lambda row: f"row {row}",
) -> None:
    """Raises DataError unless the loss can be computed for every one of the targets [n, ...].

    `num_classes` is the size of the model's class axis, None where it isn't known; `row_name` names the row
    of a target in messages. A NaN is not an error: its sample's loss is NaN, and the row is reported as such.
    """
    if criterion.kind == "custom":
        return
    if target is None:
        raise DataError(
            f"the loss {criterion.name} needs a target, and the data has none",
            hint="name the column in data.target",
        )
    if criterion.kind in ("class", "token") and not (
        criterion.name != "nll" and target.is_floating_point() and target.ndim > 1
    ):
        _check_labels(criterion, target, num_classes, row_name)
    if criterion.kind == "binary" or (criterion.kind in ("class", "token") and target.is_floating_point()):
        _check_probabilities(criterion, target, row_name)


def _check_labels(
    criterion: Criterion, target: Tensor, num_classes: int | None, row_name: Callable[[int], str]
) -> None:
    if target.is_floating_point() or target.dtype == torch.bool or target.is_complex():
        raise DataError(
            f"the targets are of type {target.dtype}; {row_name(0)} holds {_first(target)}; expected whole"
            f" numbers for the loss {criterion.name}",
            hint="save the target column as integers, or choose a loss for values, such as mse",
        )
    wrong = (target < 0) if num_classes is None else (target < 0) | (target >= num_classes)
    wrong &= target != criterion.ignore_index
    if not wrong.any():
        return
    row, label = _first_wrong(target, wrong)
    upper = "" if num_classes is None else f" to {num_classes - 1}"
    counts_from_one = num_classes is not None and int(target.max()) == num_classes and int(target.min()) >= 1
    raise DataError(
        f"{row_name(row)} has the label {int(label)} ({int(_rows(wrong).sum()):,} of {len(target):,} rows"
        f" are out of range); expected labels from 0{upper}, or {criterion.ignore_index} for those to"
        " ignore",
        hint="labels that count from 1" if counts_from_one else None,
    )


def _check_probabilities(criterion: Criterion, target: Tensor, row_name: Callable[[int], str]) -> None:
    wrong = (target < 0) | (target > 1)
    if wrong.any():
        row, value = _first_wrong(target, wrong)
        raise DataError(
            f"{row_name(row)} has the target {value.item():g}; expected probabilities from 0 to 1 for the"
            f" loss {criterion.name}",
        )


def _first(target: Tensor) -> object:
    return target.flatten()[0].item() if target.numel() else "nothing"


def _rows(wrong: Tensor) -> Tensor:
    return wrong.reshape(len(wrong), -1).any(dim=1)


def _first_wrong(target: Tensor, wrong: Tensor) -> tuple[int, Tensor]:
    row = int(_rows(wrong).nonzero()[0])
    return row, target[row][wrong[row]].flatten()[0]
