"""psgrad in a process without some libraries: the engine with torch and numpy alone, and commands without
dp-accounting.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A finder before all others that has no library of psgrad's dependencies but torch and numpy.
HIDDEN = """
import sys

class Hidden:
    names = {
        "cryptography", "datasets", "dp_accounting", "jinja2", "matplotlib", "opacus", "pandas", "peft",
        "PIL", "pyarrow", "pydantic", "pydantic_core", "rich", "safetensors", "scipy", "sklearn",
        "transformers", "typer", "yaml",
    }

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
ALL_OF_IT = """
import importlib, pkgutil
import psgrad.engine

for module in pkgutil.walk_packages(psgrad.engine.__path__, "psgrad.engine."):
    importlib.import_module(module.name)
"""
# A pass over rows with measures, a clipped sum, and a private step: what needs no config and no files.
A_RUN = """
import torch
from torch import nn
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.ragged import Block

model, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
objective = Objective(model, nn.functional.cross_entropy)
stream = Stream(objective.loss, objective.params, Block((x,), y), chunk_size=2)
streamed = torch.cat([chunk.values["grad_norm"] for chunk in stream.run(5, [GradientNorms()])])
found = per_sample_gradients(objective.loss, objective.params, (x,), y, has_aux=True)
torch.testing.assert_close(streamed, found.square_norms().sqrt())
assert found.weighted_sum(streamed)["weight"].shape == (2, 3)
"""


def run(code: str, tmp_path: Path, *arguments: str, hidden: str = HIDDEN) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(hidden)
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, *(["-c", code] if code else []), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("code", [ALL_OF_IT, A_RUN], ids=["imports", "a run"])
def test_engine_with_torch_alone(tmp_path: Path, code: str) -> None:
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_hidden_library_is_missed(tmp_path: Path) -> None:
    done = run("import psgrad.api", tmp_path)
    assert "No module named 'pydantic'" in done.stderr


@pytest.mark.sweep
def test_engine_tests_with_torch_alone(tmp_path: Path) -> None:
    """The tests that a GPU runs (benchmarks/gpu.py), of which one file stands for all here."""
    tests = "tests/engine/gradients/test_accuracy.py"
    options = ["-q", "-p", "no:cacheprovider", "-k", "gpt or cnn", "-n", "0"]
    done = run("", tmp_path, "-m", "pytest", *options, tests)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sweep
def test_benchmark_of_a_gpu_with_torch_alone(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    options = ["--device", "cpu", "--small", "--only", "copies", "--json", str(file)]
    done = run("", tmp_path, "benchmarks/gpu.py", *options)
    assert done.returncode == 0, done.stderr
    assert '"failed"' not in file.read_text()


@pytest.mark.long
def test_commands_without_dp_accounting(tmp_path: Path) -> None:
    hidden = HIDDEN.replace("self.names", "('dp_accounting',)")
    output = ["--output", str(tmp_path / "out"), "--progress", "none"]
    done = run(
        "", tmp_path, "-m", "psgrad", "analyze", "configs/digits.yaml", "--limit", "9", *output, hidden=hidden
    )
    assert done.returncode == 0, done.stderr
    output[1] = str(tmp_path / "private")
    for command, options in (("dp-step", output), ("dp-step", ["--plan"]), ("dp-audit", output)):
        done = run("", tmp_path, "-m", "psgrad", command, "configs/digits-dp.yaml", *options, hidden=hidden)
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith(
            "error: epsilon needs dp-accounting, which can't be imported: No module"
        )
        assert done.stderr.endswith("hint: install it with psgrad: pip install 'psgrad[dp]'\n")
    assert not (tmp_path / "private").exists()
