"""A value that is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psgrad.engine.gradients.planning.costs import Cost
from psgrad.engine.gradients.planning.machines import machine
from psgrad.engine.gradients.terms.base import Term, accumulating, norms_at_least, rows_of, square_norm


@dataclass(frozen=True)
class Dense(Term):
    """A value that is there: biases, affine parameters, whatever can't be factored, and what is smaller than its factors."""

    value: torch.Tensor  # [n, *shape]
    written_out: bool = False  # whether it had factors
    lost_at: str = ""  # the operator that they did not get through, if that is why

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.value.shape[1:])

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.value,)

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Dense:
        return replace(self, value=rows_of(self.value, samples).to(dtype or self.dtype))

    def square_norms(self) -> torch.Tensor:
        return square_norm(self.value)

    @property
    def summands(self) -> int:
        return 1

    def absolute_sums(self) -> torch.Tensor:
        return norms_at_least(self.value.flatten(1) if self.value.dim() > 1 else self.value.unsqueeze(1), 1)

    def materialise(self) -> torch.Tensor:
        return self.value

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        value = accumulating(self.value)
        return torch.mm(weights.to(value.dtype).unsqueeze(0), value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)).reshape(
            self.shape
        )

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        value = accumulating(self.value)
        return value.reshape(value.shape[0], vector.numel()) @ vector.reshape(-1).to(value.dtype)

    def scaled(self, factor: float) -> Dense:
        return replace(self, value=self.value * factor)

    def kin(self) -> tuple[Any, ...]:
        return Dense, self.shape

    def plus(self, others: Sequence[Dense]) -> Dense:
        lost = next((term.lost_at for term in (self, *others) if term.lost_at), "")
        return replace(self, value=sum((other.value for other in others), self.value), lost_at=lost)

    def ways(self) -> dict[str, Cost]:
        size = math.prod(self.shape) * self.dtype.itemsize
        return {self.describe(): Cost(machine(self.device).stream_seconds(size), 0)}

    def describe(self) -> str:
        if self.lost_at:
            return f"materialise after {self.lost_at}"
        return "materialise" if self.written_out else "direct"
