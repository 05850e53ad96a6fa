"""The rows of an index as the methods read them, and as they lie on the disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from psgrad.engine.influence.index.rows import BLOCK, Of, RowBlock, moments
from psgrad.engine.influence.index.spec import DType, Store, projector_of, spec_of
from psgrad.errors import InfluenceError

# Up to this many columns the sums over rows, columns x columns in float64, are kept: 512 MiB.
WIDEST = 8192
# Of rows below 2^-1000 the smallest numbers are lost: the inverse of their power would not be a number.
_LEAST = -1000


class StoredRows:
    """The rows of one checkpoint of an index, a RowSource. They are read from the disk block by block each time they are asked for."""

    def __init__(self, store: Store, number: int) -> None:
        self.store, self.number = store, number
        spec = spec_of(store.description)
        self.of, self.dtype = spec.features, spec.dtype
        self.projector = projector_of(store.description, number)

    def __len__(self) -> int:
        return int(self.store.description["rows"])

    @property
    def finite(self) -> int:
        return int(self.losses_and_square_norms()[1].isfinite().sum())

    def blocks(self) -> Iterator[RowBlock]:
        for start, arrays in self.store.blocks(self.number, max(1, BLOCK // self.projector.width)):
            yield decoded(arrays, start, self.dtype)

    def losses_and_square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] float64 both, of whole gradients of the loss, NaN where one is not finite; no row is read for them."""
        parts = [found for _, found in self.store.blocks(self.number, BLOCK, ("loss", "square_norm"))]
        loss, square_norm = (torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in ("loss", "square_norm"))
        return loss, square_norm

    def moment(self, of: Of) -> torch.Tensor:
        found = self.store.read(self.number, None).get(of)
        if found is None:
            raise InfluenceError(
                f"the index has rows of {self.projector.width:,} columns, and keeps no second moment of so many",
                expected=f"at most {WIDEST:,} columns for trak and projected_influence",
                next_step="build an index with a smaller dimension, or ask this one for gradient_dot or gradient_cosine",
            )
        return torch.from_numpy(found)

    def sums(self) -> dict[str, np.ndarray]:
        """What is kept of all rows together, once they are written: their second moments, 'loss' and 'margin', where not too large."""
        kept = {"rows": np.array([len(self)])}
        if self.projector.width <= WIDEST:
            kept.update((str(of), moment.numpy()) for of, moment in moments(self).items())
        return kept


def encoded(blocks: Sequence[RowBlock], dtype: DType) -> dict[str, np.ndarray]:
    """Neighbouring blocks as arrays of one shard.

    rows: each divided by the power of two above its largest number, which is exact, so that no row is too small or too large for a half;
    bfloat16 as the uint16 of its bits. exponent: [b] of that power.
    """
    rows = torch.cat([block.rows.double() for block in blocks])
    exponent = torch.frexp(rows.abs().amax(1)).exponent.clamp(min=_LEAST)
    kept = torch.ldexp(rows, -exponent.unsqueeze(1)).to(getattr(torch, dtype))
    arrays = {
        "rows": (kept.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else kept.numpy()),
        "exponent": exponent.to(torch.int16).numpy(),
        "loss": torch.cat([block.loss for block in blocks]).numpy(),
        "square_norm": torch.cat([block.square_norm for block in blocks]).numpy(),
    }
    weights = [block.weight for block in blocks if block.weight is not None]
    return {**arrays, "weight": torch.cat(weights).numpy()} if weights else arrays


def decoded(arrays: dict[str, np.ndarray], start: int, dtype: DType) -> RowBlock:
    """A block of a shard's rows, in float64."""
    rows = torch.from_numpy(arrays["rows"].view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(arrays["rows"])
    scale = torch.from_numpy(np.ldexp(1.0, arrays["exponent"])).unsqueeze(1)
    weight = torch.from_numpy(arrays["weight"]) if "weight" in arrays else None
    loss, square_norm = torch.from_numpy(arrays["loss"]), torch.from_numpy(arrays["square_norm"])
    return RowBlock(start, start + len(rows), rows * scale, loss, square_norm, weight)
