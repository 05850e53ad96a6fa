"""The global random number generators of PyTorch, NumPy and Python, and their states: to draw the same again."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

States = list[tuple[torch.Generator, torch.Tensor]]


def generators() -> list[torch.Generator]:
    """Those that operators draw from, unless told otherwise: the CPU's, and each GPU's once GPUs are in use."""
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def states() -> States:
    return [(generator, generator.get_state()) for generator in generators()]


def restore(saved: States) -> None:
    for generator, state in saved:
        generator.set_state(state)


@contextmanager
def kept() -> Iterator[None]:
    """PyTorch's, NumPy's and Python's generators are in the end as they were."""
    numpy = sys.modules.get("numpy")
    of_torch, of_python = states(), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        restore(of_torch)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def seed_all(numbers: Any) -> None:
    """Seed PyTorch's, NumPy's and Python's generators, by three whole numbers from 0 to 2^64 - 1."""
    of_torch, of_numpy, of_python = (int(number) for number in numbers)
    for generator in generators():
        generator.manual_seed(of_torch)
    random.seed(of_python)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed([of_numpy & 0xFFFFFFFF, of_numpy >> 32])


def torch_has_drawn() -> bool:
    """Whether one of PyTorch's generators has drawn since it was last seeded, whoever did that."""
    for generator, state in states():
        seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        if not torch.equal(state, seeded.get_state()):
            return True
    return False


def on_the_cpu() -> tuple[Any, ...]:
    """The states of the generators that a dataset may share with a model, on the CPU: Python's, NumPy's and PyTorch's; to be compared."""
    numpy = sys.modules.get("numpy")
    of_numpy = b"" if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
    return random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()


def everywhere() -> tuple[Any, ...]:
    """The same, and those on GPUs."""
    return (*on_the_cpu(), *(state.numpy().tobytes() for _, state in states()))
