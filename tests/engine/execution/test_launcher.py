"""The start of a run's processes: what they are given, and that this process stays as it was."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.launcher.api import LaunchConfig

from psgrad.cli import processes
from psgrad.engine.execution import launcher
from psgrad.engine.execution.launcher import launch


@pytest.mark.long
@pytest.mark.parametrize("code", [0, 3])
def test_launch_leaves_the_handlers_of_signals(code: int) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    assert launch(1, ["-c", f"raise SystemExit({code})"], cores=1) == code
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.skipif(
    "shutdown_timeout" not in LaunchConfig.__dataclass_fields__,
    reason="before PyTorch 2.12 the time is 30 seconds, whatever anybody says",
)
@pytest.mark.parametrize(("given", "seconds"), [(None, 600), ("7", 7)])
def test_ranks_that_are_asked_to_end_have_time_for_their_chunk(
    monkeypatch: pytest.MonkeyPatch, given: str | None, seconds: int
) -> None:
    """More than PyTorch gives them, unless the user says otherwise."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    found: list[Any] = []
    monkeypatch.setattr(launcher, "elastic_launch", lambda config, _: lambda *_: found.append(config))
    launch(2, [], cores=2)
    assert found[0].shutdown_timeout == seconds


@pytest.mark.long
@pytest.mark.parametrize(("given", "threads"), [(None, 3), ("2", 2)])
def test_ranks_divide_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, threads: int
) -> None:
    """Unless the user says otherwise: seven cores for two processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    write = "import os; open('threads-' + os.environ['RANK'], 'w').write(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.chdir(tmp_path)
    assert launch(2, ["-c", write], cores=7) == 0
    assert [(tmp_path / f"threads-{rank}").read_text() for rank in (0, 1)] == [str(threads)] * 2


def test_command_has_its_ranks_divide_the_cores_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 7)
    monkeypatch.setattr(launcher, "launch", lambda count, arguments, cores: 40 + cores)
    with pytest.raises(typer.Exit) as left:
        processes.start(2)
    assert left.value.exit_code == 47
