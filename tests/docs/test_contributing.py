"""CONTRIBUTING.md: its worked examples are added to psgrad for a test, and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from psgrad import plugins
from psgrad.engine.influence import methods
from psgrad.engine.measures import builtin
from psgrad.engine.transforms import grad, vmap
from psgrad.engine.transforms.rules import registry
from psgrad.quality import detectors
from psgrad.quality.detector import detect, detector_from
from tests.workplace import ROWS, Workplace

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(page: str, words: str) -> str:
    """The one Python block of a page with these words."""
    (found,) = (each for each in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if words in each)
    return str(found)


def put_into(package: Any, name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of this source in a package of psgrad, until the test ends."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", None)
    del sys.modules[f"{package.__name__}.{name}"]  # monkeypatch takes it out again at the end
    monkeypatch.setattr(package, name, None, raising=False)


def test_the_operator_has_per_sample_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_derivatives", dict(registry._derivatives))
    monkeypatch.setattr(registry, "_batchings", dict(registry._batchings))
    names: dict[str, Any] = {}
    exec(block(PAGE, "torch.library"), names)
    weight, samples = torch.randn(3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    log_cosh = torch.ops.contributing.log_cosh.default
    found = vmap(grad(lambda w, x: log_cosh(w * x).sum()), in_dims=(None, 0))(weight, samples)
    leaf = weight.clone().requires_grad_()
    expected = [torch.autograd.grad(torch.log(torch.cosh(leaf * x)).sum(), leaf)[0] for x in samples]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.long
def test_the_measure_is_found_by_its_file(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "measures"
    folder.mkdir()
    plugins.own_classes.cache_clear()
    put_into(builtin, "loss_per_norm", block(PAGE, "LossPerNorm"), folder, monkeypatch)
    try:
        workplace.config["analyze"] = {"measures": ["loss_per_norm"]}
        workplace.succeeded()
        samples = workplace.samples()
        np.testing.assert_allclose(
            samples["loss_per_norm"], samples["loss"] / samples["grad_norm"], rtol=1e-5
        )
    finally:
        plugins.own_classes.cache_clear()


def test_the_influence_method_is_found_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (ROOT / "docs" / "guides" / "influence.md").read_text(encoding="utf-8")
    plugins.own_classes.cache_clear()
    put_into(methods, "diagonal_fisher", block(guide, "DiagonalFisher(Method)"), tmp_path, monkeypatch)
    try:
        assert plugins.own_classes(plugins.METHODS)["diagonal_fisher"].__name__ == "DiagonalFisher"
    finally:
        plugins.own_classes.cache_clear()


def test_the_detector_is_found_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.own_classes.cache_clear()
    put_into(detectors, "distance_to_mean", block(PAGE, "DistanceToMean"), tmp_path, monkeypatch)
    try:
        rows, reference = np.arange(8.0).reshape(4, 2), np.zeros((3, 2))
        found = detect(detector_from("distance_to_mean", {"power": 2.0}), rows, reference, seed=0)
        np.testing.assert_allclose(found, np.linalg.norm(rows, axis=1) ** 2)
    finally:
        plugins.own_classes.cache_clear()


PROGRAM = """
import sys
from pathlib import Path
from tools import plugin_options
from psgrad.config import plugin_options as known
{package}.__path__.append(".")
from psgrad.plugins import KINDS, own_classes
text = plugin_options.page("")
known.FILE = Path("plugin_options.json")
known.FILE.write_text(text)
known.own_plugins.cache_clear()
for name in [name for name in sys.modules if name.startswith("psgrad.")]:
    registers = name.startswith("psgrad.engine.transforms")  # operators, which PyTorch takes only once
    if name != known.__name__ and not registers and not "{package}.".startswith(name + "."):
        del sys.modules[name]
import psgrad.config
"""


def run_with(package: str, name: str, source: str, program: str, folder: Path) -> str:
    """What a program prints when a file of this source is in a package of psgrad, and the file of all options
    was made again.
    """
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    script = f"import {package}\n{PROGRAM.format(package=package)}\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOSS_PROGRAM = """
import torch
from psgrad.config.schema import schema
from psgrad.config.config import LossConfig
from psgrad.data.loss import resolve_loss
print(schema()["definitions"]["LossConfig"]["anyOf"][1]["properties"]["scale"])
loss = resolve_loss(LossConfig(name="log_cosh", scale=2.0), Path())
print(loss.function(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])).item())
"""


@pytest.mark.sweep
def test_the_loss_is_found_by_its_file(tmp_path: Path) -> None:
    described, value = run_with(
        "psgrad.data.losses", "log_cosh", block(PAGE, "LogCosh"), LOSS_PROGRAM, tmp_path
    ).splitlines()
    assert "The error at which they meet; of log_cosh." in described
    assert float(value) == pytest.approx(np.log(np.cosh(1)) / 2)


SOURCE_PROGRAM = """
from psgrad.config.data import DataConfig
from psgrad.data.sources.load import load_data
from psgrad.data.sources.source import data_headers, header_problems
config = DataConfig(path=Path("rows.npy"), inputs="x", target="y")
(header,) = data_headers(config, Path())
print(header.rows, [str(each) for each in header_problems(header, config)])
block = load_data(config, Path()).read(1, 3)
print(block.inputs[0].tolist(), block.target.tolist())
"""


@pytest.mark.sweep
def test_the_source_is_found_by_its_file(tmp_path: Path) -> None:
    rows = np.zeros(3, dtype=[("x", np.float32, (2,)), ("y", np.int64)])
    rows["x"], rows["y"] = np.arange(6).reshape(3, 2), [0, 1, 2]
    np.save(tmp_path / "rows.npy", rows)
    source = block(PAGE, "NPY(ArraySource)")
    printed = run_with("psgrad.data.sources.formats", "npy", source, SOURCE_PROGRAM, tmp_path)
    assert printed.splitlines() == ["3 []", "[[2.0, 3.0], [4.0, 5.0]] [1, 2]"]


@pytest.mark.sweep
def test_the_command_is_found_by_its_file(workplace: Workplace, tmp_path: Path) -> None:
    script = "import importlib, sys\n"
    for package, words in (
        ("psgrad.cli", "@command"),
        ("psgrad.commands", "def count_rows(config: Config)"),
    ):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "count_rows.py").write_text(block(PAGE, words), encoding="utf-8")
        script += f"importlib.import_module({package!r}).__path__.append({str(folder)!r})\n"
    script += "from psgrad.cli import main\nmain()"
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
