"""A run: what its manifest says while it goes on and after it ended."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from psgrad.engine.execution.ranks import OneProcess
from psgrad.errors import OutputError, OutputExistsError
from psgrad.run import RunFolder
from psgrad.run.progress import LOADING, Progress
from psgrad.run.results.manifest import Counts, RunManifest
from psgrad.run.run import Run

BEGUN = RunManifest(command="analyze", created="2026-01-01T00:00:00+00:00", run="abc")


def opened(path: Path, **options: bool) -> Run[OneProcess]:
    return Run.open(path, OneProcess(), lambda _: None, **options)


def written(run: Run[OneProcess]) -> dict[str, Any]:
    found = RunFolder.manifest_of(run.path)
    assert found is not None
    return found


def test_run_manifest_from_beginning_to_end(tmp_path: Path) -> None:
    shown: list[Progress] = []
    run = Run.open(tmp_path / "run", OneProcess(), shown.append)
    assert shown == [LOADING]
    assert not run.path.exists()
    with run.clock("load"):
        run.say("slow")
        run.say("slow")
    with run.begin(BEGUN):
        assert written(run)["state"] == "running"
        manifest = run.add(counts=Counts(samples=3))
        assert manifest.timings.keys() == {"load"}
        with run.clock("report"):
            pass
    assert shown[1:] == [Progress(0, 0, "load", "slow")]
    ended = written(run)
    assert (ended["state"], ended["counts"], ended["created"]) == ("finished", {"samples": 3}, BEGUN.created)
    assert ended["timings"].keys() == {"load", "report"}
    assert ended["finished"] > BEGUN.created


@pytest.mark.parametrize(
    ("error", "state"), [(ValueError("no"), "failed"), (KeyboardInterrupt("no"), "interrupted")]
)
def test_run_manifest_of_a_run_that_fails(tmp_path: Path, error: BaseException, state: str) -> None:
    run = opened(tmp_path / "run")

    def fail() -> None:
        with run.begin(BEGUN):
            run.folder.rows = 7
            raise error

    with pytest.raises(type(error), match="no"):
        fail()
    ended = written(run)
    assert (ended["state"], ended["error"], ended["counts"]) == (state, "no", {"finished_samples": 7})
    assert "finished" not in ended


def test_run_that_goes_on_keeps_when_and_as_what_it_began(tmp_path: Path) -> None:
    first = opened(tmp_path / "run")
    with pytest.raises(ValueError, match="no"), first.begin(BEGUN):
        raise ValueError("no")
    with pytest.raises(OutputExistsError):
        opened(tmp_path / "run")
    again = opened(tmp_path / "run", resume=True)
    with again.begin(RunManifest(command="analyze", created="later", run="def"), again.folder):
        pass
    ended = written(again)
    assert (ended["state"], ended["created"], ended["run"]) == ("finished", BEGUN.created, "abc")
    assert "error" not in ended


def test_run_on_a_full_disk_raises_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = opened(tmp_path / "run")

    def fill() -> None:
        with run.begin(BEGUN):
            monkeypatch.setattr(os, "fsync", full)
            run.folder.write_bytes("scores.csv", b"1")

    with pytest.raises(OutputError, match=r"scores\.csv can't be written"):
        fill()
    assert written(run)["state"] == "running"
