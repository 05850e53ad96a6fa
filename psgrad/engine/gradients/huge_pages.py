"""Memory for results of the size samples x parameters, on a CPU.

Such a result is memory that nobody has touched: the system hands it out a page at a time, each by an interrupt, and that takes longer
than writing the numbers (measured for 400 MB: 180 ms of the system's time, 20 ms of writing). Pages of 2 MB in place of 4 kB bring it
down to a quarter. Most Linux systems give them to those who ask (`madvise`); PyTorch's allocator does not, NumPy's does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

# Smaller results are as fast from PyTorch's allocator, which reuses memory that has been touched. NumPy asks from 4 MB on.
FROM_BYTES = 16 << 20
_ALIGNMENT = 64  # bytes, as PyTorch's allocator aligns


def room(shape: Sequence[int], factors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """An uninitialised tensor of this shape for an operator on the factors to write into, of their dtype; None where the operator had
    better allocate by itself: on a GPU, for small results, without NumPy, and where something follows what operators do (a trace, a
    tracer, PyTorch's autograd).
    """
    first = factors[0]
    size = math.prod(shape) * first.element_size()
    if size < FROM_BYTES or any(type(x) is not torch.Tensor or x.device.type != "cpu" or x.dtype != first.dtype for x in factors):
        return None
    if _get_current_dispatch_mode() is not None or (torch.is_grad_enabled() and any(x.requires_grad for x in factors)):
        return None
    try:
        import numpy as np
    except ImportError:  # the engine does without
        return None
    raw = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(first.dtype).view(tuple(shape))
