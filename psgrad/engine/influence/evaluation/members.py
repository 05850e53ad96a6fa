"""Trained models as one: their weights stacked, to be asked together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad.engine.examples import Examples
from psgrad.engine.gradients.loading import placed
from psgrad.engine.objective import Criterion
from psgrad.engine.transforms import functional_call, stack_module_state, vmap
from psgrad.errors import ModelError

# Rows that are asked at once, of each of the models.
_CHUNK = 256


@dataclass(frozen=True)
class Rows:
    """All rows of a dataset, on the device and in the type of the model.

    inputs: each [n, ...]. target: [n, ...], None where the loss needs none.
    """

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def digest(self) -> str:
        """A SHA-256 of all numbers."""
        found = hashlib.sha256()
        for x in (*self.inputs, *(() if self.target is None else (self.target,))):
            found.update(f"{x.dtype} {tuple(x.shape)} ".encode())
            found.update(x.cpu().contiguous().numpy().data)
        return found.hexdigest()

    @staticmethod
    def of(examples: Examples) -> Rows:
        """All rows of these examples: what is trained again has to fit into memory."""
        block: Any = examples.read(0, len(examples))
        return Rows(*placed(block.inputs, block.target, examples.device, next(iter(examples.params.values())).dtype))


@dataclass(frozen=True)
class Members:
    """K models of one architecture.

    Attributes:
        model: of that architecture, in eval mode; its own weights count for nothing.
        state: name -> [K, ...], parameters and buffers.
        loss: [K], the mean training loss of the last epoch; NaN where nobody said.
    """

    model: nn.Module
    state: dict[str, torch.Tensor]
    loss: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.loss)

    @staticmethod
    def of(models: Sequence[nn.Module]) -> Members:
        """Models that were trained elsewhere. Raises ModelError where they are not of one architecture."""
        shapes = [{name: tuple(value.shape) for name, value in model.state_dict().items()} for model in models]
        odd = next(
            (number for number, found in enumerate(shapes) if found != shapes[0] or type(models[number]) is not type(models[0])), None
        )
        if odd is not None:
            raise ModelError(
                f"the retrained model number {odd} has other weights than number 0",
                expected="models of one class with the same parameters and buffers",
                next_step="have the training function return the model that it is given, trained",
            )
        for model in models:
            model.eval()
        state = {name: value.detach() for part in stack_module_state(models) for name, value in part.items()}
        return Members(models[0], state, np.full(len(models), np.nan))

    def member(self, number: int) -> nn.Module:
        """The model with the weights of one of them put in: the same object each time."""
        with torch.no_grad():
            own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            for name, value in self.state.items():
                own[name].copy_(value[number])
        return self.model

    def measured(self, rows: Rows, criterion: Criterion) -> np.ndarray[Any, Any]:
        """[K, m] float64: the scalar of (output, target) of each of m rows, by each model."""
        each = vmap(criterion, in_dims=(0, None if rows.target is None else 0))
        return self._asked(rows, lambda output, target: each(output, target).double())

    def outputs(self, rows: Rows) -> np.ndarray[Any, Any]:
        """[K, n, ...] float64: the output of each model for each row. Models must return one tensor."""
        return self._asked(rows, lambda output, target: output.double())

    def _asked(self, rows: Rows, answer: Callable[[Any, torch.Tensor | None], torch.Tensor]) -> np.ndarray[Any, Any]:
        def one(state: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None) -> torch.Tensor:
            return answer(functional_call(self.model, state, inputs), target)

        parts = []
        with torch.no_grad():
            for start in range(0, len(rows), _CHUNK):
                taken = slice(start, start + _CHUNK)
                target = None if rows.target is None else rows.target[taken]
                asked = vmap(one, in_dims=(0, None, None))(self.state, tuple(x[taken] for x in rows.inputs), target)
                parts.append(asked.cpu())
        found: np.ndarray[Any, Any] = torch.cat(parts, dim=1).numpy()
        return found
