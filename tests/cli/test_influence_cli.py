"""`psgrad influence` as a user meets it: its two commands, what reaches the workflows, and what goes
where.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from psgrad.cli import main
from psgrad.run.results import Progress
from psgrad.run.results.influence import IndexResult
from psgrad.run.results.influence_evaluation import EVALUATION_COLUMNS, EvaluationResult, Retrained
from tests.cli.conftest import stand_in
from tests.reports.influence_runs import UNIT, result


class Stage:
    """Workflows that remember what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.error: Exception | None = None

    def influence(self, *arguments: Any, progress: Any, **options: Any) -> Any:
        return self._called("influence", arguments, options, progress, result())

    def influence_index(self, *arguments: Any, progress: Any, **options: Any) -> Any:
        found = IndexResult(Path("runs/index"), 1437, 512, 2, 5_886_000, {})
        return self._called("influence_index", arguments, options, progress, found)

    def evaluate_influence(self, *arguments: Any, progress: Any, **options: Any) -> Any:
        table = pd.DataFrame(
            {
                "method": ["influence"],
                "control": [False],
                **{key: [0.5] for key in EVALUATION_COLUMNS["loo"]},
            }
        )
        done = Retrained(3, 1, 5, removals=4, highest=1)
        found = EvaluationResult("loo", "influence", table, done, pd.DataFrame(), UNIT, Path("runs/out-loo"))
        return self._called("evaluate_influence", arguments, options, progress, found)

    def _called(
        self, name: str, arguments: tuple[Any, ...], options: dict[str, Any], progress: Any, found: Any
    ) -> Any:
        self.calls.append((name, arguments, options))
        progress(Progress(1, 2, "scores", "a message"))
        if self.error is not None:
            raise self.error
        return found


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    found = Stage()
    stand_in(monkeypatch, "influence", influence=found.influence)
    stand_in(monkeypatch, "influence_index", influence_index=found.influence_index)
    stand_in(monkeypatch, "influence_evaluate", evaluate_influence=found.evaluate_influence)
    return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """run(words) -> exit code, stdout, stderr."""

    def command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["psgrad", *map(str, words)])
        with pytest.raises(SystemExit) as leave:
            main()
        assert isinstance(leave.value.code, int)
        return leave.value.code, *capfd.readouterr()

    return command


def test_the_tables_and_the_path_go_to_stdout_and_words_to_stderr(
    config: Path, stage: Stage, run: Any
) -> None:
    code, out, err = run("influence", config)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("influence function; positive: the training example helps the query")
    assert lines[1] == f"unit: {UNIT}"
    assert lines[-1] == "runs/digits-influence"
    assert lines[4].split()[:2] == ["rank", "helps"]
    assert "a message" in err
    assert "300 training examples scored for 20 queries" in err
    ((name, (resolved,), options),) = stage.calls
    assert name == "influence"
    assert options == {"overwrite": False, "matrix": False, "report": True, "processes": None}
    assert resolved.output == Path("runs/out")


def test_options_reach_the_workflow_and_the_config(config: Path, stage: Stage, run: Any) -> None:
    words = (
        "--method",
        "tracin",
        "--top",
        2,
        "--matrix",
        "--no-report",
        "--overwrite",
        "--output",
        "elsewhere",
    )
    code, out, err = run(
        "influence", config, *words, "--set", "influence.method=gradient_dot", "--set", "influence.top=7"
    )
    assert code == 2, "tracin needs its checkpoints: --method comes after --set"
    assert "tracin" in err
    assert not stage.calls
    code, out, err = run("influence", config, *words[2:], "--method", "ekfac")
    assert code == 0, err
    ((_, (resolved,), options),) = stage.calls
    assert (resolved.influence.method.name, resolved.influence.top, str(resolved.output)) == (
        "ekfac",
        2,
        "elsewhere",
    )
    assert options == {"overwrite": True, "matrix": True, "report": False, "processes": None}
    assert [line.split()[0] for line in out.splitlines()[4:8] if line] == ["rank", "1", "2"]


def test_json_is_one_object(config: Path, stage: Stage, run: Any) -> None:
    code, out, _ = run("influence", config, "--json")
    assert code == 0
    content = json.loads(out)
    assert content["unit"] == UNIT
    assert content["folder"] == "runs/digits-influence"


def test_the_index_is_a_command_of_two_words(config: Path, stage: Stage, run: Any) -> None:
    code, out, err = run("influence", "index", config, "--resume", "--set", "influence.top=3")
    assert code == 0, err
    assert out == "runs/index\n"
    assert "1,437 training examples, 512 numbers each at 2 checkpoints: 5.89 MB" in err
    ((name, (resolved,), options),) = stage.calls
    assert name == "influence_index"
    assert options == {
        "resume": True,
        "overwrite": False,
        "update": False,
        "processes": None,
        "part": None,
    }
    assert resolved.influence.top == 3


def test_a_config_named_index_can_be_ranked(
    config: Path, stage: Stage, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config.parent / "index").write_text(config.read_text())
    monkeypatch.chdir(config.parent)
    code, _, err = run("influence", "./index")
    assert code == 0, err
    assert stage.calls[0][0] == "influence"


@pytest.mark.parametrize("kind", ["loo", "lds", "removal"])
def test_an_evaluation_has_a_folder_of_its_own(kind: str, config: Path, stage: Stage, run: Any) -> None:
    code, out, err = run("influence", config, "--evaluate", kind, "--output", "truth", "--json")
    assert code == 0, err
    ((name, (resolved, wanted), options),) = stage.calls
    assert (name, wanted) == ("evaluate_influence", kind)
    assert resolved.output == Path("runs/out")
    assert options == {"output": Path("truth"), "overwrite": False, "processes": None}
    assert json.loads(out)["loo"]["pearson"] == 0.5


@pytest.mark.parametrize("option", [["--matrix"], ["--top", "3"]])
def test_an_evaluation_ranks_nothing(option: list[str], config: Path, stage: Stage, run: Any) -> None:
    code, out, err = run("influence", config, "--evaluate", "lds", *option)
    assert code == 2
    assert f"--evaluate was given together with {option[0]}" in err
    assert "hint: leave one of them out" in err
    assert out == ""
    assert not stage.calls


@pytest.mark.parametrize("words", [("--top", "0"), ("--evaluate", "all"), ("--resume",)])
def test_wrong_words_are_a_usage_error(words: tuple[str, ...], config: Path, stage: Stage, run: Any) -> None:
    code, _, err = run("influence", config, *words)
    assert code == 2
    assert words[0] in err
    assert not stage.calls
