"""A folder with a small model, its checkpoint, its data and a config that works, and the command line to run
it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import typer
import yaml
from safetensors.torch import save_file
from torch import nn

from psgrad.cli import main

ROWS = 24
FEATURES = 4
CLASSES = 3

MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn


def mlp(hidden=5):
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))
"""

CONFIG: dict[str, Any] = {
    "version": 1,
    "model": {"factory": "model.py:mlp", "checkpoint": "model.safetensors"},
    "loss": "cross_entropy",
    "data": {"path": "data.npz", "inputs": "x", "target": "y", "id": "uid"},
    "output": "out",
}


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit code, data for the next program, words for people."""

    code: int
    out: str
    err: str

    def succeeded(self) -> Outcome:
        """Itself, once it is seen that the command ended well."""
        assert self.code == 0, self.err
        return self

    def refused(self, code: int, *words: str) -> str:
        """What stderr says, once it is seen that the command ended so: this code, these words, one screen, no
        traceback.
        """
        assert self.code == code, self.err
        for word in words:
            assert word in self.err, self.err
        assert "Traceback" not in self.err
        assert "internal error" not in self.err
        assert len(self.err.splitlines()) < 25
        assert self.out == ""
        return self.err


_FSYNC = os.fsync
_command = cache(typer.main.get_command)


def run_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str
) -> Outcome:
    """`psgrad` with these arguments, in this process. That files are synced to the disk is tested in
    tests/run, and left out here.
    """
    monkeypatch.setattr("sys.argv", ["psgrad", *arguments])
    monkeypatch.setattr(typer.main, "get_command", _command)
    if os.fsync is _FSYNC:
        monkeypatch.setattr(os, "fsync", lambda file: None)
    capfd.readouterr()
    with pytest.raises(SystemExit) as leave:
        main()
    out, err = capfd.readouterr()
    assert isinstance(leave.value.code, int)
    return Outcome(leave.value.code, out, err)


class Workplace:
    """The folder, which is the current one too. `config` is written to config.yaml before each run."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        self.folder = folder
        self.config = json.loads(json.dumps(CONFIG))
        self._monkeypatch, self._capfd = monkeypatch, capfd
        random = np.random.default_rng(0)
        self.arrays: dict[str, Any] = {
            "x": random.normal(size=(ROWS, FEATURES)).astype(np.float32),
            "y": random.integers(0, CLASSES, ROWS),
            "uid": np.array([f"row-{row:02d}" for row in range(ROWS)]),
        }
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        (folder / "model.py").write_text(MODEL)
        save_file(self.model.state_dict(), folder / "model.safetensors")
        self.save()
        monkeypatch.chdir(folder)

    def save(self, **arrays: Any) -> None:
        """data.npz with these arrays beside, or in the place of, its own."""
        self.arrays.update(arrays)
        np.savez(self.folder / "data.npz", **self.arrays)

    def use_model(self, source: str) -> None:
        """A model of one's own: the source of a class named Model, or of a function of that name. It has no
        checkpoint.
        """
        (self.folder / "model.py").write_text(MODEL + "\n\n" + source)
        self.config["model"] = {"factory": "model.py:Model"}

    def use_loss(self, source: str) -> None:
        """A loss of one's own: the source of a function named loss."""
        (self.folder / "loss.py").write_text("import torch\n\n\n" + source)
        self.config["loss"] = "loss.py:loss"

    def analyze(self, *options: str) -> Outcome:
        """`psgrad analyze config.yaml` with these options, in this process."""
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        return self.command("analyze", "config.yaml", *options)

    def command(self, *arguments: str) -> Outcome:
        return run_command(self._monkeypatch, self._capfd, *arguments)

    def refused(self, code: int, *words: str, options: tuple[str, ...] = ()) -> str:
        """Run, and see it end with this exit code and these words on stderr, on one screen and without a
        traceback.
        """
        return self.analyze(*options).refused(code, *words)

    def succeeded(self, *options: str) -> Outcome:
        """Run, and see it end well."""
        return self.analyze(*options).succeeded()

    def measured_apart(self, data: str) -> Outcome:
        """Run on another file of rows, without a reference, in a folder of its name: `trusted` of
        trusted.npz.
        """
        settings = (f"data.path={data}", "analyze.outliers.reference=null")
        output = data.partition(".")[0]
        return self.succeeded(*(f"--set={each}" for each in settings), "--no-report", "--output", output)

    def samples(self, output: str = "out") -> pd.DataFrame:
        return pd.read_parquet(self.folder / output / "samples.parquet")

    def manifest(self, output: str = "out") -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / output / "manifest.json").read_text())
        return content
