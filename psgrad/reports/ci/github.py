"""Workflow commands of GitHub Actions, which become annotations, and the step's summary.

Of a step's annotations ten of a kind are kept and fifty of a job, and the rest is lost without a word: so
there are at most ten here. A summary beyond 1 MiB is refused whole.
"""

from __future__ import annotations

from pathlib import Path

from psgrad.reports.ci import markdown
from psgrad.reports.ci.words import VERDICTS, clean, counting, headline, more, outcome_line, sentence
from psgrad.results import CheckResult

ANNOTATIONS = 9  # and one that says how many more there are
SUMMARY_BYTES = 1 << 20


def render(result: CheckResult) -> str:
    """The outcomes that are not passed, then the gravest new findings that are errors or warnings; the review
    list is in the summary.
    """
    annotations = [
        _command(
            "error", clean(outcome.message), title=f"psgrad gate: {outcome.rule} {VERDICTS[outcome.outcome]}"
        )
        for outcome in result.outcomes
        if outcome.outcome != "passed"
    ]
    graves = [finding for finding in counting(result.findings) if finding.level != "note"]
    total = sum(result.count(rule, "new") for rule in {finding.rule for finding in graves})
    shown = graves[: max(0, ANNOTATIONS - len(annotations))]
    for finding in shown:
        where = {
            "file": clean(finding.location.path),
            "line": finding.location.line,
            "title": f"psgrad: {finding.rule}",
        }
        annotations.append(_command(finding.level, sentence(finding), **where))
    if total > len(shown):
        annotations.append(
            _command(
                "notice", more(total - len(shown), "the step's summary and findings.jsonl"), title="psgrad"
            )
        )
    lines = [
        headline(result),
        *map(outcome_line, result.outcomes),
        *(f"warning: {clean(each)}" for each in result.warnings),
    ]
    return "\n".join([*(f"psgrad: {line}" for line in lines), *annotations]) + "\n"


def write_summary(result: CheckResult, path: Path) -> None:
    """Append to the step's summary what there is room for. Raises OSError."""
    taken = path.stat().st_size if path.exists() else 0
    text = markdown.render(result, SUMMARY_BYTES - taken)
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _command(kind: str, message: str, **properties: str | int | None) -> str:
    given = ",".join(
        f"{name}={_property(str(value))}" for name, value in properties.items() if value is not None
    )
    return f"::{kind} {given}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
