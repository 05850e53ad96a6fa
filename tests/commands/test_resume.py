"""A run that goes on: only with the model, data, code and settings that its rows came from, and what is not
part of a number may change.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from psgrad.commands.analyze import analyze, limited
from psgrad.commands.check import check
from psgrad.config import load_config
from psgrad.errors import ConfigError
from psgrad.run.results import AnalyzeResult, Progress
from tests.workplace import ROWS, Workplace


@pytest.fixture
def quick(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.setattr(
        "psgrad.reports.analyze_page.write_report", lambda result, write: write("report.html", b"")
    )
    monkeypatch.setattr("psgrad.commands.analyze_passes._ROWS_PER_SHARD", 4)
    workplace.config |= {"engine": {"chunk_size": 4, "verify": 0}, "analyze": {"measures": ["el2n"]}}
    return workplace


def run(
    workplace: Workplace, progress: Callable[[Progress], None] = lambda _: None, **options: Any
) -> AnalyzeResult:
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    return analyze(load_config(Path("config.yaml")), progress=progress, **options)


def interrupted(workplace: Workplace, after: int = 12) -> None:
    """A run in out/ that somebody stopped after some rows."""

    def stop(progress: Progress) -> None:
        if progress.done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(workplace, stop)
    assert workplace.manifest()["state"] == "interrupted"
    assert workplace.manifest()["counts"]["finished_samples"] == after


@pytest.mark.long
def test_the_rows_that_are_done_are_not_done_again(quick: Workplace) -> None:
    interrupted(quick)
    seen: list[int] = []
    run(
        quick,
        lambda progress: seen.append(progress.done) if progress.phase == "samples" else None,
        resume=True,
    )
    assert seen[0] == 12
    assert quick.samples()["id"].tolist() == quick.arrays["uid"].tolist()
    assert not (quick.folder / "out" / "parts").exists()
    seen.clear()
    again = run(
        quick,
        lambda progress: seen.append(progress.done) if progress.phase == "samples" else None,
        resume=True,
    )
    assert seen == []  # it is finished
    pd.testing.assert_frame_equal(again.samples, quick.samples())


def test_without_a_run_resume_begins_one(quick: Workplace) -> None:
    assert len(run(quick, resume=True).samples) == ROWS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda w: w.config.update(loss={"name": "cross_entropy", "label_smoothing": 0.1}),
            "loss.label_smoothing was null and is 0.1",
        ),
        (lambda w: w.config["engine"].update(dtype="float64"), 'engine.dtype was "float32" and is "float64"'),
        (lambda w: w.config["analyze"].update(measures=[]), 'analyze.measures was [{"name": "el2n"}]'),
        (lambda w: w.config["analyze"].update(seed=1), "analyze.seed was 0 and is 1"),
    ],
    ids=["loss", "engine", "measures", "seed"],
)
def test_what_changed_is_refused_with_the_difference(
    quick: Workplace, change: Callable[[Workplace], None], words: str
) -> None:
    interrupted(quick)
    change(quick)
    with pytest.raises(ConfigError) as refusal:
        run(quick, resume=True)
    message = str(refusal.value)
    assert "was begun with something else, and rows of two runs can't be mixed" in message
    assert words in message
    assert "--overwrite" in message
    assert len(pd.read_parquet(quick.folder / "out" / "parts" / "samples")) == 12


def test_a_limit_is_part_of_a_run(quick: Workplace) -> None:
    interrupted(quick)
    with pytest.raises(ConfigError, match="rows was 24 and is 20"):
        run(quick, resume=True, limit=20)


@pytest.mark.long
def test_what_is_no_part_of_a_number_may_change(quick: Workplace) -> None:
    interrupted(quick)
    quick.config["engine"]["verify"] = 2
    quick.config["analyze"]["top"] = 3
    quick.config["report"] = {"title": "another"}
    quick.config["gate"] = {"nonfinite": "warning"}
    assert len(run(quick, resume=True).samples) == ROWS


def test_a_run_of_another_command_is_reported(quick: Workplace) -> None:
    interrupted(quick)
    manifest = quick.folder / "out" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"command": "analyze"', '"command": "influence"'))
    with pytest.raises(ConfigError, match="is one of psgrad influence"):
        run(quick, resume=True)


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.sweep)])
def test_a_signal_at_any_time_leaves_what_can_be_gone_on_with(workplace: Workplace, name: str) -> None:
    workplace.config |= {"engine": {"chunk_size": 1, "verify": 0, "capture": "off"}}
    x = torch.randn(500, 4)
    workplace.save(x=x.numpy(), y=torch.randint(0, 3, (500,)).numpy(), uid=torch.arange(500).numpy())
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    command = [sys.executable, "-m", "psgrad", "analyze", "config.yaml"]
    process = subprocess.Popen(
        command, cwd=workplace.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (workplace.folder / "out" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if name == "SIGINT" else 143), err
    assert "Traceback" not in err
    done = workplace.manifest()["counts"]["finished_samples"]
    assert workplace.manifest()["state"] == "interrupted"
    assert not list(workplace.folder.rglob("*.tmp"))
    assert done == len(pd.read_parquet(workplace.folder / "out" / "parts" / "samples")) if done else True
    result = analyze(load_config(Path("config.yaml")), resume=True, report=False)
    assert result.samples["id"].tolist() == list(range(500))


def test_a_finished_run_has_the_verdict_of_the_gate_as_it_is_now(quick: Workplace) -> None:
    x = quick.arrays["x"].copy()
    x[3] = np.nan
    quick.save(x=x)
    quick.config["gate"] = {"nonfinite": "warning"}
    first = run(quick)
    assert first.check is not None
    assert first.check.exit_code == 0
    quick.config["gate"] = {"nonfinite": "error"}
    again = run(quick, resume=True)
    assert again.check is not None
    assert again.check.exit_code == 1
    assert check(quick.folder / "out").exit_code == 1
    assert quick.manifest()["config"]["gate"]["nonfinite"] == "error"


@pytest.mark.parametrize(
    ("change", "words"),
    [({"outliers": {"score": "loss"}}, "outliers.score"), ({"review_fraction": 0.5}, "review_fraction")],
)
def test_a_finished_run_that_was_judged_by_other_rules_is_refused(
    quick: Workplace, change: dict[str, Any], words: str
) -> None:
    run(quick)
    before = quick.manifest()
    quick.config["analyze"] |= change
    with pytest.raises(ConfigError, match=f"analyze.{words}.* was"):
        run(quick, resume=True)
    assert quick.manifest() == before


@pytest.mark.parametrize(("limit", "rows"), [(0.29, 29), (0.57, 57), (0.005, 1), (1, 1), (7, 7), (0.999, 99)])
def test_a_limit_is_the_share_that_is_written(limit: float, rows: int) -> None:
    assert limited(100, limit) == rows
