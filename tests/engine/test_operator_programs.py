"""Random programs of operators under every nest of transforms, beside a loop of torch.autograd (tests/random_programs)."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections import Counter

import pytest
import torch
from torch import Tensor

from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import grad, interpreter, jvp, vmap
from psgrad.engine.transforms.rules import registry
from tests.random_programs.allowed import is_allowed
from tests.random_programs.checking import REFUSED, Outcome, check
from tests.random_programs.shrinking import shrunk
from tests.random_programs.writer import write

PROGRAMS, BLOCKS = 200, 8
SECONDS = 60


def failure(seed: int) -> str:
    """What is wrong with the program of a seed, and the program, made small; empty where nothing is."""
    program = write(seed)
    outcome = check(program)
    if outcome.failed or (outcome.kind == REFUSED and not is_allowed(outcome.words)):
        return f"seed {seed}: {outcome.label}\n{shrunk(program)}"
    return ""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_operator_programs_fixed_seeds(block: int) -> None:
    found = [words for seed in range(block, PROGRAMS, BLOCKS) if (words := failure(seed))]
    assert not found, "\n\n".join(found)


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_random_operator_programs_seed_of_the_day(capsys: pytest.CaptureFixture[str]) -> None:
    """One minute of programs that nobody has seen; PSGRAD_PROGRAMS_SEED repeats those of another day."""
    day = int(os.environ.get("PSGRAD_PROGRAMS_SEED") or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))
    end, counts, found = time.monotonic() + SECONDS, Counter[str](), list[str]()
    seed = day * 1_000_000
    while time.monotonic() < end and len(found) < 3:
        words = failure(seed)
        counts["failed" if words else "held"] += 1
        found += [words] if words else []
        seed += 1
    with capsys.disabled():
        print(f"\nrandom programs, PSGRAD_PROGRAMS_SEED={day}: {dict(counts)}")
    assert not found, f"PSGRAD_PROGRAMS_SEED={day}\n" + "\n\n".join(found)
