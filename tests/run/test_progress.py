"""Progress of passes over rows."""

from __future__ import annotations

import pytest

from psgrad.run import progress as run_progress
from psgrad.run.progress import Clock, PassProgress
from psgrad.run.results import Progress


def test_progress_of_passes_counts_the_rows_of_this_process_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr(run_progress.time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(run_progress, "_SECONDS_OF_SILENCE", 0.0)
    heard, clock = list[Progress](), Clock()
    progress = PassProgress(clock, heard.append, 2)
    with clock("fit"):
        for done in (0, 2, 3, 0, 2):
            progress(done, 10)
        progress(1, 7)  # rows of the queries
    with clock("scores"):
        progress(0, 10)
    passes = [", ".join(each.detail.split(", ")[:2]) for each in heard]
    assert passes == [
        "pass 1, row 0 of 10",
        "pass 1, row 4 of 10",
        "pass 1, row 10 of 10",
        "pass 2, row 0 of 10",
        "pass 2, row 4 of 10",
        "pass 1, row 2 of 7",
        "pass 1, row 0 of 10",
    ]
    assert [each.phase for each in heard] == ["fit"] * 6 + ["scores"]


def test_progress_of_a_phase_that_counts_its_steps_has_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(run_progress.time, "perf_counter", lambda: now)
    heard, clock = list[Progress](), Clock()
    progress = PassProgress(clock, heard.append, 1)
    with clock("check"):
        clock.count(3, 10)
        progress(0, 100)
        now = 4.0
        progress(60, 100)
    with clock("report"):
        progress(0, 100)
        now = 8.0
        progress(60, 100)
    assert [(each.phase, each.done, each.total, each.unit) for each in heard] == [
        ("check", 3, 10, "step"),
        ("report", 0, 0, "step"),
    ]


def test_progress_of_passes_has_rows_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(run_progress.time, "perf_counter", lambda: now)
    heard, clock = list[Progress](), Clock()
    progress = PassProgress(clock, heard.append, 1)
    with clock("fit"):
        progress(0, 100)
        now = 4.0
        progress(60, 100)
        progress(20, 30)  # too soon to be said
        now = 8.0
        progress(40, 100)
    assert [each.detail for each in heard] == [
        "pass 1, row 60 of 100, 15 rows/s, 3 s left in this pass",
        "pass 1, row 100 of 100, 15 rows/s",
    ]
