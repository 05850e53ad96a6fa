"""The guides of docs/guides/tasks: each config runs on the rows above it, with a tiny model of its task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import psgrad
from tests.docs.test_readme import DOCS, README, blocks
from tests.hugging_face import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from tests.workflows.test_text_commands import write_adapter

GUIDES = DOCS / "guides" / "tasks"
EXAMPLES = [
    pytest.param(rows, config, id=f"{page.stem}-{place}")
    for page in sorted(GUIDES.glob("*.md"))
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


def test_each_task_has_a_guide_with_a_config() -> None:
    tasks = {yaml.safe_load(each.values[1])["model"]["task"] for each in EXAMPLES}
    overview = (GUIDES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{task}`" in overview for task in tasks)
    assert len(tasks) == 8
