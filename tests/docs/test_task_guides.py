"""The guides of docs/guides/tasks: each config runs on the rows above it, with a tiny model of its task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import psgrad
from psgrad.config.model import TASKS
from tests.commands.test_text_commands import write_adapter
from tests.docs.pages import DOCS, README, blocks
from tests.hugging_face import CHAT_TEMPLATE, tiny_model, tiny_tokenizer, transformers

GUIDES = DOCS / "guides" / "tasks"
IMAGES = GUIDES / "image-classification.md"
EXAMPLES = [
    pytest.param(rows, config, id=f"{page.stem}-{place}")
    for page in sorted(GUIDES.glob("*.md"))
    if page != IMAGES
    for place, (rows, config) in enumerate(
        zip(*(blocks(page.read_text(encoding="utf-8"), kind) for kind in ("json", "yaml")), strict=True)
    )
]
CLASSIFIED = blocks((GUIDES / "text-classification.md").read_text(encoding="utf-8"), "json")[0]
EXAMPLES.append(pytest.param(CLASSIFIED, blocks(README, "yaml")[0], id="README"))
TOKENIZERS = {"causal-lm": "gpt", "seq2seq-lm": "t5"}


def names_of(rows: list[dict[str, Any]], column: str) -> dict[str, Any]:
    """The keys of a model's config for these labels by name."""
    listed = [row[column] if isinstance(row[column], list) else [row[column]] for row in rows]
    names = sorted({label for labels in listed for label in labels})
    return {"id2label": dict(enumerate(names)), "label2id": {name: place for place, name in enumerate(names)}}


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize(("rows", "config"), EXAMPLES)
def test_task_guide_config_runs_on_its_rows(
    rows: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given, listed = yaml.safe_load(config), [json.loads(line) for line in rows.splitlines()]
    model, data, task = given["model"], given["data"], given["model"]["task"]
    named = task in ("sequence-classification", "token-classification")
    tiny_model(task, tmp_path / model["pretrained"], **(names_of(listed, data["target"]) if named else {}))
    template = {"chat_template": CHAT_TEMPLATE} if "messages" in data else {}
    tiny_tokenizer(tmp_path / model["pretrained"], kind=TOKENIZERS.get(task, "bert"), **template)
    if "adapter" in model:
        write_adapter(tmp_path / model["pretrained"], tmp_path / model["adapter"])
    (tmp_path / data["path"]).write_text(rows)
    (tmp_path / "config.yaml").write_text(config)

    samples = psgrad.analyze(tmp_path / "config.yaml", report=False).samples

    assert len(samples) == len(listed)
    assert (samples["status"] == "ok").all()
    assert (samples["grad_norm"] > 0).all()


@pytest.mark.long
def test_image_guide_configs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page names the images of its rows and says how a folder looks; some more are drawn here."""
    page = IMAGES.read_text(encoding="utf-8")
    (rows,), configs = blocks(page, "json"), blocks(page, "yaml")
    monkeypatch.chdir(tmp_path)
    names = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    tiny_model("image-classification", tmp_path / "runs/vit", **names)
    transformers.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "runs/vit")
    (tmp_path / "labels.jsonl").write_text(rows)
    listed = [json.loads(line)["file"] for line in rows.splitlines()]
    drawn, draw = [*listed, "photos/cat/1.png", "photos/dog/0.jpg"], np.random.default_rng(0)
    for name in drawn:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(tmp_path / name)

    found = []
    for config in configs:
        (tmp_path / "config.yaml").write_text(config)
        samples = psgrad.analyze(tmp_path / "config.yaml", report=False).samples.sort_values("index")
        assert (samples["status"] == "ok").all()
        assert (samples["grad_norm"] > 0).all()
        found.append(samples["id"].tolist())

    assert found == [sorted(name.removeprefix("photos/") for name in drawn), listed]


def test_each_task_has_a_guide_with_a_config() -> None:
    configs = [str(each.values[1]) for each in EXAMPLES]
    configs += blocks(IMAGES.read_text(encoding="utf-8"), "yaml")
    tasks = {yaml.safe_load(config)["model"]["task"] for config in configs}
    overview = (GUIDES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{task}`" in overview for task in tasks)
    assert tasks == set(TASKS)
