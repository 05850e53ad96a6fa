"""The report of `psgrad dp-report`: facts and tables on a terminal, and a page whose prose is in
templates/privacy.html.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TextIO

from psgrad.reports.page import data_uri, render_template
from psgrad.reports.privacy import RELATIONS, compact, epsilon, guarantee, sampling_words, seeded
from psgrad.reports.tables import Table, TableColumn, table
from psgrad.reports.terminal import facts_lines, print_table, write_json
from psgrad.reports.words import count, number, percent
from psgrad.run.results.privacy_report import DPReport


def write_report(report: DPReport, style: str, stream: TextIO) -> None:
    """style: 'terminal', facts, a table, the guarantee and the page's path, or 'json', one object."""
    if style == "json":
        write_json({**asdict(report), "pitfalls": pitfalls(report.step)}, stream)
        return
    stream.write(facts_lines(facts(report)) + "\n")
    print_table(assumption_table(report), stream)
    stream.write(f"\n{guarantee(report.step)}\n\n{report.page}\n")


def facts(report: DPReport) -> list[tuple[str, str]]:
    """The guarantee in other terms: (question, answer). Every number is a bound."""
    step, delta, audit = report.step, compact(report.step["delta"]), report.audit
    found = [
        ("guarantee", f"epsilon {epsilon(report.epsilon)} at delta {delta}"),
        ("other deltas", "; ".join(f"{epsilon(each)} at {compact(at)}" for at, each in report.epsilons)),
        ("mu", f"{epsilon(report.mu)}: at least as private as mu-GDP, for every delta from {delta} on"),
    ]
    for false, true in report.attacks:
        most = percent(min(true + 5e-4, 1.0))  # rounded up
        words = f"at most {most} of the records that are in the data are found"
        found.append((f"attack, {percent(false)} false", words))
    for records, each in report.groups:
        words = f"epsilon {epsilon(each)}" if each is not None else "no bound"
        found.append((f"{records} records", f"{words} at delta {delta}"))
    words = "; ".join(report.notes)
    if audit is not None:
        words = f"epsilon at least {number(audit['epsilon'])} with {audit['confidence']:.6g} confidence"
        words += f" after {count(audit['steps'], 'step')}, for which {epsilon(audit['accounted'])} is"
        words += f" accounted: {audit['verdict']}"
    return [
        *found,
        ("audit", words),
        ("unit", f"{step['unit']}; {RELATIONS[step['relation']]}"),
        ("sampling", f"{sampling_words(step)}, as run and as accounted"),
        *((f"OPEN: {name}", words) for name, words in pitfalls(step).items()),
    ]


def assumption_table(report: DPReport) -> Table:
    """A row an assumption, and whether the run checks it."""
    columns = [
        TableColumn("assumption", lambda row: str(row.get("name"))),
        TableColumn("status", lambda row: str(row.get("status"))),
        TableColumn("what", lambda row: str(row.get("text"))),
    ]
    return table("assumptions", "Assumptions", columns, report.assumptions)


def pitfalls(step: dict[str, Any]) -> dict[str, str]:
    """The common mistakes of private training that this run is open to: name -> in words."""
    taken = f"{step['steps']} of {step['planned_steps']} planned steps are taken"
    possible = {
        "no noise": (step["noise_multiplier"] == 0, "the noise multiplier is 0, and epsilon infinite"),
        "known seed": (seeded(step), "who knows the seed of the config can take the noise off"),
        "several runs on the data": (
            step.get("budget") is None,
            "no budget: what other runs spent on the same data adds up",
        ),
        "stopping early": (
            step["steps"] < step["planned_steps"],
            f"{taken}; if results decided that, state what all planned steps cost",
        ),
    }
    return {name: words for name, (is_open, words) in possible.items() if is_open}


def render(report: DPReport, figure: bytes | None) -> str:
    """The page as HTML. figure: of epsilon against steps, as the run drew it."""
    return render_template(
        "privacy.html",
        title="What this run keeps private",
        report=report,
        step=report.step,
        facts=facts(report),
        guarantee=guarantee(report.step),
        figure=None if figure is None else data_uri("image/png", figure),
        sampling=sampling_words(report.step),
        relation=RELATIONS[report.step["relation"]],
        epsilon=epsilon,
        compact=compact,
    )
