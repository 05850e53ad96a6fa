"""The start of a run's processes leaves this process as it was."""

from __future__ import annotations

import signal

import pytest

from psgrad.engine.execution.launcher import launch


@pytest.mark.parametrize("code", [0, 3])
def test_launch_leaves_the_handlers_of_signals(code: int) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    assert launch(1, ["-c", f"raise SystemExit({code})"]) == code
    assert [signal.getsignal(number) for number in numbers] == before
