"""Finds the samples whose norms rounding may have made wrong, so that they are computed again in a safer way.

Which samples these are depends on the data, and a captured program can't depend on data. While a program is
captured or replayed, a flag is returned as one more result instead: where it is true, the whole chunk is
computed again without the program. Where a pass is only planned, on tensors without values, nothing is
checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_flags: ContextVar[list[torch.Tensor] | None] = ContextVar("flags", default=None)
_unchecked: ContextVar[bool] = ContextVar("unchecked", default=False)


def is_flagging() -> bool:
    """Whether inaccurate samples are flagged, and not computed again."""
    return _flags.get() is not None


def is_unchecked() -> bool:
    """Whether nothing is checked."""
    return _unchecked.get()


def samples_to_recompute(inaccurate: torch.Tensor) -> torch.Tensor:
    """The samples [k] of a mask [n]; none inside `flagging`, which gets a flag, and inside `unchecked`."""
    flags = _flags.get()
    if flags is None and not _unchecked.get():
        return torch.nonzero(inaccurate).squeeze(1)
    if flags is not None:
        flags.append(inaccurate.any())
    return torch.empty(0, dtype=torch.int64, device=inaccurate.device)


@contextmanager
def flagging() -> Iterator[list[torch.Tensor]]:
    """Flags [] bool are collected in the list, and no sample is computed again."""
    flags: list[torch.Tensor] = []
    token = _flags.set(flags)
    try:
        yield flags
    finally:
        _flags.reset(token)


@contextmanager
def unchecked() -> Iterator[None]:
    """No sample is flagged or computed again, as on tensors without values."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)
