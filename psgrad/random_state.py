"""The global random generators, PyTorch's, NumPy's and Python's: their states, kept and compared."""

from __future__ import annotations

import gc
import pickle
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

States = list[tuple[torch.Generator, torch.Tensor]]

_reading = threading.Lock()


def state_of(generator: torch.Generator) -> torch.Tensor:
    """`generator.get_state()`, which any thread may call.

    PyTorch holds the generator's lock while it makes the tensor that it returns. A garbage collection there
    may let another thread run. If that thread asks for the state too, it waits for it, and keeps the lock
    of Python while it waits, so that neither thread ever goes on. So there is no collection here.
    """
    with _reading:
        collects = gc.isenabled()
        gc.disable()
        try:
            return generator.get_state()
        finally:
            if collects:
                gc.enable()


def generators() -> list[torch.Generator]:
    """The default generators of operators: the CPU's, and each GPU's once GPUs are in use."""
    of_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *of_gpus]


def states(of: Sequence[torch.Generator] | None = None) -> States:
    """The generators `of`, or PyTorch's default ones, with their states."""
    return [(generator, state_of(generator)) for generator in (generators() if of is None else of)]


def restore(saved: States) -> None:
    for generator, before in saved:
        generator.set_state(before)


@contextmanager
def torch_restored(of: Sequence[torch.Generator] | None = None) -> Iterator[None]:
    """A context that restores these generators, or PyTorch's default ones, at the end."""
    before = states(of)
    try:
        yield
    finally:
        restore(before)


@contextmanager
def restored() -> Iterator[None]:
    """A context that restores PyTorch's, NumPy's and Python's generators at the end."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch_restored():
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


def cpu_states() -> tuple[Any, ...]:
    """The states of the generators that a dataset may share with a model, on the CPU: Python's, NumPy's and
    PyTorch's; for comparison.
    """
    numpy = sys.modules.get("numpy")
    of_numpy = b"" if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
    return random.getstate(), of_numpy, state_of(torch.default_generator).numpy().tobytes()


def all_states() -> tuple[Any, ...]:
    """The states of `cpu_states` and of the generators on GPUs."""
    return (*cpu_states(), *(state.numpy().tobytes() for _, state in states()))
