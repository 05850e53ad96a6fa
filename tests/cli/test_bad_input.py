"""Everything that may be wrong with what a user gives, through the command line: its words, its exit code, no
traceback.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from tests.workplace import ROWS, Workplace

# -- The config ----------------------------------------------------------------------------------------------


def test_unknown_key(workplace: Workplace) -> None:
    workplace.config["engine"] = {"chunksize": 3}
    workplace.refused(2, "config.yaml", "chunksize", "chunk_size")


def test_wrong_type(workplace: Workplace) -> None:
    workplace.config["engine"] = {"verify": "three"}
    workplace.refused(2, "engine.verify", "three")


def test_every_problem_is_reported_at_once(workplace: Workplace) -> None:
    workplace.config["engine"] = {"verify": -1, "dtype": "float8"}
    workplace.config["analyze"] = {"top": 0}
    workplace.refused(2, "3 problems", "engine.verify", "engine.dtype", "analyze.top")


def test_duplicate_key(workplace: Workplace) -> None:
    workplace.analyze("--set", "version=2")
    text = (workplace.folder / "config.yaml").read_text()
    (workplace.folder / "twice.yaml").write_text(text + "output: elsewhere\n")
    outcome = workplace.command("analyze", "twice.yaml")
    assert outcome.code == 2
    assert "output" in outcome.err
    assert "twice" in outcome.err
    assert f"twice.yaml:{len(text.splitlines()) + 1}" in outcome.err
    assert "Traceback" not in outcome.err


def test_missing_config(workplace: Workplace) -> None:
    outcome = workplace.command("analyze", "nowhere.yaml")
    assert outcome.code == 2
    assert "nowhere.yaml" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_setting_is_validated_like_the_file(workplace: Workplace) -> None:
    workplace.refused(2, "--set", "engine.verfy", "verify", options=("--set", "engine.verfy=3"))


def test_a_device_that_is_not_there(workplace: Workplace) -> None:
    workplace.refused(2, "engine.device", "cuda:99", options=("--set", "engine.device=cuda:99"))


# -- Model and checkpoint ------------------------------------------------------------------------------------


def test_missing_factory_file(workplace: Workplace) -> None:
    workplace.config["model"]["factory"] = "models.py:mlp"
    workplace.refused(2, "there is no file", "models.py")


def test_missing_factory_in_its_file(workplace: Workplace) -> None:
    workplace.config["model"]["factory"] = "model.py:mpl"
    workplace.refused(2, "model.py has no 'mpl'", "did you mean mlp?")


def test_a_factory_that_raises(workplace: Workplace) -> None:
    workplace.use_model("def Model():\n    raise ValueError('width must be even')\n")
    workplace.refused(
        3, "the factory model.py:Model raised ValueError: width must be even", "model.py:", "in Model"
    )


def test_a_factory_whose_arguments_do_not_fit(workplace: Workplace) -> None:
    workplace.config["model"]["kwargs"] = {"hiden": 5}
    workplace.refused(2, "kwargs of model.py:mlp", "hidden")


def test_a_factory_that_returns_no_module(workplace: Workplace) -> None:
    workplace.use_model("def Model():\n    return 3\n")
    workplace.refused(3, "returned an object of type int", "torch.nn.Module")


def test_batch_norm_in_train_mode(workplace: Workplace) -> None:
    workplace.use_model(
        "def Model():\n    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))\n"
    )
    workplace.config["model"]["mode"] = "train"
    workplace.refused(3, "the layer 1 (BatchNorm1d)", "train mode", "model.mode: eval", "GroupNorm")


def test_a_pretrained_model_without_a_name(workplace: Workplace) -> None:
    workplace.config["model"] = {"pretrained": "", "task": "causal-lm"}
    workplace.refused(2, "model: pretrained is empty, expected a folder of save_pretrained or a hub id")


def test_missing_checkpoint(workplace: Workplace) -> None:
    workplace.config["model"]["checkpoint"] = "weights.safetensors"
    workplace.refused(2, "there is no checkpoint weights.safetensors", "relative to the config file's folder")


def test_state_dict_mismatch_names_missing_unexpected_and_misshaped_entries(workplace: Workplace) -> None:
    state = workplace.model.state_dict()
    state["0.wieght"] = state.pop("0.weight")
    state["2.bias"] = torch.zeros(7)
    save_file(state, workplace.folder / "model.safetensors")
    workplace.refused(3, "0.weight", "0.wieght", "2.bias", "[7]", "[3]")


def test_truncated_checkpoint(workplace: Workplace) -> None:
    path = workplace.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    workplace.refused(3, "model.safetensors", "download")


def test_git_lfs_pointer(workplace: Workplace) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    (workplace.folder / "model.safetensors").write_text(pointer)
    workplace.refused(3, "git-lfs", "git lfs pull")


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.write_text, (self.canary, "executed")


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_a_pickle_payload_is_never_executed(workplace: Workplace, kind: str) -> None:
    canary, path = workplace.folder / "canary", workplace.folder / "model.pt"
    content = {**workplace.model.state_dict(), "extra": Payload(canary)}
    if kind == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    workplace.config["model"]["checkpoint"] = "model.pt"
    workplace.refused(3, "model.pt")
    assert not canary.exists()


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "deep/../../model.safetensors"])
def test_a_sharded_index_that_leads_out_of_its_folder(workplace: Workplace, shard: str) -> None:
    index = {"metadata": {}, "weight_map": dict.fromkeys(workplace.model.state_dict(), shard)}
    (workplace.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    workplace.config["model"]["checkpoint"] = "model.safetensors.index.json"
    workplace.refused(3, shard)


# -- Data ----------------------------------------------------------------------------------------------------


def test_missing_data_file(workplace: Workplace) -> None:
    workplace.config["data"]["path"] = "datta.npz"
    workplace.refused(2, "datta.npz")


def test_missing_column(workplace: Workplace) -> None:
    workplace.save(label=workplace.arrays["y"])
    workplace.config["data"]["target"] = "labels"
    workplace.refused(2, "no column 'labels'", "did you mean label?")


def test_label_out_of_range(workplace: Workplace) -> None:
    labels = workplace.arrays["y"].copy()
    labels[5] = 3
    workplace.save(y=labels)
    workplace.refused(3, "row 5 has the label 3", "labels from 0 to 2")


def test_labels_that_count_from_one(workplace: Workplace) -> None:
    workplace.save(y=workplace.arrays["y"] + 1)
    workplace.refused(3, "labels that count from 1")


def test_label_out_of_range_where_only_the_rows_themselves_tell(workplace: Workplace) -> None:
    labels = np.zeros((ROWS, 1), dtype=np.int64)
    labels[17] = -1
    workplace.save(y=labels)
    workplace.use_model("def Model():\n    return nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (3, 1)))\n")
    workplace.refused(3, "row 17 has the label -1")


def test_label_of_the_wrong_type(workplace: Workplace) -> None:
    workplace.save(y=workplace.arrays["y"] + 0.5)
    workplace.refused(3, "targets are of type torch.float32", "save the target column as integers")


def test_labels_as_text_that_class_names_lack(workplace: Workplace) -> None:
    workplace.save(y=np.array(["cat", "dog", "cow"])[workplace.arrays["y"]])
    workplace.config["data"]["class_names"] = ["cat", "dog", "horse"]
    workplace.refused(3, "cow", "cat, dog, horse")


def test_class_names_of_which_two_are_alike(workplace: Workplace) -> None:
    workplace.config["data"]["class_names"] = ["cat", "cat", "dog"]
    workplace.refused(2, "data.class_names: the name 'cat' is there twice")


def test_columns_that_nothing_would_read(workplace: Workplace) -> None:
    workplace.config["data"]["text"] = "text"
    workplace.refused(2, "text and inputs are both given")


def test_labels_beyond_whole_numbers(workplace: Workplace) -> None:
    (workplace.folder / "labels.csv").write_text("a,b,label\n0.5,1.5,99999999999999999999\n2.5,1.5,0\n")
    workplace.config["data"] = {"path": "labels.csv", "inputs": ["a", "b"], "target": "label"}
    workplace.refused(3, "the label 'label' is 1e+20 in row 0")


def test_ragged_rows(workplace: Workplace) -> None:
    ragged = np.empty(ROWS, dtype=object)
    for row in range(ROWS):
        ragged[row] = np.zeros(4 if row else 3, dtype=np.float32)
    workplace.save(x=ragged)
    workplace.refused(3, "Python objects", "pad the rows")


def test_ragged_rows_of_a_csv_file(workplace: Workplace) -> None:
    (workplace.folder / "data.csv").write_text("a,b,y\n1,2,0\n1,2,1\n1,2\n")
    workplace.config["data"] = {"path": "data.csv", "inputs": ["a", "b"], "target": "y"}
    workplace.refused(3, "row 2", "2 cells, the header 3")


@pytest.mark.parametrize("kind", ["npz", "csv", "factory"])
def test_empty_dataset(workplace: Workplace, kind: str) -> None:
    workplace.save(x=workplace.arrays["x"][:0], y=workplace.arrays["y"][:0], uid=workplace.arrays["uid"][:0])
    (workplace.folder / "data.csv").write_text("x,y,uid\n")
    (workplace.folder / "data.py").write_text("def rows():\n    return []\n")
    source = {"factory": "data.py:rows"} if kind == "factory" else {"path": f"data.{kind}"}
    workplace.config["data"] = {**source, "inputs": "x", "target": "y", "id": "uid"}
    workplace.refused(3, "has no rows")


def test_duplicate_ids(workplace: Workplace) -> None:
    ids = workplace.arrays["uid"].copy()
    ids[7] = ids[3]
    workplace.save(uid=ids)
    workplace.refused(3, "one id in", "occurs more than once", "'row-03' in rows 3, 7")


def test_columns_of_unequal_length(workplace: Workplace) -> None:
    workplace.save(y=workplace.arrays["y"][:-1])
    workplace.refused(3, "different numbers of rows", f"y has {ROWS - 1}")


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
    workplace.refused(3, "row 15", "raised OSError: no such picture")
    manifest = workplace.manifest()
    assert manifest["state"] == "failed"
    assert "no such picture" in manifest["error"]
    assert (
        manifest["counts"]["finished_samples"]
        == len(pd.read_parquet(workplace.folder / "out" / "parts" / "samples"))
        == 8
    )


# -- Loss and model together ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("torch.nn.functional.cross_entropy(output[None], target[None], reduction='none')", "shape [1]"),
        ("output", "shape [3]"),
        ("float(3)", "type float"),
        ("output.argmax()", "torch.int64"),
    ],
    ids=["one entry", "vector", "number", "integer"],
)
def test_a_loss_that_does_not_return_one_scalar(workplace: Workplace, body: str, words: str) -> None:
    workplace.use_loss(f"def loss(output, target):\n    return {body}\n")
    workplace.refused(3, "the loss loss.py:loss returned", words, "one real number")


def test_a_loss_that_raises(workplace: Workplace) -> None:
    workplace.use_loss("def loss(output, target):\n    raise KeyError('weights')\n")
    workplace.refused(3, "raised KeyError on row 0", "weights")


def test_a_missing_loss(workplace: Workplace) -> None:
    workplace.config["loss"] = "cross_entropi"
    workplace.refused(2, "cross_entropi", "cross_entropy")


def test_an_output_that_the_loss_does_not_take(workplace: Workplace) -> None:
    workplace.use_model("def Model():\n    return nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)))\n")
    workplace.refused(3, "output [3, 2] and the target []", "cross_entropy")


def linear_model(*forward: str) -> str:
    """The source of a model with a linear layer, whose forward has these lines."""
    head = [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.layer = nn.Linear(4, 3)",
        "",
    ]
    return "\n".join([*head, "    def forward(self, x):", *(f"        {line}" for line in forward), ""])


def test_a_model_that_returns_a_dict(workplace: Workplace) -> None:
    workplace.use_model(linear_model("return {'logits': self.layer(x)}"))
    workplace.refused(3, "the model returned an object of type dict with logits", "file.py:loss")


def test_a_model_that_raises(workplace: Workplace) -> None:
    workplace.use_model(linear_model("raise ValueError('not today')"))
    workplace.refused(3, "raised ValueError on row 0: not today", "--debug")


def test_an_operator_without_a_rule(workplace: Workplace) -> None:
    workplace.use_model(linear_model("weight = torch.geqrf(self.layer.weight)[0]", "return x @ weight.t()"))
    workplace.refused(3, "geqrf has no rule", "model.py:", "docs/guides/adding-an-operator.md")


def test_a_number_that_depends_on_the_data(workplace: Workplace) -> None:
    workplace.use_model(linear_model("y = self.layer(x)", "return y * y.sum().item()"))
    workplace.refused(3, "differs between samples", "model.py:", "torch.where")


def test_noise_in_eval_mode(workplace: Workplace) -> None:
    workplace.use_model(linear_model("return self.layer(x) + torch.rand(3)"))
    workplace.refused(3, "random operator", "model.py:")


def test_inputs_of_the_wrong_shape(workplace: Workplace) -> None:
    workplace.save(x=workplace.arrays["x"][:, :3])
    workplace.refused(3, "row 0", "float32 [1, 3]", "data.inputs")


@pytest.mark.parametrize("verify", [0, 3])
def test_a_token_beyond_the_vocabulary(workplace: Workplace, verify: int) -> None:
    tokens = np.zeros((ROWS, 5), dtype=np.int64)
    tokens[11, 2] = 9
    workplace.save(x=tokens)
    workplace.use_model(
        "def Model():\n    return nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(15, 3))\n"
    )
    workplace.config["engine"] = {"verify": verify}
    workplace.refused(3, "raised IndexError on row 11", "beyond the vocabulary")


def test_pixels_saved_as_whole_numbers(workplace: Workplace) -> None:
    # A cast would hide that the model was trained on other numbers, such as 0 to 1.
    workplace.save(x=np.random.default_rng(0).integers(0, 256, (ROWS, 1, 8, 8), dtype=np.uint8))
    workplace.use_model(
        "def Model():\n    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))\n"
    )
    workplace.refused(3, "row 0", "int64 [1, 1, 8, 8]", "or whole numbers, such as pixels")


# -- The output ----------------------------------------------------------------------------------------------


def test_an_output_folder_that_holds_a_run(workplace: Workplace) -> None:
    (workplace.folder / "out").mkdir()
    (workplace.folder / "out" / "manifest.json").write_text('{"tool": "psgrad"}')
    workplace.refused(2, "the output folder out holds an earlier run", "--overwrite")


def test_an_output_folder_in_the_way_is_reported_before_anything_is_loaded(workplace: Workplace) -> None:
    (workplace.folder / "out").mkdir()
    (workplace.folder / "out" / "manifest.json").write_text('{"tool": "psgrad"}')
    workplace.use_model("def Model():\n    raise AssertionError('an hour later')\n")
    workplace.refused(2, "holds an earlier run")


def test_an_output_folder_that_holds_something_else(workplace: Workplace) -> None:
    (workplace.folder / "out").mkdir()
    (workplace.folder / "out" / "thesis.tex").write_text("years of work")
    workplace.refused(2, "not empty and does not hold a psgrad run", options=("--overwrite",))
    assert (workplace.folder / "out" / "thesis.tex").exists()


def test_a_run_that_cannot_load_leaves_the_earlier_one_alone(workplace: Workplace) -> None:
    folder = workplace.folder / "out"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"tool": "psgrad"}')
    (folder / "samples.csv").write_text("the earlier run's")
    workplace.config["model"]["checkpoint"] = "gone.safetensors"
    workplace.refused(2, "gone.safetensors", options=("--overwrite",))
    assert (folder / "samples.csv").read_text() == "the earlier run's"


def test_an_output_that_is_a_file(workplace: Workplace) -> None:
    workplace.refused(2, "exists and is not a folder", options=("--output", "config.yaml"))
