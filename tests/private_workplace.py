"""A workplace with a private run: the config of one, its command, and what it leaves, read again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from psgrad.engine.privacy.accounting import Epsilon
from tests.workplace import Outcome, Workplace

PRIVACY: dict[str, Any] = {
    "steps": 20,
    "delta": 0.01,
    "expected_batch_size": 12,
    "sampling": {"scheme": "poisson", "sample_rate": 0.5},
    "clipping": {"norm": 0.5},
    "noise": {"multiplier": 2.0},
    "optimizer": {"name": "SGD", "kwargs": {"lr": 0.1}},
}
# No noise, every record in every batch, the sum itself: what an oracle can compute.
EXACT: dict[str, Any] = {
    "expected_batch_size": 24,
    "sampling": {"scheme": "poisson", "sample_rate": 1.0},
    "noise": {"multiplier": 0.0},
    "optimizer": {"name": "SGD", "kwargs": {"lr": 1.0}},
}


def leave_out_slow_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have private runs draw no figures, and state no epsilon by PLD, which take longest."""
    monkeypatch.setattr("psgrad.reports.figures.Plot.png", lambda plot: b"a figure")
    monkeypatch.setattr(
        "psgrad.commands.private_statement.epsilon_pld", lambda events, delta: Epsilon(None, "not asked for")
    )


class PrivateWorkplace:
    """A workplace whose config has a section privacy, and the command to run it."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace = workplace
        self.folder = workplace.folder
        self.config = workplace.config
        self.config["privacy"] = copy.deepcopy(PRIVACY)
        self.config["engine"] = {"dtype": "float64", "verify": 0}

    @property
    def privacy(self) -> dict[str, Any]:
        section: dict[str, Any] = self.config["privacy"]
        return section

    @property
    def run_folder(self) -> Path:
        return self.folder / self.config["output"]

    def dp_step(self, *options: str) -> Outcome:
        """`psgrad dp-step config.yaml` with these options, in this process."""
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        return self.workplace.command("dp-step", "config.yaml", *options)

    def succeeded(self, *options: str) -> Outcome:
        return self.dp_step(*options).succeeded()

    def refused(self, code: int, *words: str, options: tuple[str, ...] = ()) -> str:
        """Run, and see it end with this exit code and these words on stderr, on one screen and without a
        traceback.
        """
        return self.dp_step(*options).refused(code, *words)

    def step(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_folder / "public" / "step.json").read_bytes())
        return content

    def ledger(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of the ledger, of one kind where one is named."""
        lines = [
            json.loads(line)
            for line in (self.run_folder / "public" / "ledger.jsonl").read_text().splitlines()
        ]
        return [line for line in lines if kind is None or line["kind"] == kind]

    def step_table(self) -> pd.DataFrame:
        return pd.read_parquet(self.run_folder / "private" / "NOT_PRIVATE_steps.parquet")

    def public(self) -> bytes:
        """All that may be published."""
        return b"".join(path.read_bytes() for path in (self.run_folder / "public").iterdir())

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.run_folder / "public" / "model.safetensors")
