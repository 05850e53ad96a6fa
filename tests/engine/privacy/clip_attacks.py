"""Records that are made to add more to a clipped sum than its bound, for every kind of term, and what they do
add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.privacy.batches import batch_source
from psgrad.engine.privacy.clipping import Clipping
from tests.engine.privacy.clipped_loop import distance

Params = dict[str, Tensor]
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of term, and the loss whose gradient has it.

    Attributes:
        params: name -> shape. inputs: the shapes of one record's inputs, positions first; the gradient is
        linear in the last one. loss: (params, *inputs) to a number, and nothing but products and sums of
        them, so that no rounding depends on other records. rows: of the table that the first input is an
        index into; 0 where it is no index.
    """

    params: dict[str, tuple[int, ...]]
    inputs: tuple[tuple[int, ...], ...]
    loss: Callable[..., Tensor]
    rows: int = 0

    def make_params(self, dtype: torch.dtype, random: torch.Generator) -> Params:
        return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in self.params.items()}

    def record(self, dtype: torch.dtype, random: torch.Generator) -> Inputs:
        drawn = [torch.randn(shape, generator=random).to(dtype) for shape in self.inputs]
        if self.rows:
            drawn[0] = torch.randint(self.rows, self.inputs[0], generator=random)
        return tuple(drawn)


def product(p: Params, x: Tensor, k: Tensor) -> Tensor:
    return ((x @ p["w"].t()) * k).sum()


def conv(**options: int) -> Callable[..., Tensor]:
    return lambda p, x, k: (F.conv2d(x, p["w"], **options) * k).sum()  # type: ignore[arg-type]


KINDS: dict[str, Kind] = {
    "product, few positions": Kind({"w": (7, 5)}, ((4, 5), (4, 7)), product),
    "product, many positions": Kind({"w": (7, 5)}, ((64, 5), (64, 7)), product),
    "product and bias": Kind(
        {"w": (5, 7), "b": (5,)}, ((6, 7), (6, 5)), lambda p, x, k: (F.linear(x, p["w"], p["b"]) * k).sum()
    ),
    "product, one position": Kind(
        {"w": (7, 5)}, ((2, 5), (2, 7)), lambda p, x, k: (p["w"] @ x.sum(0)) @ k.sum(0)
    ),
    "grouped product": Kind(
        {"w": (3, 4, 5)},
        ((6, 3, 5), (6, 3, 4)),
        lambda p, x, k: (torch.einsum("tgb,gab->tga", x, p["w"]) * k).sum(),
    ),
    "convolution, kernel 1": Kind({"w": (6, 4, 1, 1)}, ((2, 4, 3, 3), (2, 6, 3, 3)), conv()),
    "convolution, kernel 1 over positions": Kind(
        {"w": (6, 4, 1)}, ((16, 4), (16, 6)), lambda p, x, k: (F.conv1d(x.t()[None], p["w"])[0].t() * k).sum()
    ),
    "convolution, kernel 3": Kind({"w": (6, 4, 3, 3)}, ((2, 4, 6, 6), (2, 6, 4, 4)), conv()),
    "convolution, few channels": Kind({"w": (6, 1, 3, 3)}, ((2, 1, 6, 6), (2, 6, 4, 4)), conv()),
    "convolution, large matrices": Kind({"w": (136, 128, 2, 1)}, ((2, 128, 3, 2), (2, 136, 2, 2)), conv()),
    "convolution, groups and strides": Kind(
        {"w": (6, 2, 3, 3)}, ((2, 4, 7, 7), (2, 6, 3, 3)), conv(groups=2, stride=2)
    ),
    "embedding": Kind(
        {"w": (5, 6)}, ((8,), (8, 6)), lambda p, i, k: (F.embedding(i, p["w"]) * k).sum(), rows=5
    ),
    "large embedding": Kind(
        {"w": (50, 6)}, ((8,), (8, 6)), lambda p, i, k: (F.embedding(i, p["w"]) * k).sum(), rows=50
    ),
    "dense": Kind({"w": (6,)}, ((4, 6), (4, 6)), lambda p, x, k: (x * p["w"] * k).sum()),
    "hadamard, one position": Kind(
        {"w": (7, 5)}, ((2, 5), (2, 7)), lambda p, x, k: ((p["w"] * MASK.to(p["w"])) @ x.sum(0)) @ k.sum(0)
    ),
    "hadamard, positions": Kind(
        {"w": (7, 5)}, ((4, 5), (4, 7)), lambda p, x, k: ((x @ (p["w"] * MASK.to(p["w"])).t()) * k).sum()
    ),
    "multiples": Kind(
        {"w": (7, 5)},
        ((4, 5), (4, 7)),
        lambda p, x, k: ((x @ p["w"].t()) * k).sum() + p["w"].square().sum() * k.sum(),
    ),
    "a weight and its transpose": Kind(
        {"w": (6, 6)},
        ((4, 6), (4, 6)),
        lambda p, x, k: ((x[:2] @ p["w"].t()) * k[:2]).sum() + ((k[2:] @ p["w"]) * x[2:]).sum(),
    ),
    "a weight in parts": Kind(
        {"w": (6, 5)},
        ((4, 5), (4, 6)),
        lambda p, x, k: product(p, x[:2], k[:2]) + (x[2:] @ p["w"][:4].t() * k[2:, :4]).sum(),
    ),
    "a tied table": Kind(
        {"w": (6, 5)},
        ((4,), (4, 5), (4, 6)),
        lambda p, i, x, k: (
            (F.embedding(i[:2], p["w"]) * x[:2] * k[:2, :5]).sum() + ((x[2:] @ p["w"].t()) * k[2:]).sum()
        ),
        rows=6,
    ),
}
MASK = torch.tensor([[1.5, 0.25, 3.0, 0.0, 1.0]] * 7)


