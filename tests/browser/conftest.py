"""A browser, and pages in it that tell what went wrong. Without Chromium or Playwright these tests are
skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from psgrad.reports.analyze_page import write_report
from psgrad.run.results import AnalyzeResult
from tests.browser.results import full, nasty

CHROMIUM = (
    os.environ.get("PSGRAD_CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)


@dataclass
class Opened:
    """A page: `at` is Playwright's; complaints: what the console said, errors of scripts, and what the page
    asked of a network.
    """

    at: Any
    complaints: list[str] = field(default_factory=list)

    def ask(self, script: str) -> Any:
        """What an expression is worth inside the page."""
        return self.at.evaluate(script)

    def texts(self, query: str) -> list[str]:
        """The visible texts of all elements that a selector finds."""
        found: list[str] = self.at.locator(query).all_inner_texts()
        return found


Open = Callable[..., Opened]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install 'psgrad[browser]'"
    )
    if CHROMIUM is None:
        pytest.skip("no Chromium on the path; PSGRAD_CHROMIUM names one")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


def written(result: AnalyzeResult, folder: Path) -> Path:
    """The page of a result, in a folder."""
    files: dict[str, bytes] = {}
    write_report(result, files.__setitem__)
    page = folder / "report.html"
    page.write_bytes(files["report.html"])
    return page


@pytest.fixture(scope="session")
def full_page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that has all there may be."""
    return written(full(), tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="session")
def nasty_page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run in which every text is nasty."""
    return written(nasty(), tmp_path_factory.mktemp("nasty"))


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """open_page(result or path, width=..., dark=..., script=...): the report in a new window, from a file."""
    contexts = []

    def open_it(
        shown: AnalyzeResult | Path, width: int = 1400, dark: bool = False, script: bool = True
    ) -> Opened:
        path = shown if isinstance(shown, Path) else written(shown, tmp_path)
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            java_script_enabled=script,
        )
        contexts.append(context)
        opened = Opened(context.new_page())
        page, complain = opened.at, opened.complaints.append
        page.on("console", lambda message: complain(f"console: {message.text}"))
        page.on("pageerror", lambda error: complain(f"error: {error}"))
        page.on("dialog", lambda dialog: (complain(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(("file:", "data:")) else complain(f"request: {request.url}")
            ),
        )
        page.goto(path.as_uri())
        return opened

    yield open_it
    for context in contexts:
        context.close()
