"""When and by which command a run was made: what manifest.json and the page say."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta

import pytest

from psgrad.commands.run_manifest import command_line
from tests.private_workplace import PrivateWorkplace
from tests.workplace import Workplace


def test_only_psgrads_own_command_line_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("/usr/bin/psgrad", "/lib/psgrad/__main__.py", "psgrad.exe"):
        monkeypatch.setattr(sys, "argv", [program, "analyze", "my config.yaml", "--set", "a.b=c d"])
        assert command_line() == "psgrad analyze 'my config.yaml' --set 'a.b=c d'"
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "secret"])
    assert command_line() is None
    monkeypatch.setattr(sys, "argv", [])
    assert command_line() is None


@pytest.mark.long
def test_the_manifest_and_the_page_say_when_how_and_from_where(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["psgrad", "analyze", "config.yaml"])
    workplace.succeeded()
    folder = workplace.folder / workplace.config["output"]
    manifest = json.loads((folder / "manifest.json").read_bytes())
    created, finished = (datetime.fromisoformat(manifest[key]) for key in ("created", "finished"))
    assert created.tzinfo is not None
    assert created <= finished <= created + timedelta(minutes=30)
    assert abs(datetime.now(UTC) - finished) < timedelta(minutes=30)
    assert manifest["command_line"] == "psgrad analyze config.yaml"
    page = (folder / "report.html").read_text()
    assert f"Made {manifest['created'].replace('T', ' ').replace('+00:00', ' UTC')} by psgrad" in page
    assert "psgrad analyze config.yaml" in page


@pytest.mark.long
def test_a_run_that_is_gone_on_with_keeps_the_time_it_began(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = (f"2026-01-0{day}T00:00:00+00:00" for day in range(1, 10))
    for place in ("psgrad.commands.run_manifest.now", "psgrad.run.run.now"):
        monkeypatch.setattr(place, lambda: next(times))
    for options in ((), ("--resume",)):
        private.succeeded(*options)
        path = private.run_folder / "private" / "NOT_PRIVATE_manifest.json"
        assert json.loads(path.read_bytes())["created"] == "2026-01-01T00:00:00+00:00"
