"""Files that the processes of a run make once on a host: hashes, and tables of converted formats."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from psgrad.config import DataConfig
from psgrad.data.sources.formats.json import JSONL
from psgrad.data.sources.load import load_data, open_rows
from psgrad.errors import DataError
from psgrad.run import host_files
from psgrad.run.host_files import made_once, shared_on_host

FORMATS = {
    "rows.csv": "a,b\n1,x\n2,y\n3.5,z\n",
    "rows.tsv": "a\tb\n1\tx\n2\ty\n3.5\tz\n",
    "rows.jsonl": '{"a": 1, "b": "x"}\n\n{"a": 2, "b": "y"}\n{"a": 3.5, "b": "z"}\n',
    "rows.json": '[{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3.5, "b": "z"}]',
}


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


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_converted_once_and_its_rows_are_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / name).write_text(FORMATS[name])
    config = DataConfig(path=name, inputs="a", target="b")
    alone = open_rows(config, tmp_path)
    request.getfixturevalue("shared")
    first = open_rows(config, tmp_path)

    def again(self: Any, *arguments: Any) -> None:
        raise AssertionError("the file was converted again")

    monkeypatch.setattr(JSONL, "rows", again)
    monkeypatch.setattr("psgrad.data.sources.formats.csv.CSV.rows", again)
    monkeypatch.setattr("psgrad.data.sources.formats.json.JSON.rows", again)
    second = open_rows(config, tmp_path)
    for rows in (first, second):
        assert rows.schema == alone.schema
        assert rows.read(0, 3) == alone.read(0, 3)
        assert rows.take(np.array([2, 0])) == alone.take(np.array([2, 0]))
        assert [rows.place(row) for row in range(3)] == [alone.place(row) for row in range(3)]
        assert rows.fingerprint == alone.fingerprint
    assert host_files._folder is not None


def test_arrays_are_read_into_memory_once_and_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    x, y = np.arange(12.0).reshape(4, 3), np.array(["a", "b", "a", "c"])
    np.savez(tmp_path / "rows.npz", x=x, y=y, uid=np.array(["r0", "r1", "r2", "r3"]))
    config = DataConfig(path="rows.npz", inputs="x", target="y", id="uid")
    alone = load_data(config, tmp_path)
    request.getfixturevalue("shared")
    first = load_data(config, tmp_path)

    def again(self: Any, *arguments: Any) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr("psgrad.data.sources.formats.arrays.NPZ.arrays", again)
    second = load_data(config, tmp_path)
    for samples in (first, second):
        block, expected = samples.read(0, 4), alone.read(0, 4)
        assert torch.equal(block.inputs[0], expected.inputs[0])
        assert block.target is not None
        assert expected.target is not None
        assert torch.equal(block.target, expected.target)
        assert samples.ids.tolist() == ["r0", "r1", "r2", "r3"]
        assert samples.fingerprint == alone.fingerprint
        block.inputs[0].add_(1)  # of this process alone
    assert torch.equal(load_data(config, tmp_path).read(0, 4).inputs[0], alone.read(0, 4).inputs[0])


def test_arrays_half_written_by_a_process_that_has_died_are_written_anew(
    shared: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "rows.npz", x=np.ones((4, 3)), y=np.arange(4))
    config = DataConfig(path="rows.npz", inputs="x", target="y")
    load_data(config, tmp_path)
    (made,) = (each for each in shared.iterdir() if each.is_dir())
    made.rename(made.with_suffix(".new"))
    assert torch.equal(
        load_data(config, tmp_path).read(0, 4).inputs[0], torch.ones(4, 3, dtype=torch.float64)
    )
