"""Selects the samples whose norms may be wrong by rounding, so that they are computed again in a safer order
or precision.

The selection depends on the data, and a captured program can't depend on data. So while a program is captured
or replayed, a flag is one more result. If it is true, the whole chunk is computed again without the program.
If a pass only runs on tensors without values, for a plan, nothing is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_flags: ContextVar[list[torch.Tensor] | None] = ContextVar("flags", default=None)
_unchecked: ContextVar[bool] = ContextVar("unchecked", default=False)


def is_flagging() -> bool:
    """Whether a flag is set for inaccurate samples in place of computing them again."""
    return _flags.get() is not None


def is_unchecked() -> bool:
    """Whether nothing is checked."""
    return _unchecked.get()


def samples_to_recompute(inaccurate: torch.Tensor) -> torch.Tensor:
    """The indices [k] of the samples in a mask [n]. None inside `unchecked`; inside `flagging` a flag is
    added instead.
    """
    flags = _flags.get()
    if flags is None and not _unchecked.get():
        return torch.nonzero(inaccurate).squeeze(1)
    if flags is not None:
        flags.append(inaccurate.any())
    return torch.empty(0, dtype=torch.int64, device=inaccurate.device)


@contextmanager
def flagging() -> Iterator[list[torch.Tensor]]:
    """A context in which no sample is computed again. Yields the list to which flags, bool [], are added."""
    flags: list[torch.Tensor] = []
    token = _flags.set(flags)
    try:
        yield flags
    finally:
        _flags.reset(token)


@contextmanager
def unchecked() -> Iterator[None]:
    """A context without checks, for tensors without values."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)
