"""`psgrad init` for what is there: a model.py with data and weights, or a pretrained folder and its data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from psgrad.config import load_config
from tests.workplace import Outcome, Workplace


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    """model.py, model.safetensors, and the rows as train.csv."""
    frame = pd.DataFrame(workplace.arrays["x"], columns=["a", "b", "c", "d"])
    frame = frame.assign(label=workplace.arrays["y"], id=workplace.arrays["uid"])
    frame.to_csv(workplace.folder / "train.csv", index=False)
    (workplace.folder / "data.npz").unlink()
    return workplace


def written(place: Workplace, *options: str) -> tuple[dict[str, Any], Outcome]:
    """What the config says that was written."""
    outcome = place.command("init", *options)
    assert outcome.code == 0, outcome.err
    config = load_config(place.folder / "psgrad.yaml")
    return config.model_dump(mode="json"), outcome


@pytest.mark.long
def test_init_writes_a_config_of_own_files_that_runs(place: Workplace) -> None:
    before = {path.name: path.read_bytes() for path in place.folder.iterdir()}
    config, outcome = written(place)
    assert config["model"]["factory"] == "model.py:mlp"
    assert config["model"]["checkpoint"] == "model.safetensors"
    data = {key: config["data"][key] for key in ("path", "inputs", "target", "id")}
    assert data == {"path": "train.csv", "inputs": ["a", "b", "c", "d"], "target": "label", "id": "id"}
    assert config["loss"]["name"] == "cross_entropy"
    assert outcome.out.split() == ["psgrad.schema.json", "psgrad.yaml"]
    assert "the target is 'label', and the loss cross_entropy; check both" in outcome.err
    assert all((place.folder / name).read_bytes() == each for name, each in before.items())
    assert place.command("validate", "psgrad.yaml", "--deep").code == 0
    done = place.command("analyze", "psgrad.yaml", "--no-report")
    assert done.code == 0, done.err
    assert place.command("init").code == 2, "and is not written over"


def test_init_of_fractions_several_files_and_a_class(place: Workplace) -> None:
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.normal(size=(5, 3)), columns=["u", "v", "price"])
    frame.to_parquet(place.folder / "train.parquet")
    (place.folder / "train.csv").unlink()
    frame.to_csv(place.folder / "other.csv")
    (place.folder / "last.pt").write_bytes(b"")
    (place.folder / "model.py").write_text(
        "from torch import nn\n\ndef helper(x):\n    return x\n\nclass Block(nn.Module):\n"
        "    def __init__(self, size):\n        pass\n\nclass Net(nn.Module):\n"
        "    def __init__(self, size=3):\n        pass\n"
    )
    config, outcome = written(place)
    assert config["model"]["factory"] == "model.py:Net"
    assert (config["data"]["path"], config["data"]["inputs"]) == ("train.parquet", ["u", "v"])
    assert (config["data"]["target"], config["loss"]["name"]) == ("price", "mse")
    assert "the dataset is train.parquet; there are others: other.csv" in outcome.err
    assert "the checkpoint is model.safetensors; there are others: last.pt" in outcome.err


def test_init_tells_which_arguments_a_model_needs(place: Workplace) -> None:
    (place.folder / "model.py").write_text("def build(width, depth=2):\n    raise RuntimeError('it ran')\n")
    config, outcome = written(place)
    assert config["model"]["factory"] == "model.py:build"
    assert "model.py:build needs width: write them into model.kwargs" in outcome.err


@pytest.mark.parametrize(
    ("model", "words"), [("x = 1\n", "defines no function and no class"), ("def f(:", "is no Python")]
)
def test_init_of_a_model_that_can_not_be_named_is_reported(place: Workplace, model: str, words: str) -> None:
    (place.folder / "model.py").write_text(model)
    place.command("init").refused(3, words)
    assert not (place.folder / "psgrad.yaml").exists()


def model_folder(place: Workplace, architecture: str, **more: Any) -> Path:
    folder = place.folder / "pretrained"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **more}))
    return folder


def rows(place: Workplace, name: str, **columns: list[Any]) -> str:
    path, frame = place.folder / name, pd.DataFrame(columns)
    if path.suffix == ".jsonl":
        path.write_text(frame.to_json(orient="records", lines=True))
    elif path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return name


CHAT = {"role": "user", "content": "a"}
ANSWER = {"answer_start": [0], "text": ["a"]}
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
    "answers": (
        "BertForQuestionAnswering",
        {},
        {"question": ["a"], "context": ["b"], "answers": [ANSWER]},
        "question-answering",
        {"text": ["question", "context"], "target": "answers"},
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
    outcome = workplace.command(
        "init", "new", "--from", "pretrained", "--data", rows(workplace, "t.csv", text=["a"])
    )
    assert outcome.code == 0, outcome.err
    config = load_config(workplace.folder / "new" / "psgrad.yaml")
    assert (config.model.pretrained, str(config.data.path)) == ("../pretrained", "../t.csv")


def test_init_from_an_adapter_names_its_base(workplace: Workplace) -> None:
    folder = model_folder(workplace, "LlamaForCausalLM")
    (workplace.folder / "adapter").mkdir()
    about = {"base_model_name_or_path": str(folder), "task_type": "CAUSAL_LM", "peft_type": "LORA"}
    (workplace.folder / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    config, outcome = written(workplace, "--from", "adapter")
    assert (config["model"]["pretrained"], config["model"]["adapter"]) == ("pretrained", ["adapter"])
    assert config["data"]["prompt"] == "prompt"
    assert "no --data was given: the names of file and columns are examples" in outcome.err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--from", "nowhere"), 3, "there is no nowhere/config.json"),
        (("--from", "pretrained"), 3, "names the architecture BertModel"),
        (("--data", "t.csv"), 2, "--data was given without --from"),
        (("--from", "pretrained", "--kind", "text"), 2, "--from was given together with --kind"),
    ],
)
def test_init_from_what_is_no_model_is_reported(
    workplace: Workplace, options: tuple[str, ...], code: int, words: str
) -> None:
    model_folder(workplace, "BertModel")
    workplace.command("init", *options).refused(code, words)


def test_init_tells_columns_that_do_not_say_what_they_are(workplace: Workplace) -> None:
    model_folder(workplace, "BertForSequenceClassification")
    path = rows(workplace, "t.csv", first=["a"], second=["b"])
    outcome = workplace.command("init", "--from", "pretrained", "--data", path)
    outcome.refused(3, "the columns of t.csv, first, second, do not say which is text and which target")


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
