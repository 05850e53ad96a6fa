"""The end of an audit on a terminal: the bound beside the accounted epsilon, the noise, the neighbours, and
the verdict.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, TextIO

from psgrad.reports.privacy import RELATIONS
from psgrad.reports.tables import Table, TableColumn, table
from psgrad.reports.terminal import facts_lines, print_table, write_json
from psgrad.reports.words import count, number, printable
from psgrad.run.results.privacy import DPAuditResult, NeighbourPair
from psgrad.wording import json_values

PRIVATE_WARNING = (
    "NOT PRIVATE: the audit took single records' gradients without noise, and what it prints and writes is"
    " outside the guarantee. Keep it secret; --canaries-only makes one that may be shown"
)


def write_audit(result: DPAuditResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', the tables, the verdict and the file, or 'json', one object."""
    if style == "json":
        write_json({**audit_content(result), "file": result.file}, stream)
        return
    stream.write(facts_lines(facts(result)) + "\n")
    if result.pairs:
        print_table(pairs_table(result), stream)
    untested = "".join(f"\n  {each}" for each in result.untested)
    stream.write(f"\nnot tested{untested}\n")
    stream.write("\n" + "\n".join(verdict_lines(result)) + f"\n{result.file}\n")


def facts(result: DPAuditResult) -> list[tuple[str, str]]:
    """What was looked at, and what the bound is: (question, answer)."""
    canaries = count(result.canaries, "canary")
    beside = "records of the dataset beside them" if result.records else "no records beside them"
    accounted = (
        "accounted for these steps: none"
        if result.accounted is None
        else f"accounted for these steps: {number(result.accounted)} ({result.accountant})"
    )
    reach = (
        ""
        if result.reach > 1 - 1e-9
        else f"; their norm is {result.reach:.0%} of a record's most, as some groups are too small"
    )
    return [
        ("audited", f"{count(result.steps, 'step')} with {canaries}, {beside}{reach}"),
        (
            "relation",
            (
                f"{RELATIONS[result.relation]}; a record is {result.unit}; {result.scheme.replace('_', ' ')}"
                " sampling"
            ),
        ),
        (
            "epsilon",
            (
                f"at least {number(result.epsilon)} with {result.confidence:.6g} confidence, at delta"
                f" {result.delta:g}; {accounted}"
            ),
        ),
        ("from", evidence_words(result)),
        ("noise", noise_words(result)),
        ("tested", ", ".join(result.noise.p_values)),
    ]


def noise_words(result: DPAuditResult) -> str:
    """What was seen of the noise itself."""
    noise = result.noise
    if not noise.numbers:
        return "none is declared"
    found = f"; ALARM: {', '.join(noise.alarms)}" if noise.alarms else ""
    return (
        f"{noise.spread:.4f} of the declared standard deviation, over {count(noise.numbers, 'number')}{found}"
    )


def evidence_words(result: DPAuditResult) -> str:
    """What was counted, and the noise that there is at most, as a share of what is declared."""
    if result.noise_at_most is None or math.isinf(result.noise_at_most):
        return result.evidence
    return f"{result.evidence}; at most {result.noise_at_most:.0%} of the declared noise"


def pairs_table(result: DPAuditResult) -> Table:
    """A row a pair of neighbours: how far their sums are apart, as a share of the declared sensitivity."""
    columns = [
        TableColumn("neighbours, with the same random numbers", lambda pair: printable(pair.pair)),
        TableColumn("distance", lambda pair: number(pair.distance), True),
        TableColumn("of the sensitivity", _ratio, True),
        TableColumn("", lambda pair: "" if pair.holds else "VIOLATION"),
    ]
    return table("", "Neighbours", columns, result.pairs)


def _ratio(pair: NeighbourPair) -> str:
    return f"{pair.ratio:.4%}" if math.isfinite(pair.ratio) else number(pair.ratio)


def verdict_lines(result: DPAuditResult) -> list[str]:
    """The verdict, and why."""
    if not result.violations:
        return [f"{result.verdict}: nothing contradicts the declared guarantee, which is no proof of it"]
    return [
        f"{result.verdict}: the declared guarantee does not hold",
        *(f"  {printable(violation)}" for violation in result.violations),
    ]


def audit_content(result: DPAuditResult) -> dict[str, Any]:
    """The result as JSON can hold it, the verdict first: what the audit's file has."""
    content = {"verdict": result.verdict, "violations": result.violations, **asdict(result)}
    del content["file"]
    found: dict[str, Any] = json_values(
        {"warning": PRIVATE_WARNING, **content} if result.records else content
    )
    return found
