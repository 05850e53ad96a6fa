"""What a record needs that is kept for later (`vjp`): none of it may be written to until then.

PyTorch counts the writes to a tensor and shares the count with its views, but not with those that are taken below its autograd, as all
are inside a transform; and a write to a traced value may be none to memory at all. So a record knows each value that it needs by the
places where it stands, and is told of writes while transforms run. Of writes outside of them PyTorch's counts tell, of all tensors that
the record has seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from psgrad.engine.transforms.derivatives import DerivativeTracer
from psgrad.engine.transforms.interpreter import Tracer, innermost, state
from psgrad.engine.transforms.operators import Op, aten, written_by
from psgrad.engine.transforms.read_only import memory_of
from psgrad.errors import TransformError


class Kept:
    """The values that one record needs."""

    def __init__(self) -> None:
        self._needed: dict[int, list[weakref.ref[Any]]] = {}  # by place
        self._seen: list[tuple[weakref.ref[torch.Tensor], int]] = []  # plain tensors, and how often they had been written to
        self._others: set[Kept] = set()  # records that this one has gone back over
        self._changed: list[weakref.ref[Any]] = []
        state.kept.add(weakref.ref(self, state.kept.discard))

    def need(self, values: Iterable[Any]) -> None:
        values = list(values)
        for value in values:
            reference = weakref.ref(value)
            for place in _places(value):
                self._needed.setdefault(place, []).append(reference)
        self.see(values)

    def see(self, values: Iterable[Any]) -> None:
        """Tensors through which something needed may be written to: what a view is taken of, what is returned."""
        for tensor in map(innermost, values):
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                self._seen.append((weakref.ref(tensor), tensor._version))

    def depend_on(self, other: Kept) -> None:
        self._others.add(other)

    def watch(self, op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Told of each operator while transforms run."""
        if op is not aten.detach_.default:  # which torch.tensor(..) ends with, and which leaves the values alone
            for target in written_by(op, args, kwargs):
                self.written(target)

    def written(self, value: Any) -> None:
        """Told of each tensor that an operator writes to while transforms run."""
        for place in _places(value, written=True):
            # a place may be another's by now: what stood there then is gone
            self._changed += [reference for reference in self._needed.get(place, ()) if reference() is not None]

    def check(self) -> None:
        for reference, version in self._seen:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                self.written(tensor)
        changed = next((value for reference in self._changed if (value := reference()) is not None), None)
        if changed is not None:
            raise TransformError(
                f"a tensor of shape {tuple(changed.shape)} that vjp's function used was changed in place before vjp_fn was called",
                cause="an optimiser's step, or another operator that ends in an underscore",
                next_step="call vjp_fn before the change, or give the function a clone",
            )
        for other in self._others:
            other.check()


def _places(value: Any, *, written: bool = False) -> Iterator[int]:
    """Where a value stands: at each level the tracer that it is a view of, and below all of them the memory.

    written: only as far down as a write to it goes; derivatives' tracers are given another value, and the old one stays as it is.
    """
    while isinstance(value, Tracer):
        while (view_of := getattr(value, "view_of", None)) is not None:
            value = view_of[0]
        yield id(value)
        if written and isinstance(value, DerivativeTracer):
            return
        value = value.value
    if isinstance(value, torch.Tensor):
        yield memory_of(value)
