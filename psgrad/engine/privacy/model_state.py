"""The state that a model and its loss keep from call to call, restored whenever they are called.

A private sum guarantees that a record moves it by its own clipped gradient. A model that keeps what it saw (a
running maximum, a memory, a counter) makes later records' gradients depend on earlier ones, and a buffer that
it writes into would be published without noise. A check of a few rows does not find every record that leads
to a write. So the state is restored around every run of the differentiated function: every chunk, every half
of one, every outcome of a branch, every second pass.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from psgrad.engine.privacy.kept_values import (
    BitSums,
    Kept,
    KeptNames,
    KeptTensor,
    has_bits,
    kept_of,
    place_of,
)
from psgrad.engine.privacy.reached import reached
from psgrad.engine.transforms.private_torch import DisableTorchFunction
from psgrad.errors import ModelError


class ModelState:
    """The state of a model and of all else that is called with it, as it was when this was made.

    Args:
        roots: the model, and the loss. From there on these are followed (`reached.py`): attributes of modules
            and of other objects (`__dict__` and `__slots__`), class attributes of the user's classes, dicts,
            lists, sets, deques and tuples, what functions have as closures, defaults and attributes, the
            globals that the user's own functions name, tensors and numpy arrays, by their bits. Caches of
            functools are emptied, where they are the user's own. Parameters, and tensors and arrays of the
            same memory, are not put back: only the optimiser changes them, and a write into one while a
            record is computed is refused.

    Not found are globals of installed packages, and what objects keep outside of Python (files, memory of
    ctypes). Writes by `.data` or numpy into tensors on a GPU or above 64 MiB are found at the end of a batch
    (`unwritten`). Random generators are `record_draws.py`'s.

    Attributes:
        version: how often `renew` found another state.

    Raises ModelError for an iterator of Python's own among them, whose place can't be put back.
    """

    def __init__(self, *roots: object) -> None:
        self._roots, self._kept, self.version = roots, list[tuple[str, Kept]](), 0
        self.renew()

    def renew(self) -> None:
        """Takes the present state as the one to restore."""
        self.version += bool(self.changes())
        self._kept, self._parameters = _found(self._roots)

    def changes(self) -> list[str]:
        """The places that have changed."""
        return [where for where, kept in self._kept if kept.changed()]

    def restore(self) -> None:
        """Restore all changes. Raises ModelError if that is impossible."""
        for where, kept in self._kept:
            if kept.changed():
                try:
                    kept.restore()
                except Exception as error:
                    raise _written(where, f", and it can't be put back: {error}") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context that begins and ends with the stored state. Raises ModelError if a parameter was written
        into.
        """
        with DisableTorchFunction():  # a recorder would take this for reads of the loss
            self.restore()
            before = [place_of(parameter) for _, parameter in self._parameters]
        try:
            yield
        finally:
            with DisableTorchFunction():
                self.restore()
                after = [place_of(parameter) for _, parameter in self._parameters]
        for (where, _), was, now in zip(self._parameters, before, after, strict=True):
            if now != was:
                raise _written(where, "")

    @contextmanager
    def unwritten(self) -> Iterator[None]:
        """A context, around the sum of a batch, in which no parameter changes by a bit, nor what can't be put
        back. Raises ModelError if one did, also by a write that PyTorch does not count.
        """
        before = [(where, tensor, BitSums.of(tensor)) for where, tensor in self._watched()]
        yield
        for where, tensor, was in before:
            if not was.same(BitSums.of(tensor)):
                raise _written(where, "")

    def _watched(self) -> list[tuple[str, Tensor]]:
        kept = [
            (where, own.target) for where, own in self._kept if isinstance(own, KeptTensor) and own.by_count
        ]
        return [(where, tensor) for where, tensor in [*self._parameters, *kept] if has_bits(tensor)]

    def holding(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss; every run of it begins with the stored state."""

        @functools.wraps(loss)
        def held(*arguments: Any) -> Any:
            with self.held():
                return loss(*arguments)

        return held


def _written(where: str, why: str) -> ModelError:
    return ModelError(
        f"the model or the loss wrote into {where} while a record was computed{why}",
        expected=(
            "a loss of each record that depends on no other record, and parameters that the optimiser alone"
            " changes"
        ),
        cause=(
            "a running statistic, a memory of what was seen, or a first pass that sets the model up from the"
            " data"
        ),
        next_step="compute it from what is public, or keep nothing from one call to the next",
    )


def _found(roots: tuple[object, ...]) -> tuple[list[tuple[str, Kept]], list[tuple[str, nn.Parameter]]]:
    """(where and what can change, the parameters), of all objects that can be reached from the roots."""
    everything = list(reached(roots))
    parameters = [(where, value) for where, value in everything if isinstance(value, nn.Parameter)]
    memory = _Memory(parameter for _, parameter in parameters)
    kept: list[tuple[str, Kept]] = []
    for where, value in everything:
        _require_no_iterator(where, value)
        if isinstance(value, nn.Parameter):
            kept.append((where, KeptNames(value, lambda: ["requires_grad"])))
        elif not memory.has(value) and (own := kept_of(value)) is not None:
            kept.append((where, own))
    return kept, parameters


def _require_no_iterator(where: str, value: Any) -> None:
    """Raises ModelError for an iterator of Python's own (a generator, a counter): its place can't be put
    back.
    """
    kind = type(value)
    if isinstance(value, Iterator) and kind.__module__ in ("builtins", "itertools"):
        raise ModelError(
            f"the model or the loss keeps an iterator, {where} ({kind.__name__})",
            expected="a state that can be put back after each record, so that no record depends on another",
            cause="a generator or a counter that is advanced from call to call",
            next_step="keep a number, a list and a place in it, or draw with torch",
        )


class _Memory:
    """The memory of some tensors. Another tensor with a part of it is one of these tensors under another
    name.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._spans = sorted({span for tensor in tensors if (span := _span(tensor)) is not None})

    def has(self, value: Any) -> bool:
        """Whether a tensor or an array has a part of it."""
        if not isinstance(value, (Tensor, np.ndarray)) or (span := _span(value)) is None:
            return False
        place = bisect_left(self._spans, (span[1], 0)) - 1
        return place >= 0 and self._spans[place][1] > span[0]


def _span(value: Tensor | np.ndarray[Any, Any]) -> tuple[int, int] | None:
    """(address of the first byte, and behind the last one) of a tensor or an array; None for one without
    memory of its own.
    """
    if isinstance(value, np.ndarray):
        first, end = np.lib.array_utils.byte_bounds(value)
    elif value.layout != torch.strided or value.is_meta or not value.numel():
        return None
    else:
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        first = value.data_ptr()
        end = first + (last + 1) * value.element_size()
    return (first, end) if first != end else None
