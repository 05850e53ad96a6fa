"""`psgrad validate` on models of libraries: what their files say, without loading weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from psgrad.commands.validate import validate
from psgrad.commands.validation import Validation
from tests.hugging_face import tiny_model, tiny_tokenizer
from tests.models.test_adapters import KINDS, make_adapter, rename_base


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("causal-lm", tmp_path / "base")
    make_adapter(tmp_path / "adapter", tmp_path / "base", KINDS["lora"]())
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


def write(folder: Path, model: dict[str, Any], **sections: Any) -> Path:
    content = {
        "version": 1,
        "model": {"pretrained": "base", "task": "causal-lm", **model},
        "data": {"path": "rows.jsonl", "text": "text"},
        "output": "out",
        **sections,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def found(folder: Path, model: dict[str, Any], **sections: Any) -> Validation:
    return validate(write(folder, model, **sections))


def problem(folder: Path, model: dict[str, Any], **sections: Any) -> tuple[str, str]:
    problems = found(folder, model, **sections).problems
    (each,) = [each for each in problems if each.where.startswith(("model", "analyze"))]
    return each.where, str(each.error)


def test_what_the_files_say(folder: Path) -> None:
    facts = found(folder, {"adapter": "adapter"}).facts
    assert facts["model"] == "base: llama, causal-lm; numbers: 17,488 F32; engine.dtype: auto is float32"
    assert "rows; text string" in facts["data"]
    assert facts["model.adapter"] == "adapter: LORA, 336 numbers"


@pytest.mark.long
def test_neither_torch_nor_transformers_is_imported(folder: Path) -> None:
    # A tokenizer, which texts are checked with, needs transformers; the model's files alone do not.
    path = write(folder, {"adapter": "adapter"}, data={"path": "rows.jsonl", "inputs": "number"})
    code = (
        "import sys; from pathlib import Path; from psgrad.commands.validate import validate;"
        f"validate(Path({str(path)!r}));"
        "print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_folder_that_is_not_there(folder: Path) -> None:
    where, said = problem(folder, {"pretrained": "./absent"})
    assert where == "model.pretrained"
    assert "there is no folder" in said


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "base" / "model.safetensors").unlink()
    assert "has no weights" in problem(folder, {})[1]


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config(content: str, folder: Path) -> None:
    (folder / "base" / "config.json").write_text(content)
    assert "config.json" in problem(folder, {})[1]


def test_a_head_of_another_task(folder: Path) -> None:
    where, said = problem(folder, {"task": "sequence-classification"})
    assert where == "model.pretrained"
    assert "was saved as LlamaForCausalLM, whose head is another" in said


def test_a_regression_head(folder: Path) -> None:
    tiny_model("regression", folder / "base")
    assert "set model.task: regression" in problem(folder, {"task": "sequence-classification"})[1]
    assert found(folder, {"task": "regression"}).facts["model"].startswith("base: bert, regression")


def test_an_adapter_of_another_width(folder: Path) -> None:
    tiny_model("causal-lm", folder / "wide", hidden_size=64)
    make_adapter(folder / "adapter", folder / "wide", KINDS["lora"]())
    rename_base(folder / "adapter", "base")
    where, said = problem(folder, {"adapter": "adapter"})
    assert where == "model.adapter"
    assert "lora_A.weight is [3, 64], and the layer of the base is [16, 16]" in said


def test_an_adapter_of_another_base(folder: Path) -> None:
    tiny_model("causal-lm", folder / "other", seed=1)
    make_adapter(folder / "adapter", folder / "other", KINDS["lora"]())
    assert "was made for another base model" in problem(folder, {"adapter": "adapter"})[1]


def test_an_adapter_whose_base_is_not_here_is_noted(folder: Path) -> None:
    rename_base(folder / "adapter", "someone/large")
    assert any(
        "names someone/large as its base" in note for note in found(folder, {"adapter": "adapter"}).notes
    )


def test_an_adapter_without_settings(folder: Path) -> None:
    (folder / "adapter" / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in problem(folder, {"adapter": "adapter"})[1]


def test_folders_as_checkpoints(folder: Path) -> None:
    tiny_model("causal-lm", folder / "checkpoint-2")
    tiny_model("causal-lm", folder / "checkpoint-10", num_hidden_layers=1)
    listed = {"analyze": {"checkpoints": "checkpoint-*"}}
    where, said = problem(folder, {}, **listed)
    assert where == "analyze.checkpoints.1"
    assert "checkpoint-10 lacks model.layers.1." in said


def test_a_library_that_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    where, said = problem(folder, {"adapter": "adapter"})
    assert where == "model"
    assert "peft is not installed" in said
    assert "pip install 'psgrad[hugging-face]'" in said


def test_what_would_be_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def hub(name: str, *, dry_run: bool = False, **_: Any) -> Any:
        if not dry_run:
            raise FileNotFoundError(name)
        planned = huggingface_hub.file_download.DryRunFileInfo
        return [planned("0" * 40, 1234, "model.safetensors", "", False, True)]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    data = {"path": "rows.jsonl", "text": "text", "id": None}
    sections = {"allow_download": True, "data": data}
    facts = found(folder, {"pretrained": "someone/new", "adapter": "adapter"}, **sections).facts
    assert (
        facts["model"]
        == "would download 1 files of someone/new, 1,234 bytes: model.safetensors (1,234 bytes)"
    )
    where, said = problem(folder, {"pretrained": "someone/new"})
    assert where == "model.pretrained"
    assert "is not in the local cache" in said


def test_a_pattern_without_a_match(folder: Path) -> None:
    problems = found(folder, {}, analyze={"checkpoints": "no-*"}).problems
    assert any("no checkpoint matches 'no-*'" in str(each.error) for each in problems)


def test_images_are_counted_and_their_classes_are_the_models(tmp_path: Path) -> None:
    names = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    tiny_model("image-classification", tmp_path / "vit", **names)
    for name in ("cat/0.png", "cat/1.png", "dog/0.png", "dog/notes.txt"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(b"not opened")
    model = {"pretrained": "vit", "task": "image-classification"}
    looked_at = found(tmp_path, model, data={"images": "photos"})
    assert not looked_at.problems
    assert looked_at.facts["data (images)"] == "3 images"
    assert any("1 file was left out" in note and "dog/notes.txt" in note for note in looked_at.notes)

    (tmp_path / "photos" / "dog").rename(tmp_path / "photos" / "dogs")
    (each,) = found(tmp_path, model, data={"images": "photos"}).problems
    assert each.where == "data.images"
    assert "the label 'dogs' in row " in str(each.error)
    assert "is no class; did you mean dog?" in str(each.error)


def test_tokens_beyond_the_vocabulary_are_found(tmp_path: Path) -> None:
    tiny_model("causal-lm", tmp_path / "base", vocab_size=9)
    tiny_tokenizer(tmp_path / "base", kind="gpt")
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat"}\n')
    (each,) = found(tmp_path, {}).problems
    assert "and the model has embeddings for 9 tokens" in str(each.error)
