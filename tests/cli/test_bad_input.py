"""Bad input through the command line: its words, its exit code, no traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from tests.workplace import ROWS, Workplace

Change = Callable[[Workplace], object]


def section(name: str, **keys: Any) -> Change:
    """Other keys in a section of the config."""
    return lambda place: place.config.setdefault(name, {}).update(keys)


def model(source: str) -> Change:
    return lambda place: place.use_model(source)


def forward(*lines: str) -> Change:
    """A model with a linear layer, whose forward has these lines."""
    head = (
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 3)\n\n    def forward(self, x):\n"
    )
    return model(head + "\n".join(f"        {line}" for line in lines) + "\n")


def columns(**changed: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Other columns in the place of those of data.npz."""
    return lambda place: place.save(**{name: change(place.arrays[name]) for name, change in changed.items()})


def put(row: int, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    """The column with another value in one row."""
    return lambda column: np.array([value if place == row else each for place, each in enumerate(column)])


def csv(text: str, **data: Any) -> Change:
    def change(place: Workplace) -> None:
        (place.folder / "rows.csv").write_text(text)
        place.config["data"] = {"path": "rows.csv", "inputs": ["a", "b"], "target": "y", **data}

    return change


def both(*changes: Change) -> Change:
    return lambda place: [change(place) for change in changes]


def damaged(place: Workplace) -> None:
    path = place.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-20])


def lfs_pointer(place: Workplace) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    (place.folder / "model.safetensors").write_text(text)


def other_weights(place: Workplace) -> None:
    state = place.model.state_dict()
    state["0.wieght"] = state.pop("0.weight")
    state["2.bias"] = torch.zeros(7)
    save_file(state, place.folder / "model.safetensors")


def ragged(place: Workplace) -> None:
    rows = np.empty(ROWS, dtype=object)
    for row in range(ROWS):
        rows[row] = np.zeros(4 if row else 3, dtype=np.float32)
    place.save(x=rows)


TOKENS = both(
    columns(x=lambda x: np.where(np.arange(ROWS)[:, None] == 11, 9, np.zeros((ROWS, 5), np.int64))),
    model("def Model():\n    return nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(15, 3))\n"),
)
PIXELS = both(
    # A cast would hide that the model was trained on other numbers, such as 0 to 1.
    columns(x=lambda x: np.random.default_rng(0).integers(0, 256, (ROWS, 1, 8, 8), dtype=np.uint8)),
    model("def Model():\n    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))\n"),
)
NORMALISED = "def Model():\n    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))\n"
TWO_AXES = "def Model():\n    return nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)))\n"
LAST_AXIS = "def Model():\n    return nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (3, 1)))\n"
ANIMALS = columns(y=lambda y: np.array(["cat", "dog", "cow"])[y])

