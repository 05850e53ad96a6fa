"""A folder that a process writes to is not replaced by another one, until that process has ended."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from psgrad.errors import OutputExistsError
from psgrad.run import RunFolder
from psgrad.run.durable_files import FolderLock
from psgrad.run.gradient_index import GradientIndex

pytest.importorskip("fcntl")

HOLD_RUN = "from psgrad.run import RunFolder; held = RunFolder.create(path)"
HOLD_INDEX = (
    "from psgrad.run.gradient_index import GradientIndex;"
    "held = GradientIndex.create(path, {'rows': 3, 'rows_per_shard': 2, 'checkpoints': [0]})"
)


@contextmanager
def another_process(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has run this code with `path`, and goes on until it is killed."""
    whole = (
        f"import sys; from pathlib import Path; path = Path({str(path)!r}); {code}; print('ready'); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", whole], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


@pytest.mark.long
def test_overwrite_of_a_run_that_goes_on_is_refused_until_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with another_process(HOLD_RUN, path) as child:
        for take in (RunFolder.require_free, RunFolder.create):
            with pytest.raises(OutputExistsError, match="a run that is going on writes to the folder"):
                take(path, True)
        (path / "samples.csv").write_text("kept")
        with pytest.raises(OutputExistsError, match="going on"):
            RunFolder.create(path, overwrite=True)
        assert (path / "samples.csv").exists()
        child.kill()
        child.wait()
        RunFolder.create(path, overwrite=True)
    assert not (path / "samples.csv").exists()


@pytest.mark.long
def test_overwrite_of_a_run_whose_process_let_go(tmp_path: Path) -> None:
    with another_process(f"{HOLD_RUN}; held.let_go()", tmp_path / "run"):
        RunFolder.create(tmp_path / "run", overwrite=True)


@pytest.mark.long
def test_overwrite_of_an_index_that_is_built_is_refused(tmp_path: Path) -> None:
    about = {"rows": 3, "rows_per_shard": 2, "checkpoints": [0]}
    with another_process(HOLD_INDEX, tmp_path / "index") as child:
        with pytest.raises(OutputExistsError, match="going on"):
            GradientIndex.create(tmp_path / "index", about, overwrite=True)
        child.kill()
        child.wait()
        GradientIndex.create(tmp_path / "index", about, overwrite=True)


def test_overwrite_by_the_same_process_and_several_holders(tmp_path: Path) -> None:
    """A process may begin anew where its own run failed; the parts of a run share a folder."""
    first = RunFolder.create(tmp_path / "run")
    second = RunFolder.create(tmp_path / "run", overwrite=True)
    for part in (first, second):
        part.hold()
        part.hold()
    FolderLock(tmp_path / "run", alone=True).release()
    first.let_go()
    first.let_go()
    second.let_go()


def test_folder_lock_ends_with_its_object(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    ended = lock._end
    del lock
    gc.collect()
    assert not ended.alive
