"""`psgrad dp-step` itself, killed with SIGKILL at every durable operation and resumed: what is released was
paid for, and it goes on.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load

from psgrad.commands.dp_step import dp_step
from psgrad.config import load_config
from psgrad.engine.privacy.snapshot import Snapshot
from psgrad.errors import ConfigError
from psgrad.run import RunFolder
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import has_begun
from psgrad.run.results import Progress
from tests.crashes import Go, Tell, kill_and_resume, points_of
from tests.private_workplace import PrivateWorkplace, leave_out_slow_parts
from tests.workplace import Workplace

STEPS = 1  # are taken by each process


@pytest.fixture
def private(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> PrivateWorkplace:
    """Steps of a run with momentum and a checkpoint after each, without the slow accountant; of the figure
    its file alone.
    """
    leave_out_slow_parts(monkeypatch)
    private = PrivateWorkplace(workplace)
    optimizer = {"name": "SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}}
    private.privacy.update({"steps": 100, "checkpoint_every": 1, "optimizer": optimizer})
    return private


@pytest.fixture
def go(private: PrivateWorkplace) -> Go:
    def go(folder: Path, tell: Tell) -> None:
        private.config["output"] = str(folder)
        (private.folder / "config.yaml").write_text(yaml.safe_dump(private.config))

        def released(progress: Progress) -> None:
            if progress.detail:
                tell(progress.done)

        begun = has_begun(folder / "public" / "ledger.jsonl")
        dp_step(
            load_config(Path("config.yaml")),
            steps=STEPS,
            resume=begun,
            overwrite=not begun,
            progress=released,
        )

    return go


def check(folder: Path, told: list[Any], finished: bool) -> None:
    public, manifest = folder / "public", folder / "manifest.json"
    assert not manifest.exists() or RunFolder.manifest_of(folder) is not None
    begun = has_begun(public / "ledger.jsonl")
    assert begun or not told
    assert begun or not any(path for path in public.glob("*") if path.name != "ledger.jsonl"), (
        "released without a ledger"
    )
    if not begun:
        return
    content = Ledger.read(public / "ledger.jsonl")
    paid = len(content.steps)
    assert max(told, default=0) <= paid, "the ledger lags what was told"
    assert [line["step"] for line in content.steps] == list(range(1, paid + 1))
    if (folder / "checkpoint.pt").exists():
        kept = Snapshot.from_bytes((folder / "checkpoint.pt").read_bytes()).metadata
        assert kept["step"] <= paid, "the ledger lags the checkpoint"
        assert content.digests[kept["ledger_position"] - 1] == kept["ledger_sha256"]
    if (public / "step.json").exists():
        step = json.loads((public / "step.json").read_bytes())
        assert step["steps"] <= paid, "the ledger lags the statement"
    if (folder / "checkpoint.pt").exists():
        assert kept["step"] <= step["steps"], "the statement lags the checkpoint"
    if (public / "model.safetensors").exists():
        load((public / "model.safetensors").read_bytes())
    if finished:
        assert (RunFolder.manifest_of(folder) or {})["state"] == "finished"
        assert step["steps"] == paid
        assert step["model_sha256"] == hashlib.sha256((public / "model.safetensors").read_bytes()).hexdigest()
        assert not list(folder.rglob("*.tmp"))


# A hundred runs in all, a quarter of them a test; a tenth of them by default.
@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "apart"), [(5, 10), *(pytest.param(each, 4, marks=pytest.mark.sweep) for each in (1, 2, 3, 4))]
)
def test_dp_step_killed_at_every_operation_and_resumed(
    go: Go, tmp_path: Path, first: int, apart: int
) -> None:
    points = points_of(go, tmp_path / "undisturbed")
    check(tmp_path / "undisturbed", [STEPS], True)
    deaths = 0
    for at in range(first, points + 1, apart):
        # of every tenth run the process that resumes is killed as well, each time elsewhere
        deaths += kill_and_resume(
            go, check, tmp_path / f"run-{at}", [at] if at % 10 else [at, 1 + at * 37 % (points // 2)]
        )
    assert deaths >= 100 // apart


@pytest.mark.long
def test_dp_step_resume_publishes_last_step(private: PrivateWorkplace, go: Go, tmp_path: Path) -> None:
    # no step is left to take when the process dies that paid for the last one
    private.privacy["steps"] = STEPS
    points = points_of(go, tmp_path / "undisturbed")
    for at in (points // 2, points // 4 * 3):
        assert kill_and_resume(go, check, tmp_path / f"run-{at}", [at, 5]) == 2
    with pytest.raises(ConfigError, match="0 of the 1 planned ones are left"):
        go(tmp_path / f"run-{at}", print)
