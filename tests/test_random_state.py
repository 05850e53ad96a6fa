"""The states of the global random generators, which two threads of a run read: the one that computes, and
the one that reads rows ahead.
"""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from psgrad import random_state

# Each allocation is a garbage collection, of tensors that let the other thread run when they go.
THREADS = """
import faulthandler, gc, sys, threading, time
import torch
from psgrad.random_state import cpu_states

def plain():
    return torch.default_generator.get_state()

class Garbage:
    def __init__(self):
        self.itself = self
        x = torch.ones(2, requires_grad=True)
        self.tensor = x * x

def run():
    while time.time() < end:
        for _ in range(3):
            Garbage()
        read()

read = {"plain": plain, "psgrad": cpu_states}[sys.argv[1]]
seconds = float(sys.argv[2])
faulthandler.dump_traceback_later(seconds + 10, exit=True)
end = time.time() + seconds
sys.setswitchinterval(1e-6)
gc.set_threshold(1, 1, 1)
other = threading.Thread(target=run)
other.start()
run()
other.join()
"""


def ends(which: str, seconds: float) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", THREADS, which, str(seconds)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or "Timeout" in done.stderr, done.stderr
    return done.returncode == 0


@pytest.mark.long
def test_two_threads_read_the_states_of_generators() -> None:
    assert ends("psgrad", 2)


def test_states_of_all_generators_are_restored() -> None:
    before = random_state.all_states()
    with random_state.restored():
        torch.rand(2), np.random.rand(), random.random()
        assert random_state.all_states() != before
        assert len({a == b for a, b in zip(before, random_state.all_states(), strict=True)}) == 1
    assert random_state.all_states() == before
