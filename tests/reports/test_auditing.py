"""What an audit looks like for people and for programs."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from psgrad.reports.audit import PRIVATE_WARNING, audit_content, write_audit
from psgrad.run.results.privacy import DPAuditResult, NeighbourPair, NoiseAudit

RESULT = DPAuditResult(
    epsilon=0.83,
    accounted=1.25,
    accountant="PLD",
    delta=1e-5,
    confidence=0.95,
    steps=20,
    canaries=1000,
    declared=True,
    noise_at_most=1.5,
    evidence="a threshold",
    reach=1.0,
    noise=NoiseAudit(5000, 0.9987, {"spread": 0.8, "how many records are drawn": 0.1}, []),
    pairs=[NeighbourPair("record \x1b[31m3 goes", 0.9999, 1.0, 0.9999, [], True, True)],
    untested=["the optimiser's update", "the steps after the first 20 of 150"],
    records=1438,
    relation="add_or_remove_one",
    scheme="poisson",
    unit="one row",
    mechanism="gaussian",
    file=Path("runs/audit.json"),
)


def printed(result: DPAuditResult, style: str = "terminal") -> str:
    stream = io.StringIO()
    write_audit(result, style, stream)
    return stream.getvalue()


def test_what_holds_is_reported() -> None:
    lines = printed(RESULT).splitlines()
    assert lines[:6] == [
        "audited   20 steps with 1,000 canaries, records of the dataset beside them",
        (
            "relation  neighbouring datasets differ by one record that is added or removed; a record is one"
            " row; poisson sampling"
        ),
        "epsilon   at least 0.83 with 0.95 confidence, at delta 1e-05; accounted for these steps: 1.25 (PLD)",
        "from      a threshold; at most 150% of the declared noise",
        "noise     0.9987 of the declared standard deviation, over 5,000 numbers",
        "tested    spread, how many records are drawn",
    ]
    assert "record \\x1b[31m3 goes" in lines[8]
    assert "99.9900%" in lines[8]
    assert lines[-6:-2] == [
        "not tested",
        "  the optimiser's update",
        "  the steps after the first 20 of 150",
        "",
    ]
    assert lines[-2:] == [
        "consistent: nothing contradicts the declared guarantee, which is no proof of it",
        "runs/audit.json",
    ]


BROKEN_PAIR = NeighbourPair("a record comes", 2.5, 1.0, 2.5, [], True, False)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            replace(RESULT, declared=False, epsilon=4.0, noise_at_most=0.52),
            (
                "canaries are told apart better than the declared steps allow: epsilon is at least 4,"
                " accounted 1.25, at most 52% of the declared noise"
            ),
        ),
        (
            replace(RESULT, noise=NoiseAudit(10, 0.5, {"spread": 0.0}, ["spread"])),
            "what is drawn is not as declared: spread",
        ),
        (
            replace(RESULT, pairs=[BROKEN_PAIR]),
            "a record comes: the sums are 2.5 times the declared sensitivity apart",
        ),
        (
            replace(RESULT, pairs=[replace(BROKEN_PAIR, ratio=1.000012)]),
            "a record comes: the sums are 1 + 1.2e-05 times the declared sensitivity apart",
        ),
        (
            replace(RESULT, pairs=[replace(BROKEN_PAIR, differing=["the divisor"])]),
            "a record comes: what is published differs in the divisor",
        ),
        (
            replace(RESULT, pairs=[replace(BROKEN_PAIR, finite=False)]),
            "a record comes: what is released is not finite",
        ),
    ],
)
def test_what_does_not_hold_is_reported_with_its_reason(result: DPAuditResult, words: str) -> None:
    assert (RESULT.verdict, RESULT.violations) == ("consistent", [])
    assert (result.verdict, result.violations) == ("VIOLATION", [words])
    lines = printed(result).splitlines()
    assert lines[-3:-1] == ["VIOLATION: the declared guarantee does not hold", f"  {words}"]


def test_an_audit_without_noise_or_accountant_says_so() -> None:
    result = replace(
        RESULT,
        accounted=None,
        noise=NoiseAudit(0, math.nan, {}, []),
        noise_at_most=math.inf,
        records=0,
        pairs=[],
        reach=0.5,
        canaries=1,
    )
    text = printed(result)
    assert "20 steps with 1 canary, no records beside them; their norm is 50% of a record's most" in text
    assert "accounted for these steps: none" in text
    assert "noise     none is declared" in text
    assert "neighbours" not in text


def test_json_has_null_for_what_is_not_finite_and_the_warning_where_records_took_part() -> None:
    found = json.loads(printed(replace(RESULT, noise_at_most=math.inf), "json"))
    assert found["warning"] == PRIVATE_WARNING
    assert (found["verdict"], found["violations"], found["file"]) == ("consistent", [], "runs/audit.json")
    assert found["noise_at_most"] is None
    assert "warning" not in audit_content(replace(RESULT, records=0))
