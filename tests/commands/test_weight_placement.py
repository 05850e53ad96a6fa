"""Where weights live, by the size of the model's files, the free memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from psgrad.commands import weight_placement
from psgrad.commands.weight_placement import pick_device, weight_placement_of
from psgrad.config import load_config
from psgrad.engine.execution.ranks import OneProcess
from tests.workplace import Workplace


@pytest.mark.parametrize(
    ("share", "engine", "expected"),
    [
        (0.4, {}, "resident"),
        (0.4, {"parameters": "offloaded"}, "offloaded"),
        (3.0, {}, "offloaded"),
        (3.0, {"parameters": "resident"}, "resident"),
    ],
)
def test_where_weights_live(
    workplace: Workplace,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    engine: dict[str, Any],
    expected: str,
) -> None:
    """Of a model whose files take so many times the free memory of a process."""
    workplace.config["engine"] = engine
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    config = load_config(workplace.folder / "config.yaml")
    size = weight_placement.weight_bytes(config.model, config.base)
    monkeypatch.setattr(weight_placement, "free_memory", lambda device: round(size / share))
    assert weight_placement_of(config, torch.device("cpu"), OneProcess()).where == expected


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("auto", "3", "cuda:3"),
        ("cuda", "3", "cuda:3"),
        ("cuda", "9", "cuda:1"),  # of more processes than GPUs
        ("cuda:2", "3", "cuda:2"),
        ("cpu", "3", "cpu"),
        ("auto", None, "cuda"),
    ],
)
def test_process_takes_the_gpu_of_its_own_number(
    monkeypatch: pytest.MonkeyPatch, name: str, rank: str | None, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert str(pick_device(name)) == expected
