"""A folder whose config names code of its own for everything: a factory that loads its weights itself, a
loss, a dataset, a measure, each with a module that it imports; and every change by which a
run becomes another one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from psgrad.config import Config, load_config

ROWS = 24

FILES = {
    "model.py": (
        """\
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

import id_helper

HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        settings = json.loads((HERE / "settings.json").read_text())
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.GroupNorm(1, hidden), nn.Dropout(settings["p"]))
        self.head = nn.Linear(hidden, 3)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("table", torch.from_numpy(np.load(HERE / "table.npy")), persistent=False)
        self.plain = torch.from_numpy(np.load(HERE / "plain.npy"))
        self.power = settings["power"]

    def forward(self, x):
        from id_late import activation

        y = self.head(activation(self.body(x * self.table))) + self.frozen + self.kept
        return y * self.plain**self.power * id_helper.scale()


def build(hidden=5):
    model = Net(hidden)
    model.load_state_dict(load_file(HERE / "weights.safetensors"))
    return model
"""
    ),
    "id_helper.py": "from id_deep import SCALE\n\n\ndef scale():\n    return SCALE\n",
    "id_deep.py": "SCALE = 1.0\n",
    "id_late.py": "import torch\n\n\ndef activation(x):\n    return torch.tanh(x)\n",
    "loss.py": "import id_loss\n\n\ndef loss(output, target):\n    return id_loss.value(output, target)\n",
    "id_loss.py": (
        "import torch.nn.functional as F\n\n\ndef value(output, target):\n    return F.cross_entropy(output,"
        " target)\n"
    ),
    "rows.py": (
        """\
from pathlib import Path

import numpy as np

import id_rows


class Rows:
    def __init__(self, name):
        data = np.load(Path(__file__).parent / name)
        self.x, self.y = data["x"], data["y"]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return {"x": id_rows.look(self.x[row]), "y": self.y[row]}


def build(name="rows.npz"):
    return Rows(name)
"""
    ),
    "id_rows.py": "def look(x):\n    return x\n",
    "measure.py": (
        """\
from dataclasses import dataclass

from psgrad.engine.measures.measure import Measure


@dataclass
class Twice(Measure):
    name = "twice"

    def columns(self, gradients):
        return {"twice": 2 * gradients.square_norms()}
"""
    ),
    "settings.json": '{"p": 0.0, "power": 1}',
}

CONFIG: dict[str, Any] = {
    "version": 1,
    "model": {"factory": "model.py:build"},
    "loss": "loss.py:loss",
    "data": {"factory": "rows.py:build", "inputs": "x", "target": "y"},
    "engine": {"chunk_size": 4, "verify": 0, "capture": "off"},
    "analyze": {"measures": [{"name": "measure.py:Twice"}]},
    "report": {"include_inputs": False},
    "output": "out",
}


class IdentityWorkplace:
    """The folder. `config` is written to config.yaml by `read`; `restore` puts all back as it was when the
    object was made.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.config: dict[str, Any] = json.loads(json.dumps(CONFIG))
        for name, text in FILES.items():
            (folder / name).write_text(text)
        random = np.random.default_rng(0)
        x = random.normal(size=(ROWS, 4)).astype(np.float32)
        np.savez(folder / "rows.npz", x=x, y=random.integers(0, 3, ROWS))
        np.save(folder / "table.npy", np.ones(4, np.float32))
        np.save(folder / "plain.npy", np.ones(3, np.float32))
        torch.manual_seed(1)
        shapes = {"body.0.weight": (5, 4), "body.0.bias": (5,), "body.1.weight": (5,), "body.1.bias": (5,)}
        shapes |= {"head.weight": (3, 5), "head.bias": (3,), "frozen": (3,), "kept": (3,)}
        save_file(
            {name: torch.randn(shape) for name, shape in shapes.items()}, folder / "weights.safetensors"
        )
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        self._files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self._config = json.dumps(self.config)

    def read(self, **changes: Any) -> Config:
        """The config as it is now, for a process that has imported nothing of the folder."""
        for name in [name for name in sys.modules if name.startswith(("id_", "psgrad_file_"))]:
            del sys.modules[name]
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config | changes))
        return load_config(self.folder / "config.yaml")

    def settle(self) -> None:
        """Take the config as it is now for the one that `restore` puts back."""
        self._config = json.dumps(self.config)

    def restore(self) -> None:
        """All files and the config as they were; the files are newer."""
        for name, content in self._files.items():
            (self.folder / name).write_bytes(content)
        self.config = json.loads(self._config)

    def edit(self, name: str, before: str, after: str) -> None:
        """Change a file of code."""
        text = (self.folder / name).read_text()
        assert before in text
        (self.folder / name).write_text(text.replace(before, after))

    def nudge(self, name: str) -> None:
        """Move one number of a tensor of the weights' file by one unit in its last place."""
        weights = load_file(self.folder / "weights.safetensors")
        flat = weights[name].view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(torch.inf))
        save_file(weights, self.folder / "weights.safetensors")

    def nudge_array(self, name: str, key: str | None = None, row: int = 0) -> None:
        """The same for one number of an npy file, or of a row of an npz file's column."""
        path = self.folder / name
        if key is None:
            array = np.load(path)
            array[row] = np.nextafter(array[row], np.float32(np.inf))
            np.save(path, array)
            return
        with np.load(path) as file:
            arrays = {each: file[each] for each in file.files}
        arrays[key][row] = (
            np.nextafter(arrays[key][row], np.float32(np.inf)) if key == "x" else (arrays[key][row] + 1) % 3
        )
        np.savez(path, **arrays)


