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

CRITICAL, THEORETICAL, NEGLIGIBLE = "critical", "theoretical", "negligible"


def write_report(report: DPReport, style: str, stream: TextIO) -> None:
    """style: 'terminal', facts, tables, the paragraph and the page's path, or 'json', one object."""
    if style == "json":
        write_json(
            {**asdict(report), "pitfalls": pitfalls(report.step), "statement": statement(report)}, stream
        )
        return
    stream.write(facts_lines(facts(report)))
    for each in (assumption_table(report), pitfall_table(report.step)):
        stream.write("\n")
        print_table(each, stream)
    stream.write(f"\n{statement(report)}\n\n{report.page}\n")


def facts(report: DPReport) -> list[tuple[str, str]]:
    """The guarantee in other terms: (question, answer). Every number is a bound."""
    step, delta = report.step, compact(report.step["delta"])
    audit = report.audit
    return [
        ("guarantee", f"epsilon {epsilon(report.epsilon)} at delta {delta}"),
        ("other deltas", "; ".join(f"{epsilon(each)} at {compact(at)}" for at, each in report.epsilons)),
        ("mu", f"{epsilon(report.mu)}: at least as private as mu-GDP, for every delta from {delta} on"),
        *((f"attack, {percent(false)} false", attack_words(true)) for false, true in report.attacks),
        *(
            (
                f"{records} records",
                f"epsilon {epsilon(each)} at delta {delta}"
                if each is not None
                else f"no bound at delta {delta}",
            )
            for records, each in report.groups
        ),
        (
            "audit",
            "; ".join(report.notes)
            if audit is None
            else f"epsilon at least {number(audit['epsilon'])} with {audit['confidence']:.6g} confidence"
            f" after {count(audit['steps'], 'step')}, for which {epsilon(audit['accounted'])} is accounted:"
            f" {audit['verdict']}",
        ),
        ("unit", f"{step['unit']}; {RELATIONS[step['relation']]}"),
        ("sampling", f"{sampling_words(step)}, as run and as accounted"),
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


def pitfall_table(step: dict[str, Any]) -> Table:
    """A row a pitfall, those that are open first."""
    columns = [
        TableColumn("pitfall", lambda row: row["name"]),
        TableColumn("severity", lambda row: row["severity"]),
        TableColumn("", lambda row: "OPEN" if row["open"] else "closed"),
        TableColumn("here", lambda row: row["text"]),
    ]
    return table("pitfalls", "Pitfalls", columns, sorted(pitfalls(step), key=lambda row: not row["open"]))


def pitfalls(step: dict[str, Any]) -> list[dict[str, Any]]:
    """The common mistakes of private training, {"name", "severity", "open", "text"}, with the severities of
    JAX-Privacy: critical, the stated epsilon does not hold; theoretical, it breaks against an attacker of
    theory; negligible, it is a little larger.
    """
    budget, early = step.get("budget"), step["steps"] < step["planned_steps"]
    seed = "a seed of the config" if seeded(step) else "the noise comes from the system's entropy"
    runs = "a budget composes all runs that name it" if budget else "no budget: what other runs spent adds up"
    taken = "if results decided that, state what all planned steps cost" if early else "all planned are taken"
    each = [
        ("no noise", CRITICAL, step["noise_multiplier"] == 0, f"multiplier {step['noise_multiplier']:g}"),
        ("known seed", CRITICAL, seeded(step), seed),
        ("division by batch size", CRITICAL, False, "the divisor is a public number of the config"),
        ("sensitivity", CRITICAL, False, "the noise is a multiple of what each record is clipped to"),
        ("accounting of other batches", CRITICAL, False, "the ledger has the scheme that draws the batches"),
        ("private metadata", CRITICAL, False, "sizes, losses and norms are in private/ alone"),
        ("neighbouring relation", CRITICAL, False, f"{step['relation']}, in each line of the ledger"),
        ("empty batches, NaN", CRITICAL, False, "an empty batch is noise alone; such a record adds 0"),
        ("gradient accumulation", CRITICAL, False, "noise is added once, to the sum of all chunks"),
        ("mixed examples", CRITICAL, False, "no operator mixes records"),
        ("several runs on the data", CRITICAL, budget is None, runs),
        ("stopping early", CRITICAL, early, taken),
        ("floating point", THEORETICAL, False, "what is released is on a public grid"),
        (
            "rounding",
            NEGLIGIBLE,
            False,
            f"{epsilon(step['rounding']['residual_epsilon'])} of epsilon at most",
        ),
    ]
    return [dict(zip(("name", "severity", "open", "text"), row, strict=True)) for row in each]


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
        tables=[assumption_table(report), pitfall_table(report.step)],
        statement=statement(report),
        figure=None if figure is None else data_uri("image/png", figure),
        sampling=sampling_words(report.step),
        relation=RELATIONS[report.step["relation"]],
        epsilon=epsilon,
        compact=compact,
    )
