"""What a release needs: `python -m tools.release 1.2.0` prints a line for each point, and ends with 1 where
one is open. With all of them done, tag the commit `v1.2.0`, which gives the package its version, and upload
what `python -m build` makes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS_OF_THE_WHEEL = (sys.executable, "-m", "pytest", "-q", "-m", "", "-n", "0", "tests/test_wheel.py")


def output(root: Path, *command: str) -> tuple[int, str]:
    """The exit code of a command in the checkout, and what it printed."""
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


def open_points(root: Path, version: str, tests: Sequence[str] = TESTS_OF_THE_WHEEL) -> dict[str, str | None]:
    """point -> what is missing; None where it is done."""
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.search(rf"^## {re.escape(version)}, \d{{4}}-\d{{2}}-\d{{2}}$", changes, re.MULTILINE)
    _, changed = output(root, "git", "status", "--porcelain")
    _, tagged = output(root, "git", "tag", "--list", f"v{version}")
    _, here = output(root, "git", "tag", "--list", "v*", "--points-at", "HEAD")
    others = [tag for tag in here.split() if tag != f"v{version}"]
    code, printed = output(root, *tests)
    return {
        "version": None
        if re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version)
        else f"{version!r} is no version of a release, such as 1.2.0 or 1.2.0rc1",
        "changelog": None if dated else f"CHANGELOG.md has no heading '## {version}, YEAR-MONTH-DAY'",
        "clean tree": None if not changed else f"there are changes that are not committed: {changed}",
        "tag": f"v{version} exists, of another commit: raise the version"
        if tagged and tagged not in here.split()
        else f"this commit is already {others[0]}"
        if others
        else None,
        "tests of the wheel": None if code == 0 else printed[-2_000:],
    }


def main(arguments: Sequence[str]) -> int:
    """Print the points, and return how the process ends."""
    if len(arguments) != 1:
        print("usage: python -m tools.release VERSION")
        return 2
    points = open_points(ROOT, arguments[0])
    for point, missing in points.items():
        print(f"{'done' if missing is None else 'OPEN'}  {point}{f': {missing}' if missing else ''}")
    return int(any(points.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
