"""Makes the pictures of the documentation again, from runs of the examples.

    python -m tools.pictures [NAME ...]      # such as digits-report; without names all

The pictures of reports need Chromium and Playwright (`pip install -e ".[browser]"`). docs/dp-accuracy.png
takes many trainings: `python benchmarks/dp_utility.py --plot docs/dp-accuracy.png` makes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHROMIUM = os.environ.get("PSGRAD_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
WIDTH, HEIGHT = 944, 1428


def psgrad(*arguments: str) -> None:
    """A command of psgrad, run from the root of the repository."""
    subprocess.run([sys.executable, "-m", "psgrad", *arguments], cwd=ROOT, check=True)


def picture_of(report: Path, target: Path) -> None:
    """The top of a page, as a browser shows it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(report.as_uri())
        page.screenshot(path=target)
        browser.close()


def digits_report(target: Path, folder: Path) -> None:
    psgrad("analyze", "configs/digits.yaml", "--output", str(folder / "run"))
    picture_of(folder / "run" / "report.html", target)


def influence_report(target: Path, folder: Path) -> None:
    options = ("--set", "influence.queries.rows=[5]", "--output", str(folder / "run"))
    psgrad("influence", "configs/digits-influence.yaml", *options)
    picture_of(folder / "run" / "report.html", target)


PICTURES: Mapping[str, Callable[[Path, Path], None]] = {
    "digits-report": digits_report,
    "influence-report": influence_report,
}
"""name -> what makes docs/<name>.png, from the path of the picture and an empty folder."""

ELSEWHERE = {"dp-accuracy": "benchmarks/dp_utility.py"}
"""name -> the script that makes the picture."""


def main(names: list[str]) -> None:
    for name in names or PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            PICTURES[name](DOCS / f"{name}.png", Path(folder))
        print(DOCS / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
