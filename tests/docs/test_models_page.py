"""The page on models: each model section on it is a valid one, of files that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from psgrad.config import load_config
from tests.hugging_face import tiny_model
from tests.models.test_adapters import KINDS, make_adapter

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "models.md"
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files that the page names."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model("sequence-classification", folder / "runs" / "bert")
    for step in (200, 400):
        checkpoint = folder / "runs" / "bert" / f"checkpoint-{step}"
        tiny_model("sequence-classification", checkpoint)
        state = {"global_step": step, "log_history": [{"learning_rate": 0.1}]}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    tiny_model("causal-lm", folder / "base")
    make_adapter(folder / "runs" / "lora", folder / "base", KINDS["lora"]())
    (folder / "model.py").write_text("from torch import nn\n\n\ndef mlp():\n    return nn.Linear(2, 1)\n")
    torch.save({"state_dict": {"weight": torch.ones(1, 2), "bias": torch.ones(1)}}, folder / "runs/last.ckpt")
    save_file({"weight": torch.ones(1)}, folder / "best.safetensors")
    (folder / "rows.jsonl").write_text('{"text": "a", "label": 0}\n')
    return folder


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_models_page_example_is_valid(number: int, folder: Path) -> None:
    content: dict[str, Any] = yaml.safe_load(EXAMPLES[number])
    data = {"path": "rows.jsonl", "text": "text", "target": "label"}
    content = {"version": 1, "loss": "cross_entropy", "data": data, "output": "out", **content}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    model = load_config(folder / "config.yaml").model
    for path in (
        model.pretrained,
        model.checkpoint,
        *(model.adapter if isinstance(model.adapter, list) else []),
    ):
        assert path is None or (folder / path).exists() or "/" not in str(path)


def test_models_page_has_an_example_of_each_origin() -> None:
    origins = {name for example in EXAMPLES for name in yaml.safe_load(example)["model"]}
    assert {"pretrained", "factory", "adapter", "checkpoint", "dtype"} <= origins
