"""A small run that is kept as `psgrad dp-step` keeps its own, and what must hold of it whenever it died."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from psgrad.engine.privacy.snapshot import Snapshot
from psgrad.run import RunFolder
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import has_begun
from psgrad.run.private_runs import PrivateRunFolder
from tests.crashes import Tell

PLANNED = 2
HEADER = {"delta": 1e-5, "planned": PLANNED}


class Run:
    """A run of a few steps, kept as `psgrad dp-step` keeps its own. The parts are methods, so that a test can
    get one wrong.
    """

    def __init__(self, path: Path, tell: Tell) -> None:
        self.path, self.tell = path, tell

    def __call__(self) -> None:
        weight = torch.zeros(8, 8)
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
        step = 0
        if (self.path / "manifest.json").exists() and has_begun(self.path / "public" / "ledger.jsonl"):
            self.folder = PrivateRunFolder.open(self.path)
            snapshot = (
                Snapshot.from_bytes(self.folder.checkpoint.read_bytes())
                if self.folder.checkpoint.exists()
                else None
            )
            self.ledger = Ledger.resume(
                self.folder.ledger, {}, expected=HEADER, mark=snapshot and snapshot.metadata
            )
            self.folder.remove_leftovers()
            if snapshot is not None:
                snapshot.restore({"weight": weight}, optimizer)
                step = snapshot.metadata["step"]
                self.release(
                    self.public(step, weight, snapshot.metadata["ledger_position"])
                )  # it may have died before it could
        else:
            self.folder = PrivateRunFolder.create(self.path, overwrite=True)
            self.ledger = Ledger.create(self.folder.ledger, HEADER)
        while step < PLANNED:
            self.pay(step)
            weight.grad = torch.full_like(weight, float(self.ledger.position))
            optimizer.step()
            step += 1
            self.keep(
                Snapshot.take({"weight": weight}, optimizer, {"step": step, **self.ledger.mark()}).to_bytes()
            )
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
        self.tell(content)
        self.folder.write_public_json("step.json", content)


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
    assert begun or not releases, "released without a ledger"
    if begun:
        content = Ledger.read(path / "public" / "ledger.jsonl")
        for release in releases:
            assert content.position > release["line"], "the ledger lags a release"
            assert content.lines[release["line"]].get("step") == release["step"] - 1, (
                "another line than the step's own paid for it"
            )
        values = {(release["line"], release["value"]) for release in releases if release["value"] is not None}
        assert len({line for line, _ in values}) == len(values), "one line paid for two releases"
        if (path / "checkpoint.pt").exists():
            kept = Snapshot.from_bytes((path / "checkpoint.pt").read_bytes())
            position = kept.metadata["ledger_position"]
            assert content.digests[position - 1] == kept.metadata["ledger_sha256"]
    if (path / "manifest.json").exists():
        assert RunFolder.manifest_of(path) is not None, "manifest.json is torn"
    if finished:
        assert told[-1]["step"] == PLANNED
        assert (RunFolder.manifest_of(path) or {})["state"] == "finished"
        assert not list(path.rglob("*.tmp"))
