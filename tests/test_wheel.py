"""The wheel and the sdist: what is in them, and that the wheel runs where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = "1.2.3"  # of the tag
LEFT_OUT = (".git", "build", "dist", "__pycache__", "*.egg-info", "*_cache", ".venv*", "runs", "node_modules")
BUILD = "import setuptools.build_meta as backend; print(backend.build_{}('..'))"

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path


def run(*command: str | Path, cwd: Path, path: str = "") -> str:
    """What the command printed, in a folder and with a PYTHONPATH of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The sdist of a copy of the checkout with a tag, and the wheel that is built from that sdist, as
    `python -m build` makes them.
    """
    # A new environment of Python 3.11 has an old setuptools, and another may be behind it on the path.
    newest = max(distributions(name="setuptools"), key=lambda each: int(each.version.split(".")[0]))
    path = str(newest.locate_file(""))  # where setuptools-scm is, too
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    commit = ["-c", "user.name=a", "-c", "user.email=a@localhost", "commit", "--quiet", "--message", "all"]
    for git in (["init", "--quiet"], ["add", "--all"], commit, ["tag", f"v{VERSION}"]):
        run("git", *git, cwd=folder / "copy")
    printed = run(sys.executable, "-c", BUILD.format("sdist"), cwd=folder / "copy", path=path)
    sdist = folder / printed.splitlines()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    printed = run(sys.executable, "-c", BUILD.format("wheel"), cwd=source, path=path)
    yield Built(sdist, source.parent / printed.splitlines()[-1])
    shutil.rmtree(folder)


def test_the_version_is_that_of_the_tag(built: Built) -> None:
    assert (built.sdist.name, built.wheel.name.split("-")[1]) == (f"psgrad-{VERSION}.tar.gz", VERSION)


def package_files() -> set[str]:
    """The files of psgrad/, relative to the checkout."""
    files = (path for path in (ROOT / "psgrad").rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == package_files()
    # That there are such files is what the line above can't say.
    for part in ("py.typed", "psgrad.mplstyle", "reports/templates/", "cli/templates/", "testing.py"):
        assert any(part in name for name in names), part


def test_the_sdist_holds_the_package_and_what_a_build_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert package_files() <= names
    others = {name for name in names if not name.startswith(("psgrad/", "psgrad.egg-info/"))}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= others
    assert {name for name in others if "/" in name} == set()


def test_the_wheel_alone_runs_the_first_commands(built: Built, tmp_path: Path) -> None:
    target, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    run(*pip, "--target", target, built.wheel, cwd=work)
    path = str(target)
    shown = run(sys.executable, "-c", "import psgrad; print(psgrad.__file__)", cwd=work, path=path)
    assert Path(shown.strip()) == target / "psgrad" / "__init__.py"
    assert run(target / "bin" / "psgrad", "--version", cwd=work, path=path).startswith(f"psgrad {VERSION}\n")
    run(target / "bin" / "psgrad", "init", cwd=work, path=path)
    folder = run(target / "bin" / "psgrad", "analyze", "psgrad.yaml", cwd=work, path=path).splitlines()[-1]
    assert (work / folder / "report.html").stat().st_size > 10_000
    fixtures = run(sys.executable, "-m", "pytest", "--fixtures", "--rootdir=.", cwd=work, path=path)
    assert "psgrad_gate" in fixtures
