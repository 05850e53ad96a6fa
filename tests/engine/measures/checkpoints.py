"""Checkpoints of small models, and what a plain loop over checkpoints and samples says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.execution.objective import BY_POSITION, Forward, Objective
from psgrad.engine.measures.builtin.over_checkpoints import CheckpointOutputs
from psgrad.engine.measures.measure import CheckpointModel, Gathered, Measure, Setting
from tests.engine.measures.own_passes import columns_of, setting_of
from tests.oracles import one_sample_gradients

Loss = Callable[..., Tensor]


def of_checkpoints(
    models: Sequence[nn.Module],
    loss: Loss,
    inputs: tuple[Tensor, ...],
    target: Tensor | None,
    forward: Forward = BY_POSITION,
    **facts: Any,
) -> Setting:
    """Samples at these models, the last of which is the one that all other measures see."""

    def checkpoint(number: int, model: nn.Module) -> CheckpointModel:
        return CheckpointModel(f"epoch-{number}", lambda: Objective(model, loss, forward=forward))

    checkpoints = [checkpoint(number, model) for number, model in enumerate(models)]
    return setting_of(models[-1], loss, inputs, target, forward, checkpoints=checkpoints, **facts)


def of_classes(models: Sequence[nn.Module], x: Tensor, y: Tensor, *more: Tensor, **facts: Any) -> Setting:
    """Samples of three classes at these models; more: inputs after x."""
    about = {"kind": "class", "classes": 3, "targets": y, **facts}
    return of_checkpoints(models, F.cross_entropy, (x, *more), y, **about)


def rows_of(setting: Setting, chunk_size: int = 5, start: int = 0) -> dict[str, Tensor]:
    """The columns of the pass that measures over checkpoints share."""
    return columns_of(CheckpointOutputs(), setting, chunk_size, start)


def gathered(measure: Measure, setting: Setting, rows: dict[str, Tensor] | None = None) -> Gathered:
    """What a measure over checkpoints says of all samples."""
    measure.prepare(setting)
    return measure.gather(rows_of(setting) if rows is None else rows)


def plain_norms(
    models: Sequence[nn.Module], loss: Loss, inputs: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss [n, T], gradient norm [n, T]) by torch's autograd, one sample at a time."""
    losses, norms = [], []
    for model in models:
        outputs = model(inputs).detach()
        losses.append(torch.stack([loss(z, y) for z, y in zip(outputs, target, strict=True)]))
        gradients = one_sample_gradients(model, loss, (inputs,), target)
        norms.append(torch.cat([each.flatten(1) for each in gradients.values()], 1).norm(dim=1))
    return torch.stack(losses, 1), torch.stack(norms, 1)


class WithBuffers(nn.Module):
    """Images [n, 1, 6, 6] to logits [n, 3]: a convolution, batch normalisation by what it has seen, a tied
    and a frozen weight.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.convolution = nn.Conv2d(1, 4, 3)
            self.normal = nn.BatchNorm2d(4)
            self.square = nn.Linear(4, 4)
            self.again = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4)
            self.head = nn.Linear(4, 3)
            self.normal.running_mean = torch.randn(4)
            self.normal.running_var = torch.rand(4) + 0.5
        self.again.weight = self.square.weight
        self.frozen.requires_grad_(False)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.normal(self.convolution(x))).mean((-1, -2))
        return self.head(torch.tanh(self.frozen(self.again(torch.tanh(self.square(x))))))  # type: ignore[no-any-return]


def perceptrons(count: int = 3) -> list[nn.Module]:
    return [perceptron(seed) for seed in range(count)]


def perceptron(seed: int, out: int = 3, scale: float = 1.0) -> nn.Module:
    """Vectors [n, 4] to [n, out], in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, out)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model.eval()