@dataclass(frozen=True)
class Change:
    """What changes a run. part: of its identity: weights, modules, code, data or config. words: of the
    refusal to go on with an analyze.
    """

    apply: Callable[[IdentityWorkplace], object]
    part: str
    words: str


_MODEL = "code that model.py:build imports"

CHANGES = {
    "a weight by one unit in the last place": Change(
        lambda w: w.nudge("body.0.weight"), "weights", "model (its weights)"
    ),
    "a frozen parameter": Change(lambda w: w.nudge("frozen"), "weights", "model (its weights)"),
    "a buffer": Change(lambda w: w.nudge("kept"), "weights", "model (its weights)"),
    "a buffer that is not persistent": Change(
        lambda w: w.nudge_array("table.npy"), "weights", "model (its weights)"
    ),
    "a tensor that is a plain attribute": Change(
        lambda w: w.nudge_array("plain.npy"), "weights", "model (its weights)"
    ),
    "a plain attribute": Change(
        lambda w: w.edit("settings.json", '"power": 1', '"power": 2'), "modules", "model (its modules)"
    ),
    "a layer's option": Change(
        lambda w: w.edit("settings.json", '"p": 0.0', '"p": 0.5'),
        "modules",
        "model (its modules)",
    ),
    "the mode": Change(
        lambda w: w.config["model"].update(mode="train"), "config", 'model.mode was "eval" and is "train"'
    ),
    "an argument": Change(
        lambda w: w.config["model"].update(kwargs={"hidden": 5}),
        "config",
        "model.kwargs.hidden was null and is 5",
    ),
    "a default argument": Change(
        lambda w: w.edit("model.py", "hidden=5", "hidden=5, unused=0"), "code", "code of model.py:build was"
    ),
    "a module that the model imports": Change(
        lambda w: w.edit("id_helper.py", "SCALE\n\n", "SCALE\n\n\n"), "code", f"{_MODEL}: id_helper was"
    ),
    "a module that an imported one imports": Change(
        lambda w: w.edit("id_deep.py", "1.0", "2.0"), "code", f"{_MODEL}: id_deep was"
    ),
    "a module imported in forward": Change(
        lambda w: w.edit("id_late.py", "tanh", "sin"), "code", f"{_MODEL}: id_late was"
    ),
    "the loss": Change(
        lambda w: w.edit("loss.py", "return", "return 2 *"), "code", "code of loss.py:loss was"
    ),
    "a module that the loss imports": Change(
        lambda w: w.edit("id_loss.py", "return", "return 2 *"), "code", "loss.py:loss imports: id_loss was"
    ),
    "a number of a row": Change(
        lambda w: w.nudge_array("rows.npz", "x", ROWS // 2), "data", "data (its content) was"
    ),
    "a target": Change(lambda w: w.nudge_array("rows.npz", "y", ROWS // 2), "data", "data (its content) was"),
    "the dataset's code": Change(
        lambda w: w.edit("rows.py", "[row])", "[row] * (1 + (row == 5)))"),
        "data",
        "code of rows.py:build was",
    ),
}
