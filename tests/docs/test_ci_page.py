"""docs/guides/ci.md: its tables say what the code does, its workflow files are whole, and its commands run in
an empty folder.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from psgrad.config import GateConfig
from psgrad.errors import (
    EXIT_GATE_FAILED,
    EXIT_GATE_NOT_EVALUABLE,
    EXIT_OK,
)
from psgrad.quality.baselines import SAVED_ROWS
from psgrad.quality.findings import read_ignore_list
from psgrad.reports.ci import (
    ANNOTATIONS,
    COMMENT_BYTES,
    FORMATS,
    SARIF_RESULTS,
    SHOWN_IN_JUNIT,
    SHOWN_IN_MARKDOWN,
    SHOWN_IN_TERMINAL,
    SUMMARY_BYTES,
)
from psgrad.run.results import RULES
from psgrad.run.results.check import FINDINGS_OF_A_RULE
from tests.workplace import Workplace

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "ci.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def first_column(title: str) -> list[str]:
    return [
        row.split("|")[1].strip().strip("`")
        for row in section(title).splitlines()
        if row.startswith("| ") and "---" not in row
    ][1:]


def block(title: str) -> str:
    return section(title).split("```yaml\n")[1].split("```")[0]


def commands(text: str) -> list[str]:
    """Every psgrad command in blocks of shell, in order."""
    blocks = re.findall(r"^ *```sh\n(.*?)```", text, flags=re.MULTILINE | re.DOTALL)
    return [
        line.strip() for each in blocks for line in each.splitlines() if line.strip().startswith("psgrad ")
    ]


def test_the_tables_have_what_the_code_has() -> None:
    assert first_column("What is found") == list(RULES)
    assert all(meaning in section("What is found") for meaning in RULES.values())
    gate = yaml.safe_load(block("The gate"))["gate"]
    assert list(gate) == list(GateConfig.model_fields)
    GateConfig.model_validate(gate)
    assert f"{EXIT_OK} (every rule passed), {EXIT_GATE_FAILED} (a rule failed)" in section("The gate")
    assert f"{EXIT_GATE_NOT_EVALUABLE} (none failed" in section("The gate")
    assert first_column("Formats") == list(FORMATS)


def test_the_limits_are_those_of_the_code() -> None:
    rows = {
        row.split("|")[1].strip(" `"): row for row in section("Formats").splitlines() if row.startswith("| `")
    }
    assert f"the first {SHOWN_IN_TERMINAL} findings" in rows["terminal"]
    assert f"the first {SHOWN_IN_JUNIT} findings" in rows["junit"]
    assert f"the first {SARIF_RESULTS:,}" in rows["sarif"]
    assert f"{ANNOTATIONS} and one that says" in rows["github"]
    assert SUMMARY_BYTES == 1 << 20
    assert f"the first {SHOWN_IN_MARKDOWN} findings, at most {COMMENT_BYTES:,} bytes" in rows["markdown"]
    assert f"at most {FINDINGS_OF_A_RULE:,} of each rule" in " ".join(PAGE.split())
    assert f"up to {SAVED_ROWS:,}" in " ".join(PAGE.split())


def test_the_ignore_list_is_one(tmp_path: Path) -> None:
    (tmp_path / "ignore.yaml").write_text(block("The ignore list"))
    assert [entry.rule for entry in read_ignore_list(tmp_path / "ignore.yaml")] == ["outlier", None]


def workflow_steps() -> list[dict[str, Any]]:
    # YAML 1.1 reads the key `on` as true.
    content = yaml.safe_load(block("GitHub Actions"))
    assert set(content[True]) == {"push", "pull_request"}
    steps: list[dict[str, Any]] = content["jobs"]["psgrad"]["steps"]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    return steps


@pytest.mark.sweep
@pytest.mark.report
def test_the_commands_run_in_an_empty_folder(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    job = yaml.safe_load(block("GitLab CI"))["data-quality"]
    lines = [*(step["run"] for step in workflow_steps() if "run" in step), *job["script"]]
    lines += commands(section("A baseline: fail on what is new")) + commands(PAGE)[1:3]
    # There is one run here, which is its own past.
    lines += [
        line.replace("runs/main", "runs/ci") for line in commands(section("What changed between two runs"))
    ]
    work = workplace.folder / "empty"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(work / "summary.md"))
    assert workplace.command("init", "--kind", "tabular", ".").code == 0
    measured = False
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program in ("psgrad", "pip")
        # Both hosts measure; once is enough here.
        if program == "pip" or (arguments[0] == "analyze" and measured):
            continue
        measured |= arguments[0] == "analyze"
        outcome = workplace.command(*arguments)
        assert outcome.code == 0, f"{line}: {outcome.err}"
    assert (work / "summary.md").read_text().startswith("### psgrad: the gate is passed")
    uploaded = next(
        step["with"]["sarif_file"] for step in workflow_steps() if "upload-sarif" in step.get("uses", "")
    )
    wanted = [
        uploaded,
        *job["artifacts"]["reports"].values(),
        *job["artifacts"]["paths"],
        "psgrad-baseline.json",
    ]
    assert [name for name in wanted if not (work / name).is_file()] == []
