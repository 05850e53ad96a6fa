"""A stored value: the gradient of a bias, of an affine parameter, or of any parameter without factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from psgrad.engine.gradients.terms.numerics import (
    accumulating,
    square_norm,
)
from psgrad.engine.gradients.terms.term import Term


@dataclass(frozen=True)
class Dense(Term):
    """A stored value: biases, affine parameters, values without factors or smaller than their factors."""

    value: torch.Tensor  # [n, *shape]
    materialised: bool = False  # whether it had factors
    lost_at: str = ""  # the operator at which the factors were lost; empty if none were

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.value.shape[1:])

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.value,)

    def square_norms(self) -> torch.Tensor:
        return square_norm(self.value)

    @property
    def summands(self) -> int:
        return 1

    def materialise(self) -> torch.Tensor:
        return self.value

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        value = accumulating(self.value)
        return torch.mm(
            weights.to(value.dtype).unsqueeze(0), value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)
        ).reshape(self.shape)

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        value = accumulating(self.value)
        return value.reshape(value.shape[0], vector.numel()) @ vector.reshape(-1).to(value.dtype)

    def plus(self, others: Sequence[Dense]) -> Dense:
        lost = next((term.lost_at for term in (self, *others) if term.lost_at), "")
        return replace(self, value=sum((other.value for other in others), self.value), lost_at=lost)

    def order(self) -> str:
        if self.lost_at:
            return f"materialise after {self.lost_at}"
        return "materialise" if self.materialised else "direct"

    @property
    def row_count(self) -> int | None:
        return None

    def some_rows(self, rows: slice, count: int) -> torch.Tensor:
        return self.value.reshape(self.samples, count, -1)[:, rows]
