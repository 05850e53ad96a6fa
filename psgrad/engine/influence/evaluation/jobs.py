"""The trainings of an evaluation: the rows, the jobs, the recipe of the built-in trainer, and the trained
models with their weights stacked.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import to_device
from psgrad.engine.execution.objective import Criterion
from psgrad.engine.transforms import functional_call, stack_module_state, vmap
from psgrad.errors import ModelError

# Rows that each of the models processes at once.
_CHUNK = 256


@dataclass(frozen=True)
class LoadedRows:
    """All rows of a dataset, on the device and in the type of the model.

    inputs: each [n, ...]. target: [n, ...], None where the loss needs none.
    """

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def digest(self) -> str:
        """A SHA-256 of all numbers."""
        sha = hashlib.sha256()
        for x in (*self.inputs, *(() if self.target is None else (self.target,))):
            sha.update(f"{x.dtype} {tuple(x.shape)} ".encode())
            sha.update(x.cpu().contiguous().numpy().data)
        return sha.hexdigest()

    @staticmethod
    def of(examples: Examples) -> LoadedRows:
        """All rows of these examples: what is trained again has to fit into memory. Raises ModelError where
        they would have to be padded for a model that does not ignore padding.
        """
        block = examples.rows.take(range(len(examples)))
        if block.lengths is not None and block.ragged is not None and not block.ragged.masked:
            shortest, longest = int(block.lengths.min()), int(block.lengths.max())
            if shortest < longest:
                raise ModelError(
                    f"rows of {shortest} to {longest} positions can't be trained on together: the model"
                    " does not ignore padding",
                    hint="give the model a mask as an input, or evaluate on rows of one length",
                )
        there = to_device(block, examples.device, next(iter(examples.params.values())).dtype)
        return LoadedRows(there.inputs, there.target)


@dataclass(frozen=True)
class Members:
    """K models of one architecture.

    Attributes:
        model: of that architecture, in eval mode; its own weights count for nothing.
        state: name -> [K, ...], parameters and buffers.
        loss: [K], the mean training loss of the last epoch; NaN if unknown.
    """

    model: nn.Module
    state: dict[str, torch.Tensor]
    loss: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.loss)

    @staticmethod
    def of(models: Sequence[nn.Module]) -> Members:
        """Models that were trained elsewhere. Raises ModelError where they are not of one architecture."""
        shapes = [
            {name: tuple(value.shape) for name, value in model.state_dict().items()} for model in models
        ]
        kinds = [(type(model), shape) for model, shape in zip(models, shapes, strict=True)]
        odd = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None)
        if odd is not None:
            raise ModelError(
                f"the retrained model number {odd} has other weights than number 0",
                hint="have the training function return the model that it is given, trained",
            )
        for model in models:
            model.eval()
        state = {name: value.detach() for part in stack_module_state(models) for name, value in part.items()}
        return Members(models[0], state, np.full(len(models), np.nan))

    def measured(self, rows: LoadedRows, criterion: Criterion) -> np.ndarray[Any, Any]:
        """[K, m] float64: the scalar of (output, target) of each of m rows, by each model."""
        each = vmap(criterion, in_dims=(0, None if rows.target is None else 0))

        def one(
            state: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None
        ) -> torch.Tensor:
            return each(functional_call(self.model, state, inputs), target).double()

        parts = []
        with torch.no_grad():
            for start in range(0, len(rows), _CHUNK):
                taken = slice(start, start + _CHUNK)
                target = None if rows.target is None else rows.target[taken]
                part = vmap(one, in_dims=(0, None, None))(
                    self.state, tuple(x[taken] for x in rows.inputs), target
                )
                parts.append(part.cpu())
        found: np.ndarray[Any, Any] = torch.cat(parts, dim=1).numpy()
        return found


@dataclass(frozen=True)
class Job:
    """One model to be trained.

    name: for people. rows: the numbers of its training rows. seed: of its initial weights and shuffles.
    """

    name: str
    rows: np.ndarray[Any, Any]
    seed: int


OptimizerName = Literal["sgd", "adam", "adamw", "newton"]
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Recipe:
    """A training from fresh weights.

    Attributes:
        optimizer: sgd, adam and adamw are torch.optim's. newton minimises a convex objective exactly.
        epochs, batch_size: passes over the rows, in shuffled order, the last batch of a pass being the rest.
        learning_rate: of the first step.
        schedule: constant, or falling to zero by the last step, linearly or as half a cosine.
        momentum: of sgd.
        weight_decay: the optimiser's own. newton adds n * weight_decay / 2 * |theta|^2 to the sum of the
            losses, where n counts the whole training set whichever rows are left out: the objective that
            removals are predicted for.
        tolerance: newton ends where no entry of the gradient of the mean loss is larger.
        together: how many models are trained at once.
    """

    optimizer: OptimizerName = "adam"
    epochs: int = 50
    batch_size: int = 64
    learning_rate: float = 1e-3
    schedule: Schedule = "constant"
    momentum: float = 0.0
    weight_decay: float = 0.0
    tolerance: float = 1e-10
    together: int = 100

    def optimiser(self, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """torch's optimiser over stacked parameters [K, *shape]: it works element by element, so the models
        do not affect each other.
        """
        options: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "fused": True}
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, momentum=self.momentum, **options)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, **options)

    def steps_per_epoch(self, rows: int) -> int:
        """The number of batches of `rows` rows."""
        return -(-rows // self.batch_size)

    def alike(self, rows: int) -> int:
        """Models on different numbers of rows are trained together if this number is the same for them."""
        return rows if self.optimizer == "newton" else self.steps_per_epoch(rows)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step number `step` of `steps`."""
        left = 1 - step / steps
        factor = {"constant": 1.0, "linear": left, "cosine": (1 + math.cos(math.pi * (1 - left))) / 2}[
            self.schedule
        ]
        return self.learning_rate * factor
