"""action.yml and .pre-commit-hooks.yaml: their commands exist, and the action's steps run in a shell."""

from __future__ import annotations

import html
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml

from psgrad.cli.app import app
from tests.workplace import Workplace

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
STEPS = {step.get("id", "install"): step for step in ACTION["runs"]["steps"]}


def commands_of_the_action() -> list[str]:
    text = "\n".join(step["run"] for step in STEPS.values())
    return re.findall(r"^ *(psgrad .*?) \|\| ", text, flags=re.MULTILINE)


@pytest.mark.parametrize("line", [*commands_of_the_action(), *(hook["entry"] for hook in HOOKS)])
def test_a_command_and_its_options_exist(line: str) -> None:
    program, name, *words = shlex.split(re.sub(r"\$\{\w+:\+(.*?)\}", r"\1", line))
    assert program == "psgrad"
    commands: Any = typer.main.get_command(app)
    known = {
        option for each in commands.commands[name].params for option in (*each.opts, *each.secondary_opts)
    }
    assert {word for word in words if word.startswith("--")} <= known


def test_the_commands_are_found() -> None:
    assert [line.split()[1] for line in commands_of_the_action()] == ["check", "review"]
    assert [hook["entry"].split()[1] for hook in HOOKS] == ["check", "review"]


def test_hooks_have_what_pre_commit_asks_for() -> None:
    for hook in HOOKS:
        assert {"id", "name", "entry", "language"} <= set(hook)
        # Without files in common with the commit a hook would be skipped.
        assert hook["always_run"]
        assert not hook["pass_filenames"]


def test_every_input_is_used_and_none_is_put_into_a_script() -> None:
    assert ACTION["runs"]["using"] == "composite"
    used = set(re.findall(r"inputs\.([\w-]+)", str(ACTION["runs"])))
    assert used == set(ACTION["inputs"])
    for step in STEPS.values():
        assert "${{" not in step["run"], "a value of the event would be code of the shell"
        assert step["shell"] == "bash"


class Runner:
    """Runs a step of the action as GitHub's runner does, with psgrad and gh in a folder on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = {
            "psgrad": f'exec "{sys.executable}" -m psgrad "$@"',
            "gh": 'printf "%s\\n" "$@" > "$RUNNER_TEMP/gh.txt"; exit "${GH_CODE:-0}"',
        }
        for name, body in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)

    def step(self, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        defaults = {key: str(each.get("default", "")) for key, each in ACTION["inputs"].items()}
        given = {
            variable: defaults.get(expression.removeprefix("${{ inputs.").removesuffix(" }}"), "")
            for variable, expression in STEPS[name].get("env", {}).items()
        }
        for file in ("summary.md", "output.txt"):
            (self.folder / file).touch()
        variables = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
            "GITHUB_OUTPUT": str(self.folder / "output.txt"),
            "RUNNER_TEMP": str(self.folder),
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]]
        return subprocess.run(
            command,
            env={**os.environ, **variables, **given, **environment},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    return Runner(tmp_path_factory.mktemp("runner"))


@pytest.mark.long
def test_the_action_checks_a_run_and_comments(workplace: Workplace, runner: Runner) -> None:
    inputs = workplace.arrays["x"].copy()
    inputs[5] = np.nan
    workplace.save(x=inputs)
    workplace.succeeded("--no-report")
    done = runner.step("verdict", RUN="out")
    assert done.returncode == 1, done.stderr
    assert "::error" in done.stdout
    assert "exit-code=1" in (runner.folder / "output.txt").read_text()
    summary = (runner.folder / "summary.md").read_text()
    assert summary.startswith("### psgrad: the gate is failed")
    assert "sample row-05: " in html.unescape(summary)
    assert runner.step("comment", NUMBER="7").returncode == 0
    comment = runner.folder / "psgrad-comment.md"
    assert (runner.folder / "gh.txt").read_text().split() == [
        "pr",
        "comment",
        "7",
        "--body-file",
        str(comment),
    ]
    assert comment.read_text() == summary


def test_the_action_without_run_and_base_is_an_error(runner: Runner) -> None:
    done = runner.step("verdict")
    assert done.returncode == 2
    assert "::error::psgrad: give run" in done.stdout


def test_a_long_summary_is_cut_at_a_line(runner: Runner) -> None:
    line = "| é " * 30
    (runner.folder / "psgrad-summary.md").write_text(f"{line}\n" * 1_000, encoding="utf-8")
    assert runner.step("comment", NUMBER="7").returncode == 0
    lines = (runner.folder / "psgrad-comment.md").read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == ["", "The summary of the step has more."]
    assert set(lines[:-2]) == {line}
    assert 59_000 < len("\n".join(lines).encode()) < 61_000


def test_no_comment_without_a_summary_and_a_warning_where_it_is_refused(runner: Runner) -> None:
    (runner.folder / "psgrad-summary.md").touch()
    assert runner.step("comment", NUMBER="7").returncode == 0
    assert not (runner.folder / "gh.txt").exists()
    (runner.folder / "psgrad-summary.md").write_text("words\n")
    done = runner.step("comment", NUMBER="7", GH_CODE="1")
    assert done.returncode == 0
    assert "::warning::psgrad: the comment" in done.stdout
