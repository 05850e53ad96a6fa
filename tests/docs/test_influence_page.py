"""The pages on influence and their example: code, config, command, options, and the numbers of the tables."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from psgrad.cli.app import app
from psgrad.config import IndexConfig, load_config
from psgrad.plugins import METHODS, own_classes
from psgrad.run.folders import OWN_ENTRIES
from psgrad.run.results.influence import SCORE_COLUMNS
from psgrad.run.results.influence_evaluation import EVALUATION_COLUMNS
from tests.docs.pages import ROOT, blocks, stored, table_below

PAGE = ROOT / "docs" / "guides" / "influence.md"
TEXT = PAGE.read_text(encoding="utf-8")
METHODS_PAGE = (ROOT / "docs" / "explanation" / "influence.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "influence-results.md").read_text(encoding="utf-8")
CONFIG = ROOT / "configs" / "digits-influence.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The example's run folder, and what the command of the page printed."""
    folder = tmp_path_factory.mktemp("influence") / "run"
    command, *_ = blocks(TEXT, "console")[0].splitlines()
    arguments = shlex.split(command.removeprefix("$ psgrad "))
    arguments[arguments.index("configs/digits-influence.yaml")] = str(CONFIG)
    done = CliRunner().invoke(app, [*arguments, "--output", str(folder)])
    assert done.exit_code == 0, done.stderr
    return folder, done.stdout


def test_the_code_of_the_page_runs() -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in blocks(TEXT, "python"):
        if "def train(" in block:
            continue  # a signature, with nothing in it
        line = TEXT[: TEXT.index(block)].count("\n")
        exec(compile("\n" * line + block, str(PAGE), "exec"), names)
    x, y, xq, yq, model = (names[name] for name in ("x", "y", "xq", "yq", "model"))

    def loop(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = [
            nn.functional.cross_entropy(model(each[None]), label[None])
            for each, label in zip(x, y, strict=True)
        ]
        return torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
                for loss in losses
            ]
        )

    gradients, asked = loop(x, y).double(), loop(xq, yq).double()
    probabilities = model(x).softmax(1).double()
    spread = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None]
    wide = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    # Of logits W x + b the Gauss-Newton matrix is the sum of (diag p - p p') times (x, 1)(x, 1)'; here in the
    # order of rows of (W, b).
    curvature = torch.einsum("nab,ni,nj->aibj", spread, wide, wide).reshape(15, 15) + len(
        x
    ) * 0.01 * torch.eye(15)

    def in_order(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[:, :12].reshape(-1, 3, 4), rows[:, 12:].reshape(-1, 3, 1)], 2).flatten(1)

    expected = in_order(gradients) @ torch.linalg.solve(curvature, in_order(asked).T)
    torch.testing.assert_close(names["scores"], expected, rtol=1e-4, atol=1e-6)


def test_the_config_of_the_page_loads(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        next(block for block in blocks(TEXT, "yaml") if block.startswith("version")), encoding="utf-8"
    )
    shown = load_config(tmp_path / "config.yaml").influence
    assert shown.model_fields_set == set(type(shown).model_fields), "a key that the page does not show"


def test_every_method_and_option_is_on_the_page() -> None:
    for name, kind in own_classes(METHODS).items():
        assert f"`{name}`" in METHODS_PAGE
        if dataclasses.is_dataclass(kind):
            for option in dataclasses.fields(kind):
                assert f"`{option.name}`" in METHODS_PAGE, f"{name}: {option.name}"
    for option in IndexConfig.model_fields:
        assert f"`{option}`" in TEXT


@pytest.mark.sweep
def test_every_column_and_file_is_on_the_page(run: tuple[Path, str]) -> None:
    for column in SCORE_COLUMNS:
        assert column in TEXT
    for path in run[0].iterdir():
        assert f"`{path.name}" in TEXT, path.name
        assert path.name in (*OWN_ENTRIES, "manifest.json"), f"{path.name} would stay behind --overwrite"
    for kind in EVALUATION_COLUMNS:
        assert f"`{kind}`" in TEXT


@pytest.mark.sweep
def test_the_command_prints_what_the_page_shows(run: tuple[Path, str]) -> None:
    """Words and ids; digits of scores differ from machine to machine."""
    shown = [
        line.split()
        for line in blocks(TEXT, "console")[0].splitlines()[1:]
        if not line.startswith(("self-check", "scores:"))
    ]
    printed = [line.split() for line in run[1].splitlines()]
    assert [line for line in shown if line and line[0] == "rank"] == [
        line for line in printed if line and line[0] == "rank"
    ]
    first = [word for line in shown for word in line if word.startswith("digit-")]
    again = [word for line in printed for word in line if word.startswith("digit-")]
    assert set(first) & set(again) >= set(first[:4])


@pytest.mark.sweep
def test_the_example_knows_what_the_page_says_it_knows(run: tuple[Path, str]) -> None:
    manifest = json.loads((run[0] / "manifest.json").read_text())
    assert manifest["model"]["trainable"] == 4810
    training, queries = (
        pd.read_parquet(run[0] / "self_influence.parquet"),
        pd.read_parquet(run[0] / "queries.parquet"),
    )
    assert len(training) == 1437
    assert (training["prediction"] == training["target"]).all()
    assert (training["self_influence"] >= 0).all()
    assert queries[["target", "prediction"]].to_numpy().tolist() == [[9, 5]]
    assert len(np.load(CONFIG.parent / "digits-influence" / "test.npz")["label"]) == 360
    assert manifest["influence"]["predicts_removal"] is True


def test_the_datamodeling_scores_are_the_stored_ones() -> None:
    content = stored("influence-quality-cpu")
    known = {
        (
            row["models"],
            row["tuned"] is not None,
            f"{row['mean']:.3f} ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})",
        )
        for row in content["rows"]
    }
    rows = table_below(RESULTS, "## Linear datamodeling scores")
    assert len(rows) >= 25
    for _, models, default, tuned in rows:
        assert (int(models), False, default) in known
        assert not tuned or (int(models), True, tuned) in known
    missed = [bar for bar, kept in content["bars"].items() if not kept]
    assert missed == ["psgrad influence ahead of captum NaiveInfluenceFunction, one model, tuned: 0.003"], (
        "the page names what is missed"
    )


def test_the_agreement_with_others_is_the_stored_one() -> None:
    content = stored("influence-agreement-cpu")
    rows = table_below(RESULTS, "## Agreement with other libraries")
    assert [row[1] for row in rows] == [each["name"] for each in content["comparisons"]]
    for row, each in zip(rows, content["comparisons"], strict=True):
        assert row[3] == (f"{each['error']:.1e}" if each["same"] else f"Spearman {each['spearman']:.7f}")
        assert each["passed"]


def test_the_seconds_are_the_stored_ones() -> None:
    content = stored("influence-speed-cpu")
    for (_, ours, others), task in zip(
        table_below(RESULTS, "## Speed"), ("gradient_dot", "ekfac"), strict=True
    ):
        assert ours == f"{content[task]['seconds']['psgrad']['median']:.3f} s"
        for words in others.split(", "):
            library, *_, seconds, _ = words.split()
            assert float(seconds) == round(
                min(v["median"] for name, v in content[task]["seconds"].items() if library in name), 3
            )
