"""What mkdocs.yml calls while the site is built: pages outside of docs/ are pages of the site, too, and links
between files of the repository become links between pages.

    pip install -c constraints.txt -e ".[docs]" && mkdocs build --strict      # writes site/
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*.md", "benchmarks/results/*")
"""Files outside of docs/ that the site has, at the same paths."""

_LINK_WITH_TEXT = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def _in_repository(source: str) -> str:
    """The path in the repository of a file of the site."""
    return source if (ROOT / source).exists() and not (ROOT / "docs" / source).exists() else f"docs/{source}"


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            source = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, source, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Links as the site has them. Of a link to a file that is no page, such as code, the text stays."""
    here = page.file.src_uri
    folder = os.path.dirname(_in_repository(here))

    def on_site(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        path = os.path.normpath(os.path.join(folder, target))
        source = path.removeprefix("docs/")
        if (ROOT / path).is_dir() and (ROOT / path / "README.md").exists():
            source = f"{source}/README.md"
        if files.get_file_from_path(source) is None:
            return (
                text if (ROOT / path).exists() else match.group()
            )  # what is nowhere, the strict build names
        link = os.path.relpath(source, os.path.dirname(here) or ".")
        return f"{picture}[{text}]({link}{anchor or ''})"

    return _LINK_WITH_TEXT.sub(on_site, markdown)
