"""kill -9 at operations on the disk: the ledger never lags a release, no checkpoint is torn, the run goes on,
and mistakes would be found.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psgrad.errors import CheckpointError
from psgrad.run import durable_files
from psgrad.run.ledger import Ledger
from tests.crashes import Tell, in_a_child, kill_and_resume, points_of
from tests.run.runs import Run, check, go


@pytest.mark.long
def test_kill_and_resume(tmp_path: Path) -> None:
    # at every third operation; test_kill_dp_step.py takes every one, of the real run
    points = points_of(go, tmp_path / "undisturbed")
    for at in range(1, points + 1, 3):
        assert kill_and_resume(go, check, tmp_path / str(at), [at]) == 1


@pytest.mark.long
def test_kill_repeatedly_and_resume(tmp_path: Path) -> None:
    # no progress but in the ledger: each process dies before its first checkpoint
    path = tmp_path / "run"
    crashes = points_of(go, tmp_path / "undisturbed") // 2
    assert kill_and_resume(go, check, path, [crashes, *[8] * 10]) == 11
    content = Ledger.read(path / "public" / "ledger.jsonl")
    assert sum(line["kind"] == "resume" for line in content.lines) >= 10


# -- What the harness is for: each of these is a mistake that it finds ---------------------------------------


class PaysLate(Run):
    def pay(self, step: int) -> None:
        self.tell({"step": step + 1, "line": self.ledger.position, "value": None})
        super().pay(step)


class KeepsInPlace(Run):
    def keep(self, data: bytes) -> None:
        with self.folder.checkpoint.open("wb", buffering=0) as file:
            durable_files.write_all(file.fileno(), data)


class ReleasesInPlace(Run):
    def release(self, content: dict[str, Any]) -> None:
        with (self.path / "public" / "step.json").open("wb", buffering=0) as file:
            durable_files.write_all(file.fileno(), json.dumps(content).encode())
        self.tell(content)


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("mistake", "words"),
    [(PaysLate, "the ledger lags a release"), (KeepsInPlace, "is damaged"), (ReleasesInPlace, "is torn")],
)
def test_kill_check_finds_planted_mistake(tmp_path: Path, mistake: type[Run], words: str) -> None:
    def wrong(path: Path, tell: Tell) -> None:
        mistake(path, tell)()

    points = points_of(wrong, tmp_path / "undisturbed")

    def all_kills() -> None:
        for at in range(1, points + 1):
            kill_and_resume(wrong, check, tmp_path / str(at), [at])

    with pytest.raises((AssertionError, CheckpointError), match=words):
        all_kills()


@pytest.mark.long
def test_write_atomically_killed_at_each_operation(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    result = []
    for at in range(1, 8):
        target.write_bytes(b"old")
        ended = in_a_child(lambda _: durable_files.write_atomically(target, b"new content"), at)
        temporary = [path.read_bytes() for path in durable_files.leftovers_of(target)]
        result.append((ended.killed, target.read_bytes(), temporary))
        for path in durable_files.leftovers_of(target):
            path.unlink()
    assert result == [
        (True, b"old", []),  # before the temporary file is opened
        (True, b"old", [b""]),  # before it is written
        (True, b"old", [b"new c"]),  # in the middle of it
        (True, b"old", [b"new content"]),  # before it is synced
        (True, b"old", [b"new content"]),  # before it is renamed
        (True, b"new content", []),  # before the folder is synced
        (False, b"new content", []),
    ]