def cancelling(record: Inputs, scale: float, rest: float) -> Inputs:
    """The record with positions in its second half that take back what the first half adds, but for a share
    `rest` of it.
    """
    result = []
    for place, x in enumerate(record):
        half = len(x) // 2
        last = place == len(record) - 1
        first = x[:half] * scale if last else x[:half]
        result.append(torch.cat([first, (-first * (1 + rest)).to(x.dtype) if last else first]))
    return tuple(result)


def with_a_remainder(record: Inputs, scale: float) -> Inputs:
    """The record whose positions cancel exactly in pairs, but for the last ones, which are not scaled."""
    result = list(cancelling(record, scale, 0.0))
    for place, x in enumerate(record):
        quarter = len(x) // 4
        if quarter:
            result[place] = torch.cat([result[place][: len(x) - quarter], x[-quarter:]])
            if place == len(record) - 1:  # those whose partners are gone
                result[place][len(x) // 2 - quarter : len(x) // 2] = 0
    return tuple(result)


def contribution(
    kind: Kind,
    params: Params,
    clipping: Clipping,
    others: list[Inputs],
    record: Inputs,
) -> float:
    """How far the sums with and without the record are apart, in float64: the largest share of a group's
    bound.
    """
    sums = []
    for records in ([*others, record], others):
        batch = (
            [torch.stack(column) for column in zip(*records, strict=True)]
            if records
            else [x[None][:0] for x in record]
        )
        sums.append(batch_source(kind.loss, params, *batch)(clipping).sums)
    assert all(value.isfinite().all() for value in sums[0].values())
    with_it, without = sums
    return max(
        distance(
            {name: with_it[name] for name in group.parameters},
            {name: without[name] for name in group.parameters},
        )
        / group.bound
        for group in clipping.groups
    )


def clippings(names: list[str]) -> Iterator[Clipping]:
    yield Clipping.flat(names, 1.0)
    yield Clipping.per_parameter(names, 0.3)
    yield Clipping.per_layer(names, 2.0, rule="automatic")


def ascend(kind: Kind, params: Params, record: Inputs, steps: int) -> Iterator[Inputs]:
    """Records whose gradient becomes smaller beside their inputs: gradient descent on the logarithm of the
    one over the other.
    """
    exact = {name: value.double().requires_grad_() for name, value in params.items()}
    free = [x.double().clone().requires_grad_() if x.is_floating_point() else x for x in record]
    moved = [x for x in free if x.is_floating_point()]
    optimizer = torch.optim.Adam(moved, lr=0.1)
    for _ in range(steps):
        gradients = torch.autograd.grad(kind.loss(exact, *free), list(exact.values()), create_graph=True)
        norm = sum((g.square().sum() for g in gradients), torch.zeros((), dtype=torch.float64))
        objective = (norm + 1e-300).log() - sum(
            (x.square().sum().log() for x in moved), torch.zeros((), dtype=torch.float64)
        )
        grads = torch.autograd.grad(objective, moved)
        for x, g in zip(moved, grads, strict=True):
            x.grad = g.nan_to_num()
        optimizer.step()
        yield tuple(x.detach().to(old.dtype) for x, old in zip(free, record, strict=True))
