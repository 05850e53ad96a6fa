"""A model and a loss as one function of the parameters and one sample; a group of rows is one sample, too,
whose loss is the sum over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.transforms.functional import swapped, tied_slots
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.errors import LossError, ModelError

Criterion = Callable[..., torch.Tensor]
Summary = Callable[[Any, Any], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Forward:
    """How a model is called on a batch, and which part of what it returns the loss reads.

    Attributes:
        names: the keyword of each input; empty for a model that takes its inputs by position.
        pick: from the model's output to the part that the loss reads; None for all of it.
        weighted: whether the last input is the weight of each sample's loss, which the model does not get.
    """

    names: tuple[str, ...] = ()
    pick: Callable[[Any], Any] | None = None
    weighted: bool = False

    def __call__(self, model: nn.Module, *inputs: torch.Tensor) -> Any:
        """What the loss reads of the model's output for these inputs, sample axis in front."""
        inputs = self.of_model(inputs)
        output = model(**dict(zip(self.names, inputs, strict=True))) if self.names else model(*inputs)
        return output if self.pick is None else self.pick(output)

    def of_model(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Those of a row's inputs that the model gets: all but the weight of its loss."""
        return inputs[: -1 if self.weighted else None]


BY_POSITION = Forward()


class Objective:
    """`loss(params, inputs, target)` of one sample, for a model that expects a batch.

    Args:
        model: takes tensors with a leading batch axis. It is neither changed nor copied; its buffers are
            read.
        criterion: (output, target) of one sample, both without a batch axis, to a loss of shape ().
        summary: (output, target) to small tensors worth keeping (a prediction); the default keeps nothing.
        forward: how the model is called on its inputs.
        autocast: the type in which matrix products and convolutions run, torch.bfloat16 for mixed
            precision: model and criterion run under torch.autocast, which leaves delicate operators (softmax,
            norms, losses) in float32. Parameters, and with them their gradients, stay what they are. None
            runs all in the parameters' type.

    Attributes:
        params: name -> parameter, those that require a gradient; each tensor once, under the first of its
            names.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        summary: Summary | None = None,
        *,
        forward: Forward = BY_POSITION,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.forward = forward
        self.criterion = criterion
        self.summary = summary
        self.autocast = autocast
        self.weighted = forward.weighted
        self.params = {
            name: parameter.detach()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        if not self.params:
            raise ModelError(
                "the model has no parameter that requires a gradient",
                hint=(
                    "all parameters are frozen, or the factory returned a module without any; set"
                    " requires_grad=True on the parameters to look at"
                ),
            )
        self._slots = tied_slots(model, self.params)

    def with_scalar(self, criterion: Criterion, summary: Summary | None = None) -> Objective:
        """This objective with another scalar of (output, target) in place of the loss. Samples have no
        weights in it.
        """
        other = copy(self)
        other.criterion, other.summary, other.weighted = criterion, summary, False
        return other

    def unweighted(self) -> Objective:
        """This objective for samples whose losses have no weights."""
        if not self.forward.weighted:
            return self
        other = copy(self)
        other.weighted, other.forward = False, replace(self.forward, weighted=False)
        return other

    def with_model(self, model: nn.Module) -> Objective:
        """This objective's loss with another model, such as that of another checkpoint."""
        return Objective(model, self.criterion, self.summary, forward=self.forward, autocast=self.autocast)

    def with_summary(self, summary: Summary | None) -> Objective:
        """This objective with another summary."""
        other = copy(self)
        other.summary = summary
        return other

    def precision(self) -> AbstractContextManager[Any]:
        """What model and criterion run under.

        The backward pass does not: it takes each cotangent in the type that the value had. Autocast keeps no
        casts of weights either, as it would for weights that require a gradient: they would outlive a pass,
        and belong to one that PyTorch's autograd follows.
        """
        if self.autocast is None:
            return nullcontext()
        device = next(iter(self.params.values())).device.type
        return torch.autocast(device, dtype=self.autocast, cache_enabled=False)

    def output(self, *batch: torch.Tensor) -> Any:
        """The model's output for the only sample of a batch, without the batch axis; under autocast in
        float32.

        A loss subtracts numbers that are nearly the same (a probability from one), which half precision would
        not distinguish.
        """
        output = first(self.forward(self.model, *batch))
        return (
            tree_map(lambda x: accumulating(x) if isinstance(x, torch.Tensor) else x, output)
            if self.autocast is not None
            else output
        )

    def predict(self, params: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> Any:
        """The model's output for one sample with these parameters: inputs and output without a batch axis."""
        with swapped(self._slots, params), self.precision():
            return self.output(*[x.unsqueeze(0) for x in inputs])

    def weights(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The weights [k] of the losses of k samples; None where they have none."""
        return inputs[-1] if self.weighted else None

    def plain_loss(self, inputs: Sequence[torch.Tensor], target: torch.Tensor | None) -> torch.Tensor:
        """The loss [] of the only sample of a batch at the model's own parameters, as PyTorch's autograd
        takes it: inputs and target with their batch axis.
        """
        own = None if target is None else target[0]
        loss: torch.Tensor = self.criterion(self.output(*inputs), own)
        return loss * inputs[-1][0] if self.weighted else loss

    def loss(
        self, params: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None
    ) -> Any:
        """(loss, summary) of one sample: inputs and target without a batch axis. A loss in half
        precision comes as float32.
        """
        with swapped(self._slots, params), self.precision():
            output = self.output(*[x.unsqueeze(0) for x in inputs])
            value = self.criterion(output, target)  # inside: a loss may look at the model's weights, too
        require_number(
            value,
            "the loss",
            "sample",
            hint="end the loss with .mean() or .sum(); it sees one sample, without a batch axis",
        )
        if not value.dtype.is_floating_point:
            raise LossError(
                f"the loss returned a tensor of dtype {value.dtype}; expected a floating-point number per"
                " sample",
            )
        if self.autocast is not None:
            value = accumulating(value)
        if self.weighted:
            value = value * inputs[-1].to(value.dtype)
        return value, self.summary(output, target) if self.summary is not None else {}

    def loss_of_numbered(
        self, params: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None
    ) -> Any:
        """As `loss`, of a sample whose last input is its row's number."""
        return self.loss(params, inputs[:-1], target)


def require_number(value: Any, function: str, row: str, hint: str) -> None:
    """Raises LossError unless `value`, which a function returned for one row, is a tensor of shape ()."""
    if isinstance(value, torch.Tensor) and not value.dim():
        return
    is_tensor = isinstance(value, torch.Tensor)
    what = f"a tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
    raise LossError(f"{function} returned {what} for one {row}; expected a tensor of shape ()", hint=hint)


def first(output: Any) -> Any:
    """The model's output for the only sample of its batch: the batch axis taken off every tensor."""
    if isinstance(output, torch.Tensor):
        return output.squeeze(0) if output.dim() and output.shape[0] == 1 else output
    if isinstance(output, dict):
        return (
            type(output)((key, first(value)) for key, value in output.items())
            if type(output) is dict
            else _mapping(output)
        )
    if isinstance(output, (tuple, list)):
        items = [first(item) for item in output]
        return (
            items
            if isinstance(output, list)
            else type(output)(*items)
            if hasattr(output, "_fields")
            else tuple(items)
        )
    return output


def _mapping(output: Any) -> Any:
    """Dict-like records (a model library's outputs) keep their class, so that `output.logits` goes on
    working.
    """
    taken = {key: first(value) for key, value in output.items()}
    try:
        return type(output)(**taken)
    except TypeError:
        return taken
