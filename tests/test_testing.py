"""The fixture psgrad_gate, in a pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml

from psgrad.testing import SHOWN
from tests.workplace import Workplace

ROOT = Path(__file__).parents[1]

CASES = """\
def test_passes(psgrad_gate):
    run = psgrad_gate("config.yaml", settings=["gate.nonfinite=warning"])
    assert len(run.samples) == 24
    assert not run.folder.joinpath("report.html").exists()


def test_twice(psgrad_gate):
    first = psgrad_gate("config.yaml", settings=["gate.nonfinite=ignore"])
    again = psgrad_gate("config.yaml", settings=["gate.nonfinite=ignore"])
    assert first.folder != again.folder


def test_fails(psgrad_gate):
    psgrad_gate("config.yaml")


def test_many(psgrad_gate):
    psgrad_gate("config.yaml", settings=["data.path=many.npz"])


def test_undecided(psgrad_gate):
    psgrad_gate("config.yaml", settings=["gate.nonfinite=ignore", "gate.max_outliers=3"])


def test_wrong_config(psgrad_gate):
    psgrad_gate("config.yaml", settings=["gate.max_outlier=3"])


def test_objects(psgrad_gate):
    import model
    import torch

    rows = torch.utils.data.TensorDataset(torch.ones(6, 4), torch.zeros(6, dtype=torch.long))
    assert len(psgrad_gate(model=model.mlp(), data=rows, loss="cross_entropy").samples) == 6
"""


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"psgrad": "psgrad.testing"}


def test_the_plugin_is_loaded_without_torch() -> None:
    code = "import sys, psgrad.testing; assert not {'torch', 'pandas', 'psgrad.api'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.long
def test_the_gate_fails_a_test_with_the_samples_named(workplace: Workplace) -> None:
    inputs = workplace.arrays["x"].copy()
    inputs[:] = np.nan
    np.savez(workplace.folder / "many.npz", **{**workplace.arrays, "x": inputs})
    inputs = workplace.arrays["x"].copy()
    inputs[[3, 7]] = np.nan
    workplace.save(x=inputs)
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    (workplace.folder / "test_data.py").write_text(CASES)
    (workplace.folder / "sub").mkdir()
    # The entry point is there only where psgrad is installed as it is now, and then it would be a second one.
    plugin = ("-p", "no:psgrad", "-p", "psgrad.testing", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "--rootdir", "..", "../test_data.py"],
        cwd=workplace.folder / "sub",
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{workplace.folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    reports = dict(re.findall(r"^_+ (test_\w+) _+\n(.*?)(?=\n[_=])", done.stdout, re.MULTILINE | re.DOTALL))
    assert set(reports) == {"test_fails", "test_many", "test_undecided", "test_wrong_config"}, done.stdout
    assert "3 passed" in done.stdout
    assert "Traceback" not in done.stdout
    assert "FAIL nonfinite: 2 samples" in reports["test_fails"]
    assert re.findall(r"^  sample (\S+): ", reports["test_fails"], re.MULTILINE) == ["row-03", "row-07"]
    assert reports["test_many"].count("  sample row-") == SHOWN
    assert "and 4 more, see" in reports["test_many"]
    assert "NOT EVALUABLE max_outliers" in reports["test_undecided"]
    assert "max_outliers" in reports["test_wrong_config"]
