"""benchmarks/influence-truth.md: how well each influence method predicts retraining, from the stored
results of benchmarks/influence_settings.py.

`python -m tools.pages` writes it. A setting without a stored result is listed as not measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "influence-truth.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- made by tools/influence_page.py -->\n", "<!-- end of the made part -->\n"
TITLES = {
    "digits": "Digits network",
    "cnn": "Convolutional network",
    "adam": "Adam",
    "remove10": "A tenth removed",
    "text": "Text model",
}
KINDS = {"psgrad": "psgrad", "rival": "other library", "control": "control"}
# A method is worth its price that has so much of the best one's score.
_NEARLY = 0.9

Content = dict[str, Any]


def stored(name: str, results: Path = RESULTS) -> Content | None:
    """The result of a setting; None where there is none."""
    path = results / f"influence-setting-{name}-cpu.json"
    if not path.exists():
        return None
    content: Content = json.loads(path.read_text(encoding="utf-8"))
    return content


def command(name: str) -> str:
    return (
        f"python benchmarks/influence_settings.py --setting {name} "
        f"--json benchmarks/results/influence-setting-{name}-cpu.json"
    )


def page(text: str) -> str:
    """The page with its generated part made again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{generated(RESULTS)}\n{END}{after}"


def generated(results: Path) -> str:
    found = {name: stored(name, results) for name in TITLES}
    parts = ["## The order of the methods", _orders(found), "## The best and the cheapest", _advice(found)]
    for name, content in found.items():
        parts += [f"## {TITLES[name]}", _missing(name) if content is None else _setting(content)]
    published = json.loads((results / "influence-published.json").read_text(encoding="utf-8"))
    return "\n\n".join([*parts, "## Published by others", _published(published)]) + "\n"


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def _missing(name: str) -> str:
    return f"Not measured yet. This command measures it:\n\n    {command(name)}"


def _score(row: Content) -> str:
    low, high = row["interval"]
    return f"{row['mean']:.3f} ({low:.3f} to {high:.3f})"


# -- The order -----------------------------------------------------------------------------------------------


def verdict(low: float, high: float) -> str:
    """Of the interval of a difference that is claimed to be above zero."""
    return "yes" if low > 0 else "no" if high < 0 else "not decided"


def _orders(found: dict[str, Content | None]) -> str:
    rows = []
    for name, content in found.items():
        if content is None:
            rows.append(f"| {TITLES[name]} | not measured yet | | | | |")
            continue
        first, middle, last = (_row(content, title) for title in content["order"])
        # What is stored of a row is how far the middle one is ahead of it.
        over, under = first["behind_interval"], last["behind_interval"]
        cells = (_score(first), _score(middle), _score(last), verdict(-over[1], -over[0]), verdict(*under))
        rows.append(f"| {TITLES[name]} | " + " | ".join(cells) + " |")
    head = (
        "| setting | one run's ten checkpoints | ten final models | one final model | checkpoints ahead of"
        " ten models | ten models ahead of one |"
    )
    return _table(head, rows)


def _row(content: Content, name: str) -> Content:
    return next(row for row in content["rows"] if row["name"] == name)


# -- Advice --------------------------------------------------------------------------------------------------


def best_and_cheapest(rows: list[Content]) -> tuple[Content, Content]:
    """(psgrad's row with the largest score, the one with the fewest processor seconds of those that have
    nearly as much).
    """
    ours = [row for row in rows if row["kind"] == "psgrad"]
    best = max(ours, key=lambda row: row["mean"])
    near = [row for row in ours if row["mean"] >= _NEARLY * best["mean"]]
    return best, min(near, key=lambda row: row["cpu_seconds"])


def _advice(found: dict[str, Content | None]) -> str:
    rows = []
    for name, content in found.items():
        if content is None:
            rows.append(f"| {TITLES[name]} | not measured yet | |")
            continue
        best, cheapest = (
            f"{row['name']}: {row['mean']:.3f}, {row['cpu_seconds']:.1f} s"
            for row in best_and_cheapest(content["rows"])
        )
        rows.append(f"| {TITLES[name]} | {best} | {cheapest} |")
    return _table(f"| setting | best | cheapest with {_NEARLY:.0%} of that score |", rows)


# -- A setting -----------------------------------------------------------------------------------------------


def _setting(content: Content) -> str:
    return "\n\n".join([_facts(content), _methods(content), *_not_run(content)])


def _facts(content: Content) -> str:
    best, machine, losses = content["ceiling"], content["machine"], content["loss"]
    return (
        f"{content['words']}: {content['parameters']:,} parameters, {content['training_rows']:,} training"
        f" rows, {content['epochs']} epochs, mean loss {losses['training']:.3f} on training rows and"
        f" {losses['queries']:.3f} on queries.\nThe truth: {content['subsets']} random subsets with"
        f" {content['share']:.0%} of the rows, {content['seeds']} models each, {content['queries']} queries;"
        f" {content['truth_cpu_seconds']:.0f} s of the processor.\nOne seed's outcomes correlate with"
        f" another's by {best['single']:.2f}, and the true expectation would score {best['best']:.2f}.\n"
        f"Measured on {machine['processor']}, one thread, torch {machine['torch']}."
        + "".join(f"\n{note}" for note in (*content.get("notes", ()), *_earlier(content)))
    )


def _earlier(content: Content) -> Iterator[str]:
    if content.get("intervals") != "jackknife":
        yield (
            "Measured with the version before: intervals are basic bootstrap intervals, which correct for the"
            " bias of a rank correlation and so lie above the score, and ekfac has no exact blocks."
        )


def _methods(content: Content) -> str:
    rows = []
    for kind, words in KINDS.items():
        of_kind = [row for row in content["rows"] if row["kind"] == kind]
        for row in sorted(of_kind, key=lambda row: -row["mean"]):
            priced = row["cpu_seconds"] is not None
            price = f"{row['cpu_seconds']:.1f} | {row['memory'] / 2**20:,.0f}" if priced else "|"
            rows.append(f"| {row['name'].removeprefix('control: ')} | {words} | {_score(row)} | {price} |")
    return _table("| scores | of | LDS | processor (s) | memory (MB) |", rows)


def _not_run(content: Content) -> Iterator[str]:
    lines = [f"- {method}: {why}." for method, why in content["not_run"].items()]
    if lines:
        yield "Not run here:\n\n" + "\n".join(lines)


# -- Published numbers ---------------------------------------------------------------------------------------


def _published(published: list[Content]) -> str:
    rows = [
        f"| {each['library']} | {each['method']} | {each['setting']} | {each['lds']} | {each['source']} |"
        for each in published
    ]
    return _table("| library | method | setting | LDS, as published | source |", rows)
