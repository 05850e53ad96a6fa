"""Small training sets with a model that was trained on them by plain linear algebra, for tests of
influence.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.linalg import cho_factor, cho_solve
from scipy.special import log_softmax, softmax
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective
from psgrad.ragged import Block


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of one sample: logits [classes], label []."""
    return F.cross_entropy(output[None], target[None])


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half the square of the error of one sample: prediction [k], target [k]."""
    return 0.5 * (output - target).square().sum()


def examples(
    model: nn.Module, criterion: Any, inputs: torch.Tensor, target: torch.Tensor, **options: Any
) -> Examples:
    """These rows as `model` sees them. Options are the Stream's."""
    return Examples(Objective(model, criterion), Block((inputs,), target), options)


def huber(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Flat in its second derivatives where an error is large, but not in its first."""
    return F.huber_loss(output, target, delta=0.5, reduction="sum")


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs [1437, 64] float64 in [0, 1] and labels [1437], then those of the 360 test rows. Stratified,
    seed 0.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    parts = train_test_split(data.data / 16, data.target, test_size=360, random_state=0, stratify=data.target)
    train, test, train_labels, test_labels = (torch.tensor(part) for part in parts)
    return train, train_labels, test, test_labels


# -- softmax regression --------------------------------------------------------------------------------------


@dataclass
class SoftmaxRegression:
    """sum of the losses + penalty / 2 |weights|^2, bias included, where n is the number of rows of the *full*
    training set and penalty = n * weight_decay.

    Attributes:
        inputs: [n, d + 1], ones last. labels: [n]. classes, penalty.
    """

    inputs: np.ndarray
    labels: np.ndarray
    classes: int
    penalty: float

    @classmethod
    def of(cls, inputs: torch.Tensor, labels: torch.Tensor, weight_decay: float) -> SoftmaxRegression:
        wide = np.concatenate([inputs.numpy(), np.ones((len(inputs), 1))], axis=1)
        return cls(wide, labels.numpy(), int(labels.max()) + 1, len(inputs) * weight_decay)

    def without(self, row: int) -> SoftmaxRegression:
        """The training set without one row, and with the penalty as it was."""
        keep = np.arange(len(self.labels)) != row
        return SoftmaxRegression(self.inputs[keep], self.labels[keep], self.classes, self.penalty)

    def gradient(self, weights: np.ndarray) -> np.ndarray:
        """[classes, d + 1] at weights of that shape."""
        residual = softmax(self.inputs @ weights.T, axis=1)
        residual[np.arange(len(self.labels)), self.labels] -= 1
        return residual.T @ self.inputs + self.penalty * weights

    def hessian(self, weights: np.ndarray) -> np.ndarray:
        """[p, p], of the weights flattened class by class."""
        p, x = softmax(self.inputs @ weights.T, axis=1), self.inputs
        wide = x.shape[1]
        whole = np.zeros((self.classes, wide, self.classes, wide))
        for a in range(self.classes):
            for b in range(a + 1):
                block = x.T @ ((p[:, a] * ((a == b) - p[:, b]))[:, None] * x)
                whole[a, :, b], whole[b, :, a] = block, block
        return whole.reshape(self.classes * wide, -1) + self.penalty * np.eye(self.classes * wide)

    def solve(self, start: np.ndarray | None = None, factor: Any = None) -> np.ndarray:
        """The weights with a gradient below 1e-10 everywhere, by Newton's method.

        factor: Cholesky factor of a Hessian nearby, which stands in for the Hessian itself as long as each
        step takes off two thirds of the gradient.
        """
        weights = np.zeros((self.classes, self.inputs.shape[1])) if start is None else start
        last = np.inf
        for _ in range(100):
            gradient = self.gradient(weights)
            size = np.abs(gradient).max()
            if size < 1e-10:
                return weights
            if factor is None or size > last / 3:
                factor = cho_factor(self.hessian(weights))
            last = size
            weights = weights - cho_solve(factor, gradient.reshape(-1)).reshape(weights.shape)
        raise AssertionError(f"Newton's method stopped at a gradient of {size}")

    def losses(self, weights: np.ndarray, inputs: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
        """[m]: the losses of other rows."""
        logits = inputs.numpy() @ weights[:, :-1].T + weights[:, -1]
        return -log_softmax(logits, axis=1)[np.arange(len(labels)), labels.numpy()]


def linear(weights: np.ndarray) -> nn.Linear:
    """A linear layer of weights [outputs, d + 1], the bias last."""
    layer = nn.Linear(weights.shape[1] - 1, weights.shape[0]).double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weights[:, :-1].copy()))
        layer.bias.copy_(torch.from_numpy(weights[:, -1].copy()))
    return layer


def flattened(weights: np.ndarray) -> np.ndarray:
    """[outputs * (d + 1)]: weights [outputs, d + 1] in the order of a linear layer's parameters, weight
    before bias.
    """
    return np.concatenate([weights[:, :-1].reshape(-1), weights[:, -1]])


# -- other models --------------------------------------------------------------------------------------------


def ridge(inputs: torch.Tensor, targets: torch.Tensor, penalty: float) -> np.ndarray:
    """[outputs, d + 1]: the weights with the least sum of squared_error + penalty / 2 |weights|^2."""
    wide = np.concatenate([inputs.numpy(), np.ones((len(inputs), 1))], axis=1)
    return np.linalg.solve(wide.T @ wide + penalty * np.eye(wide.shape[1]), wide.T @ targets.numpy()).T


def mlp(seed: int = 0, sizes: tuple[int, ...] = (6, 5, 3)) -> nn.Module:
    """Fully connected with Tanh in between, float64, as initialised."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def convolution(seed: int = 0) -> nn.Module:
    """Of pictures [1, 6, 6] to 3 classes, float64, as initialised."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)
    ).double()


def classified(
    count: int, shape: tuple[int, ...] = (6,), classes: int = 3, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs [count, *shape] and labels [count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64), torch.randint(
        classes, (count,), generator=generator
    )


def parts(
    training: int, queries: int, shape: tuple[int, ...] = (6,), classes: int = 3
) -> tuple[torch.Tensor, ...]:
    """Random inputs and labels of a training set, then those of queries."""
    inputs, labels = classified(training + queries, shape, classes)
    return inputs[:training], labels[:training], inputs[training:], labels[training:]


def both(
    model: nn.Module, data: tuple[torch.Tensor, ...], of_queries: Any = cross_entropy, **options: Any
) -> tuple[Examples, Examples]:
    """Training examples and queries of such parts."""
    x, y, xq, yq = data
    return examples(model, cross_entropy, x, y, **options), examples(model, of_queries, xq, yq, **options)


@functools.cache
def trained_digits_mlp(steps: int = 200) -> nn.Module:
    """64-16-10 on digits(), float64, so many steps of Adam with the whole training set."""
    inputs, labels, _, _ = digits()
    model = mlp(0, (64, 16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


# -- oracles -------------------------------------------------------------------------------------------------


def gradient_rows(model: nn.Module, criterion: Any, inputs: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """[n, p]: the gradient of each row by torch.autograd, one row at a time, in the order of the
    parameters.
    """
    result = []
    for x, y in zip(inputs, target, strict=True):
        gradients = torch.autograd.grad(criterion(model(x[None])[0], y), list(model.parameters()))
        result.append(torch.cat([g.reshape(-1) for g in gradients]).double())
    return torch.stack(result).numpy()


def output_jacobians(model: nn.Module, inputs: torch.Tensor) -> np.ndarray:
    """[n, outputs, p]: of the flattened output by torch.autograd, number by number."""
    result = []
    for x in inputs:
        output = model(x[None])[0].reshape(-1)
        rows = [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in output]
        result.append(torch.stack([torch.cat([g.reshape(-1) for g in row]).double() for row in rows]))
    return torch.stack(result).numpy()


def output_hessians(
    model: nn.Module, criterion: Any, inputs: torch.Tensor, target: torch.Tensor
) -> np.ndarray:
    """[n, outputs, outputs]: of the loss in the flattened output by torch.autograd."""
    result = []
    for x, y in zip(inputs, target, strict=True):
        output = model(x[None])[0].detach().double()
        second = torch.autograd.functional.hessian(lambda z, y=y: criterion(z, y), output)
        result.append(second.reshape(output.numel(), output.numel()))
    return torch.stack(result).numpy()


def gauss_newton(model: nn.Module, criterion: Any, inputs: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """[p, p]: the sum over rows of J' L J."""
    jacobians, hessians = output_jacobians(model, inputs), output_hessians(model, criterion, inputs, target)
    return np.einsum("ncp,ncd,ndq->pq", jacobians, hessians, jacobians, optimize=True)


def loss_hessian(model: nn.Module, criterion: Any, inputs: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """[p, p]: of the sum of the losses, by torch.autograd: torch.func.hessian is wrong for a layer norm
    (PyTorch 2.13), as finite differences show.
    """
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def total(values: torch.Tensor) -> torch.Tensor:
        parts = dict(zip(params, values.split([p.numel() for p in params.values()]), strict=True))
        outputs = torch.func.functional_call(
            model, {name: parts[name].reshape(p.shape) for name, p in params.items()}, inputs
        )
        return torch.stack([criterion(z, y) for z, y in zip(outputs, target, strict=True)]).sum()

    flat = torch.cat([p.reshape(-1) for p in params.values()])
    return torch.autograd.functional.hessian(total, flat).numpy()
