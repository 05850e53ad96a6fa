"""Random generators that the user's code holds, seeded by record and step as the global ones are.

`rng = np.random.default_rng(0)` in a dataset or an augmentation advances from call to call, so a record's
draws depend on the records that were read before it; and with a known seed the draws are known. Such
generators are found (`reached.py`), and seeded from the run's secret key wherever the global ones are.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from psgrad.engine.privacy.reached import GENERATORS, reached

# Containers with more parts are rows of a dataset, which hold no generators.
_MOST = 10_000


class OwnGenerators:
    """The random generators that can be reached from some objects: a dataset, an augmentation, a model, a
    loss.

    Those of PyTorch (on any device), NumPy and Python; not those of other libraries, nor those that draw from
    the operating system.
    """

    def __init__(self, *roots: object) -> None:
        self._found: list[Any] = [
            value for _, value in reached(roots, _MOST) if isinstance(value, GENERATORS)
        ]

    def __len__(self) -> int:
        return len(self._found)

    def states(self) -> tuple[bytes, ...]:
        """The state of each, to be compared."""
        return tuple(pickle.dumps(_state(generator)) for generator in self._found)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The states are restored at the end."""
        before = [_state(generator) for generator in self._found]
        try:
            yield
        finally:
            for generator, state in zip(self._found, before, strict=True):
                _restore(generator, state)

    def seed(self, numbers: Sequence[int]) -> None:
        """Seed each by a whole number from 0 to 2^64 - 1 of its own."""
        for generator, number in zip(self._found, numbers, strict=True):
            _seed(generator, int(number))


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    return (
        generator.bit_generator.state
        if isinstance(generator, np.random.Generator)
        else generator.get_state(legacy=False)
    )


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        if state is not None:
            generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _seed(generator: Any, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    else:  # NumPy's, the old one and the new
        bits = (
            generator.bit_generator
            if isinstance(generator, np.random.Generator)
            else generator._bit_generator
        )
        _restore(generator, type(bits)(number).state)
