"""CPU memory that is reused for one widened weight after another."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from psgrad.engine.transforms.private_torch import tree_leaves

# Bytes. For smaller weights the C library keeps memory. Memory that is kept here is not given back, so larger
# weights don't use it.
_LEAST, LARGEST_REUSED = 1 << 20, 1 << 26
_spare: list[Tensor] = []  # at most one, flat, in bytes
_taking = threading.Lock()


class ReusedMemory:
    """The memory that the numbers of one operator's weights take while it runs.

    New memory is filled with zeros by the system, page by page, which takes as long as widening. So each
    operator gets the memory of the one before.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def widened(self, narrow: Tensor, dtype: torch.dtype) -> Tensor:
        """`narrow.to(dtype)`, valid until `end`."""
        size = narrow.numel() * dtype.itemsize
        dense = narrow.is_contiguous() or (narrow.dim() == 2 and narrow.t().is_contiguous())
        plain = type(narrow) is Tensor and narrow.device.type == "cpu"  # and no tensor without values
        if narrow.dtype == dtype or not plain or not dense or not _LEAST <= size <= LARGEST_REUSED:
            return narrow.to(dtype)
        with _taking:
            memory = _spare.pop() if _spare else torch.empty(0)
        if memory.nbytes < size:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._memory.append(memory)
        return memory[:size].view(dtype).as_strided(narrow.shape, narrow.stride()).copy_(narrow)

    def end(self, result: Any) -> None:
        """The operator has run. Memory that its result lies in stays the result's."""
        used = {x.untyped_storage().data_ptr() for x in tree_leaves(result) if type(x) is Tensor}
        for memory in self._memory:
            if memory.untyped_storage().data_ptr() not in used:
                with _taking:
                    _spare[:] = [max((memory, *_spare), key=lambda each: each.nbytes)]
