"""The parts of the sweep, which `.ci/run` takes day by day."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = "tests/engine/privacy/test_clip_bound.py"


def collected(part: str | None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PSGRAD_SWEEP_PART"}
    if part is not None:
        environment["PSGRAD_SWEEP_PART"] = part
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-m", "", FILE]
    done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.startswith(FILE)]


@pytest.mark.sweep
def test_each_test_of_the_sweep_is_in_one_part() -> None:
    """Tests outside of the sweep are in all of them."""
    every, parts = collected(None), [set(collected(f"{number}/3")) for number in (1, 2, 3)]
    always = set.intersection(*parts)
    assert always
    assert all(part - always for part in parts)
    assert set.union(*parts) == set(every)
    assert sum(len(part - always) for part in parts) == len(set(every) - always)