# what is bad -> (the change, the exit code, words on stderr)
BAD: dict[str, tuple[Change, int, tuple[str, ...]]] = {
    "unknown key": (section("engine", chunksize=3), 2, ("config.yaml", "chunksize", "chunk_size")),
    "wrong type": (section("engine", verify="three"), 2, ("engine.verify", "three")),
    "three problems": (
        both(section("engine", verify=-1, dtype="float8"), section("analyze", top=0)),
        2,
        ("3 problems", "engine.verify", "engine.dtype", "analyze.top"),
    ),
    "device": (section("engine", device="cuda:99"), 2, ("engine.device", "cuda:99")),
    "file of the factory": (section("model", factory="models.py:mlp"), 2, ("there is no file", "models.py")),
    "name of the factory": (section("model", factory="model.py:mpl"), 2, ("has no 'mpl'", "mean mlp?")),
    "factory raises": (
        model("def Model():\n    raise ValueError('width must be even')\n"),
        3,
        ("the factory model.py:Model raised ValueError: width must be even", "model.py:", "in Model"),
    ),
    "kwargs": (section("model", kwargs={"hiden": 5}), 2, ("kwargs of model.py:mlp", "hidden")),
    "no module": (model("def Model():\n    return 3\n"), 3, ("object of type int", "torch.nn.Module")),
    "batch norm in train mode": (
        both(model(NORMALISED), section("model", mode="train")),
        3,
        ("the layer 1 (BatchNorm1d)", "train mode", "model.mode: eval", "GroupNorm"),
    ),
    "pretrained without a name": (
        lambda place: place.config.update(model={"pretrained": "", "task": "causal-lm"}),
        2,
        ("model: pretrained is empty, expected a folder of save_pretrained or a hub id",),
    ),
    "no checkpoint": (
        section("model", checkpoint="weights.safetensors"),
        2,
        ("there is no checkpoint weights.safetensors", "relative to the config file's folder"),
    ),
    "other weights": (other_weights, 3, ("0.weight", "0.wieght", "2.bias", "[7]", "[3]")),
    "damaged checkpoint": (damaged, 3, ("model.safetensors", "download")),
    "git-lfs pointer": (lfs_pointer, 3, ("git-lfs", "git lfs pull")),
    "no data": (section("data", path="datta.npz"), 2, ("datta.npz",)),
    "no column": (section("data", target="yy"), 2, ("no column 'yy'", "did you mean y?")),
    "label beyond": (columns(y=put(5, 3)), 3, ("row 5 has the label 3", "labels from 0 to 2")),
    "labels from 1": (columns(y=lambda y: y + 1), 3, ("labels that count from 1",)),
    "label beyond, by the row": (
        both(columns(y=lambda y: put(17, [-1])(np.zeros((ROWS, 1), np.int64))), model(LAST_AXIS)),
        3,
        ("row 17 has the label -1",),
    ),
    "fractions as labels": (
        columns(y=lambda y: y + 0.5),
        3,
        ("targets are of type torch.float32", "save the target column as integers"),
    ),
    "label without a name": (
        both(ANIMALS, section("data", class_names=["cat", "dog", "horse"])),
        3,
        ("cow", "cat, dog, horse"),
    ),
    "a name twice": (
        section("data", class_names=["cat", "cat", "dog"]),
        2,
        ("data.class_names: the name 'cat' is there twice",),
    ),
    "columns that nothing reads": (section("data", text="text"), 2, ("text and inputs are both given",)),
    "labels beyond whole numbers": (
        csv("a,b,y\n0.5,1.5,99999999999999999999\n2.5,1.5,0\n"),
        3,
        ("the label 'y' is 1e+20 in row 0",),
    ),
    "ragged rows": (ragged, 3, ("Python objects", "pad rows to one length")),
    "cells of csv": (csv("a,b,y\n1,2,0\n1,2,1\n1,2\n"), 3, ("rows.csv", "Expected 3 columns, got 2")),
    "empty npz": (columns(**dict.fromkeys("xy", lambda x: x[:0]), uid=lambda u: u[:0]), 3, ("has no rows",)),
    "empty csv": (csv("a,b,y\n"), 3, ("has no rows",)),
    "ids twice": (
        columns(uid=put(7, "row-03")),
        3,
        ("one id in", "occurs more than once", "'row-03' in rows 3, 7"),
    ),
    "unequal columns": (columns(y=lambda y: y[:-1]), 3, ("different numbers of rows", f"y has {ROWS - 1}")),
    "no loss": (
        lambda place: place.config.update(loss="cross_entropi"),
        2,
        ("cross_entropi", "cross_entropy"),
    ),
    "loss raises": (
        lambda place: place.use_loss("def loss(output, target):\n    raise KeyError('weights')\n"),
        3,
        ("raised KeyError on row 0", "weights"),
    ),
    "output of two axes": (model(TWO_AXES), 3, ("output [3, 2] and the target []", "cross_entropy")),
    "output is a dict": (
        forward("return {'logits': self.layer(x)}"),
        3,
        ("the model returned an object of type dict with logits", "file.py:loss"),
    ),
    "model raises": (
        forward("raise ValueError('not today')"),
        3,
        ("raised ValueError on row 0: not today", "--debug"),
    ),
    "no rule": (
        forward("weight = torch.geqrf(self.layer.weight)[0]", "return x @ weight.t()"),
        3,
        ("geqrf has no rule", "model.py:", "docs/guides/adding-an-operator.md"),
    ),
    "a number that depends on the data": (
        forward("y = self.layer(x)", "return y * y.sum().item()"),
        3,
        ("differs between samples", "model.py:", "torch.where"),
    ),
    "noise in eval mode": (
        forward("return self.layer(x) + torch.rand(3)"),
        3,
        ("random operator", "model.py:"),
    ),
    "shape of inputs": (columns(x=lambda x: x[:, :3]), 3, ("row 0", "float32 [1, 3]", "data.inputs")),
    "token beyond": (TOKENS, 3, ("raised IndexError on row 11", "beyond the vocabulary")),
    "token beyond, without a self-check": (
        both(TOKENS, section("engine", verify=0)),
        3,
        ("raised IndexError on row 11", "beyond the vocabulary"),
    ),
    "pixels": (PIXELS, 3, ("row 0", "int64 [1, 1, 8, 8]", "or whole numbers, such as pixels")),
}


