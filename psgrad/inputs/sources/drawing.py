"""What the items of a dataset draw from the global generators: by their row, and nothing else moves on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_by_row(row: int) -> None:
    """An item that draws from the global generators is the same one in every process, whatever was read
    before.
    """
    torch.default_generator.manual_seed(row)
    np.random.seed(row)
    random.seed(row)


@contextmanager
def drawing_the_same() -> Iterator[None]:
    """The global generators are in the end as they were, whatever was drawn."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
