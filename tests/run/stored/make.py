"""Makes the stored folders of the version that runs it: `python tests/run/stored/make.py`, in this
repository's root.

It leaves a folder named after the version, beside this file: a config, its model's code, weights and data,
and what three commands wrote with them. The folder of a released version is never made again: later versions
have to open what that version wrote.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from psgrad import __version__

MODEL = """\
from torch import nn


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
"""

CONFIG = """\
version: 1
model: {factory: model.py:mlp, checkpoint: model.safetensors}
loss: cross_entropy
data: {path: data.npz, inputs: x, target: y, id: uid}
engine: {device: cpu, dtype: float32}
analyze:
  top: 5
  measures: [margin, el2n]
  outliers: {detectors: [nearest_neighbours]}
gate: {max_outliers: 0}
influence:
  method: gradient_dot
  queries: {rows: [0, 5, 9]}
  index: {path: index}
privacy:
  steps: 4
  delta: 0.01
  expected_batch_size: 12
  sampling: {scheme: poisson, sample_rate: 0.5}
  clipping: {norm: 0.5}
  noise: {multiplier: 2.0}
  optimizer: {name: SGD, kwargs: {lr: 0.1, momentum: 0.5}}
output: analyze
"""

ROWS = 24
DROPPED = ("plots", "report.html")  # `psgrad report` makes them again


def write_inputs(folder: Path) -> None:
    """The config and the files that it names."""
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "model.py").write_text(MODEL)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    save_file(model.state_dict(), folder / "model.safetensors")
    random = np.random.default_rng(0)
    np.savez(
        folder / "data.npz",
        x=random.normal(size=(ROWS, 4)).astype(np.float32),
        y=random.integers(0, 3, ROWS),
        uid=np.array([f"row-{row:02d}" for row in range(ROWS)]),
    )


def main() -> None:
    kept = Path(__file__).parent / __version__
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for command in (
            ("analyze", "config.yaml"),
            ("influence", "index", "config.yaml"),
            ("dp-step", "config.yaml", "--steps", "2", "--output", "dp-step"),
        ):
            subprocess.run([sys.executable, "-m", "psgrad", *command], cwd=folder, check=True)
        for dropped in DROPPED:
            path = folder / "analyze" / dropped
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for figure in (*(folder / "dp-step").rglob("*.png"), *(folder / "dp-step").rglob("*.svg")):
            figure.unlink()
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    main()
