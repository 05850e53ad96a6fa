"""Exact products of float32 numbers, whatever the settings of PyTorch are.

PyTorch lets a GPU round the factors of convolutions to TF32 (10 bits) by default, and those of matrix
products where a setting says so; some CPUs then take bfloat16. A norm and the sum that it clips for are
different products of the same factors: with rounded factors a record adds up to a thousandth more than its
bound, which no margin of `Clipping` allows for. Autocast around a clipped sum has the same effect, only
larger; it is applied to the loss alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def in_full_precision(
    loss: Callable[..., Any], params: Mapping[str, torch.Tensor]
) -> Iterator[Callable[..., Any]]:
    """`full_float32` on the device of the parameters, and the loss as it runs in it: autocast that is on
    outside is on in the loss alone.
    """
    device, dtype = next(iter(params.values())).device, autocast_on(params)

    def cast(*args: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            return loss(*args)

    with full_float32(device):
        yield loss if dtype is None else cast


def autocast_on(params: Mapping[str, torch.Tensor]) -> torch.dtype | None:
    """The dtype of the autocast that is on, on the device of the parameters; None where it is off."""
    kind = next(iter(params.values())).device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """No autocast on this device, and no TF32 and no bfloat16 in place of float32. What was set before is set
    again afterwards.
    """
    backends: Any = torch.backends
    ops = (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
    )
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
    """The context in which switches can be set after `torch.backends.disable_global_flags()`, as PyTorch's
    own tests call it.
    """
    switches: AbstractContextManager[Any] = getattr(
        torch.backends, "__allow_nonbracketed_mutation", nullcontext
    )()
    return switches


def _older_switches() -> tuple[str, bool] | None:
    """The switches that PyTorch had before `fp32_precision`; None if both kinds were used: reading the older
    ones is then an error.
    """
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None
