"""The files that a release and its users need, and tools/release.py."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tools.release import open_points

ROOT = Path(__file__).parents[1]
PASSING = (sys.executable, "-c", "")


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that is ready to be released as 1.2.0."""
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0, 2026-11-28\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    return tmp_path


def missing(folder: Path, version: str = "1.2.0", tests: tuple[str, ...] = PASSING) -> list[str]:
    return [point for point, words in open_points(folder, version, tests).items() if words is not None]


def test_nothing_is_open_before_and_after_the_tag(checkout: Path) -> None:
    assert missing(checkout) == []
    git(checkout, "tag", "v1.2.0")
    assert missing(checkout) == []


def replaced(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(path.read_text().replace(old, new))
        git(folder, "commit", "--all", "--quiet", "--message", "changed")

    return change


def tagged_before(folder: Path) -> None:
    git(folder, "tag", "v1.2.0")
    git(folder, "commit", "--allow-empty", "--quiet", "--message", "more")


@pytest.mark.parametrize(
    ("change", "point"),
    [
        (replaced("CHANGELOG.md", "1.2.0", "1.3.0"), "changelog"),
        (replaced("CHANGELOG.md", "2026-11-28", "unreleased"), "changelog"),
        (lambda folder: (folder / "new.txt").write_text(""), "clean tree"),
        (tagged_before, "tag"),
        (lambda folder: git(folder, "tag", "v1.1.0"), "tag"),
    ],
    ids=["version without changes", "unreleased", "new file", "tag of another commit", "two versions"],
)
def test_an_open_point_is_named(checkout: Path, change: Callable[[Path], None], point: str) -> None:
    change(checkout)
    assert missing(checkout) == [point]


def test_a_version_of_development_and_failing_tests_are_open(checkout: Path) -> None:
    replaced("CHANGELOG.md", "1.2.0", "1.2.0.dev0")(checkout)
    assert missing(checkout, "1.2.0.dev0", (sys.executable, "-c", "raise SystemExit(1)")) == [
        "version",
        "tests of the wheel",
    ]


def test_the_citation_has_what_the_format_asks_for() -> None:
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(content)
    assert f'license = "{content["license"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_an_issue_template_has_what_the_host_asks_for(name: str) -> None:
    path = ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(content)
    ids = [part["id"] for part in content["body"]]
    assert len(set(ids)) == len(ids)
    assert all(part["attributes"]["label"] for part in content["body"])


def test_the_image_is_built_of_files_that_are_sent_and_asks_for_the_same_torch() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    sent = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name in sent if not (ROOT / name).exists()] == []
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (torch,) = re.findall(r'"(torch[<>=].*?)"', text)
    assert f'"{torch}"' in project
    (extras,) = re.findall(r'"\.\[(.*)\]"', text)
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))
    steps = [line.split()[0] for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert steps.index("USER") > max(place for place, step in enumerate(steps) if step == "RUN")
