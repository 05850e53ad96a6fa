"""Refuses writes to memory that is still needed while a function of the user runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from psgrad.engine.transforms.operators import Op, refuse_mutation, written_by
from psgrad.engine.transforms.private_torch import DisableTorchFunction, storage_key
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import innermost


@contextmanager
def read_only(values: Iterable[Any]) -> Iterator[None]:
    """Raise an error if a function of the user writes to these values or their memory, which are used
    elsewhere.
    """
    memories = {memory_of(x) for x in values if isinstance(x, torch.Tensor)}

    def refuse_writes(op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        for target in written_by(op, args, kwargs):
            if isinstance(target, torch.Tensor) and memory_of(target) in memories:
                refuse_mutation(
                    op,
                    "an argument of a function with a derivative of its own (custom_vjp, checkpoint,"
                    " autograd.Function), or a cotangent",
                    "the function's derivative is computed with the same tensor",
                )

    before = state.watchers
    state.watchers = (*before, refuse_writes)
    try:
        yield
    finally:
        state.watchers = before


def memory_of(tensor: torch.Tensor) -> int:
    """A key of the memory under all tracers; views of one tensor have the same key."""
    value = innermost(tensor)
    if not isinstance(value, torch.Tensor):
        return id(value)
    with DisableTorchFunction():  # the user's function does not call this operator
        return storage_key(value.untyped_storage())
