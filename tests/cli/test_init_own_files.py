"""`psgrad init --from`: a config for a factory or a pretrained folder, and its data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from psgrad.config import load_config
from tests.workplace import Outcome, Workplace


def written(place: Workplace, *options: str) -> tuple[dict[str, Any], Outcome]:
    """What the config says that was written."""
    outcome = place.command("init", *options).succeeded()
    config = load_config(place.folder / "psgrad.yaml")
    return config.model_dump(mode="json"), outcome


@pytest.mark.long
def test_init_from_a_factory_and_a_table_runs(workplace: Workplace) -> None:
    frame = pd.DataFrame(workplace.arrays["x"], columns=["a", "b", "c", "d"])
    frame = frame.assign(label=workplace.arrays["y"], uid=workplace.arrays["uid"])
    frame.to_csv(workplace.folder / "train.csv", index=False)
    before = {path.name: path.read_bytes() for path in workplace.folder.iterdir()}
    config, outcome = written(workplace, "--from", "model.py:mlp", "--data", "train.csv")
    data = {key: config["data"][key] for key in ("path", "inputs", "target", "id")}
    assert data == {"path": "train.csv", "inputs": ["a", "b", "c", "d"], "target": "label", "id": "uid"}
    assert (config["model"]["factory"], config["loss"]["name"]) == ("model.py:mlp", "cross_entropy")
    assert outcome.out.split() == ["psgrad.yaml"]
    assert "the target is 'label', and the loss is cross_entropy: check that" in outcome.err
    assert "the weights are those that the factory gives" in outcome.err
    assert all((workplace.folder / name).read_bytes() == each for name, each in before.items())
    workplace.command("analyze", "psgrad.yaml", "--no-report").succeeded()


@pytest.mark.long
def test_init_from_a_factory_and_a_folder_of_images_runs(workplace: Workplace) -> None:
    for name in ("cat", "dog"):
        (workplace.folder / "images" / name).mkdir(parents=True)
        for number in range(4):
            values = np.full((2, 1), number * (9 if name == "cat" else 60), dtype=np.uint8)
            Image.fromarray(values).save(workplace.folder / "images" / name / f"{number}.png")
    (workplace.folder / "model.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(2, 2))\n"
    )
    config, _ = written(workplace, "--from", "model.py:build", "--data", "images")
    assert (config["data"]["images"], config["data"]["path"]) == ("images", None)
    workplace.command("analyze", "psgrad.yaml", "--no-report").succeeded()


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_init_of_fractions_as_targets_has_a_loss_of_numbers(workplace: Workplace, suffix: str) -> None:
    path = rows(workplace, f"t.{suffix}", u=[0.5, 1.5], v=[1, 2], price=[1.5, 2.0])
    config, outcome = written(workplace, "--from", "model.py:mlp", "--data", path)
    assert (config["data"]["inputs"], config["loss"]["name"]) == (["u", "v"], "mse")
    assert "the target is 'price', and the loss is mse: check that" in outcome.err


def model_folder(place: Workplace, architecture: str, **more: Any) -> Path:
    folder = place.folder / "pretrained"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **more}))
    return folder


def rows(place: Workplace, name: str, /, **columns: list[Any]) -> str:
    path, frame = place.folder / name, pd.DataFrame(columns)
    if path.suffix == ".jsonl":
        path.write_text(frame.to_json(orient="records", lines=True))
    elif path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return name


CHAT = {"role": "user", "content": "a"}
TASKS: dict[str, tuple[str, dict[str, Any], dict[str, list[Any]], str, dict[str, Any]]] = {
    "pair": (
        "BertForSequenceClassification",
        {"id2label": {"0": "no", "1": "yes"}},
        {"premise": ["a"], "hypothesis": ["b"], "label": [1], "uid": ["x"]},
        "sequence-classification",
        {"text": ["premise", "hypothesis"], "target": "label", "id": "uid"},
    ),
    "regression": (
        "BertForSequenceClassification",
        {"problem_type": "regression"},
        {"sentence": ["a"], "score": [0.5]},
        "regression",
        {"text": "sentence", "target": "score"},
    ),
    "tokens": (
        "RobertaForTokenClassification",
        {},
        {"tokens": [["a", "b"]], "ner_tags": [["O", "B"]]},
        "token-classification",
        {"text": "tokens", "target": "ner_tags"},
    ),
    "prompt": (
        "LlamaForCausalLM",
        {},
        {"instruction": ["a"], "output": ["b"]},
        "causal-lm",
        {"prompt": "instruction", "completion": "output"},
    ),
    "chat": (
        "GPT2LMHeadModel",
        {},
        {"messages": [[{"role": "user"}]]},
        "causal-lm",
        {"messages": "messages"},
    ),
    "plain": ("GPT2LMHeadModel", {}, {"text": ["a"]}, "causal-lm", {"text": "text"}),
    "masked": ("BertForMaskedLM", {}, {"text": ["a"]}, "masked-lm", {"text": "text"}),
    "seq2seq": (
        "T5ForConditionalGeneration",
        {},
        {"document": ["a"], "summary": ["b"]},
        "seq2seq-lm",
        {"text": "document", "target": "summary"},
    ),
    "images": (
        "ViTForImageClassification",
        {},
        {"image": ["a.png"], "label": [0]},
        "image-classification",
        {"image": "image", "target": "label"},
    ),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_init_from_a_model_folder_names_task_and_columns(
    workplace: Workplace, name: str, suffix: str
) -> None:
    architecture, about, columns, task, data = TASKS[name]
    model_folder(workplace, architecture, **about)
    path = rows(workplace, f"train.{suffix}", **columns)
    config, _ = written(workplace, "--from", "pretrained", "--data", path)
    assert (config["model"]["pretrained"], config["model"]["task"]) == ("pretrained", task)
    assert {key: config["data"][key] for key in data} == data
    assert config["data"]["path"] == path


def test_init_into_another_folder_has_paths_relative_to_it(workplace: Workplace) -> None:
    model_folder(workplace, "BertForMaskedLM")
    workplace.command(
        "init", "new", "--from", "pretrained", "--data", rows(workplace, "t.csv", text=["a"])
    ).succeeded()
    config = load_config(workplace.folder / "new" / "psgrad.yaml")
    assert (config.model.pretrained, str(config.data.path)) == ("../pretrained", "../t.csv")


FROM_FILE, FROM_FOLDER = ("--from", "model.py:mlp"), ("--from", "pretrained")
OF_FOLDER = (*FROM_FOLDER, "--data", "data.npz")
COLUMNS = "the columns of t.csv, first, second, do not say which is text and which target"


@pytest.mark.every(1)
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--from", "nowhere", "--data", "data.npz"), 3, "there is no nowhere/config.json"),
        (OF_FOLDER, 3, "names the architecture BertModel"),
        ((*OF_FOLDER, "--kind", "text"), 2, "--from was given together with --kind"),
        (("--from", "model.py", "--data", "data.npz"), 2, "--from model.py:NAME, of a function"),
        (FROM_FILE, 2, "--from was given without --data"),
        (("--data", "t.csv"), 2, "--data was given without --from"),
        ((*FROM_FOLDER, "--data", "t.csv"), 3, COLUMNS),
        ((*FROM_FILE, "--data", "t.jsonl"), 3, "t.jsonl can't be read"),
        ((*FROM_FILE, "--data", "t.parquet"), 3, "t.parquet can't be read"),
        ((*FROM_FILE, "--data", "t.xlsx"), 3, "the columns of t.xlsx can't be read by init"),
        ((*FROM_FILE, "--data", "t.npz"), 3, "t.npz can't be read"),
        ((*FROM_FILE, "--data", "gone.csv"), 3, "there is no dataset gone.csv"),
    ],
)
def test_init_from_what_is_no_model_or_can_not_be_read_is_reported(
    workplace: Workplace, options: tuple[str, ...], code: int, words: str
) -> None:
    of_labels = words == COLUMNS
    model_folder(workplace, "BertForSequenceClassification" if of_labels else "BertModel")
    rows(workplace, "t.csv", first=["a"], second=["b"])
    contents = {"jsonl": b'{"x": 1}\n{"x": "a"}\n', "parquet": b"not one", "xlsx": b"", "npz": b"PK"}
    for suffix, content in contents.items():
        (workplace.folder / f"t.{suffix}").write_bytes(content)
    workplace.command("init", *options).refused(code, words)
    assert not (workplace.folder / "psgrad.yaml").exists()


@pytest.mark.long
def test_init_from_imports_neither_torch_nor_transformers(workplace: Workplace) -> None:
    model_folder(workplace, "BertForMaskedLM")
    rows(workplace, "t.jsonl", text=["a"])
    script = (
        "import sys\nsys.argv = ['psgrad', 'init', '--from', 'pretrained', '--data', 't.jsonl']\n"
        "from psgrad.cli import main\ntry:\n    main()\nexcept SystemExit as error:\n"
        "    print(error.code, [m for m in ('torch', 'transformers') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
