"""A dataset of the user's own makes each row once, for its fingerprint, its id and all passes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from psgrad.commands.analyze import analyze
from psgrad.commands.dp_step import dp_step
from psgrad.commands.influence import influence
from psgrad.commands.influence_index import influence_index
from psgrad.config import Config, config_from
from psgrad.data.sources import datasets
from psgrad.run.results import Progress
from tests.private_workplace import PRIVACY
from tests.workplace import CONFIG

ROWS = 60
CALLS: Counter[int] = Counter()


class Counted(Dataset[Any]):
    """Rows that draw from the global generator, and count how often they are made."""

    def __init__(self, named: bool) -> None:
        self._named = named

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, int] | dict[str, Any]:
        CALLS[row] += 1
        return {"x": torch.randn(4), "y": row % 3, "name": f"n{row}"} if self._named else (torch.randn(4), 0)


def counted() -> Counted:
    return Counted(named=False)


def named() -> Counted:
    return Counted(named=True)


NAMED = {"factory": f"{__name__}:named", "inputs": "x", "target": "y", "id": "name"}


def config_of(folder: Path, data: dict[str, Any] | None = None, **sections: Any) -> Config:
    CALLS.clear()
    content = copy.deepcopy(CONFIG) | {
        "data": data or {"factory": f"{__name__}:counted"},
        "output": str(folder / "out"),
        "engine": {"chunk_size": 16},
        **sections,
    }
    return config_from(content, base=folder)


def of_rows(said: list[tuple[int, Progress]]) -> list[tuple[int, Progress]]:
    return [each for each in said if each[1].phase == "rows"]


@pytest.mark.long
@pytest.mark.parametrize("data", [None, NAMED], ids=["numbered", "named"])
@pytest.mark.parametrize("measures", [[], ["cosine_to_mean", "el2n"]], ids=["one pass", "two passes"])
def test_analyze_makes_each_row_once(workplace: Any, data: Any, measures: list[str]) -> None:
    said: list[tuple[int, Progress]] = []
    run = config_of(workplace.folder, data, analyze={"measures": measures})
    first = analyze(run, progress=lambda each: said.append((CALLS.total(), each)), report=False)
    assert {*CALLS.values()} == {1}
    assert len(CALLS) == ROWS
    assert said[0] == (0, Progress(0, 0, "load"))
    assert of_rows(said)[0][0] < ROWS
    assert of_rows(said)[0][1].total == ROWS
    CALLS.clear()
    analyze(run, resume=True, report=False)  # in another process: rows are read anew, once
    assert {*CALLS.values()} == {1}
    again = analyze(config_of(workplace.folder, data), overwrite=True, report=False)
    assert again.samples["loss"].tolist() == first.samples["loss"].tolist()


@pytest.mark.parametrize("command", [influence, influence_index])
def test_influence_and_index_make_each_row_once(workplace: Any, command: Callable[..., Any]) -> None:
    said: list[tuple[int, Progress]] = []
    asked: dict[str, Any] = {"queries": {"ids": [0, 1, 2], "worst": 2}, "method": "ekfac"}
    if command is influence_index:
        asked |= {"index": {"path": str(workplace.folder / "index"), "dimension": 8}}
    config = config_of(workplace.folder, influence=asked)
    more: dict[str, Any] = {} if command is influence_index else {"report": False}
    command(config, **more, progress=lambda each: said.append((CALLS.total(), each)))
    assert {*CALLS.values()} == {1}
    assert len(CALLS) == ROWS
    assert of_rows(said)[0][0] < ROWS


@pytest.mark.long
def test_rows_without_room_are_made_again(workplace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    enough = analyze(config_of(workplace.folder, output=str(workplace.folder / "enough")), report=False)
    monkeypatch.setattr(datasets, "_KEPT_BYTES", 20 * 250)
    found = analyze(config_of(workplace.folder), report=False)
    assert Counter(CALLS.values())[1] >= 20
    assert max(CALLS.values()) > 1
    assert found.samples["loss"].tolist() == enough.samples["loss"].tolist()


@pytest.mark.long
def test_private_runs_make_rows_anew(workplace: Any) -> None:
    sampling = {"scheme": "poisson", "sample_rate": 0.9}
    privacy = PRIVACY | {"expected_batch_size": 54, "sampling": sampling}
    dp_step(config_of(workplace.folder, privacy=privacy, engine={"verify": 0}), steps=3)
    assert max(CALLS.values()) > 3
