"""Commands that can't share their rows refuse to be one of several processes, before they read anything."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from psgrad.cli.app import app
from psgrad.errors import EXIT_USAGE


@pytest.mark.parametrize("options", [[], ["index"], ["--evaluate", "loo"]])
def test_a_rank_is_refused_before_any_work(options, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = tmp_path / "config.yaml"
    config.write_text("not read")
    result = CliRunner().invoke(app, ["influence", *options, str(config)])
    assert result.exit_code == EXIT_USAGE
    assert "was started in 2 processes" in result.stderr
    assert "run it in one process" in result.stderr
