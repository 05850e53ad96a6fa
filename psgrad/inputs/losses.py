"""The loss of one sample, as a plain function of the model's output and the target, and what it asks of
targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.config import LOSS_OPTIONS, LossConfig
from psgrad.errors import ConfigError, DataError, LossError
from psgrad.inputs.code import module_of, resolve

Kind = Literal["class", "token", "binary", "value", "custom"]
LossFunction = Callable[[Tensor, Tensor], Tensor]

_IGNORED = -100  # torch's own default


@dataclass(frozen=True)
class Criterion:
    """A loss, ready to be applied to one sample at a time.

    `function(output, target)` returns a scalar; neither argument has a batch axis. Labels equal to
    `ignore_index` count for nothing. `modules_imported` are the modules and files whose code was run to get
    it.
    """

    name: str
    function: LossFunction
    kind: Kind
    ignore_index: int = _IGNORED
    modules_imported: tuple[str, ...] = ()


def resolve_loss(config: LossConfig, base: Path) -> Criterion:
    """The loss that a config names; a file of the user's own is relative to `base`.

    Raises ConfigError where the callable is not there, LossError where importing it fails. The function
    raises LossError for an output and a target that don't go together, and for a loss of the user's own that
    does not return one scalar.
    """
    if config.name not in LOSS_OPTIONS:
        function = resolve(config.name, base, raises=LossError)
        if inspect.isclass(function):
            raise ConfigError(
                f"the loss {config.name} is a class", expected="a function of (output, target) for one sample"
            )
        return Criterion(
            config.name,
            partial(_custom, config.name, function),
            "custom",
            modules_imported=(module_of(config.name),),
        )
    ignore_index = _IGNORED if config.ignore_index is None else config.ignore_index
    kind, function = _named(config, ignore_index)
    return Criterion(config.name, partial(_of_one_tensor, config.name, function), kind, ignore_index)


def _named(config: LossConfig, ignore_index: int) -> tuple[Kind, LossFunction]:
    weight = None if config.weight is None else torch.tensor(config.weight)
    match config.name:
        case "cross_entropy":
            return "class", partial(
                _cross_entropy,
                weight=weight,
                ignore_index=ignore_index,
                label_smoothing=config.label_smoothing,
            )
        case "token_cross_entropy":
            return "token", partial(
                _token_cross_entropy,
                weight=weight,
                ignore_index=ignore_index,
                label_smoothing=config.label_smoothing,
            )
        case "nll":
            return "class", partial(_nll, weight=weight, ignore_index=ignore_index)
        case "bce_with_logits":
            return "binary", _binary_cross_entropy
        case "mse":
            return "value", partial(_elementwise, F.mse_loss)
        case "l1":
            return "value", partial(_elementwise, F.l1_loss)
        case "smooth_l1":
            return "value", partial(_elementwise, partial(F.smooth_l1_loss, beta=config.beta))
        case "huber":
            return "value", partial(_elementwise, partial(F.huber_loss, delta=config.delta))
    raise AssertionError(f"no function for the loss {config.name}")  # the config knows the names


# -- The functions -------------------------------------------------------------------------------------------
#
# torch's means divide by the sum of the class weights, which for a single label would cancel its weight. A
# sample's loss here is weight[label] * loss, averaged over the positions that are not ignored; all ignored is
# 0. The functions run inside psgrad's tracers: no branch may look at values. A batch of one keeps torch from
# taking the classes or positions of a sample for a batch.
#
# Logits are taken in float64 where the loss subtracts a probability from a label: p - 1 in float32 is zero or
# has few digits where a sample is predicted with confidence. The loss itself is cast back, and keeps its
# relative precision.


def _cross_entropy(
    output: Tensor, target: Tensor, *, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Logits [c] or [c, *positions] against labels [] or [*positions], or probabilities of the output's
    shape.
    """
    labels = not target.is_floating_point()
    _require(
        output.ndim > 0 and (output.shape[1:] if labels else output.shape) == target.shape,
        "cross_entropy",
        output,
        target,
    )
    logits = output.double()
    options: dict[str, Any] = {
        "weight": _on(logits, weight),
        "reduction": "none",
        "label_smoothing": label_smoothing,
    }
    if not labels:
        return _rounded(
            F.cross_entropy(logits[None], target.to(logits.dtype)[None], **options).mean(), output
        )
    losses = F.cross_entropy(logits[None], target[None], ignore_index=ignore_index, **options)
    return _rounded(_mean_of_counted(losses, target, ignore_index), output)


