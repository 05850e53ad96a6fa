"""One private step by several processes of torch.distributed: each takes its share of the batch, and noise is
drawn once.

Every process runs the same program: the same `PrivateTraining`, with a `SharedGenerator` around the first
process's generator and a `shared_source` around its own share of the batch. The draws, the sums and so the
weights are then the same everywhere. Noise of standard deviation multiplier * sensitivity is on the sum over
all processes, once; a draw in each of them would add up to another one.

Only tensors travel: nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from psgrad.engine.privacy.batches import ClippedSum, GradientSource, RecordColumns
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import Generator


class SharedGenerator(Generator):
    """The first process's generator for all processes: each number is drawn there and broadcast.

    Args:
        generator: the first process's. That of the other processes is ignored; they may pass None.
        group: the processes; None for all.
    """

    def __init__(self, generator: Generator | None, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._own = generator if dist.get_rank(group) == 0 else None
        if dist.get_rank(group) == 0 and generator is None:
            raise ValueError("the first process of a group draws the numbers, and needs a generator")
        self.name = (
            f"of the first process: {generator.name}" if generator is not None else "of the first process"
        )
        own = torch.tensor(
            [float(self._own.secure), self._own.reach] if self._own is not None else [0.0, 0.0],
            dtype=torch.float64,
        )
        secure, self.reach = self._broadcast(own).tolist()
        self.secure = bool(secure)

    def uint64(self, n: int) -> np.ndarray:
        drawn = (
            torch.from_numpy(self._own.uint64(n).view(np.int64))
            if self._own is not None
            else torch.empty(n, dtype=torch.int64)
        )
        return self._broadcast(drawn).numpy().view(np.uint64)

    def normal(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        if self._own is not None:
            return self._broadcast(self._own.normal(shape, dtype, device))
        return self._broadcast(torch.empty(tuple(shape), dtype=dtype, device=device))

    def _broadcast(self, numbers: Tensor) -> Tensor:
        dist.broadcast(numbers, src=_first_of(self._group), group=self._group)
        return numbers


def share_of(records: np.ndarray, group: dist.ProcessGroup | None = None) -> np.ndarray:
    """[k]: the part of a batch's records [n] that this process takes; each is taken by one process."""
    return records[dist.get_rank(group) :: dist.get_world_size(group)]


def shared_source(source: GradientSource, group: dist.ProcessGroup | None = None) -> GradientSource:
    """The clipped sum over all processes' shares, on each of them; `source` is this process's. The records
    are all processes', too.
    """

    def found(clipping: Clipping) -> ClippedSum:
        mine = source(clipping)
        sums = {name: value.clone() for name, value in mine.sums.items()}
        for value in sums.values():
            dist.all_reduce(value, group=group)
        return replace(mine, sums=sums, records=_gathered(mine.records, group))

    return found


def paid_once(pay: Callable[..., None], group: dist.ProcessGroup | None = None) -> Callable[..., None]:
    """`pay` in the first process alone, while the others wait for it: no share is released before the whole
    is paid for.

    Where paying fails, the first process raises that error, and the others a RuntimeError: nothing is
    released.
    """

    def paid(*event: Any) -> None:
        error: Exception | None = None
        if dist.get_rank(group) == 0:
            try:
                pay(*event)
            except Exception as raised:
                error = raised
        failed = torch.tensor([int(error is not None)])
        dist.broadcast(failed, src=_first_of(group), group=group)
        if error is not None:
            raise error
        if failed.item():
            raise RuntimeError(
                "the first process could not write the step into the ledger, so nothing is released"
            )

    return paid


def _first_of(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_global_rank(group, 0)


def _gathered(mine: RecordColumns, group: dist.ProcessGroup | None) -> RecordColumns:
    """The columns of all processes, one after the other: as one matrix, filled up to the longest share."""
    columns = [mine.norms, mine.losses.double(), mine.below.double(), *mine.factors.T]
    matrix = torch.stack(columns, 1)  # [n, 3 + groups]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(matrix)]), group=group)
    longest = int(max(sizes))
    filled = torch.cat([matrix, matrix.new_zeros(longest - len(matrix), matrix.shape[1])])
    parts = [torch.zeros_like(filled) for _ in sizes]
    dist.all_gather(parts, filled, group=group)
    whole = torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])
    return RecordColumns(
        norms=whole[:, 0], losses=whole[:, 1], below=whole[:, 2].bool(), factors=whole[:, 3:]
    )
