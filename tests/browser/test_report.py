"""The report in a real browser: it opens in silence, sorts, filters, fits its window, and runs no
script but its own.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.browser.conftest import Open, Opened
from tests.browser.results import SCRIPTS
from tests.reports import frames

pytestmark = pytest.mark.browser

CONTRAST = """() => {
  const light = (c) => {
    const [r, g, b] = c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const e of document.querySelectorAll("main *")) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.closest("svg") || !e.checkVisibility()) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color).slice(0, 3)), light(ground(e))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5)
      low.push(`${e.tagName} ${e.className} ${ratio.toFixed(2)} ${e.textContent.slice(0, 30)}`);
  }
  return [document.querySelectorAll("main *").length, low];
}"""

OUTSIDE = """() => [...document.querySelectorAll("main *")]
  .filter(e => !e.closest(".scroll") && !e.closest("svg") && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.outerHTML.slice(0, 120))"""


def column(page: Opened, key: str, table: str = "samples") -> list[str]:
    """The texts of one column in the rows that are shown, from the top."""
    found: list[str] = page.ask(
        f"""() => {{
        const t = document.getElementById("{table}"), heads = [...t.querySelectorAll("thead th")];
        const place = heads.findIndex(h => h.dataset.key === "{key}");
        return [...t.tBodies[0].rows].filter(r => !r.hidden).map(r => r.cells[place].textContent.trim());
        }}"""
    )
    return found


def numbers(texts: list[str]) -> list[float | None]:
    return [None if text == "–" else float(text.replace(",", "").rstrip("%")) for text in texts]


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_opens_in_silence_fits_the_window_and_can_be_read(
    open_page: Open, full_page: Path, width: int, dark: bool
) -> None:
    page = open_page(full_page, width=width, dark=dark)
    page.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.complaints == []
    assert page.ask("document.scrollingElement.scrollWidth <= innerWidth"), page.ask(OUTSIDE)
    assert page.ask(OUTSIDE) == []
    elements, low = page.ask(CONTRAST)
    assert elements > 500
    assert low == []
    ground = page.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 150) is dark


def test_whoever_sees_no_pictures_and_has_no_mouse_finds_their_way(open_page: Open, full_page: Path) -> None:
    page = open_page(full_page)
    assert (
        page.ask(
            "[...document.images].filter(i => !i.alt.trim() || !i.complete || !i.naturalWidth).map(i =>"
            " i.src.slice(0, 80))"
        )
        == []
    )
    assert page.ask("[...document.querySelectorAll('input')].filter(i => !i.labels.length).length") == 0
    assert (
        page.ask(
            "[...document.querySelectorAll('button')].filter(b => !b.hidden && !b.textContent.trim()).length"
        )
        == 0
    )
    levels = page.ask("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    assert page.ask(
        "[...document.querySelectorAll('[id]')].length === new"
        " Set([...document.querySelectorAll('[id]')].map(e => e.id)).size"
    )
    assert (
        page.ask(
            "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a =>"
            " !document.querySelector(a.hash)).length"
        )
        == 0
    )
    assert page.ask("document.documentElement.lang") == "en"
    # Every box that scrolls can be reached with the keyboard.
    assert (
        page.ask(
            "[...document.querySelectorAll('.scroll')].filter(b => b.tabIndex < 0 ||"
            " !b.getAttribute('aria-label')).length"
        )
        == 0
    )


@pytest.mark.parametrize("key", ["loss", "margin", "rank", "confidence"])
def test_a_click_on_a_heading_sorts_by_its_numbers_and_leaves_missing_ones_last(
    open_page: Open, full_page: Path, key: str
) -> None:
    page = open_page(full_page)
    before = column(page, key)
    head = page.at.locator(f"#samples th[data-key={key}]")
    for _ in range(2):
        head.locator("button").click()
        way = head.get_attribute("aria-sort")
        values = numbers(column(page, key))
        there = [value for value in values if value is not None]
        assert values == sorted(there, reverse=way == "descending") + [None] * (len(values) - len(there))
        assert sorted(column(page, key)) == sorted(before)
    assert page.ask("document.querySelectorAll('#samples th[aria-sort]').length") == 1
    if key == "margin":
        assert None in values


def test_the_filter_finds_words_numbers_and_what_is_missing(open_page: Open, full_page: Path) -> None:
    page = open_page(full_page)
    field = page.at.get_by_label("Filter", exact=True).first
    everything = len(column(page, "loss"))
    wanted = sum(value is not None and value > 0.5 for value in numbers(column(page, "loss")))
    field.fill("loss>0.5")
    assert 0 < wanted == len(column(page, "loss")) < everything
    assert page.texts(".tools output")[0] == f"{wanted} of {everything} shown"
    field.fill("loss>0.5 loss<=1")
    assert all(value is not None and 0.5 < value <= 1 for value in numbers(column(page, "loss")))
    field.fill("margin=")
    assert set(column(page, "margin")) == {"–"}
    field.fill("margin!=")
    assert "–" not in column(page, "margin")
    one = column(page, "id")[3]
    field.fill(one.upper())
    assert column(page, "id") == [one]
    field.fill("nothing has this")
    assert column(page, "id") == []
    field.fill("")
    assert len(column(page, "id")) == everything
    assert page.complaints == []


def test_without_scripts_all_is_there_to_read(open_page: Open, full_page: Path) -> None:
    page = open_page(full_page, script=False)
    assert page.complaints == []
    assert page.at.locator("#samples tbody tr:visible").count() == 200
    assert page.at.locator("button, input").count() == 0
    text = page.at.locator("body").inner_text()
    for words in (
        "What stands out",
        "The gate failed",
        "18 outliers, at most 3",
        "Kernel",
        "PARTIAL",
        "900 of 5,000 samples",
        "Layer by layer",
    ):
        assert words in text
    assert page.at.locator("#classes tbody tr").count() == 10


@pytest.mark.parametrize("width", [400, 1400])
def test_nasty_texts_run_nothing_break_nothing_and_stay_within_two_megabytes(
    open_page: Open, nasty_page: Path, width: int
) -> None:
    page = open_page(nasty_page, width=width)
    assert page.ask("document.documentElement.outerHTML.length") <= 2_000_000
    page.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    for button in ("#samples th[data-key=id] button", "#classes th button"):
        page.at.locator(button).first.click()
    page.at.get_by_label("Filter", exact=True).first.fill("<img")
    assert len(column(page, "id")) > 0
    page.at.get_by_label("Filter", exact=True).first.fill("")
    assert page.ask("window.psgradWasHere") is None
    assert page.complaints == []
    assert page.ask("document.scripts.length") == 1
    assert (
        page.ask(
            "document.querySelectorAll('main :is(script, iframe, [onerror], [onmouseover], [onfocus],"
            " [onload])').length"
        )
        == 0
    )
    assert page.ask("document.scrollingElement.scrollWidth <= innerWidth"), page.ask(OUTSIDE)
    assert SCRIPTS[0][:60] in page.texts("h1")[0]


def test_a_script_that_gets_into_the_page_does_not_run(open_page: Open) -> None:
    """The policy, not the escaping: what is put into the page by hand is refused."""
    page = open_page(frames.result(frames.regression(60), inputs=None))
    page.ask(
        """() => { const s = document.createElement("script"); s.textContent = "window.psgradWasHere = true";
        document.body.append(s);
      document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.psgradWasHere = true'>"); }"""
    )
    page.at.wait_for_timeout(100)
    assert page.ask("window.psgradWasHere") is None
    assert any("Content Security Policy" in each for each in page.complaints)


def test_regression_text_and_a_bare_run_open_too(open_page: Open) -> None:
    for result in (
        frames.result(frames.regression(), inputs="text"),
        frames.result(frames.classification(3, nonfinite=3), manifest={}),
    ):
        page = open_page(result, width=400)
        assert page.complaints == []
        assert page.ask("document.scrollingElement.scrollWidth <= innerWidth"), page.ask(OUTSIDE)
