"""Products of float32 numbers as products of float32 numbers, whatever the machine is told to take for them.

PyTorch lets a GPU round the factors of convolutions to TF32 (10 bits) by default, and those of matrix products where it is told to; some
CPUs then take bfloat16. A norm and the sum that it clips for are different products of the same factors: so rounded, a record adds up to
a thousandth more than its bound, which no margin of `Clipping` allows for. Autocast that is on around a clipped sum does the same, and more
so; it is meant for the loss, and kept to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def with_autocast_inside(loss: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The loss under the autocast that is on where this is called, if any, for callers that turn it off around the loss."""
    if not torch.is_autocast_enabled(device.type):
        return loss
    dtype = torch.get_autocast_dtype(device.type)

    def cast(*args: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            return loss(*args)

    return cast


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """No autocast on this device, and no TF32 and no bfloat16 in place of float32. What was set before is set again afterwards."""
    backends: Any = torch.backends
    ops = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    before = [op.fp32_precision for op in ops]
    older = _older_switches()
    with _frozen_switches_too():
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = False
        for op in ops:
            op.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _frozen_switches_too():
            if older is not None:
                torch.set_float32_matmul_precision(older[0])
                backends.cudnn.allow_tf32 = older[1]
            for op, value in zip(ops, before, strict=True):
                op.fp32_precision = value


def _frozen_switches_too() -> AbstractContextManager[Any]:
    """After `torch.backends.disable_global_flags()`, as PyTorch's own tests call it, switches are set by context managers alone, which are
    made with this one."""
    switches: AbstractContextManager[Any] = getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)()
    return switches


def _older_switches() -> tuple[str, bool] | None:
    """What the switches say that PyTorch had before `fp32_precision`; None where both kinds were used: the older can't be asked then."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None
