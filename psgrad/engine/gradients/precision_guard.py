"""Norms that rounding may have spoilt: the samples are found and taken again by another way.

Which samples these are depends on data, and a recorded program can't. There the doubt is noted instead, as
one more result of the program, and whoever replays it takes the whole chunk again where it is raised. Where a
pass is only planned, on tensors without values, there are no doubts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_noted: ContextVar[list[torch.Tensor] | None] = ContextVar("noted", default=None)
_trusting: ContextVar[bool] = ContextVar("trusting", default=False)


def is_noting() -> bool:
    return _noted.get() is not None


def is_trusting() -> bool:
    return _trusting.get()


def samples_where(doubtful: torch.Tensor) -> torch.Tensor:
    """The samples [k] to take again, of a mask [n]; none while doubts are noted, or all numbers trusted."""
    noted = _noted.get()
    if noted is None and not _trusting.get():
        return torch.nonzero(doubtful).squeeze(1)
    if noted is not None:
        noted.append(doubtful.any())
    return torch.empty(0, dtype=torch.int64, device=doubtful.device)


@contextmanager
def noting() -> Iterator[list[torch.Tensor]]:
    """Doubts are collected, each a truth value, and nothing is taken again."""
    noted: list[torch.Tensor] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


@contextmanager
def trusting() -> Iterator[None]:
    """No number is doubted: the course of a pass is followed without its values."""
    token = _trusting.set(True)
    try:
        yield
    finally:
        _trusting.reset(token)
