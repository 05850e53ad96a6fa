"""`psgrad --version`: the versions, and the commit of a checkout."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from psgrad import __version__
from psgrad.cli.version import commit_of


def test_the_versions_are_those_that_run() -> None:
    command = [sys.executable, "-m", "psgrad", "--version"]
    first, *others = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert first.startswith(f"psgrad {__version__.partition('+')[0]}")
    assert others == [f"torch {torch.__version__}", f"Python {platform.python_version()}"]


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_of_a_checkout_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "--quiet")
    assert commit_of(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")[:12]
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("b")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    (tmp_path / "site-packages").mkdir()
    assert commit_of(tmp_path / "site-packages") is None  # the repository is another one
    monkeypatch.setenv("PATH", "")  # no git
    assert commit_of(tmp_path) is None
