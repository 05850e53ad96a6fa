"""EK-FAC materialised: hooks of torch.autograd on the layers, one sample at a time, Kronecker products as
matrices, in numpy, float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from psgrad.engine.gradients.flat import Flat
from psgrad.engine.influence.curvature.kronecker_fitting import KroneckerBlock
from tests.engine.influence.problems import gradient_rows


@dataclass
class Dense:
    """A block: whose it is (groups of a convolution are blocks of one layer), which of the p columns it is
    about, an orthogonal basis of them, and the mean squares of the gradients in it.
    """

    owner: str
    columns: np.ndarray
    basis: np.ndarray
    values: np.ndarray

    @property
    def matrix(self) -> np.ndarray:
        return self.basis @ np.diag(self.values) @ self.basis.T


def blocks_of(model: nn.Module, criterion: Any, inputs: torch.Tensor, target: torch.Tensor) -> list[Dense]:
    """Of the empirical Fisher: a block for each linear, convolutional and embedding layer with its bias, an
    exact one for every other parameter. Layers are found by their types.
    """
    rows = gradient_rows(model, criterion, inputs, target)
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    handles = [
        module.register_forward_hook(_keeper(seen.setdefault(name, []), module))
        for name, module in _layers(model).items()
    ]
    for x, y in zip(inputs, target, strict=True):
        criterion(model(x[None])[0], y).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    places = _places(model)
    result: list[Dense] = []
    covered: set[str] = set()
    for name, module in _layers(model).items():
        groups = getattr(module, "groups", 1)
        weight = places[f"{name}.weight"].reshape(groups, module.weight.shape[0] // groups, -1)
        bias = getattr(module, "bias", None)
        covered |= {f"{name}.weight"} | ({f"{name}.bias"} if bias is not None else set())
        for group in range(groups):
            columns = weight[group]
            if bias is not None:
                columns = np.concatenate(
                    [columns, places[f"{name}.bias"].reshape(groups, -1)[group][:, None]], 1
                )
            left, right = _factors(seen[name], module, group, groups)
            result.append(_block(name, rows, columns, left, right))
    for name, columns in places.items():
        if name not in covered:
            own = rows[:, columns]
            values, vectors = np.linalg.eigh(own.T @ own / len(own))
            result.append(Dense(name, columns, vectors, values))
    return result


def scores(
    blocks: list[Dense], training: np.ndarray, queries: np.ndarray, relative: float = 0.1
) -> np.ndarray:
    """[n, m] from gradients [n, p] and [m, p]: block by block a dense solve, damped by `relative` times the
    owner's mean eigenvalue.
    """
    total = np.zeros((len(training), len(queries)))
    for block in blocks:
        mean = np.concatenate([other.values for other in blocks if other.owner == block.owner]).mean()
        matrix = block.matrix + relative * mean * np.eye(len(block.values))
        total += training[:, block.columns] @ np.linalg.solve(matrix, queries[:, block.columns].T)
    return total / len(training)


def _block(owner: str, rows: np.ndarray, columns: np.ndarray, left: np.ndarray, right: np.ndarray) -> Dense:
    """columns: [a, b], those of the matrix's elements. left, right: second moments [a, a], [b, b]."""
    basis = np.kron(np.linalg.eigh(left)[1], np.linalg.eigh(right)[1])
    flat = columns.reshape(-1)
    return Dense(owner, flat, basis, ((rows[:, flat] @ basis) ** 2).mean(0))


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding)
    }


def _keeper(seen: list[tuple[torch.Tensor, torch.Tensor]], module: nn.Module) -> Any:
    def hook(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        output.register_hook(lambda cotangent: seen.append((inputs[0].detach(), cotangent.detach())))

    return hook


def _places(model: nn.Module) -> dict[str, np.ndarray]:
    places, start = {}, 0
    for name, parameter in model.named_parameters():
        places[name] = np.arange(start, start + parameter.numel())
        start += parameter.numel()
    return places


def _factors(
    seen: list[tuple[torch.Tensor, torch.Tensor]], module: Any, group: int, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Second moments over samples and positions: of cotangents, or of what stands at a table's rows; and of
    the other factor.
    """
    left, right = [], []
    for x, cotangent in seen:
        if isinstance(module, nn.Embedding):
            left.append(F.one_hot(x.reshape(-1), module.num_embeddings).double())
            right.append(cotangent.reshape(-1, cotangent.shape[-1]))
            continue
        if isinstance(module, nn.Conv2d):
            x = F.unfold(
                x.chunk(groups, 1)[group], module.kernel_size, module.dilation, module.padding, module.stride
            )[0].T
            cotangent = cotangent.chunk(groups, 1)[group][0].flatten(1).T
        x, cotangent = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, cotangent.shape[-1])
        right.append(x if module.bias is None else torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1))
        left.append(cotangent)
    one, other = (torch.cat(parts).numpy() for parts in (left, right))
    return one.T @ one, other.T @ other


class Tied(nn.Module):
    """An embedding that is the head's weight as well, and a packed projection that is used in slices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4)
        self.packed = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        h = torch.tanh(F.linear(h, self.packed[:4])) * F.linear(h, self.packed[4:])
        return (h @ self.table.weight.t()).mean(1)


def dense(blocks: list[KroneckerBlock], flat: Flat) -> np.ndarray:
    """[p, p]: psgrad's own blocks, applied to the unit vectors."""
    total = torch.zeros(flat.size, flat.size, dtype=torch.float64)
    for block in blocks:
        vectors = flat.split(torch.eye(flat.size, dtype=torch.float64))
        result = block.basis.vectors(
            block.basis.rotate_back(block.basis.rotate(block.basis.matrices(vectors)) * block.values)
        )
        total += flat.join(
            {name: result.get(name, torch.zeros_like(value)) for name, value in vectors.items()}
        )
    return total.numpy()
