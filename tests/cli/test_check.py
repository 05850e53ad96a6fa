"""`psgrad check`, `psgrad baseline save` and `psgrad diff` from end to end, with their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.verdicts import REFERENCE, finished, table
from tests.workplace import ROWS, Workplace

# The commands that read a finished run.
READERS = (("check", "run"), ("report", "run"), ("diff", "run", "run"), ("baseline", "save", "run"))


def judged(work: Workplace, name: str = "run", listed: tuple[int, ...] = (2, 5), **changes: object) -> Path:
    """A finished run whose outliers a reference has decided."""
    return finished(work.folder / name, table(10, listed=listed), REFERENCE, **changes)


@pytest.mark.long
def test_every_run_has_findings_and_a_verdict(workplace: Workplace) -> None:
    workplace.succeeded()
    verdict = json.loads((workplace.folder / "out" / "check.json").read_text())
    assert (verdict["exit_code"], verdict["samples"]) == (0, ROWS)
    lines = (workplace.folder / "out" / "findings.jsonl").read_text().splitlines()
    assert [json.loads(line)["rule"] for line in lines] == ["review"]
    assert json.loads(lines[0])["location"] == {"path": "data.npz", "line": None}


@pytest.mark.long
def test_a_sample_that_is_not_finite_fails_the_gate(workplace: Workplace) -> None:
    x = workplace.arrays["x"].copy()
    x[3, 1] = np.nan
    workplace.save(x=x)
    workplace.succeeded()
    outcome = workplace.command("check", "out")
    assert outcome.code == 1
    assert "FAIL nonfinite: 1 sample with a loss or gradient that is not finite" in outcome.out
    assert "row-03" in outcome.out
    assert workplace.command("check", "out", "--exit-zero").code == 0
    assert workplace.command("check", "out", "--set", "gate.nonfinite=warning").code == 0


def test_exit_codes(workplace: Workplace) -> None:
    judged(workplace)
    assert workplace.command("check", "run").code == 0
    assert workplace.command("check", "run", "--set", "gate.max_outliers=2").code == 0
    assert workplace.command("check", "run", "--set", "gate.max_outliers=1").code == 1
    workplace.command("check", "run", "--set", "gate.max_outlier=1").refused(2, "did you mean max_outliers?")
    workplace.command("check", "run", "--set", "analyze.top=1").refused(2, "only its gate can be changed")
    workplace.command("check", "nowhere").refused(3, "nowhere holds no run of psgrad")
    finished(workplace.folder / "plain", table(10, listed=(1,)))
    assert workplace.command("check", "plain", "--set", "gate.max_outliers=5").code == 4
    assert workplace.command("check", "plain", "--set", "gate.max_outliers=5", "--exit-zero").code == 0


def test_one_that_is_ignored_leaves_the_others(workplace: Workplace) -> None:
    judged(workplace)
    (workplace.folder / "ignore.yaml").write_text("- {id: s2, reason: looked at}\n")
    outcome = workplace.command(
        "check", "run", "--set", "gate.ignore=ignore.yaml", "--set", "gate.max_outliers=0"
    )
    assert (outcome.code, outcome.err) == (1, "")
    assert "outlier 2 (1 ignored)" in outcome.out
    lines = (workplace.folder / "run" / "findings.jsonl").read_text().splitlines()
    assert {(each["id"], each["ignored_because"]) for each in map(json.loads, lines)} == {
        ("s2", "looked at"),
        ("s5", None),
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda frame: frame.assign(status=3), "the column status of"),
        (lambda frame: frame.assign(grad_norm=frame["grad_norm"].astype(str)), "the column grad_norm of"),
        (lambda frame: frame.assign(is_outlier_issue=0.5), "the column is_outlier_issue of"),
        (lambda frame: frame.drop(columns="grad_norm"), "has no column grad_norm"),
    ],
)
def test_a_table_that_was_changed_gets_no_verdict(
    workplace: Workplace, change: Callable[[pd.DataFrame], pd.DataFrame], words: str
) -> None:
    path = judged(workplace) / "samples.parquet"
    change(pd.read_parquet(path)).to_parquet(path)
    for command in READERS:
        workplace.command(*command).refused(3, words, "run psgrad analyze again")


def test_a_manifest_that_was_changed_or_a_folder_in_place_of_a_table(workplace: Workplace) -> None:
    path = judged(workplace) / "manifest.json"
    content = json.loads(path.read_text())
    for key in ("config", "counts", "outliers"):
        path.write_text(json.dumps({**content, key: [1]}))
        for command in READERS:
            workplace.command(*command).refused(3, f"manifest.json can't be read: {key}: ")
    path.write_text(json.dumps(content))
    (path.parent / "samples.parquet").unlink()
    (path.parent / "samples.parquet").mkdir()
    for command in READERS[:2]:
        workplace.command(*command).refused(3, "samples.parquet can't be read")


def test_a_baseline_lets_what_is_known_pass(workplace: Workplace) -> None:
    judged(workplace)
    saved = workplace.command("baseline", "save", "run")
    assert (saved.code, saved.out) == (0, "psgrad-baseline.json\n")
    assert "2 accepted findings: 2 taken in, 0 dropped" in saved.err
    judged(workplace, "later", (5, 7))
    against = ("check", "later", "--set", "gate.max_outliers=0", "--baseline")
    checked = workplace.command(*against, "psgrad-baseline.json")
    assert checked.code == 1
    assert "1 new outlier, and 0 may be" in checked.out
    gone = "1 of 2 entries of the baseline"
    assert f"{gone} psgrad-baseline.json are not found any more" not in checked.out  # an absolute path is
    assert gone in checked.out
    again = workplace.command("baseline", "save", "later")
    assert "1 accepted finding: 0 taken in, 1 dropped" in again.err
    assert "1 new finding refused: a baseline only shrinks" in again.err
    assert "2 accepted findings: 1 taken in" in workplace.command("baseline", "save", "later", "--grow").err
    assert workplace.command(*against, "psgrad-baseline.json").code == 0
    workplace.command(*against, "nowhere.json").refused(2, "there is no baseline nowhere.json")


def test_the_files_of_a_gate_are_relative_to_the_config(workplace: Workplace) -> None:
    (workplace.folder / "configs").mkdir()
    (workplace.folder / "configs" / "ignore.yaml").write_text(
        "- {id: s2, reason: looked at}\n- {id: s5, rule: outlier, reason: fine}\n"
    )
    config = {
        "data": {"path": "data.parquet"},
        "gate": {"ignore": "ignore.yaml", "max_outliers": 0, "baseline": "none.json"},
    }
    judged(workplace, config=config, config_folder="configs")
    outcome = workplace.command("check", "run")
    assert outcome.code == 0, outcome.out
    assert "outlier 2 (2 ignored)" in outcome.out
    assert "there is no baseline configs/none.json yet: all findings are new" in outcome.out


def test_mistakes_in_the_files_of_a_gate_are_reported_before_anything_is_measured(
    workplace: Workplace,
) -> None:
    workplace.config["gate"] = {"ignore": "ignore.yaml"}
    workplace.refused(2, "there is no ignore list ignore.yaml")
    (workplace.folder / "ignore.yaml").write_text("- {id: a}\n")
    workplace.refused(2, "ignore.yaml:1: reason: missing")
    assert not (workplace.folder / "out").exists()


def test_a_partial_run_is_gated_and_said_and_is_no_baseline(workplace: Workplace) -> None:
    judged(workplace, counts={"samples": 10, "in_dataset": 40})
    outcome = workplace.command("check", "run", "--set", "gate.max_outliers=1")
    assert (outcome.code, "PARTIAL: the run looked at the first 10 of 40 samples" in outcome.out) == (1, True)
    workplace.command("baseline", "save", "run").refused(2, "can't be a baseline", "without --limit")


def test_a_run_that_can_not_be_written_to_is_still_checked(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from psgrad.errors import OutputError

    def refuse(*_: object) -> None:
        raise OutputError("run/findings.jsonl can't be written: Read-only file system")

    monkeypatch.setattr("psgrad.commands.check.write_check", refuse)
    judged(workplace)
    outcome = workplace.command("check", "run")
    assert (outcome.code, "the verdict is not kept in the run folder" in outcome.out) == (0, True)


@pytest.mark.long
def test_lines_of_a_csv_file_are_reported_as_long_as_it_is_the_same(workplace: Workplace) -> None:
    rows = ["uid,a,b,c,d,y", *(f'"row\n{row}",{row},1,0,0.5,{row % 3}' for row in range(6))]
    (workplace.folder / "data.csv").write_text("\n".join(rows) + "\n")
    workplace.config["data"] = {"path": "data.csv", "inputs": [*"abcd"], "target": "y", "id": "uid"}
    workplace.config["analyze"] = {"review_fraction": 0.9}
    workplace.succeeded("--limit", "3", "--sample")
    content = json.loads(workplace.command("check", "out", "--format", "json").out)
    found = {each["id"]: each["location"]["line"] for each in content["findings"]}
    assert found == {name: 2 + 2 * int(name[4:]) for name in found} != {}
    workplace.succeeded("--overwrite")
    content = json.loads(workplace.command("check", "out", "--format", "json").out)
    assert {each["index"]: each["location"] for each in content["findings"]} == {
        row: {"path": "data.csv", "line": 2 + 2 * row} for row in range(6)
    }
    (workplace.folder / "data.csv").write_text("\n".join(rows[:1] + rows) + "\n")
    content = json.loads(workplace.command("check", "out", "--format", "json").out)
    assert {each["location"]["line"] for each in content["findings"]} == {None}


def test_a_verdict_goes_to_a_file_and_is_said(workplace: Workplace) -> None:
    judged(workplace)
    outcome = workplace.command("check", "run", "--format", "sarif", "--output", "found.sarif")
    assert (outcome.code, outcome.out) == (0, "")
    assert "PASS nonfinite" in outcome.err
    assert json.loads((workplace.folder / "found.sarif").read_text())["version"] == "2.1.0"


def test_a_step_of_github_gets_its_summary(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(workplace)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(workplace.folder / "summary.md"))
    assert workplace.command("check", "run", "--format", "github").code == 0
    assert (workplace.folder / "summary.md").read_text().startswith("### psgrad: the gate is passed")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(workplace.folder / "no" / "summary.md"))
    outcome = workplace.command("check", "run", "--format", "github")
    assert (outcome.code, "the step's summary can't be written" in outcome.err) == (0, True)


def test_two_runs_are_compared(workplace: Workplace) -> None:
    judged(workplace)
    judged(workplace, "later", (5, 7))
    outcome = workplace.command("diff", "run", "later", "--top", "3")
    assert outcome.code == 0
    assert "10 samples in both, 0 came, 0 went" in outcome.out
    assert "1 entered the list of B and 1 left that of A" in outcome.out
    assert (
        json.loads(workplace.command("diff", "run", "later", "--format", "json").out)["counts"]["common"]
        == 10
    )
    workplace.command("diff", "run", "nowhere").refused(3, "nowhere holds no run of psgrad")


@pytest.mark.sweep
def test_check_and_diff_do_without_torch(workplace: Workplace) -> None:
    judged(workplace)
    code = (
        "import sys; from pathlib import Path\n"
        "from psgrad.reports.ci import FORMATS, render_check\n"
        "from psgrad.reports.comparison import render_comparison\n"
        "from psgrad.commands.check import check, save_baseline\n"
        "from psgrad.commands.diff import diff\n"
        "result = check(Path('run')); [render_check(result, each) for each in FORMATS]\n"
        "save_baseline(Path('run')); render_comparison(diff(Path('run'), Path('run')), 'terminal')\n"
        "print(sorted({'torch', 'sklearn', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
