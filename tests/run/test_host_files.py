"""Files that the processes of a run make once on a host."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psgrad.errors import DataError
from psgrad.run.host_files import made_once, shared_on_host


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this host's processes."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with shared_on_host("a run", removes=True):
        (folder,) = (tmp_path / "temporary").iterdir()
        yield folder
    assert not folder.exists()


def _make(target: Path, log: Path, seconds: float = 0.0) -> None:
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(seconds)
    target.write_text("content")


def _come(log: Path, answers: Any) -> None:
    found = made_once("content", lambda target: _make(target, log, 0.2))
    answers.put(None if found is None else found.read_text())


def test_one_process_makes_the_file_and_all_read_it(shared: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    ranks = [context.Process(target=_come, args=(tmp_path / "log", answers)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    assert [answers.get(timeout=20) for _ in ranks] == ["content"] * 4
    for rank in ranks:
        rank.join()
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_process_alone_shares_nothing(tmp_path: Path) -> None:
    assert made_once("content", lambda target: _make(target, tmp_path / "log")) is None
    assert not (tmp_path / "log").exists()


def test_a_disk_that_is_full_leaves_each_process_to_itself(shared: Path) -> None:
    def make(target: Path) -> None:
        target.write_text("a part of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    assert made_once("content", make) is None
    assert list(shared.iterdir()) == []


def test_another_content_is_another_file(shared: Path, tmp_path: Path) -> None:
    found = [made_once(name, lambda target: _make(target, tmp_path / "log")) for name in ("a", "b", "a")]
    assert found[0] == found[2] != found[1]
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_a_file_whose_maker_has_died_is_made_by_the_next(shared: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    dead = context.Process(target=made_once, args=("content", lambda target: os._exit(1)))
    dead.start()
    dead.join()
    assert list(shared.glob("*.lock"))
    found = made_once("content", lambda target: _make(target, tmp_path / "log"))
    assert found is not None
    assert found.read_text() == "content"


def test_what_the_maker_raises_is_raised_and_the_next_one_tries(shared: Path, tmp_path: Path) -> None:
    def fails(target: Path) -> None:
        raise DataError("a damaged file")

    with pytest.raises(DataError, match="a damaged file"):
        made_once("content", fails)
    assert made_once("content", lambda target: _make(target, tmp_path / "log")) is not None


def test_a_folder_that_others_can_open_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with shared_on_host("a run", removes=False):
        pass
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o755)
    with shared_on_host("a run", removes=True):
        assert made_once("content", lambda target: target.touch()) is None
