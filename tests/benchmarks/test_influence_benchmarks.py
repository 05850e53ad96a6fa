"""The benchmarks of influence, each once at a size that takes no time."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A benchmark by name; they import one another as scripts do."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def bench(script: Any, tmp_path: Path) -> Any:
    truth = script("influence_truth")
    return truth.Bench(
        tmp_path, replace(truth.RECIPE, epochs=1), subsets=4, seeds=2, tuning_subsets=3, models=2
    )


def test_models_are_trained_once_and_kept(bench: Any, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = script("influence_truth")
    first = bench.outcomes(1, 2, 2)
    monkeypatch.setattr(truth, "EnsembleTrainer", lambda *_: pytest.fail("trained again"))
    again = truth.Bench(bench.cache, bench.recipe).outcomes(1, 2, 2)
    np.testing.assert_array_equal(again.losses, first.losses)
    assert first.losses.shape == (2, 2, 360)
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        truth.Bench(bench.cache, bench.recipe).outcomes(2, 2, 2)


@pytest.mark.sweep
def test_the_table_of_quality(
    bench: Any, script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quality = script("influence_quality")
    dot = (quality.GradientDot(), ())
    trak = (quality.TRAK(dimension=32), (0.1, 1.0))
    monkeypatch.setattr(quality, "OURS", {quality.MAIN: dot, "psgrad trak": trak})
    rival = quality.Rival(lambda problem, factor: factor * quality.torch.ones(1437, 360), 1.0, (1.0, 2.0))
    monkeypatch.setattr(quality, "RIVALS", {"constant": rival})
    table = quality.Table(bench)
    quality.fill(table, [1, 2], [quality.MAIN, "psgrad trak", "constant"])
    content = quality.report(table)
    rows = {(row["method"], row["models"], row["tuned"]) for row in content["rows"]}
    assert {
        (quality.MAIN, 1, None),
        ("psgrad trak", 2, None),
        ("psgrad trak (halves)", 1, None),
        ("constant", 1, None),
    } <= rows
    assert {method for method, _, tuned in rows if tuned} == {
        "psgrad trak",
        "psgrad trak (halves)",
        "constant",
    }
    constant = next(row for row in content["rows"] if row["method"] == "constant" and row["tuned"] is None)
    assert (constant["mean"], constant["undefined"]) == (0.0, 300)
    assert f"{quality.MAIN} ahead of constant, one model" in content["bars"]
    assert "control: random" in capsys.readouterr().out


@pytest.mark.sweep
def test_the_table_of_a_training_run(
    bench: Any, script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of checkpoints of one epoch's runs; a second report computes nothing again."""
    trajectory = script("influence_trajectory")
    bench = replace(bench, recipe=replace(bench.recipe, epochs=2))
    scorer = trajectory.Scorer(trajectory.task_of(bench))
    monkeypatch.setattr(trajectory, "RUNS", (0, 1))
    dot = trajectory.GradientDot()
    wanted = [
        trajectory.Row("last", dot, 1, "last"),
        trajectory.Row("whole run", dot, 1, "all"),
        trajectory.Row("two runs", trajectory.TracIn(), 2, "all"),
    ]
    content = trajectory.report(bench, scorer, wanted)
    assert [row["name"] for row in content["rows"]] == ["last", "whole run", "two runs"]
    assert content["rows"][0]["mean"] != content["rows"][1]["mean"]
    assert len(list((bench.cache / "run-0-10").glob("*.safetensors"))) == 2
    monkeypatch.setattr(trajectory.Scorer, "_compute", lambda *_: pytest.fail("computed again"))
    assert trajectory.report(bench, scorer, wanted)["rows"] == content["rows"]
    assert "ceiling" in capsys.readouterr().out


@pytest.fixture
def settings(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = script("influence_settings")
    monkeypatch.setattr(module, "RUNS", 2)
    return module


def small(settings: Any, setting: Any, rows: list[Any], epochs: int = 1) -> Any:
    """The setting with a few retrained models and these rows; the others are behind the first."""
    task = replace(setting.task, recipe=replace(setting.task.recipe, epochs=epochs))
    order = (rows[0].name,) * 3
    return replace(setting, task=task, subsets=4, seeds=2, rows=rows, order=order, rivals=())


@pytest.mark.long
def test_a_setting_is_measured_once(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Methods, another library and controls; a second report trains nothing and computes no score again."""
    row = settings.Row("gradient_dot", settings.GradientDot(), 1, "last")
    rival = settings.Rival("ones", "torch", lambda problem: torch.ones(1437, len(problem.query_inputs)))
    absent = settings.Rival("absent", "no_such_package", lambda problem: pytest.fail("asked"))
    setting = replace(small(settings, settings.SETTINGS["digits"](tmp_path), [row]), rivals=(rival, absent))
    content = settings.report(setting)
    found = {each["name"]: each for each in content["rows"]}
    assert (content["queries"], content["parameters"], content["share"]) == (150, 4810, 0.5)
    assert (found["ones"]["undefined"], found["ones"]["kind"]) == (150, "rival")
    assert found["gradient_dot"]["cpu_seconds"] > 0
    assert {"control: random", "control: same label"} <= set(found)
    assert "absent: no_such_package is not installed" in capsys.readouterr().out
    assert json.loads(json.dumps(content))["rows"]

    def again(*_: Any) -> None:
        pytest.fail("computed again")

    monkeypatch.setattr(settings, "EnsembleTrainer", lambda *_: again)
    monkeypatch.setattr(settings, "kept_apart", again)
    monkeypatch.setattr(sys.modules["influence_runs"], "kept_apart", again)
    repeated = settings.report(setting)
    assert repeated["rows"] == content["rows"]
    assert repeated["truth_cpu_seconds"] == pytest.approx(content["truth_cpu_seconds"])


@pytest.mark.long
def test_stored_scores_of_several_models_join_as_fresh_ones(settings: Any, tmp_path: Path) -> None:
    """TRAK averages two factors over models; each is stored."""
    ours = importlib.import_module("influence_ours")
    method = settings.TRAK(dimension=32)
    setting = small(
        settings, settings.SETTINGS["digits"](tmp_path), [settings.Row("trak", method, 2, "last")]
    )
    runs = [settings.Place.all_of(setting.task, seed) for seed in range(2)]
    ((_, scored),) = settings.ours(setting, runs)
    places = [run[-1] for run in runs]
    numbers = [place.checkpoint().number for place in places]
    assert numbers[0] != numbers[1], "both models have the same projection"
    fits = [
        method.fit(setting.task.examples(place.model(), setting.task.training), place.checkpoint())
        for place in places
    ]
    asked = [setting.task.examples(place.model(), setting.task.queries) for place in places]
    joined = ours.joined_scores(method, fits, asked)
    expected = torch.cat([block.scores[""] for block in joined])
    torch.testing.assert_close(torch.as_tensor(scored.scores), expected)
    assert scored.memory is not None


def test_a_way_with_other_scores_is_not_timed(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    speed = script("influence_speed")
    ways = {
        "psgrad": lambda: torch.ones(3, 2),
        "same": lambda: torch.ones(3, 2),
        "other": lambda: 2 * torch.ones(3, 2),
    }
    found = speed.contest("ekfac", ways, 1)
    assert set(found["seconds"]) == {"psgrad", "same"}
    assert "other: wrong" in capsys.readouterr().out


@pytest.mark.sweep
def test_solvers_are_held_against_their_prediction(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    solvers, stored = script("influence_solvers"), tmp_path / "solvers.json"
    monkeypatch.setattr(sys, "argv", ["influence_solvers.py", "--small", "--json", str(stored)])
    solvers.main()
    said, found = capsys.readouterr().out, json.loads(stored.read_text(encoding="utf-8"))
    assert [row["solver"] for row in found["cases"][0]["solvers"]] == ["exact", "dual", "conjugate_gradient"]
    for case in found["cases"]:
        network = solvers.Case(**{name: case[name] for name in ("hidden", "outputs", "count", "queries")})
        work = network.work(network.data()[0])
        for row in case["solvers"]:
            assert row["operations"] == work.operations()[row["solver"]]
            assert row["rate"] == pytest.approx(row["operations"] / row["seconds"])
    assert set(found["constants"]) == {"_INNER", "_PRODUCT", "_ITERATIONS"}
    assert found["constants"]["_INNER"]["in_use"] == solvers.choice._INNER
    assert "fastest: " in said
    assert "_PRODUCT" in said


@pytest.mark.sweep
def test_seconds_of_solves_beside_plain_ways(script: Any, tmp_path: Path) -> None:
    """The scores of psgrad and of the plain way are the same."""
    bars = script("influence_bars")
    torch.manual_seed(0)
    problem = bars.posed(torch.nn.Sequential(torch.nn.Linear(64, 3), torch.nn.Linear(3, 10)), tmp_path, 2)
    assert len(problem.checkpoints) == 2
    one = replace(problem, states=problem.states[:1], learning_rates=(1.0,))
    exact = bars.Influence(solver="exact", damping=bars.DAMPING)
    torch.testing.assert_close(
        bars.scores(one, exact),
        bars.plain_exact(one),
        rtol=1e-3,
        atol=1e-5 * float(bars.scores(one, exact).abs().max()),
    )


@pytest.mark.sweep
def test_quality_of_an_index_by_its_bytes(script: Any) -> None:
    quality, truth = script("index_quality"), script("influence_truth")
    torch.manual_seed(0)
    (x, asked), (y, labels) = torch.rand(25, 64).split([20, 5]), (torch.arange(25) % 10).split([20, 5])
    problem = quality.Problem(truth.perceptron(), x, y, asked, labels)
    method = quality.METHODS["gradient_dot"]
    exact = quality.scored(problem, method, None).scores
    found = {name: quality.scored(problem, method, spec) for name, spec in quality.SPECS.items()}
    assert np.corrcoef(found["rank 1, int8"].scores.ravel(), exact.ravel())[0, 1] > 0.999
    dense = found[quality.DENSE].size
    assert dense == 4 * 2048 + 2
    assert all(each.size * quality.SHARE <= dense for name, each in found.items() if name != quality.DENSE)
