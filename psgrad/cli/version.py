"""`psgrad --version`: what to name in a report of a mistake."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from psgrad import __version__


def version_lines() -> list[str]:
    """The versions of psgrad (with the commit, of a checkout), PyTorch, which is not loaded, and Python."""
    commit = commit_of(Path(__file__).parents[2])
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return [
        # The version of a checkout names the commit that was installed, which others may have followed.
        f"psgrad {__version__.partition('+')[0]} (commit {commit})" if commit else f"psgrad {__version__}",
        f"torch {torch}",
        f"Python {platform.python_version()}",
    ]


def commit_of(checkout: Path) -> str | None:
    """The commit of this folder, with -dirty where files are changed; None where it is no checkout. A
    repository further up is another one's, which has psgrad in an environment.
    """
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
