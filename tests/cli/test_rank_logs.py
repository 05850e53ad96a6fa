"""What ranks log, and the last lines of one that has died in the error of the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from psgrad.cli import progress as displays
from psgrad.cli.progress import ProgressStyle, display, log_of, with_last_lines
from psgrad.commands.analyze_passes import Passes
from psgrad.errors import DistributedError
from psgrad.run.results import Progress
from tests.forked_ranks import die, hasty, run_ranks
from tests.workplace import Workplace


def rank(number: int) -> Any:
    return SimpleNamespace(rank=number, size=3)


def said_by(number: int, folder: Path, **options: Any) -> None:
    with display(ProgressStyle.plain, rank(number), folder, **options) as progress:
        progress(Progress(0, 0, "samples", "a message"))


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    (tmp_path / "manifest.json").write_text("{}")
    return tmp_path


def test_first_rank_speaks_and_each_logs(begun: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said_by(0, begun)
    said_by(2, begun)
    assert capfd.readouterr().err == "a message\n"
    for number in (0, 2):
        head, *lines = log_of(begun, number).read_text().splitlines()
        assert head.startswith(f"rank {number} of 3 on ")
        assert lines == ["a message"]


def test_first_rank_of_a_private_run_has_no_log(begun: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said_by(0, begun, private=True)
    said_by(1, begun, private=True)
    assert capfd.readouterr().err == "a message\n"
    assert [each.name for each in (begun / "logs").iterdir()] == ["rank-1.log"]


@pytest.mark.parametrize("head", ["manifest.json", "index.json"])
def test_log_waits_until_the_run_has_begun(tmp_path: Path, head: str) -> None:
    """A folder that is there, and empty, is one that the first rank may take."""
    with display(ProgressStyle.plain, rank(1), tmp_path) as progress:
        progress(Progress(0, 0, "samples", "before"))
        assert list(tmp_path.iterdir()) == []
        (tmp_path / head).write_text("{}")
        progress(Progress(0, 0, "samples", "after"))
        assert log_of(tmp_path, 1).read_text().splitlines()[1:] == ["before", "after"]


def test_log_that_cannot_be_written_ends_nothing(begun: Path) -> None:
    (begun / "logs").write_text("a file")
    said_by(1, begun)


def test_error_has_the_last_lines_of_the_rank_it_names(begun: Path) -> None:
    (begun / "logs").mkdir()
    log_of(begun, 1).write_text("".join(f"line {number}\n" for number in range(9000)))
    error = DistributedError("rank 1 is gone", cause="a cause", next_step="a step", rank=1)
    found = str(with_last_lines(error, begun))
    last = [f"    line {number}" for number in range(8995, 9000)]
    expected = ["rank 1 is gone", f"  its last lines in {log_of(begun, 1)}:", *last]
    assert found.splitlines() == [*expected, "  likely cause: a cause", "  next step: a step"]


@pytest.mark.parametrize("number", [None, 2])
def test_error_without_a_log_stays_as_it_is(begun: Path, number: int | None) -> None:
    error = DistributedError("ranks differ", rank=number)
    assert with_last_lines(error, begun) is error


@pytest.mark.long
def test_rank_that_dies_is_named_with_what_it_has_logged(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty(monkeypatch)
    workplace.config["engine"] = {"chunk_size": 4}
    workplace.refused(2, "", options=("--part", "0/1"))  # which writes the config

    def plant(number: int) -> None:
        monkeypatch.setattr(displays, "PLAIN_INTERVAL_S", 0.0)
        if number:
            monkeypatch.setattr(Passes, "_merge", lambda self, measures: die())

    first, other = run_ranks(workplace.folder, 2, "analyze", "config.yaml", "--no-report", plant=plant)
    assert (first.code, other.code) == (3, -9), first.err
    assert "error: rank 1 has sent no heartbeat" in first.err
    _, head, lines = first.err.partition("  its last lines in out/logs/rank-1.log:\n")
    assert head
    assert "    samples: 24/24" in lines
    assert "Traceback" not in first.err
