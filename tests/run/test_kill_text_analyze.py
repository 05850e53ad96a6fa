"""`psgrad analyze` on texts of unequal length, killed with SIGKILL and resumed: tokens are kept, rows are
taken in buckets, and the files are the same bytes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psgrad.commands.analyze import analyze
from psgrad.config import load_config
from psgrad.run.results import Progress
from tests.crashes import Tell, kill_and_resume, points_of
from tests.run.test_kill_analyze import contents
from tests.text_tasks import CASES


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["classification", "completion"])
def test_analyze_of_texts_killed_at_any_point_and_resumed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psgrad.commands.analyze_passes._ROWS_PER_SHARD", 4)
    monkeypatch.setattr(
        "psgrad.reports.analyze_page.write_report", lambda result, write: write("report.html", b"a page")
    )
    case = replace(CASES[name], rows=[*CASES[name].rows] * 4)
    path = case.write(tmp_path / "case")
    engine = "engine: {dtype: float32, verify: 0"
    path.write_text(path.read_text().replace(engine, engine + ", chunk_size: 4"))

    def go(folder: Path, tell: Tell) -> None:
        def said(progress: Progress) -> None:
            if progress.phase == "samples":
                tell(progress.done)

        analyze(load_config(path, [f"output={folder}"]), resume=True, progress=said)

    points = points_of(go, tmp_path / "undisturbed")
    expected = contents(tmp_path / "undisturbed")
    resumed_in_the_middle = []

    def check(folder: Path, told: list[Any], finished: bool) -> None:
        resumed_in_the_middle.append(not finished and 0 < max(told, default=0) < len(case.rows))
        assert not finished or contents(folder) == expected

    draw = random.Random(name)
    for attempt in range(6):
        kill_and_resume(go, check, tmp_path / f"run-{attempt}", [draw.randint(1, points)])
    assert any(resumed_in_the_middle)
