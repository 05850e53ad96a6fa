"""Commands that can't share their rows refuse to be one of several processes, before they read anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from psgrad.cli.app import app
from psgrad.errors import EXIT_USAGE


@pytest.mark.parametrize(
    "command",
    [
        ["dp-step", "--plan"],
        ["merge"],
        ["analyze", "--part", "1/2"],
        ["influence", "index", "--part", "1/2"],
    ],
    ids=" ".join,
)
def test_one_of_several_processes_is_refused_before_any_work(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = tmp_path / "config.yaml"
    config.write_text("not read")
    result = CliRunner().invoke(app, [*command, str(config)])
    assert result.exit_code == EXIT_USAGE
    assert "was started in 2 processes" in result.stderr
    assert "run it in one process" in result.stderr
