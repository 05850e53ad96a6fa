"""`psgrad analyze` as a user meets it: what goes where, and which exit code comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgrad.cli import main
from psgrad.errors import CheckpointError, ConfigError, DataError, OutputExistsError
from psgrad.run.results import Progress
from tests.reports import frames

Install = Callable[[Callable[..., Any]], None]


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["psgrad", *map(str, arguments)])
    with pytest.raises(SystemExit) as leave:
        main()
    assert isinstance(leave.value.code, int)
    return leave.value.code


def _raise(error: BaseException) -> Callable[..., Any]:
    def analyze(*args: Any, **kwargs: Any) -> Any:
        raise error

    return analyze


def test_the_table_and_the_path_go_to_stdout_and_words_to_stderr(
    config: Path, workflow: Install, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def analyze(config: Any, *, progress: Callable[[Progress], None], **options: Any) -> Any:
        progress(Progress(0, 1797, "gradients", "imports: digits"))
        progress(Progress(1797, 1797, "gradients"))
        return frames.result(frames.classification())

    workflow(analyze)
    assert _run(monkeypatch, "analyze", config) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["rank", "id", "label", "prediction", "loss", "gradient", "norm", "percentile"]
    assert len(lines) == 22
    assert lines[-1] == "runs/digits"
    assert "imports: digits" in err
    assert "gradients: 1,797/1,797 samples" in err
    assert "18 in the review list" in err
    assert "self-check: worst relative error 2.1e-07 over 3 samples" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad"), 2),
        (OutputExistsError("there"), 2),
        (DataError("rows"), 3),
        (CheckpointError("torn"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_a_message_and_an_exit_code(
    config: Path,
    workflow: Install,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    workflow(_raise(error))
    assert _run(monkeypatch, "analyze", config) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert str(error) in err


def test_a_mistake_of_ours_is_one_screen_with_the_way_to_report_it(
    config: Path, workflow: Install, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    workflow(_raise(ZeroDivisionError("division by zero\n" * 100)))
    assert _run(monkeypatch, "analyze", config) == 3
    err = capfd.readouterr().err
    assert err.startswith("internal error: ZeroDivisionError: division by zero\n")
    assert "--debug" in err
    assert "report" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 10


def test_memory_that_runs_out_is_no_mistake_of_ours_and_an_exit_of_the_users_code_no_pass(
    config: Path, workflow: Install, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    workflow(_raise(MemoryError("Unable to allocate 745. GiB")))
    assert _run(monkeypatch, "analyze", config) == 3
    err = capfd.readouterr().err
    assert err.startswith("error: out of memory")
    assert "Unable to allocate 745. GiB" in err
    workflow(_raise(SystemExit(0)))
    assert _run(monkeypatch, "analyze", config) == 3
    assert capfd.readouterr().err.startswith("error: code that the config names has called sys.exit")


def test_escape_sequences_in_a_message_do_not_reach_the_terminal(
    config: Path, workflow: Install, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    workflow(_raise(DataError("the id '\x1b[2J' is there twice")))
    assert _run(monkeypatch, "analyze", config) == 3
    assert "the id '\\x1b[2J' is there twice" in capfd.readouterr().err
