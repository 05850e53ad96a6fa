"""Every command that processes share finds with sharded weights what one process finds with weights in its
memory, to the last bit of each row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from psgrad import plugins
from psgrad.engine.execution import sharded
from tests.forked_ranks import EndedRank, hasty, run_ranks
from tests.workflows.same_runs import assert_same_runs
from tests.workplace import ROWS, Outcome, Workplace, run_command


@pytest.fixture(autouse=True)
def all_weights_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "WHOLE_BELOW", 0)
    hasty(monkeypatch)


def by_ranks(folder: Path, config: dict[str, Any], size: int, *command: str) -> list[EndedRank]:
    config["engine"] = {**config.get("engine", {}), "parameters": "sharded"}
    config["output"] = "sharded"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return run_ranks(folder, size, *command)


def test_analyze_over_two_ranks(workplace: Workplace) -> None:
    workplace.config["engine"] = {"chunk_size": 5, "verify": 2}
    workplace.succeeded("--no-report")
    ended = by_ranks(workplace.folder, workplace.config, 2, "analyze", "config.yaml", "--no-report")
    assert [rank.code for rank in ended] == [0, 0], [rank.err for rank in ended]
    assert_same_runs(workplace.folder / "out", workplace.folder / "sharded")
    manifest = json.loads((workplace.folder / "sharded/manifest.json").read_text())
    assert manifest["engine"]["parameters"] == "sharded"
