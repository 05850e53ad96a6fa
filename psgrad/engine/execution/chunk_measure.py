"""The interface of the measures that a stream calls for each chunk, and the columns that they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class ChunkMeasure(Protocol):
    """Something that is computed from deferred gradients, sample by sample.

    A chunk may be tried more than once, so what a measure gathers over the whole dataset counts from `keep`
    on.

    needs_factors: whether it needs more than norms, losses and aux. Where no measure does, the factors of
    one parameter's gradient are dropped before the next one's are complete.
    """

    needs_factors: bool

    def columns(self, gradients: Any) -> dict[str, torch.Tensor]:
        """name -> [n], for the samples of one chunk, which come in dataset order."""

    def keep(self) -> None:
        """The chunk that `columns` was last asked about is done."""


@dataclass(frozen=True)
class Columns:
    """What the measures computed of the rows start, ..., stop - 1."""

    start: int
    stop: int
    values: dict[str, torch.Tensor]

    @classmethod
    def of_chunks(cls, parts: Sequence[Columns]) -> Columns:
        """The columns of one chunk after another, as those of one range of rows."""
        values = {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values}
        return cls(parts[0].start, parts[-1].stop, values)


def on_the_cpu(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Columns on the CPU. From a GPU all of them are under way before any is waited for."""
    copies = {name: column.detach().to("cpu", non_blocking=True) for name, column in values.items()}
    for device in {column.device for column in values.values() if column.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies
