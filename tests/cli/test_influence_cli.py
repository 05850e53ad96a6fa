"""`psgrad influence` as a user meets it: its two commands, what reaches the workflows, and what goes
where.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from psgrad.run.results import Progress
from psgrad.run.results.influence import IndexResult
from psgrad.run.results.influence_evaluation import EVALUATION_COLUMNS, EvaluationResult, Retrained
from tests.cli.conftest import stand_in
from tests.reports.influence_runs import UNIT, result
from tests.workplace import Outcome

Run = Callable[..., Outcome]


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


def test_the_tables_and_the_path_go_to_stdout_and_words_to_stderr(
    config: Path, stage: Stage, run: Run
) -> None:
    ended = run("influence", config).succeeded()
    lines = ended.out.splitlines()
    assert lines[0].startswith("influence function; positive: the training example helps the query")
    assert lines[1] == f"unit: {UNIT}"
    assert lines[-1] == "runs/digits-influence"
    assert lines[4].split()[:2] == ["rank", "helps"]
    assert "a message" in ended.err
    assert "300 training examples scored for 20 queries" in ended.err
    ((name, (resolved,), options),) = stage.calls
    assert name == "influence"
    assert options == {"overwrite": False, "matrix": False, "report": True, "processes": None}
    assert resolved.output == Path("runs/out")


def test_options_reach_the_workflow_and_the_config(config: Path, stage: Stage, run: Run) -> None:
    words = ("--top", 2, "--matrix", "--no-report", "--overwrite", "--output", "elsewhere")
    settings = ("--set", "influence.method=gradient_dot", "--set", "influence.top=7")
    refused = run("influence", config, "--method", "tracin", *words, *settings)
    assert refused.code == 2, "tracin needs its checkpoints: --method comes after --set"
    assert "tracin" in refused.err
    assert not stage.calls
    ended = run("influence", config, *words, "--method", "ekfac").succeeded()
    ((_, (resolved,), options),) = stage.calls
    found = (resolved.influence.method.name, resolved.influence.top, str(resolved.output))
    assert found == ("ekfac", 2, "elsewhere")
    assert options == {"overwrite": True, "matrix": True, "report": False, "processes": None}
    assert [line.split()[0] for line in ended.out.splitlines()[4:8] if line] == ["rank", "1", "2"]


def test_json_is_one_object(config: Path, stage: Stage, run: Run) -> None:
    ended = run("influence", config, "--json")
    assert ended.code == 0
    content = json.loads(ended.out)
    assert content["unit"] == UNIT
    assert content["folder"] == "runs/digits-influence"


def test_the_index_is_a_command_of_two_words(config: Path, stage: Stage, run: Run) -> None:
    ended = run("influence", "index", config, "--resume", "--set", "influence.top=3").succeeded()
    assert ended.out == "runs/index\n"
    assert "1,437 training examples, 512 numbers each at 2 checkpoints: 5.89 MB" in ended.err
    ((name, (resolved,), options),) = stage.calls
    assert name == "influence_index"
    others = {"overwrite": False, "update": False, "processes": None, "part": None}
    assert options == {"resume": True, **others}
    assert resolved.influence.top == 3


def test_a_config_named_index_can_be_ranked(
    config: Path, stage: Stage, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config.parent / "index").write_text(config.read_text())
    monkeypatch.chdir(config.parent)
    run("influence", "./index").succeeded()
    assert stage.calls[0][0] == "influence"


@pytest.mark.parametrize("kind", ["loo", "lds", "removal"])
def test_an_evaluation_has_a_folder_of_its_own(kind: str, config: Path, stage: Stage, run: Run) -> None:
    ended = run("influence", config, "--evaluate", kind, "--output", "truth", "--json").succeeded()
    ((name, (resolved, wanted), options),) = stage.calls
    assert (name, wanted) == ("evaluate_influence", kind)
    assert resolved.output == Path("runs/out")
    assert options == {"output": Path("truth"), "overwrite": False, "processes": None}
    assert json.loads(ended.out)["loo"]["pearson"] == 0.5


NOT_TOGETHER = ("--evaluate was given together with {}", "hint: leave one of them out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--evaluate", "lds", "--matrix"), [each.format("--matrix") for each in NOT_TOGETHER]),
        (("--evaluate", "lds", "--top", "3"), [each.format("--top") for each in NOT_TOGETHER]),
        *(((*words,), [words[0]]) for words in (("--top", "0"), ("--evaluate", "all"), ("--resume",))),
    ],
)
def test_wrong_words_and_an_evaluation_that_ranks_are_refused(
    options: tuple[str, ...], words: list[str], config: Path, stage: Stage, run: Run
) -> None:
    run("influence", config, *options).refused(2, *words)
    assert not stage.calls
