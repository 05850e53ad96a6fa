"""What mkdocs.yml calls while the site is built: pages outside of docs/ are pages of the site, too, and links
between files of the repository become links between pages.

    pip install -c constraints.txt -e ".[docs]" && mkdocs build --strict      # writes site/
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*.md", "benchmarks/results/*")
"""Files outside of docs/ that the site has, at the same paths."""

_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            source = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, source, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Links as the site has them. Of a link to a file that is no page, such as code, the text stays."""
    here = PurePosixPath(page.file.src_uri).parent
    in_docs = (ROOT / "docs" / page.file.src_uri).exists()
    folder = PurePosixPath("docs") / here if in_docs else here

    def on_site(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        path = posixpath.normpath(folder / target)
        source = path.removeprefix("docs/")
        if (ROOT / path / "README.md").exists():
            source += "/README.md"
        if files.get_file_from_path(source) is None:  # of what is nowhere, the strict build complains
            return text if (ROOT / path).exists() else match.group()
        return f"{picture}[{text}]({posixpath.relpath(source, here)}{anchor or ''})"

    return _LINK.sub(on_site, markdown)
