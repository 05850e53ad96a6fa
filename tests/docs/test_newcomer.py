"""A newcomer's way, from an empty folder, through processes of the real command line: init, validate,
analyze, look, gate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sklearn.datasets import load_digits

import psgrad


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`psgrad ARGUMENTS` in the folder."""
    environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "psgrad", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def children() -> float:
    """Seconds of a processor that this process's children took: what a clock shows where nothing else
    runs.
    """
    times = os.times()
    return times.children_user + times.children_system


class Page(HTMLParser):
    """What is in a page: its open tags, its text, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            value
            for name, value in attrs
            if name in ("src", "href") and value and not value.startswith(("data:", "#"))
        ]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.sweep
@pytest.mark.report
def test_from_an_empty_folder_to_a_gate(tmp_path: Path) -> None:
    before = children()
    made = command(tmp_path, "init")
    assert made.returncode == 0, made.stderr

    valid = command(tmp_path, "validate", "psgrad.yaml")
    assert valid.returncode == 0, valid.stderr
    assert "digits.npz: 600 rows" in valid.stdout

    run = command(tmp_path, "analyze", "psgrad.yaml", "--json")
    assert run.returncode == 0, run.stderr
    assert children() - before < 60  # seconds of a processor, report included
    found = json.loads(run.stdout)
    assert (found["samples"], found["partial"]) == (600, False)
    folder = tmp_path / found["folder"]

    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert {"html", "title", "table"} <= set(page.tags)
    assert page.fetched == []
    assert found["top"][0]["id"] in " ".join(page.words)

    # Of the twelve labels that are wrong on purpose most are among the two dozen that pull hardest.
    samples = psgrad.load_run(folder).samples
    flipped = samples[samples["target"].astype(int) != load_digits().target[: len(samples)]]
    assert len(flipped) == 12
    assert (flipped["rank"] <= 24).sum() > 6

    passed = command(tmp_path, "check", str(folder), "--format", "json")
    assert passed.returncode == 0, passed.stderr
    assert json.loads(passed.stdout)["samples"] == 600

    saved = command(tmp_path, "baseline", "save", str(folder))
    assert saved.returncode == 0, saved.stderr
    baseline = saved.stdout.strip()
    assert (tmp_path / baseline).exists()
    again = command(tmp_path, "check", str(folder), "--baseline", baseline)
    assert again.returncode == 0, again.stderr

    # A gate that can't be evaluated without a reference is no pass.
    strict = command(tmp_path, "check", str(folder), "--set", "gate.max_outliers=0")
    assert strict.returncode == 4, strict.stdout + strict.stderr
    assert "not evaluable" in strict.stdout.lower()
