"""`psgrad analyze` itself, killed with SIGKILL and resumed: at most one shard is lost, and the tables are the
same bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from psgrad.commands.analyze import analyze
from psgrad.config import load_config
from psgrad.run.results import Progress
from tests.crashes import Go, Tell, kill_and_resume, points_of
from tests.workplace import ROWS, Workplace

CHUNK, SHARD = 4, 8
# A measure that gathers, looks twice, keeps several numbers a sample and has a pass of its own: all that a
# state has to hold.
MEASURE = """\
from dataclasses import dataclass

import torch

from psgrad.engine.measures.measure import Gathered, Measure, OwnPass


@dataclass
class Everything(Measure):
    name = "everything"
    needs_factors = True
    needs_second_pass = True

    def prepare(self, setting):
        self.setting, self.chunk = setting, {}
        self.total = {name: torch.zeros_like(p) for name, p in setting.examples.params.items()}

    def columns(self, gradients):
        self.chunk = gradients.weighted_sum(torch.full_like(gradients.losses, 1.1))
        return {"pair": torch.stack([gradients.losses, 2 * gradients.losses], 1)}

    def keep(self):
        for name, value in self.chunk.items():
            self.total[name] += value
        self.chunk = {}

    def columns_again(self, gradients):
        return {"dot": gradients.dot(self.total)}

    def passes(self):
        def run(rows, chunk_size):
            examples = self.setting.examples.sized(chunk_size)
            asked = examples.each(lambda g: {"own": g.losses * 3}, rows.start, rows.stop)
            for part, found in asked:
                yield type("C", (), {"start": part.start, "stop": part.stop, "values": found})
        return [OwnPass("everything", run)]

    def state(self):
        return self.total

    def restore(self, state):
        self.total = dict(state)

    def gather(self, rows):
        arrays = {"pairs": rows["pair"], **self.total}
        return Gathered(columns={"whole": rows["dot"] + rows["own"]}, arrays=arrays)
"""


@pytest.fixture
def go(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Go:
    monkeypatch.setattr("psgrad.commands.analyze_passes._ROWS_PER_SHARD", SHARD)
    monkeypatch.setattr(
        "psgrad.reports.analyze_page.write_report", lambda result, write: write("report.html", b"a page")
    )
    (workplace.folder / "own.py").write_text(MEASURE)
    workplace.config |= {
        "engine": {"chunk_size": CHUNK, "verify": 0},
        "analyze": {"measures": ["own.py:Everything", "el2n"]},
    }

    def go(folder: Path, tell: Tell) -> None:
        workplace.config["output"] = str(folder)
        (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))

        def said(progress: Progress) -> None:
            if progress.phase == "samples":
                tell(progress.done)

        analyze(load_config(Path("config.yaml")), resume=True, progress=said)

    return go


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file, but of the manifest, which has timings. The verdict says where the run lies,
    which is left out.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    contents = {path: path.read_bytes().replace(json.dumps(str(folder)).encode(), b"") for path in files}
    return {
        str(path.relative_to(folder)): hashlib.sha256(content).hexdigest()
        for path, content in contents.items()
    }


class Checked:
    """What must hold after each death: no whole shard is lost, nothing is done twice that a shard holds; and
    at the end the same bytes.
    """

    def __init__(self, undisturbed: Path) -> None:
        self.expected = contents(undisturbed)

    def __call__(self, folder: Path, told: list[Any], finished: bool) -> None:
        if finished:
            assert contents(folder) == self.expected
            assert json.loads((folder / "manifest.json").read_text())["state"] == "finished"
            return
        if (folder / "samples.parquet").exists():
            assert pd.read_parquet(folder / "samples.parquet")["id"].tolist() == [
                f"row-{row:02d}" for row in range(ROWS)
            ]
        shards = folder / "parts" / "samples"
        if shards.exists():
            kept = sum(len(pd.read_parquet(path)) for path in shards.glob("[0-9]*.parquet"))
            # What was told as done after the last kill, but for the shard at work, is there.
            assert kept >= max(told, default=0) - SHARD


# A hundred kills in all, a tenth of them by default.
@pytest.mark.long
@pytest.mark.parametrize(("seed", "kills_in_all"), [(0, 10), pytest.param(1, 90, marks=pytest.mark.sweep)])
def test_analyze_killed_at_every_point_and_resumed(
    go: Go, tmp_path: Path, seed: int, kills_in_all: int
) -> None:
    points = points_of(go, tmp_path / "undisturbed")
    check = Checked(tmp_path / "undisturbed")
    assert {"samples.parquet", "parameters.parquet", "samples.csv", "measures/everything.safetensors"} <= set(
        check.expected
    )
    draw = random.Random(seed)
    deaths = 0
    while deaths < kills_in_all:
        kills = [draw.randint(1, points) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
        deaths += kill_and_resume(go, check, tmp_path / f"run-{deaths}", kills)


@pytest.mark.long
def test_analyze_kill_check_finds_lost_state(go: Go, tmp_path: Path, workplace: Workplace) -> None:
    points = points_of(go, tmp_path / "undisturbed")
    check = Checked(tmp_path / "undisturbed")
    (workplace.folder / "own.py").write_text(MEASURE.replace("self.total = dict(state)", "pass"))
    with pytest.raises(AssertionError):
        kill_and_resume(go, check, tmp_path / "run", [points // 2])


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["00001.parquet", "_00002.state.safetensors", "_00001.arrays.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_analyze_resume_damaged_shard(
    go: Go, tmp_path: Path, name: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    points_of(go, tmp_path / "undisturbed")

    def killed(self: Any, frame: pd.DataFrame) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("psgrad.run.RunFolder.finish_samples", killed)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "run", lambda told: None)
    path = tmp_path / "run" / "parts" / "samples" / name
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    told: list[int] = []
    go(tmp_path / "run", told.append)
    Checked(tmp_path / "undisturbed")(tmp_path / "run", told, True)
    # What was gathered is kept with the last shard alone: without that all is done again.
    assert told[0] == 0


@pytest.mark.long
def test_analyze_resume_keeps_chunk_size(go: Go, workplace: Workplace, tmp_path: Path) -> None:
    workplace.config["engine"]["chunk_size"] = "auto"
    workplace.save(
        x=np.tile(workplace.arrays["x"], (3, 1)),
        y=np.tile(workplace.arrays["y"], 3),
        uid=np.array([f"row-{i:02d}" for i in range(3 * ROWS)]),
    )
    points = points_of(go, tmp_path / "undisturbed")
    expected = contents(tmp_path / "undisturbed")

    def check(folder: Path, told: list[Any], finished: bool) -> None:
        assert not finished or contents(folder) == expected

    assert kill_and_resume(go, check, tmp_path / "run", [points // 2]) == 1
