"""The page on private steps and the example that it shows: its commands, its config, its code and the numbers
that it claims.
"""

from __future__ import annotations

import json
import re
import runpy
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from psgrad.cli.app import app
from psgrad.config import load_config
from psgrad.run.results.privacy import STEP_KEYS
from tests.docs.pages import README, ROOT, blocks, shown, stored, table

PAGE = ROOT / "docs" / "guides" / "private-training.md"
TEXT = PAGE.read_text(encoding="utf-8")
CONFIG, EXAMPLE = ROOT / "configs" / "digits-dp.yaml", ROOT / "configs" / "digits-dp"


def psgrad(*arguments: str) -> str:
    """What the command writes to stdout, in this process."""
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, float]:
    """The example's run folder after two steps, what the second call printed, and the seconds of the first as
    a process of its own.
    """
    folder = tmp_path_factory.mktemp("private") / "run"
    arguments = ["dp-step", str(CONFIG), "--output", str(folder)]
    before = time.perf_counter()
    first = subprocess.run(
        [sys.executable, "-m", "psgrad", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    took = time.perf_counter() - before
    assert first.returncode == 0, first.stderr
    return folder, psgrad(*arguments, "--resume", "--json"), took


@pytest.fixture
def names(two_steps: tuple[Path, str, float], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's code leaves, run from top to bottom as one program in the run folder."""
    monkeypatch.chdir(two_steps[0])
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in blocks(TEXT, "python"):
        line = TEXT[: TEXT.index(block)].count("\n")
        exec(compile("\n" * line + block, str(PAGE), "exec"), names)
    Path("model.pt").unlink()  # what the page's own loop saves is no file of the run
    return names


# -- The page ------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_the_code_of_the_page(names: dict[str, Any], two_steps: tuple[Path, str, float]) -> None:
    stated = json.loads((two_steps[0] / "public" / "step.json").read_text(encoding="utf-8"))
    # dp-accounting rounds the losses to a grid of its own; both are upper bounds.
    assert names["spent"] == pytest.approx(stated["epsilon_pld"], rel=1e-2)
    assert names["noisy"].noise_std == pytest.approx(1.1)
    assert 2.9 < names["epsilon_pld"](names["planned"](names["multiplier"]), 1e-5).value <= 3.0


REST_OF_A_CONFIG = """\
version: 1
model: {factory: "model.py:build"}
loss: cross_entropy
data: {path: rows.parquet, inputs: x, target: y}
output: out
"""


def test_the_config_of_the_page_is_a_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(REST_OF_A_CONFIG + blocks(TEXT, "yaml")[0], encoding="utf-8")
    privacy = load_config(path).privacy
    assert privacy is not None
    assert {"steps", "delta", "sampling", "clipping", "noise", "optimizer"} <= privacy.model_fields_set


@pytest.mark.sweep
def test_the_plan_is_the_one_shown(tmp_path: Path) -> None:
    _, lines = shown(TEXT, "--plan")
    told = psgrad("dp-step", str(CONFIG), "--plan", "--output", str(tmp_path / "run")).splitlines()
    assert told == lines
    assert not list(tmp_path.iterdir())


@pytest.mark.sweep
def test_what_the_run_says_is_what_the_config_leads_to(two_steps: tuple[Path, str, float]) -> None:
    """The figures of the run that the page shows follow from the config: those of the plan hold here, too."""
    stated = json.loads(two_steps[1])
    _, lines = shown(TEXT, "--steps 150")
    told = dict(re.split(r"  +", line, maxsplit=1) for line in lines if "  " in line)
    assert told["after"].startswith("150 of 150 planned steps")
    assert f"= {stated['noise_multiplier']:.4g} x sensitivity {stated['sensitivity']:.4g}" in told["noise"]
    spent = [float(value) for value in re.findall(r"([\d.]+) \(", told["privacy spent"])]
    assert spent == [
        pytest.approx(stated[key], rel=1e-3) for key in ("planned_epsilon_pld", "planned_epsilon_rdp")
    ]


@pytest.mark.sweep
def test_files_that_the_page_names_are_written(two_steps: tuple[Path, str, float]) -> None:
    folder = two_steps[0]
    section = TEXT[TEXT.index("## The run folder") :].partition("\n## ")[0]
    named = re.findall(r"^- `([\w./*]+)`: ", section, flags=re.MULTILINE)
    assert len(named) == 10
    for name in named:
        # The model of this run has no adapters, and nobody asked for a report.
        assert list(folder.glob(name)) or name in ("public/adapter/", "public/report.html"), name
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    known = {str(path.relative_to(folder)) for name in named for path in folder.glob(name)}
    assert written == known


def test_the_table_of_accuracies_is_the_stored_result() -> None:
    found = stored("dp-utility-cpu")
    last = {side: [seed[-1] for seed in seeds] for side, seeds in found["accuracy"].items()}
    expected = [
        [f"{statistics.mean(right):.1f} %", f"{statistics.stdev(right):.1f}"] for right in last.values()
    ]
    assert list(last) == ["psgrad", "opacus"]
    assert table(TEXT, "| after 150 steps") == expected
    assert found["settings"]["steps"] == 150
    assert found["epsilon"]["psgrad, pld"] == pytest.approx(3.0, abs=0.01)


def test_the_readme_shows_lines_of_the_page() -> None:
    (private,) = (block.splitlines() for block in blocks(README, "console") if "digits-dp" in block)
    whole = next(
        block.splitlines() for block in blocks(TEXT, "console") if block.startswith(private[0] + "\n")
    )
    assert len(private) >= 4
    assert [line for line in whole if line in private] == [line for line in private if line != "..."]


# -- The example ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_step_of_the_example_is_quick(two_steps: tuple[Path, str, float]) -> None:
    """One step with the imports, the accounting and the plots: under 30 s on two cores."""
    assert two_steps[2] < 30


@pytest.mark.long
def test_the_public_record_has_its_keys(two_steps: tuple[Path, str, float]) -> None:
    folder, printed, _ = two_steps
    stated = json.loads((folder / "public" / "step.json").read_text(encoding="utf-8"))
    assert json.loads(printed) == stated
    assert list(stated) == list(STEP_KEYS)
    assert (
        stated["steps"],
        stated["planned_steps"],
        stated["sample_rate"],
        stated["expected_batch_size"],
    ) == (2, 150, 0.1, 144)
    assert stated["noise_std"] == pytest.approx(stated["noise_multiplier"] * stated["sensitivity"])
    assert 0 < stated["epsilon_pld"] <= stated["epsilon_rdp"] < stated["planned_epsilon_rdp"]
    assert 2.99 < stated["planned_epsilon_pld"] <= 3.0


def test_the_released_weights_are_finite_and_fit_the_model(two_steps: tuple[Path, str, float]) -> None:
    model = runpy.run_path(str(EXAMPLE / "model.py"))["build"]()
    weights = load_file(two_steps[0] / "public" / "model.safetensors")
    model.load_state_dict(weights)
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_the_digits_are_the_original_ones_in_two_parts() -> None:
    original = load_digits()
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name in ("train", "test"):
        with np.load(EXAMPLE / f"{name}.npz") as data:
            rows = np.array([int(text.removeprefix("digit-")) for text in data["id"]])
            np.testing.assert_array_equal(
                data["image"][:, 0], (original.images[rows] / 16).astype(np.float32)
            )
            np.testing.assert_array_equal(data["label"], original.target[rows])
        found[name] = rows
    assert sorted([*found["train"], *found["test"]]) == list(range(len(original.target)))


def test_delta_of_the_example_is_below_one_over_its_records() -> None:
    privacy = load_config(CONFIG).privacy
    assert privacy is not None
    with np.load(EXAMPLE / "train.npz") as data:
        assert privacy.delta < 1 / len(data["label"])
        assert privacy.expected_batch_size == round(0.1 * len(data["label"]))