@pytest.mark.every(1)
@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_with_its_words(workplace: Workplace, what: str) -> None:
    change, code, words = BAD[what]
    change(workplace)
    workplace.refused(code, *words)


def test_missing_config(workplace: Workplace) -> None:
    workplace.command("analyze", "nowhere.yaml").refused(2, "nowhere.yaml")


def test_a_setting_is_validated_like_the_file(workplace: Workplace) -> None:
    workplace.refused(2, "--set", "engine.verfy", "verify", options=("--set", "engine.verfy=3"))


RAISES_ON_ROW_15 = """
import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, row):
        if row == 15:
            raise OSError("no such picture")
        return torch.zeros(4), 0
"""


def test_a_dataset_that_raises_in_the_middle(workplace: Workplace) -> None:
    (workplace.folder / "data.py").write_text(RAISES_ON_ROW_15)
    workplace.config["data"] = {"factory": "data.py:Rows"}
    workplace.config["engine"] = {**workplace.config.get("engine", {}), "chunk_size": 8}
    workplace.refused(3, "row 15", "raised OSError: no such picture")
    manifest = workplace.manifest()
    assert manifest["state"] == "failed"
    assert "no such picture" in manifest["error"]
    assert (
        manifest["counts"]["finished_samples"]
        == len(pd.read_parquet(workplace.folder / "out" / "parts" / "samples"))
        == 8
    )


# -- The output ----------------------------------------------------------------------------------------------


def test_an_output_folder_that_holds_a_run_is_refused_before_anything_is_loaded(workplace: Workplace) -> None:
    (workplace.folder / "out").mkdir()
    (workplace.folder / "out" / "manifest.json").write_text('{"tool": "psgrad"}')
    workplace.use_model("def Model():\n    raise AssertionError('an hour later')\n")
    workplace.refused(2, "the output folder out holds an earlier run", "--overwrite")


def test_an_output_folder_that_holds_something_else(workplace: Workplace) -> None:
    (workplace.folder / "out").mkdir()
    (workplace.folder / "out" / "thesis.tex").write_text("years of work")
    workplace.refused(2, "not empty and does not hold a psgrad run", options=("--overwrite",))
    assert (workplace.folder / "out" / "thesis.tex").exists()
    workplace.refused(2, "exists and is not a folder", options=("--output", "config.yaml"))


def test_a_run_that_cannot_load_leaves_the_earlier_one_alone(workplace: Workplace) -> None:
    folder = workplace.folder / "out"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"tool": "psgrad"}')
    (folder / "samples.csv").write_text("the earlier run's")
    workplace.config["model"]["checkpoint"] = "gone.safetensors"
    workplace.refused(2, "gone.safetensors", options=("--overwrite",))
    assert (folder / "samples.csv").read_text() == "the earlier run's"
