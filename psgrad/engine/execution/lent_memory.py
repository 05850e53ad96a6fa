"""Memory of the CPU that widened weights take in turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from psgrad.engine.transforms.private_torch import tree_leaves

# Bytes. Smaller numbers lie in the C library's memory, larger ones are rare; what lies here is not given back.
_LEAST, _MOST = 1 << 20, 1 << 26
_spare: list[Tensor] = []  # at most one, flat, in bytes


class Lent:
    """The memory that the numbers of one operator's weights take while it runs.

    New memory is filled with zeros by the system, page by page, which takes as long as widening. So each
    operator gets what the one before has left.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def widened(self, narrow: Tensor, dtype: torch.dtype) -> Tensor:
        """`narrow.to(dtype)`, valid until `end`."""
        size = narrow.numel() * dtype.itemsize
        dense = narrow.is_contiguous() or (narrow.dim() == 2 and narrow.t().is_contiguous())
        if narrow.dtype == dtype or narrow.device.type != "cpu" or not dense or not _LEAST <= size <= _MOST:
            return narrow.to(dtype)
        try:
            memory = _spare.pop()
        except IndexError:
            memory = None
        if memory is None or memory.nbytes < size:
            memory = torch.empty(size, dtype=torch.uint8)
        self._memory.append(memory)
        return memory[:size].view(dtype).as_strided(narrow.shape, narrow.stride()).copy_(narrow)

    def end(self, result: Any) -> None:
        """The operator has run. Memory that its result lies in stays the result's."""
        used = {x.untyped_storage().data_ptr() for x in tree_leaves(result) if type(x) is Tensor}
        for memory in self._memory:
            if memory.untyped_storage().data_ptr() not in used:
                _spare[:] = [max((memory, *_spare), key=lambda each: each.nbytes)]
