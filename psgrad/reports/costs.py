"""What a run will take, as a table with its totals, or as JSON.

The end of an audit on a terminal: the bound beside the accounted epsilon, the noise, the neighbours, and the
verdict.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from psgrad.reports.privacy import RELATIONS, facts_lines
from psgrad.reports.terminal import print_table
from psgrad.reports.words import count, number, printable
from psgrad.results import AuditBound, DPAuditResult, PlanResult
from psgrad.wording import common_prefix, listed_names, parameter_names, prefix_note

_UNITS = ("B", "kB", "MB", "GB", "TB")


def write_plan(result: PlanResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', a table and its totals, or 'json', one object."""
    if style == "json":
        json.dump(dataclasses.asdict(result) | {"total_bytes": result.total_bytes}, stream, indent=2)
        stream.write("\n")
        return
    if prefix := common_prefix([row.parameter for row in result.parameters]):
        stream.write(f"{prefix_note(prefix)}\n\n")
    print_table(plan_table(result), stream)
    stream.write("\n" + "\n".join(totals(result)) + "\n")


def plan_table(result: PlanResult) -> Table:
    """One row a parameter: its shape, its terms, how they are contracted, and what that takes a sample."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, numeric in (
        ("parameter", False),
        ("shape", True),
        ("terms", False),
        ("way", False),
        ("us a sample", True),
        ("bytes a sample", True),
    ):
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row, name in zip(
        result.parameters, parameter_names([row.parameter for row in result.parameters], 60), strict=True
    ):
        cells = (name, row.shape, row.terms, row.way, number(row.microseconds), f"{row.bytes:,}")
        table.add_row(*map(Text, cells))
    return table


def totals(result: PlanResult) -> list[str]:
    """The run as a whole, a line for each question."""
    chunks = -(-result.rows // result.chunk_size)
    lines = [
        f"chunk size   {result.chunk_size:,}, {count(chunks, 'chunk')} for {count(result.rows)}",
        (
            f"time         {duration(result.seconds)} for the gradients, {duration(result.chunk_seconds)} a"
            " chunk"
        ),
        (
            f"memory       {amount(result.total_bytes)} at its highest: a pass {amount(result.peak_bytes)}, "
            f"a chunk's inputs {amount(result.input_bytes)}, the parameters {amount(result.parameter_bytes)}"
        ),
        f"replay       {'yes' if result.replayed else 'no'}: {printable(result.replay_reason)}",
        (
            "written out "
            f" {listed_names([p.parameter for p in result.parameters if not p.factored]) or 'no parameter'}"
        ),
        f"machine      {printable(result.machine)}",
    ]
    if result.obstacle is not None:
        lines.append(
            f"note         the pass was followed while the first rows ran: {printable(result.obstacle)}"
        )
    return lines


def amount(size: float) -> str:
    """Bytes with a unit: 512 B, 18.2 MB."""
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"


def duration(seconds: float) -> str:
    """Seconds with a unit that suits them: 12.3 ms, 4.56 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


PRIVATE_WARNING = (
    "NOT PRIVATE: the audit took single records' gradients without noise, and what it prints and writes is"
    " outside the guarantee. It is for your eyes; --canaries-only makes one that may be shown"
)


def write_audit(result: DPAuditResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', the tables, the verdict and the file, or 'json', one object."""
    if style == "json":
        json.dump({**audit_content(result), "file": str(result.file)}, stream, indent=2, allow_nan=False)
        stream.write("\n")
        return
    stream.write(facts_lines(facts(result)) + "\n")
    print_table(bounds_table(result), stream)
    if result.pairs:
        stream.write("\n")
        print_table(pairs_table(result), stream)
    stream.write("\n" + "\n".join(verdict_lines(result)) + f"\n{result.file}\n")


def facts(result: DPAuditResult) -> list[tuple[str, str]]:
    """What was looked at, and what the bound is: (question, answer)."""
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
        ("audited", f"{count(result.steps, 'step')} with {canaries_words(result.canaries)}, {beside}{reach}"),
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
        ("guesses", f"{result.right:,} of {result.guesses:,} right, in the attack that needs no assumption"),
        ("noise", noise_words(result)),
    ]


def canaries_words(n: int) -> str:
    """1 canary, 1,000 canaries."""
    return "1 canary" if n == 1 else f"{n:,} canaries"


def noise_words(result: DPAuditResult) -> str:
    """What was seen of the noise itself."""
    noise = result.noise
    if not noise.numbers:
        return "none is declared"
    alarms = (
        f"; ALARM: {', '.join(noise.alarms)}"
        if noise.alarms
        else "; no number in it that repeats another, no other shape, none off its grid"
    )
    return (
        f"{noise.spread:.4f} of the declared standard deviation, over"
        f" {count(noise.numbers, 'number')}{alarms}"
    )


def bounds_table(result: DPAuditResult) -> Table:
    """A row a method: the epsilon that it refutes, how much of the declared noise there is at most, and what
    it counted.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, numeric in (("epsilon >=", True), ("noise <=", True), ("of", False), ("from", False)):
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for bound in result.bounds:
        table.add_row(*map(Text, (number(bound.epsilon), share_words(bound), bound.method, bound.evidence)))
    return table


def share_words(bound: AuditBound) -> str:
    """The noise that there is at most, as a share of what is declared."""
    if bound.noise is None:
        return ""
    return "any" if math.isinf(bound.noise) else f"{bound.noise:.0%}"


def pairs_table(result: DPAuditResult) -> Table:
    """A row a pair of neighbours: how far their sums are apart, as a share of the declared sensitivity."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, numeric in (
        ("neighbours, with the same random numbers", False),
        ("distance", True),
        ("of the sensitivity", True),
        ("", False),
    ):
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for pair in result.pairs:
        share = f"{pair.ratio:.4%}" if math.isfinite(pair.ratio) else number(pair.ratio)
        table.add_row(
            *map(
                Text, (printable(pair.pair), number(pair.distance), share, "" if pair.holds else "VIOLATION")
            )
        )
    return table


def verdict_lines(result: DPAuditResult) -> list[str]:
    """The verdict, and why."""
    if not result.violations:
        return [f"{result.verdict}: nothing contradicts the declared guarantee, which is no proof of it"]
    return [
        f"{result.verdict}: the declared guarantee does not hold",
        *(f"  {printable(violation)}" for violation in result.violations),
    ]


def audit_content(result: DPAuditResult) -> dict[str, Any]:
    """The result as JSON can hold it, the verdict first: what the audit's file has. Numbers that are not
    finite are null.
    """
    content = {"verdict": result.verdict, "violations": result.violations, **asdict(result)}
    del content["file"]
    found = _finite({"warning": PRIVATE_WARNING, **content} if result.records else content)
    assert isinstance(found, dict)
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
