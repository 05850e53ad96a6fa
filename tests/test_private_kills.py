"""kill -9 at every durable operation of a real `psgrad dp-step`: the ledger never lags a release, and the run goes on to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from psgrad.config import Config, load_config
from psgrad.engine.privacy.accounting import Epsilon, epsilon_rdp, event_of
from psgrad.engine.privacy.snapshot import Snapshot
from psgrad.engine.privacy.step import PrivateTraining
from psgrad.storage import Ledger
from psgrad.storage.ledger_lines import has_begun
from psgrad.workflows import dp_step
from tests.crashes import Tell, kill_and_resume, points_of
from tests.private_workplace import PRIVACY
from tests.workplace import Workplace

PLANNED = 2


@pytest.fixture
def config(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run of two steps that keeps each of them, without figures and the slow accountant."""
    monkeypatch.setattr("psgrad.workflows.private_training.write_plots", lambda result, public, private: None)
    monkeypatch.setattr("psgrad.workflows.private_statement.epsilon_pld", lambda events, delta: Epsilon(None, "not asked for in this test"))
    workplace.config["privacy"] = {**PRIVACY, "steps": PLANNED, "checkpoint_every": 1}
    workplace.config["engine"] = {"verify": 0, "device": "cpu"}
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    torch.set_num_threads(1)
    return load_config(workplace.folder / "config.yaml")


def test_killed_at_every_operation_and_resumed(config: Config, tmp_path: Path) -> None:
    def go(path: Path, tell: Tell) -> None:
        """One process: it tells of every noisy sum that leaves the mechanism, and goes on until the plan is done."""
        update = PrivateTraining.update

        def told(self: PrivateTraining, sums: Any) -> None:
            tell({"step": self.taken + 1})
            update(self, sums)

        mine = config.model_copy(update={"output": path})
        mine._base = config.base
        begun = has_begun(path / "public" / "ledger.jsonl")
        taken = len(Ledger.read(path / "public" / "ledger.jsonl").steps) if begun else 0
        if taken < PLANNED:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PrivateTraining, "update", told)
                dp_step(mine, steps=PLANNED - taken, resume=begun, overwrite=not begun)

    def check(path: Path, told: list[Any], finished: bool) -> None:
        begun = has_begun(path / "public" / "ledger.jsonl")
        assert begun or not told
        if not begun:
            return
        steps = Ledger.read(path / "public" / "ledger.jsonl").steps
        assert len(steps) >= len(told), "the ledger lags a release"
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
        spent = epsilon_rdp([(event_of(line), 1) for line in steps], PRIVACY["delta"]).value
        assert spent is not None
        statement = path / "public" / "step.json"
        checkpoint = path / "checkpoint.safetensors"
        if checkpoint.exists():
            kept = Snapshot.from_bytes(checkpoint.read_bytes())
            said = json.loads(statement.read_bytes())
            assert kept.metadata["step"] <= said["steps"] <= len(steps), "step.json says less than the checkpoint has"
            assert said["epsilon_rdp"] <= spent * (1 + 1e-12)
        if (path / "public" / "model.safetensors").exists():
            load_file(path / "public" / "model.safetensors")
        if finished:
            assert len(steps) == PLANNED

    points = points_of(go, tmp_path / "undisturbed")
    deaths = 0
    for at in range(1, points + 1):
        # Every second time the process that resumes is killed as well, each time elsewhere.
        deaths += kill_and_resume(go, check, tmp_path / str(at), [at] if at % 2 else [at, 1 + at * 37 % points])
    assert deaths > points > 100
