"""The pages as a whole: links, lengths, words, and the parts that are made from the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import benchmarks_page, config_page, influence_page, layers, pictures

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), ROOT / "benchmarks" / "README.md"]
PROSE = [page for page in PAGES if page.name not in ("CHANGELOG.md", "glossary.md")]
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
GLOSSARY = (DOCS / "glossary.md").read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    """The text without blocks of code and without what stands in backticks."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as hosts of Markdown make them."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), flags=re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A title: of `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-title-of-code) [c](none.md) [d](other.md#nothing) `[e](no-link.md)`"
        " [f](#here)\n"
    )
    assert broken_links(page) == ["none.md", "other.md#nothing", "#here"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"(?:\(|`)((?:docs|configs|tests|tools|benchmarks|psgrad)/[\w./-]+)(?:\)|`)",
        page.read_text(encoding="utf-8"),
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_is_linked_from_the_index() -> None:
    linked = {
        (DOCS / link.partition("#")[0]).resolve()
        for link in re.findall(r"\]\(([^)\s]+)\)", (DOCS / "README.md").read_text())
    }
    pages = {page.resolve() for page in DOCS.rglob("*.md")} - {
        (DOCS / "README.md").resolve(),
        *(page.resolve() for page in DECISIONS),
    }
    assert pages - linked == set()


def test_the_decisions_are_numbered_short_and_listed() -> None:
    listed = re.findall(
        r"^- \[(\d{4})\]\((.*?)\) (.*)$", (DOCS / "decisions" / "README.md").read_text(), flags=re.MULTILINE
    )
    assert [(f"{number:04}", page.name) for number, page in enumerate(DECISIONS, 1)] == [
        (number, name) for number, name, _ in listed
    ]
    for page, (number, _, title) in zip(DECISIONS, listed, strict=True):
        lines = page.read_text(encoding="utf-8").splitlines()
        assert lines[0] == f"# {number}. {title}"
        assert 5 <= len(lines) <= 25, page.name


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("ARCHITECTURE.md", 100)])
def test_a_page_has_at_most_so_many_lines(name: str, most: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


# -- Words ---------------------------------------------------------------------------------------------------


def terms() -> list[str]:
    """The terms of the glossary, in order; one line may have several."""
    rows = re.findall(r"^- \*\*([^*]+)\*\*: ", GLOSSARY, flags=re.MULTILINE)
    return [term for row in rows for term in row.split(", ")]


def avoided() -> list[str]:
    """The phrases that the glossary puts in double quotes."""
    return re.findall(r'"([^"]+)"', " ".join(GLOSSARY[GLOSSARY.index("## Axis letters") :].split()))


def phrases_in(text: str) -> list[str]:
    """The avoided phrases that a page uses outside of code."""
    words = " ".join(without_code(text).lower().split())
    return [phrase for phrase in avoided() if re.search(rf"\b{phrase}\b", words)]


def test_the_glossary_has_the_words_of_the_design_once() -> None:
    words = (
        "operator rule VJP JVP cotangent tangent level tracer tape term factor materialise query chunk stream"
        " shard pass checkpoint"
    )
    words += " measure method detector loss source finding gate baseline reference record program entry"
    assert [word for word in words.split() if terms().count(word) != 1] == []
    assert {"n", "m", "t", "s", "o", "i", "p", "c"} <= set(terms())
    assert len(avoided()) > 20


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_a_page_uses_the_words_of_the_glossary(page: Path) -> None:
    assert phrases_in(page.read_text(encoding="utf-8")) == []


def test_an_avoided_phrase_is_found() -> None:
    assert phrases_in("a value that is written\nout, `by heart`, on two floors") == ["written out", "floors"]


# -- Parts that are made from the code -----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "generator",
    [benchmarks_page, config_page, influence_page, layers],
    ids=lambda generator: generator.__name__,
)
def test_a_generated_page_is_up_to_date(generator: object) -> None:
    text = generator.PAGE.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert generator.page(text) == text, "run python -m tools.pages"  # type: ignore[attr-defined]


def test_every_picture_has_a_program_that_makes_it() -> None:
    assert {path.stem for path in DOCS.rglob("*.png")} == {*pictures.PICTURES, *pictures.ELSEWHERE}
    assert all((ROOT / script).is_file() for script in pictures.ELSEWHERE.values())


def test_the_layers_of_a_small_program() -> None:
    arrows = {"top": {"left", "right"}, "left": {"base"}, "right": {"base"}, "base": set[str]()}
    assert layers.layers(arrows) == [["top"], ["left", "right"], ["base"]]
    with pytest.raises(ValueError, match=r"cycle: (left > base > left|base > left > base)"):
        layers.layers({**arrows, "base": {"left"}})
