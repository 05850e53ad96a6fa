"""CONTRIBUTING.md: its command is added to psgrad for a test, and run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT, block
from tests.workplace import ROWS, Workplace

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.sweep
def test_the_command_runs(workplace: Workplace, tmp_path: Path) -> None:
    script = "import importlib, sys\n"
    for package, words in (
        ("psgrad.cli", "def count_rows(config: ConfigPath"),
        ("psgrad.commands", "def count_rows(config: Config)"),
    ):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "count_rows.py").write_text(block(PAGE, "python", words), encoding="utf-8")
        script += f"importlib.import_module({package!r}).__path__.append({str(folder)!r})\n"
    script += "from psgrad.cli import main\nfrom psgrad.cli.app import app\n"
    script += "from psgrad.cli.command import with_boundary\nfrom psgrad.cli.count_rows import count_rows\n"
    script += "app.command('count-rows')(with_boundary(count_rows))\nmain()"
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    for arguments, words in ((["config.yaml"], f"{ROWS}\n"), (["--help"], "Print how many rows the dataset")):
        done = subprocess.run(
            [sys.executable, "-c", script, "count-rows", *arguments],
            cwd=workplace.folder,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert words in done.stdout, done.stderr
