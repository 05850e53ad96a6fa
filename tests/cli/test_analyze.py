"""`psgrad analyze` as a user meets it: what goes where, and which exit code comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgrad.errors import CheckpointError, ConfigError, DataError, OutputExistsError
from psgrad.run.results import Progress
from tests.reports import frames
from tests.workplace import Outcome

Install = Callable[[Callable[..., Any]], None]
Run = Callable[..., Outcome]


def _raise(error: BaseException) -> Callable[..., Any]:
    def analyze(*args: Any, **kwargs: Any) -> Any:
        raise error

    return analyze


def test_the_table_and_the_path_go_to_stdout_and_words_to_stderr(
    config: Path, workflow: Install, run: Run
) -> None:
    def analyze(config: Any, *, progress: Callable[[Progress], None], **options: Any) -> Any:
        progress(Progress(0, 1797, "gradients", "imports: digits"))
        progress(Progress(1797, 1797, "gradients"))
        return frames.result(frames.classification())

    workflow(analyze)
    ended = run("analyze", config)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0].split() == ["rank", "id", "label", "prediction", "loss", "gradient", "norm", "percentile"]
    assert len(lines) == 22
    assert lines[-1] == "runs/digits"
    assert "imports: digits" in ended.err
    assert "gradients: 1,797/1,797 samples" in ended.err
    assert "18 in the review list" in ended.err
    assert "self-check: worst relative error 2.1e-07 over 3 samples" in ended.err


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
    config: Path, workflow: Install, run: Run, error: BaseException, code: int
) -> None:
    workflow(_raise(error))
    run("analyze", config).refused(code, str(error))


def test_a_mistake_of_ours_is_one_screen_with_the_way_to_report_it(
    config: Path, workflow: Install, run: Run
) -> None:
    workflow(_raise(ZeroDivisionError("division by zero\n" * 100)))
    ended = run("analyze", config)
    err = ended.err
    assert ended.code == 3
    assert err.startswith("internal error: ZeroDivisionError: division by zero\n")
    assert "--debug" in err
    assert "report" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 10


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("Unable to allocate 745. GiB"), ("error: out of memory", "Unable to allocate 745. GiB")),
        (SystemExit(0), ("error: code that the config names has called sys.exit",)),
    ],
)
def test_memory_that_runs_out_is_no_mistake_of_ours_and_an_exit_of_the_users_code_no_pass(
    config: Path, workflow: Install, run: Run, error: BaseException, words: tuple[str, ...]
) -> None:
    workflow(_raise(error))
    assert run("analyze", config).refused(3, *words).startswith(words[0])


def test_escape_sequences_in_a_message_do_not_reach_the_terminal(
    config: Path, workflow: Install, run: Run
) -> None:
    workflow(_raise(DataError("the id '\x1b[2J' is there twice")))
    run("analyze", config).refused(3, "the id '\\x1b[2J' is there twice")
