"""`psgrad influence` by `method: replay`: scores are what less of an example in the described run does, and a
run that does not lead to the checkpoint is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from psgrad.engine.influence.training_run import training_batches
from psgrad.errors import ConfigError
from tests.influence_workplace import QUERIES, InfluenceWorkplace
from tests.workplace import CLASSES, FEATURES, ROWS

EPOCHS, BATCH, RATE, SEED = 5, 16, 0.1, 4


@pytest.fixture
def replay(influence_place: InfluenceWorkplace) -> InfluenceWorkplace:
    """A smooth run of plain gradient descent, from weights in a file."""
    place = influence_place
    place.save_checkpoint("initial.safetensors", seed=7)
    del place.config["model"]["checkpoint"]
    place.config["engine"] = {"dtype": "float64"}
    place.section.update(
        method={"name": "replay", "subsets": 0},
        training={
            "optimizer": "sgd",
            "learning_rate": RATE,
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "seed": SEED,
            "initial": "initial.safetensors",
        },
        top=3,
    )
    return place


def trained(place: InfluenceWorkplace, left_out: int | None = None, weight: float = 0.0) -> nn.Module:
    """The same run by a loop of torch.optim, one example with another weight."""
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    model.load_state_dict(
        {name: value.double() for name, value in load_file(place.folder / "initial.safetensors").items()}
    )
    data = np.load(place.folder / "data.npz")
    inputs, labels = torch.from_numpy(data["x"]).double(), torch.from_numpy(data["y"])
    weights = torch.ones(ROWS, dtype=torch.float64)
    if left_out is not None:
        weights[left_out] = weight
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in training_batches(ROWS, epochs=EPOCHS, batch_size=BATCH, seed=SEED):
        losses = nn.functional.cross_entropy(model(inputs[batch]), labels[batch], reduction="none")
        optimiser.zero_grad()
        (weights[batch] * losses).mean().backward()
        optimiser.step()
    return model


def losses_of_queries(place: InfluenceWorkplace, model: nn.Module) -> np.ndarray:
    inputs, labels = torch.from_numpy(place.queries["x"]).double(), torch.from_numpy(place.queries["y"])
    with torch.no_grad():
        losses: np.ndarray = nn.functional.cross_entropy(model(inputs), labels, reduction="none").numpy()
    return losses


@pytest.mark.long
def test_replay_scores_are_the_run_with_less_of_an_example(replay: InfluenceWorkplace) -> None:
    table = replay.ranked("--no-report").query("query_index >= 0")
    assert len(table) == QUERIES * 6
    step = 1e-4
    for row in table.groupby("query_index").head(1).itertuples():
        more, less = (
            losses_of_queries(replay, trained(replay, int(row.train_index), 1 + sign * step))  # type: ignore[arg-type]
            for sign in (1, -1)
        )
        expected = (less - more)[int(row.query_index)] / (2 * step)  # type: ignore[arg-type]
        assert row.score == pytest.approx(expected, rel=1e-5)


@pytest.mark.sweep
def test_replay_model_is_the_end_of_the_run(replay: InfluenceWorkplace) -> None:
    replay.ranked("--no-report")
    queries = pd.read_parquet(replay.folder / "out" / "queries.parquet")
    np.testing.assert_allclose(queries["measurement"], losses_of_queries(replay, trained(replay)), rtol=1e-6)


@pytest.mark.sweep
def test_replay_says_how_far_to_trust_it(replay: InfluenceWorkplace) -> None:
    replay.section["method"] = {"name": "replay", "subsets": 5}
    outcome = replay.influence()
    assert outcome.code == 0, outcome.err
    assert "replay: with 5 subsets of each size left out for real" in outcome.err
    (facts,) = replay.manifest()["influence"]["fit"]
    assert list(facts["agreement"]) == ["1% left out", "5% left out", "20% left out"]
    assert facts["agreement"]["5% left out"] > 0.9  # a smooth run
    assert facts["slope"]["1% left out"] == pytest.approx(1, abs=0.1)
    assert "uncalibrated" not in replay.manifest()["influence"]["unit"]
    assert (replay.folder / "out" / "report.html").exists()


@pytest.mark.sweep
def test_replay_of_a_run_that_is_not_smooth_is_called_a_guess(replay: InfluenceWorkplace) -> None:
    replay.section["method"] = {"name": "replay", "subsets": 5}
    replay.section["training"] |= {"learning_rate": 30.0, "epochs": 20}
    outcome = replay.influence("--no-report")
    assert outcome.code == 0, outcome.err
    assert "does not depend smoothly on its data, and scores are a guess" in outcome.err
    assert "uncalibrated" in replay.manifest()["influence"]["unit"]


@pytest.mark.long
def test_replay_that_ends_elsewhere_is_refused(replay: InfluenceWorkplace) -> None:
    save_file(trained(replay).state_dict(), replay.folder / "end.safetensors")
    replay.config["model"]["checkpoint"] = "end.safetensors"
    replay.section["training"]["learning_rate"] = 0.09
    outcome = replay.influence("--no-report")
    assert outcome.code == 3
    assert "does not end at end.safetensors: its end is 0." in outcome.err
    assert "leave model.checkpoint out" in outcome.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": None}, "describe it in influence.training"),
        ({"method": "influence"}, "training is of method: replay, and the method is influence"),
        ({"checkpoints": ["initial.safetensors"]}, "replay has one model, the end of its run"),
        ({"index": {"path": "index"}}, "replay does not read an index"),
        ({"method": {"name": "replay", "subsets": 2}}, "2 subsets have no rank correlation"),
        ({"training": {"optimizer": "adam", "momentum": 0.9}}, "adam does not take momentum"),
        ({"training": {"optimizer": "newton"}}, "sgd"),
    ],
)
def test_replay_options_that_do_not_fit(
    replay: InfluenceWorkplace, change: dict[str, Any], message: str
) -> None:
    replay.section.update(change)
    outcome = replay.influence("--no-report")
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": "module"}, "replay has no scores of single layers"),
        ({"self_influence": "always"}, "replay has no cheap self-influence"),
    ],
)
def test_replay_refuses_what_it_does_not_have(
    replay: InfluenceWorkplace, change: dict[str, Any], message: str
) -> None:
    replay.section.update(change)
    outcome = replay.influence("--no-report")
    assert outcome.code == 3
    assert message in outcome.err


def test_replay_by_several_processes_is_refused(replay: InfluenceWorkplace) -> None:
    with pytest.raises(ConfigError, match="not computed by several processes"):
        replay.first_of_two()
    assert not (replay.folder / "out").exists()
