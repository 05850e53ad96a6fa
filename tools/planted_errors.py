"""Plants errors in a copy of the code, one at a time, and runs the tests that should notice.

    python -m tools.planted_errors                  # all of them, about ten minutes
    python -m tools.planted_errors clipping csv     # those whose description has one of the words

Prints for each error whether a test failed. A line of code that is not there any more is reported, too: then
planted_errors.yaml has to follow the code. Leaves with 1 unless every error turned a test red. To be run
before tests are removed and after it: as many have to be red.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parent.parent
ERRORS = Path(__file__).with_suffix(".yaml")


class Planted(NamedTuple):
    """An error: the first `right` in a file of psgrad/ becomes `wrong`, and one of `tests` has to fail."""

    what: str
    file: str
    right: str
    wrong: str
    tests: str


def main(words: list[str]) -> int:
    errors = [Planted(**each) for each in yaml.safe_load(ERRORS.read_text(encoding="utf-8"))]
    chosen = [error for error in errors if not words or any(word in error.what for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "psgrad"
        for name in subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        for error in chosen:
            found = outcome(error, copy)
            missed += found != "red"
            print(f"{found:8} {error.what} ({error.file})", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} planted errors turned a test red")
    return int(missed > 0)


def outcome(error: Planted, copy: Path) -> str:
    """`red` where a test notices the error, `green` where none does, `absent` where it can't be planted."""
    file = copy / "psgrad" / error.file
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    if error.right not in before:
        return "absent"
    file.write_text(before.replace(error.right, error.wrong, 1), encoding="utf-8")
    try:
        tests = [f"tests/{each}" for each in error.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not sweep", *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
    finally:
        file.write_text(before, encoding="utf-8")
    return {0: "green", 1: "red"}.get(done.returncode, f"rc {done.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
