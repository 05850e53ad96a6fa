"""CONTRIBUTING.md: its worked examples are added to psgrad for a test, and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from psgrad import plugins
from psgrad.config import DataConfig, LossConfig
from psgrad.config.plugin_names import OWN, Group
from psgrad.data.loss import resolve_loss
from psgrad.data.sources.load import load_data
from psgrad.quality.detector import detect, detector_from
from tests.workplace import ROWS, Workplace

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(page: str, words: str) -> str:
    """The one Python block of a page with these words."""
    (found,) = (each for each in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if words in each)
    return str(found)


def register(
    group: Group, name: str, kind: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of this source that can be imported, whose class is one of psgrad's plugins, until the test
    ends.
    """
    module = f"contributed_{name}"
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(OWN[group], name, f"{module}:{kind}")


@pytest.mark.long
def test_the_measure_is_computed(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = block(PAGE, "LossPerNorm")
    register("measures", "loss_per_norm", "LossPerNorm", source, tmp_path, monkeypatch)
    workplace.config["analyze"] = {"measures": ["loss_per_norm"]}
    workplace.succeeded()
    samples = workplace.samples()
    np.testing.assert_allclose(samples["loss_per_norm"], samples["loss"] / samples["grad_norm"], rtol=1e-5)


def test_the_influence_method_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (ROOT / "docs" / "guides" / "influence.md").read_text(encoding="utf-8")
    source = block(guide, "DiagonalFisher(Method)")
    register("methods", "diagonal_fisher", "DiagonalFisher", source, tmp_path, monkeypatch)
    method = plugins.configured(plugins.METHODS, "diagonal_fisher", {}, Path())
    assert type(method).__name__ == "DiagonalFisher"


def test_the_detector_scores_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = block(PAGE, "DistanceToMean")
    register("detectors", "distance_to_mean", "DistanceToMean", source, tmp_path, monkeypatch)
    rows, reference = np.arange(8.0).reshape(4, 2), np.zeros((3, 2))
    found = detect(detector_from("distance_to_mean", {"power": 2.0}), rows, reference, seed=0)
    np.testing.assert_allclose(found, np.linalg.norm(rows, axis=1) ** 2)


def test_the_loss_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register("losses", "log_cosh", "LogCosh", block(PAGE, "LogCosh"), tmp_path, monkeypatch)
    loss = resolve_loss(LossConfig(name="log_cosh", scale=2.0), Path())
    found = loss.function(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])).item()
    assert found == pytest.approx(np.log(np.cosh(1)) / 2)


def test_the_source_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register("sources", "npy", "NPY", block(PAGE, "NPY(Source)"), tmp_path, monkeypatch)
    rows = np.zeros(3, dtype=[("x", np.float32, (2,)), ("y", np.int64)])
    rows["x"], rows["y"] = np.arange(6).reshape(3, 2), [0, 1, 2]
    np.save(tmp_path / "rows.npy", rows)
    data = load_data(DataConfig(path=Path("rows.npy"), inputs="x", target="y"), tmp_path).read(1, 3)
    assert data.inputs[0].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert data.target is not None
    assert data.target.tolist() == [1, 2]


@pytest.mark.sweep
def test_the_command_runs(workplace: Workplace, tmp_path: Path) -> None:
    script = "import importlib, sys\n"
    for package, words in (
        ("psgrad.cli", "def count_rows(config: ConfigPath"),
        ("psgrad.commands", "def count_rows(config: Config)"),
    ):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "count_rows.py").write_text(block(PAGE, words), encoding="utf-8")
        script += f"importlib.import_module({package!r}).__path__.append({str(folder)!r})\n"
    script += "from psgrad.cli import main\nfrom psgrad.cli.app import app\n"
    script += "from psgrad.cli.command import with_boundary\nfrom psgrad.cli.count_rows import count_rows\n"
    script += "app.command('count-rows')(with_boundary(count_rows))\nmain()"
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    for arguments, words in ((["config.yaml"], f"{ROWS}\n"), (["--help"], "Print how many rows the dataset")):
        done = subprocess.run(
            [sys.executable, "-c", script, "count-rows", *arguments],
            cwd=workplace.folder,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert words in done.stdout, done.stderr
