"""The report of `psgrad dp-report`: facts and tables on a terminal, and a page whose prose is in
templates/privacy.html.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TextIO

from psgrad.reports.page import data_uri, render_template
from psgrad.reports.privacy import RELATIONS, compact, epsilon, sampling_words, seeded
from psgrad.reports.tables import Table, TableColumn, table
from psgrad.reports.terminal import facts_lines, print_table, write_json
from psgrad.reports.words import count, number, percent
from psgrad.run.results.privacy_report import DPReport


def write_report(report: DPReport, style: str, stream: TextIO) -> None:
    """style: 'terminal', facts, tables, the paragraph and the page's path, or 'json', one object."""
    if style == "json":
        said = {"pitfalls": pitfalls(report.step), "statement": statement(report)}
        write_json({**asdict(report), **said}, stream)
        return
    stream.write(facts_lines(facts(report)) + "\n")
    print_table(assumption_table(report), stream)
    stream.write(f"\n{statement(report)}\n\n{report.page}\n")


def facts(report: DPReport) -> list[tuple[str, str]]:
    """The guarantee in other terms: (question, answer). Every number is a bound."""
    step, delta, audit = report.step, compact(report.step["delta"]), report.audit
    found = [
        ("guarantee", f"epsilon {epsilon(report.epsilon)} at delta {delta}"),
        ("other deltas", "; ".join(f"{epsilon(each)} at {compact(at)}" for at, each in report.epsilons)),
        ("mu", f"{epsilon(report.mu)}: at least as private as mu-GDP, for every delta from {delta} on"),
    ]
    found += [(f"attack, {percent(false)} false", attack_words(true)) for false, true in report.attacks]
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


def attack_words(true_positive: float) -> str:
    """What an attacker can achieve, rounded up."""
    return f"at most {percent(min(true_positive + 5e-4, 1.0))} of the records that are in the data are found"


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


def statement(report: DPReport) -> str:
    """A paragraph for a privacy statement."""
    step, budget = report.step, report.step.get("budget")
    rate, found = report.attacks[-1]
    assumed = [each["name"] for each in report.assumptions if each["status"] != "checked"]
    together = (
        ""
        if budget is None
        else f" All runs on these data that share its budget keep to epsilon {compact(budget['epsilon'])} at"
        f" delta {compact(budget['delta'])} together."
    )
    return (
        f"The model was trained with differentially private gradient descent ({step['optimizer']['name']} on"
        f" clipped and noised sums; {sampling_words(step)}). What is published is"
        f" ({epsilon(report.epsilon)}, {compact(step['delta'])})-differentially private for {step['unit']},"
        f" where {RELATIONS[step['relation']]}. An attacker who accepts {percent(rate)} false accusations"
        f" finds {attack_words(found).removesuffix(' are found')}.{together} One trusted party holds the data"
        " and ran the training; the guarantee assumes of it what no program can check:"
        f" {', '.join(assumed)}."
    )


def render(report: DPReport, figure: bytes | None) -> str:
    """The page as HTML. figure: of epsilon against steps, as the run drew it."""
    return render_template(
        "privacy.html",
        title="What this run keeps private",
        report=report,
        step=report.step,
        facts=facts(report),
        assumptions=assumption_table(report),
        statement=statement(report),
        figure=None if figure is None else data_uri("image/png", figure),
        sampling=sampling_words(report.step),
        relation=RELATIONS[report.step["relation"]],
        epsilon=epsilon,
        compact=compact,
    )
