"""`psgrad analyze` over several checkpoints: refusals before any work, a run that goes on, and the
example.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import nn

import psgrad.commands.checkpoints as moments
from tests.workplace import Workplace

MEASURES = ["trajectory", "grand", "el2n_over_checkpoints", "forgetting", "vog"]
FILES = ["first.safetensors", "second.safetensors", "third.safetensors"]


def weights(seed: int, hidden: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3)).state_dict()


@pytest.fixture
def training(workplace: Workplace) -> Workplace:
    """A workplace with three checkpoints and all measures over them."""
    for seed, name in enumerate(FILES):
        save_file(weights(10 + seed), workplace.folder / name)
    workplace.config["analyze"] = {"checkpoints": list(FILES), "measures": list(MEASURES)}
    return workplace


def measures(training: Workplace, output: str = "out") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((training.folder / output / "measures.json").read_text())
    return content


@pytest.mark.long
def test_one_run_tells_all_that_measures_over_checkpoints_say(training: Workplace) -> None:
    training.succeeded("--no-report")
    frame, said = training.samples(), measures(training)
    columns = {"grand", "grand_std", "el2n_mean", "vog", "vog_z", "forgetting_events", "mean_confidence"}
    assert {*columns, "loss_slope"} <= set(frame.columns)
    assert not [name for name in frame.columns if name.startswith(("moments", "vog."))]
    assert said["moments"]["numbers"]["checkpoints"] == FILES
    for measure in MEASURES:
        assert set(said[measure]["meanings"]) <= set(frame.columns)
    table = pd.read_parquet(training.folder / "out" / "measures" / "trajectory.checkpoints.parquet")
    assert table["checkpoint"].tolist() == FILES


@pytest.mark.long
def test_the_model_of_the_config_is_no_checkpoint_of_its_own(training: Workplace) -> None:
    training.config["model"]["checkpoint"] = FILES[2]
    training.succeeded("--no-report")

    norms = load_file(training.folder / "out" / "measures" / "trajectory.safetensors")["grad_norm"]
    assert norms.shape == (24, 3)
    frame = training.samples().sort_values("index")
    np.testing.assert_allclose(norms[:, 2], frame["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(frame["grand"], norms.mean(1), rtol=1e-6)


def test_measures_over_checkpoints_need_some(training: Workplace) -> None:
    del training.config["analyze"]["checkpoints"]
    training.refused(
        3,
        "and analyze.checkpoints lists none",
        "list files of a training run in analyze.checkpoints",
    )
    assert not (training.folder / "out").exists()


def test_the_same_weights_twice_are_refused(training: Workplace) -> None:
    torch.save(weights(10), training.folder / "copy.pt")
    training.config["analyze"]["checkpoints"].append("copy.pt")
    training.refused(
        2, "the checkpoints first.safetensors and copy.pt hold the same weights", "it would count double"
    )


def test_a_checkpoint_of_another_model_is_refused_before_any_work(training: Workplace) -> None:
    save_file(weights(0, hidden=6), training.folder / FILES[1])
    training.refused(3, FILES[1])
    assert not (training.folder / "out").exists()


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on_at_the_checkpoint_it_had_come_to(
    training: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.config["engine"] = {"chunk_size": 5}
    training.succeeded("--output", "whole", "--no-report")
    plain, asked = moments._objective, []

    def stopping(run: Any, path: Path) -> Any:
        asked.append(str(path))
        if asked.count(FILES[1]) == 1 and str(path) == FILES[1]:
            raise KeyboardInterrupt
        return plain(run, path)

    monkeypatch.setattr(moments, "_objective", stopping)
    assert training.analyze().code == 130
    assert asked == FILES[:2]
    training.succeeded("--resume", "--no-report")
    assert asked[2:4] == FILES[1:]  # the first has passed, and is not asked again before the pass of vog
    measured = ("trajectory.safetensors", "trajectory.checkpoints.parquet")
    for name in ("samples.parquet", *(f"measures/{each}" for each in measured)):
        found, expected = (training.folder / run / name for run in ("out", "whole"))
        assert found.read_bytes() == expected.read_bytes()


@pytest.mark.long
def test_a_run_does_not_go_on_with_other_checkpoints(
    training: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = moments._objective

    def stopping(run: Any, path: Path) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(moments, "_objective", stopping)
    assert training.analyze().code == 130
    monkeypatch.setattr(moments, "_objective", plain)
    save_file(weights(0), training.folder / FILES[1])
    training.refused(
        2, "was begun with something else", "analyze.checkpoints (their content)", options=("--resume",)
    )
