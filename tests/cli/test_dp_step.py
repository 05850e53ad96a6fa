"""`psgrad dp-step` as a user meets it: what goes where, what stays private, and which exit code comes
back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from psgrad.run.results import Progress
from tests.cli.conftest import stand_in
from tests.reports import private_runs
from tests.workplace import Outcome

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """install(dp_step=function, dp_plan=function) makes these what the command calls."""

    def install(**functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            stand_in(monkeypatch, name, **{name: function})

    return install


Run = Callable[..., Outcome]


def taken(config: Any, *, progress: Callable[[Progress], None], **options: Any) -> Any:
    progress(Progress(0, 120, "steps", unit="step"))
    progress(Progress(120, 120, "steps", unit="step", detail="epsilon 1.235 (RDP, delta 1e-5)"))
    return private_runs.result()


def test_what_is_public_goes_to_stdout_and_words_to_stderr(config: Path, install: Install, run: Run) -> None:
    install(dp_step=taken)
    ended = run("dp-step", config)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0] == "privacy spent  epsilon 1.101 (PLD), 1.235 (RDP) at delta 1e-5"
    assert lines[-1] == "runs/private"
    for words in ("a note", "steps: 120/120 steps", "epsilon 1.235 (RDP, delta 1e-5)"):
        assert words in ended.err
    assert "clip fraction" not in ended.out + ended.err


def test_json_is_one_object_of_public_things(config: Path, install: Install, run: Run) -> None:
    install(dp_step=taken)
    assert json.loads(run("dp-step", config, "--json").out) == json.loads(json.dumps(private_runs.step()))


def test_options_reach_the_workflow(config: Path, install: Install, run: Run, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def dp_step(config: Any, **options: Any) -> Any:
        seen.update(config=config, **options)
        return private_runs.result()

    install(dp_step=dp_step)
    assert run("dp-step", config).code == 0
    assert (seen["steps"], seen["resume"], seen["insecure_deterministic"]) == (1, False, False)
    output = tmp_path / "elsewhere"
    options = ("--steps", 20, "--resume", "--insecure-deterministic", "--output", output)
    run("dp-step", config, *options, "--set", "engine.chunk_size=8").succeeded()
    assert (seen["steps"], seen["resume"], seen["insecure_deterministic"]) == (20, True, True)
    assert (seen["config"].output, seen["config"].engine.chunk_size) == (output, 8)
    assert run("dp-step", config, "--steps", "all").code == 0
    assert seen["steps"] == "all"
    for wrong in ("0", "-1", "1.5", "some"):
        assert run("dp-step", config, "--steps", wrong).code == 2


def test_a_plan_takes_no_step(config: Path, install: Install, run: Run) -> None:
    install(dp_plan=lambda config, **options: private_runs.plan())
    ended = run("dp-step", config, "--plan")
    assert ended.code == 0
    assert "* configured" in ended.out
    plan = json.loads(run("dp-step", config, "--plan", "--json").out)
    assert len(plan["plans"]) == 5


PLANNED = """\
privacy:
  steps: 40
  delta: 1e-5
  expected_batch_size: 128
  sampling: {scheme: poisson, sample_rate: 0.02}
  clipping: {norm: 0.5}
  noise: {multiplier: 1.25}
  optimizer: {name: SGD, kwargs: {lr: 0.5}}
"""


@pytest.mark.sweep
def test_a_plan_is_what_dp_accounting_says_and_needs_neither_model_nor_data(
    config: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config.write_text(config.read_text() + PLANNED)
    ended = run("dp-step", config, "--plan", "--json")
    assert (ended.code, ended.err) == (0, "")
    told = json.loads(ended.out)
    assert (told["sensitivity"], told["relation"], told["unit"]) == (0.5, "add_or_remove_one", "one row")
    assert [plan["noise_multiplier"] for plan in told["plans"] if plan["configured"]] == [1.25]
    for plan in told["plans"]:
        step = dp_accounting.PoissonSampledDpEvent(
            0.02, dp_accounting.GaussianDpEvent(plan["noise_multiplier"])
        )
        steps = dp_accounting.SelfComposedDpEvent(step, 40)
        assert plan["noise_std"] == plan["noise_multiplier"] * 0.5
        assert plan["epsilon_rdp"] == pytest.approx(
            rdp.RdpAccountant().compose(steps).get_epsilon(1e-5), rel=1e-6
        )
        if not plan["configured"]:
            continue  # what follows takes its time
        # Both are upper bounds, and differ by how finely losses are rounded up.
        assert plan["epsilon_pld"] == pytest.approx(
            pld.PLDAccountant().compose(steps).get_epsilon(1e-5), rel=5e-3
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["config.yaml"]


@pytest.mark.parametrize("option", ["--resume", "--processes"])
def test_a_plan_goes_with_no_option_of_a_run(config: Path, install: Install, run: Run, option: str) -> None:
    install()
    ended = run("dp-step", config, "--plan", option, *(["2"] if option == "--processes" else []))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines() == [
        f"error: --plan was given together with {option}",
        "  hint: leave one of them out",
    ]
