"""Markdown for a step's summary or a comment: no text of the data is a link, a mention, a table's end or
HTML.
"""

from __future__ import annotations

from psgrad.reports.ci.words import VERDICTS, clean, counting, headline, more, place, sentence
from psgrad.results import CheckResult

SHOWN = 100
_COMMENT = 60_000  # bytes; a comment of GitHub may have 65,536 letters
_KEPT = frozenset(" ;=")  # beside letters and digits: no sign of Markdown is made of these


def render(result: CheckResult, limit: int = _COMMENT) -> str:
    """The outcomes and the first new findings, as many as there is room for in so many bytes."""
    lines = [f"### psgrad: {plain(headline(result))}", "", "| gate | verdict | |", "| --- | --- | --- |"]
    lines += [
        f"| {plain(each.rule)} | {VERDICTS[each.outcome]} | {plain(clean(each.message))} |"
        for each in result.outcomes
    ]
    lines += ["", *(f"- warning: {plain(clean(warning))}" for warning in result.warnings[:SHOWN]), ""]
    new = counting(result.findings)
    rows = [
        f"| {each.level} | {plain(each.rule)} | {code(place(each))} | {code(sentence(each))} |"
        for each in new[:SHOWN]
    ]
    table = ["| level | rule | where | finding |", "| --- | --- | --- | --- |"] if rows else []
    left = limit - sum(len(line.encode()) + 1 for line in (*lines, *table)) - 200
    taken = 0
    while taken < len(rows) and (left := left - len(rows[taken].encode()) - 1) >= 0:
        taken += 1
    total = result.count(state="new")
    last = ["", more(total - taken)] if total > taken else []
    text = "\n".join([*lines, *(table if taken else []), *rows[:taken], *last]) + "\n"
    return text if len(text.encode()) <= limit else ""


def plain(text: str) -> str:
    """The text as text: every sign that Markdown or HTML may take for more than itself is written by its
    number.
    """
    return "".join(letter if letter.isalnum() or letter in _KEPT else f"&#{ord(letter)};" for letter in text)


def code(text: str) -> str:
    # In code nobody is mentioned, and nothing is linked.
    return f"<code>{plain(text)}</code>"