def _token_cross_entropy(
    output: Tensor, target: Tensor, *, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Logits [t, c] against labels [t]."""
    _require(output.ndim == 2 and output.shape[:1] == target.shape, "token_cross_entropy", output, target)
    logits = output.double()
    losses = F.cross_entropy(
        logits,
        target,
        _on(logits, weight),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return _rounded(_mean_of_counted(losses, target, ignore_index), output)


def _nll(output: Tensor, target: Tensor, *, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Log-probabilities [c] or [c, *positions] against labels [] or [*positions]."""
    _require(output.shape[1:] == target.shape and output.ndim > 0, "nll", output, target)
    losses = F.nll_loss(
        output[None], target[None], _on(output, weight), ignore_index=ignore_index, reduction="none"
    )
    return _mean_of_counted(losses, target, ignore_index)


def _elementwise(loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> Tensor:
    """The mean over the elements; the shapes may differ in axes of size 1 only, so that nothing is broadcast
    by mistake.
    """
    same = [size for size in output.shape if size != 1] == [size for size in target.shape if size != 1]
    _require(same, "this loss", output, target)
    return loss(output, target.reshape(output.shape).to(output.dtype))


def _binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Logits against probabilities of the output's shape."""
    return _rounded(_elementwise(F.binary_cross_entropy_with_logits, output.double(), target), output)


def _of_one_tensor(name: str, loss: LossFunction, output: Any, target: Tensor) -> Tensor:
    """A named loss, for models that return what it can be computed from."""
    if isinstance(output, Tensor):
        return loss(output, target)
    parts = f" with {', '.join(map(str, list(output)[:8]))}" if isinstance(output, dict) else ""
    raise LossError(
        f"the model returned an object of type {type(output).__name__}{parts}",
        expected=f"a tensor, for the loss {name}",
        next_step=(
            "write a loss of your own that picks what it needs, def loss(output, target), and name it:"
            " file.py:loss"
        ),
    )


def _custom(name: str, loss: LossFunction, output: Tensor, target: Tensor) -> Tensor:
    value = loss(output, target)
    if isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point():
        return value
    got = (
        f"a tensor of shape {list(value.shape)} and type {value.dtype}"
        if isinstance(value, Tensor)
        else f"an object of type {type(value).__name__}"
    )
    raise LossError(
        f"the loss {name} returned {got} for one sample",
        expected="one real number: a floating-point tensor without axes",
        cause="it is called with one sample at a time, without a batch axis",
        next_step="reduce over all axes, for example with .mean()",
    )


def _mean_of_counted(losses: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    counted = (target != ignore_index).sum().clamp(min=1)
    return losses.sum() / counted


def _rounded(loss: Tensor, output: Tensor) -> Tensor:
    """A loss in float64 in the output's type, and in float32 where that is shorter."""
    return loss.to(torch.promote_types(output.dtype, torch.float32))


def _on(output: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.to(device=output.device, dtype=output.dtype)


def _require(fits: bool, name: str, output: Tensor, target: Tensor) -> None:
    if not fits:
        raise LossError(
            f"the model's output {list(output.shape)} and the target {list(target.shape)} of one sample don't"
            f" go together in {name}",
            expected=_EXPECTED_SHAPES.get(name, "the same shape, but for axes of size 1"),
        )


_EXPECTED_SHAPES = {
    "cross_entropy": (
        "logits [classes] with a label [], [classes, *positions] with [*positions], or probabilities of the"
        " same shape"
    ),
    "token_cross_entropy": "logits [positions, classes] with labels [positions]",
    "nll": "log-probabilities [classes] with a label [], or [classes, *positions] with [*positions]",
}


# -- The targets ---------------------------------------------------------------------------------------------


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
