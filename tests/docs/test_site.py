"""The site of the documentation is built without a warning, and loads nothing from another host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*?src=[\"']?https?://|<link\b[^>]*?href=[\"']?https?://"
)
_PAGES = (
    "index",
    "tutorial",
    "guides/review",
    "reference/config",
    "explanation/dp",
    "CHANGELOG",
    "benchmarks/costs",
)


@pytest.mark.long
def test_site_is_built_strictly_and_loads_nothing_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("material", reason="the extra docs builds the site")
    pytest.importorskip("mkdocs_jupyter", reason="the extra docs builds the site")
    pytest.importorskip("mkdocstrings", reason="the extra docs builds the site")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    build(config)  # strict: a link that leads nowhere, or a page outside of the navigation, raises
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert not {str(path): found[0] for path, text in pages.items() if (found := _LOADED.findall(text))}
    assert {tmp_path / f"{name}.html" for name in _PAGES} <= pages.keys()
    assert "per_sample_square_norms" in pages[tmp_path / "reference" / "library.html"]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {
        path.relative_to(ROOT / "docs").as_posix()
        for path in (ROOT / "docs").rglob("*")
        if path.suffix in (".md", ".ipynb")
    }
    left_out = {page for page in pages if f"{page}\n" not in navigation}
    assert {page for page in left_out if not page.startswith("decisions/0")} == set()
