"""kill -9 at every durable operation: the ledger never lags a release, no checkpoint is torn, and the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from psgrad.engine.privacy.snapshot import Snapshot
from psgrad.errors import CheckpointError
from psgrad.storage import Ledger, PrivateRunFolder, crash, files
from psgrad.storage.ledger_lines import has_begun
from tests.crashes import Tell, in_a_child, kill_and_resume, points_of

PLANNED = 3
HEADER = {"delta": 1e-5, "planned": PLANNED}


class Run:
    """A run of a few steps, kept as `psgrad dp-step` keeps its own. The parts are methods, so that a test can get one wrong."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self.path, self.tell = path, tell

    def __call__(self) -> None:
        weight = torch.zeros(8, 8)
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
        step = 0
        if (self.path / "manifest.json").exists() and has_begun(self.path / "public" / "ledger.jsonl"):
            self.folder = PrivateRunFolder.open(self.path)
            snapshot = Snapshot.from_bytes(self.folder.checkpoint.read_bytes()) if self.folder.checkpoint.exists() else None
            self.ledger = Ledger.resume(self.folder.ledger, {}, expected=HEADER, mark=snapshot and snapshot.metadata)
            self.folder.remove_leftovers()
            if snapshot is not None:
                snapshot.restore({"weight": weight}, optimizer)
                step = snapshot.metadata["step"]
                self.release(self.public(step, weight, snapshot.metadata["ledger_position"]))  # it may have died before it could
        else:
            self.folder = PrivateRunFolder.create(self.path, overwrite=True)
            self.ledger = Ledger.create(self.folder.ledger, HEADER)
        while step < PLANNED:
            self.pay(step)
            weight.grad = torch.full_like(weight, float(self.ledger.position))
            optimizer.step()
            step += 1
            self.keep(Snapshot.take({"weight": weight}, optimizer, {"step": step, **self.ledger.mark()}).to_bytes())
            self.release(self.public(step, weight, self.ledger.position))
        self.folder.write_manifest({"command": "dp-step", "state": "finished", "timings": {"all": 1.0}})
        self.ledger.close()

    @staticmethod
    def public(step: int, weight: torch.Tensor, position: int) -> dict[str, Any]:
        """What is released of a step: its number, the weights, and the line that paid for them."""
        return {"step": step, "line": position - 1, "value": float(weight[0, 0])}

    def pay(self, step: int) -> None:
        self.ledger.append({"step": step, "noise_multiplier": 1.1})

    def keep(self, data: bytes) -> None:
        self.folder.write_checkpoint(data)

    def release(self, content: dict[str, Any]) -> None:
        self.folder.write_public_json("step.json", content)
        self.tell(content)


def go(path: Path, tell: Tell) -> None:
    Run(path, tell)()


def released_on_disk(path: Path) -> Iterator[dict[str, Any]]:
    """What anybody can read of releases: in the public folder, half-written files included."""
    for file in (path / "public").glob("*step.json*"):
        try:
            yield json.loads(file.read_bytes())
        except ValueError:
            assert file.name.endswith(".tmp"), f"{file} is torn"


def check(path: Path, told: list[Any], finished: bool) -> None:
    releases = [*told, *released_on_disk(path)]
    begun = has_begun(path / "public" / "ledger.jsonl")
    assert begun or not releases
    if begun:
        content = Ledger.read(path / "public" / "ledger.jsonl")
        for release in releases:
            assert content.position > release["line"], "the ledger lags a release"
            assert content.lines[release["line"]].get("step") == release["step"] - 1, "another line than the step's own paid for it"
        values = {(release["line"], release["value"]) for release in releases if release["value"] is not None}
        assert len({line for line, _ in values}) == len(values), "one line paid for two releases"
        if (path / "checkpoint.safetensors").exists():
            kept = Snapshot.from_bytes((path / "checkpoint.safetensors").read_bytes())
            position = kept.metadata["ledger_position"]
            assert content.digests[position - 1] == kept.metadata["ledger_sha256"]
    if (path / "manifest.json").exists():
        json.loads((path / "manifest.json").read_bytes())
    if finished:
        assert told[-1]["step"] == PLANNED
        assert json.loads((path / "manifest.json").read_bytes())["state"] == "finished"
        assert not list(path.rglob("*.tmp"))


def test_killed_at_every_operation_and_resumed(tmp_path: Path) -> None:
    points = points_of(go, tmp_path / "undisturbed")
    deaths = 0
    for at in range(1, points + 1):
        # of every other run the process that resumes is killed as well, each time elsewhere
        deaths += kill_and_resume(go, check, tmp_path / str(at), [at] if at % 2 else [at, 1 + at * 37 % (points // 2)])
    assert deaths >= 100


def test_killed_again_and_again(tmp_path: Path) -> None:
    # no progress but in the ledger: each process dies before its first checkpoint
    path = tmp_path / "run"
    crashes = points_of(go, tmp_path / "undisturbed") // 2
    assert kill_and_resume(go, check, path, [crashes, *[8] * 10]) == 11
    content = Ledger.read(path / "public" / "ledger.jsonl")
    assert sum(line["kind"] == "resume" for line in content.lines) >= 10


# What the harness is for: each of these is a mistake that it finds ---------------------------------------------------------------------


class PaysLate(Run):
    def pay(self, step: int) -> None:
        self.tell({"step": step + 1, "line": self.ledger.position, "value": None})
        super().pay(step)


class KeepsInPlace(Run):
    def keep(self, data: bytes) -> None:
        with self.folder.checkpoint.open("wb", buffering=0) as file:
            files.write_all(file.fileno(), data)


class ReleasesInPlace(Run):
    def release(self, content: dict[str, Any]) -> None:
        with (self.path / "public" / "step.json").open("wb", buffering=0) as file:
            files.write_all(file.fileno(), json.dumps(content).encode())
        self.tell(content)


@pytest.mark.parametrize(
    ("mistake", "words"), [(PaysLate, "the ledger lags a release"), (KeepsInPlace, "is damaged"), (ReleasesInPlace, "is torn")]
)
def test_a_planted_mistake_is_found(tmp_path: Path, mistake: type[Run], words: str) -> None:
    def wrong(path: Path, tell: Tell) -> None:
        mistake(path, tell)()

    points = points_of(wrong, tmp_path / "undisturbed")

    def all_kills() -> None:
        for at in range(1, points + 1):
            kill_and_resume(wrong, check, tmp_path / str(at), [at])

    with pytest.raises((AssertionError, CheckpointError), match=words):
        all_kills()


def test_the_hook_kills_where_it_is_told_to(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    found = []
    for at in range(1, 8):
        target.write_bytes(b"old")
        ended = in_a_child(lambda _: files.write_atomically(target, b"new content"), at)
        temporary = [path.read_bytes() for path in files.leftovers_of(target)]
        found.append((ended.killed, target.read_bytes(), temporary))
        for path in files.leftovers_of(target):
            path.unlink()
    assert found == [
        (True, b"old", []),  # before the temporary file is opened
        (True, b"old", [b""]),  # before it is written
        (True, b"old", [b"new c"]),  # in the middle of it
        (True, b"old", [b"new content"]),  # before it is synced
        (True, b"old", [b"new content"]),  # before it is renamed
        (True, b"new content", []),  # before the folder is synced
        (False, b"new content", []),
    ]


def test_the_hook_does_nothing_unless_it_is_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash._hook, "at", None)
    before = crash.passed()
    crash.point(lambda: pytest.fail("half of what?"))
    assert crash.passed() == before
