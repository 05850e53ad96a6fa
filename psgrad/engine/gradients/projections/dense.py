"""Dense projections: every entry of the matrix is random, and no more than a block of it ever exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from psgrad.engine.gradients.placed import DeferredGradient
from psgrad.engine.gradients.projections.base import Per, Projection, Sums, room_of
from psgrad.engine.gradients.projections.entries import Entries, Kind, key_of
from psgrad.engine.gradients.projections.slices import slices

# Places a product is taken over at once, at most: longer float32 sums would lose digits.
WIDEST = 16384


@dataclass(frozen=True)
class Dense(Projection):
    """k x parameters independent entries, divided by sqrt(k); what `Rademacher` and `Gaussian` have in common.

    A slice of the samples' gradients is written out for a block of places, the matrix' columns of these places are made from their
    counters (`entries`), and the two are multiplied: a call makes parameters * k entries, whatever the number of samples, and takes
    samples * parameters * k products. The first is shared by the samples of a call, so chunks should be large. Rows of a table that no
    sample looked up are never made.
    """

    k: int
    seed: int = 0
    per: Per = "total"
    matrices: ClassVar[Kind]

    def __post_init__(self) -> None:
        self._check(k=self.k)

    @property
    def width(self) -> int:
        return self.k

    @property
    def scale(self) -> float:
        return self.k**-0.5

    def add(self, sums: Sums, name: str, gradient: DeferredGradient) -> None:
        add_dense(sums, self.matrices, key_of(self.seed, self.kind, name), gradient, self.k)


@dataclass(frozen=True)
class Rademacher(Dense):
    """A dense projection with entries of -1 and 1, over sqrt(k) (Achlioptas, "Database-friendly random projections", 2003).

    Var <Px, Py> = (|x|^2 |y|^2 + <x, y>^2 - 2 sum_i x_i^2 y_i^2) / k.
    """

    kind: ClassVar[str] = "rademacher"
    matrices: ClassVar[Kind] = "rademacher"


@dataclass(frozen=True)
class Gaussian(Dense):
    """A dense projection with normal entries, over sqrt(k).

    Var <Px, Py> = (|x|^2 |y|^2 + <x, y>^2) / k. The entries are the normal distribution's quantiles at 2^16 equally likely places, scaled
    to a variance of exactly one: the same bits on every device, and none beyond 4.4. To make them takes several times as long as to make
    signs, whose estimates vary no more than theirs.
    """

    kind: ClassVar[str] = "gaussian"
    matrices: ClassVar[Kind] = "gaussian"


def add_dense(sums: Sums, kind: Kind, key: int, gradient: DeferredGradient, k: int) -> None:
    """Add the gradients times a dense matrix of unscaled entries, [n, k]."""
    room = room_of(sums.device, sums.dtype)
    width = max(1, min(WIDEST, room // k))
    matrix = Entries(kind, key, k, sums.device)
    for placed in gradient.terms:
        for part in slices(placed, sums.dtype, room, width):
            for cut in part.cut(width):
                sums.add_product(cut.samples, cut.values, matrix.at(cut.place_tensor()).to(sums.dtype))
