"""What the CI formats say of findings and outcomes: one line, bounded, and harmless wherever it is
printed.
"""

from __future__ import annotations

from collections.abc import Sequence

from psgrad.reports.words import brief, count, identifier
from psgrad.results import CheckResult, Finding, GateOutcome

MESSAGE_LIMIT = 600
VERDICTS = {"passed": "PASS", "failed": "FAIL", "not evaluable": "NOT EVALUABLE"}


def clean(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """The text on one line, without control characters, marks of direction or halves of letters."""
    # GitHub's runner takes a line of a log that begins with "::" for a command, and "##[" anywhere in it.
    line = brief(text, limit).replace("##[", "# #[")
    return line.replace("::", ": :", 1) if line.lstrip().startswith("::") else line


def who(finding: Finding) -> str:
    """The sample's id, as people see it."""
    return clean(identifier(finding.id))


def sentence(finding: Finding) -> str:
    """Who and what, with the reasons that the message does not give."""
    reasons = [reason for reason in finding.reasons if reason not in finding.message]
    group = f"; group {finding.group}" if finding.group not in (None, "all") else ""
    return clean(
        f"sample {who(finding)}: {finding.message}{''.join(f'; {reason}' for reason in reasons)}{group}"
    )


def place(finding: Finding) -> str:
    """path:line, or the path."""
    line = finding.location.line
    return clean(finding.location.path) + ("" if line is None else f":{line}")


def outcome_line(outcome: GateOutcome) -> str:
    """One line on one rule of the gate."""
    return f"{VERDICTS[outcome.outcome]} {outcome.rule}: {clean(outcome.message)}"


def headline(result: CheckResult) -> str:
    """The verdict in a sentence."""
    verdict = {0: "the gate is passed", 1: "the gate is failed", 4: "the gate can't be evaluated"}[
        result.exit_code
    ]
    partial = "PARTIAL run: " if result.facts.partial else ""
    return f"{partial}{verdict}, {count(result.samples)}; {counts_line(result)}"


def counts_line(result: CheckResult) -> str:
    """How many findings of each rule, and how many of these are known or ignored."""
    parts = []
    for rule in result.facts.counts:
        total = result.count(rule)
        if total:
            apart = [
                f"{result.count(rule, state):,} {state}"
                for state in ("known", "ignored")
                if result.count(rule, state)
            ]
            parts.append(f"{rule} {total:,}" + (f" ({', '.join(apart)})" if apart else ""))
    return ", ".join(parts) or "no findings"


def more(left: int, where: str = "findings.jsonl in the run folder") -> str:
    """That there are others, and where."""
    return f"and {left:,} more, see {where}"


def counting(findings: Sequence[Finding]) -> list[Finding]:
    """Those that nobody has accepted: not known to the baseline, not ignored."""
    return [finding for finding in findings if finding.state == "new"]
