"""The loss of one sample: what each kind of loss is, and the one that a config names."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from psgrad.config import LossConfig, is_callable_spec
from psgrad.errors import ConfigError, LossError
from psgrad.plugins import LOSSES, configured
from psgrad.user_code import module_of, resolve
from psgrad.wording import unit_of_loss

LossKind = Literal["class", "token", "binary", "value", "custom"]
LossFunction = Callable[..., Tensor]

IGNORED = -100  # the label that does not count: torch's own default


class Loss(ABC):
    """A loss that a config can name. A subclass is a frozen dataclass in `psgrad/data/losses`; its fields
    are the options.

    Attributes:
        name: as in a config.
        kind: what the targets are: 'class' (one of c classes), 'token' (a class at each position), 'binary'
            (a probability) or 'value'.
        ignore_index: the target that does not count; None for torch's -100.
    """

    name: ClassVar[str]
    kind: ClassVar[LossKind]
    ignore_index: int | None = None

    @abstractmethod
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss [] of one sample, from its output and its target without a batch axis.

        It runs inside psgrad's tracers: no branch may look at values. Raises LossError where the shapes do
        not go together.
        """


@dataclass(frozen=True)
class Criterion:
    """A loss, ready to be applied to one sample at a time.

    Attributes:
        function: (output, target) -> a scalar; neither argument has a batch axis.
        ignore_index: labels equal to it do not count.
        modules_imported: the modules and files whose code was run to get it.
        unit: such as nats; None where it is not known.
    """

    name: str
    function: LossFunction
    kind: LossKind
    ignore_index: int = IGNORED
    modules_imported: tuple[str, ...] = ()
    unit: str | None = None


def resolve_loss(config: LossConfig, base: Path) -> Criterion:
    """The loss that a config names; a file of the user's own is relative to `base`.

    Raises ConfigError where the callable is not there, LossError where importing it fails. The function
    raises LossError for an output and a target that don't go together, and for a loss of the user's own that
    does not return one scalar.
    """
    if not is_callable_spec(config.name):
        loss: Loss = configured(LOSSES, config.name, config.options, base)
        ignore_index = IGNORED if loss.ignore_index is None else loss.ignore_index
        unit = unit_of_loss(config.name, config.options.get("reduction", "mean"))
        of_tensor = partial(_of_one_tensor, config.name, loss)
        return Criterion(config.name, of_tensor, loss.kind, ignore_index, unit=unit)
    function = resolve(config.name, base, raises=LossError)
    if inspect.isclass(function):
        raise ConfigError(f"the loss {config.name} is a class; expected a function of (output, target)")
    custom = partial(_custom, config.name, function)
    return Criterion(config.name, custom, "custom", modules_imported=(module_of(config.name),))


def _of_one_tensor(name: str, loss: LossFunction, output: Any, target: Tensor) -> Tensor:
    """A named loss, for models that return what it can be computed from."""
    if isinstance(output, Tensor):
        return loss(output, target)
    parts = f" with {', '.join(map(str, list(output)[:8]))}" if isinstance(output, dict) else ""
    raise LossError(
        f"the model returned an object of type {type(output).__name__}{parts}; {name} takes a tensor",
        hint="write a def loss(output, target) that picks what it needs, and name it: file.py:loss",
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
        f"the loss {name} returned {got} for one sample; expected one real number",
        hint="it gets one sample, without a batch axis: reduce over all axes, such as with .mean()",
    )


def require_shapes(fits: bool, name: str, expected: str, output: Tensor, target: Tensor) -> None:
    """Raises LossError unless `fits`."""
    if not fits:
        raise LossError(
            f"the model's output {list(output.shape)} and the target {list(target.shape)} of one sample don't"
            f" go together in {name}; expected {expected}"
        )


def rounded(loss: Tensor, output: Tensor) -> Tensor:
    """A loss in float64 in the output's type, and in float32 where that is shorter."""
    return loss.to(torch.promote_types(output.dtype, torch.float32))
