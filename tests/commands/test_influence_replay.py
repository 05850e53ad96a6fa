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
    assert "at most 0.001 times (influence.training.tolerance)" in outcome.err
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
        ({"training": {"step": "own.py:step", "learning_rate": 0.1}}, "training does not take learning_rate"),
        ({"training": {"batches": "own.py:batches", "epochs": 3}}, "training does not take epochs"),
        ({"training": {"state": "own.py:state"}}, "state is of a step of your own"),
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


# -- steps and batches of one's own --------------------------------------------------------------------------

OWN = f"""
import torch
from torch.func import functional_call, grad

torch.manual_seed(0)
MODEL = torch.nn.Sequential(
    torch.nn.Linear({FEATURES}, 5), torch.nn.Tanh(), torch.nn.Linear(5, {CLASSES})
).double()


def loss(params, batch, weights):
    x, y = batch
    losses = torch.nn.functional.cross_entropy(functional_call(MODEL, params, (x,)), y, reduction="none")
    return (weights * losses).mean()


def step(params, state, batch, weights):
    gradients = grad(loss)(params, batch, weights)
    moved = {{name: p - {RATE} * gradients[name] for name, p in params.items()}}
    return moved, {{"count": state["count"] + 1}}


def state(params):
    return {{"count": torch.zeros((), dtype=torch.int64)}}


def batches(rows, seed):
    from psgrad.engine.influence.training_run import training_batches

    return [each.tolist() for each in training_batches(rows, epochs={EPOCHS}, batch_size={BATCH}, seed=seed)]


def wrong(params, state, batch):
    return params, state


def failing(params, state, batch, weights):
    return step(params, state, batch, weights[:, None] @ weights)


def too_high(rows, seed):
    return [[0, rows]]


def of_data(rows, seed):
    return [torch.zeros(3, 2)]


def none(rows, seed):
    return []


def unseeded(rows, seed):
    return list(torch.randperm(rows).split({BATCH}))
"""


@pytest.fixture
def own(replay: InfluenceWorkplace) -> InfluenceWorkplace:
    """The same run by a step and batches of one's own."""
    (replay.folder / "own.py").write_text(OWN)
    replay.section["training"] = {
        "step": "own.py:step",
        "state": "own.py:state",
        "batches": "own.py:batches",
        "seed": SEED,
        "initial": "initial.safetensors",
    }
    return replay


def matrix(place: InfluenceWorkplace) -> torch.Tensor:
    outcome = place.influence("--no-report", "--matrix", "--overwrite")
    assert outcome.code == 0, outcome.err
    return load_file(place.folder / "out" / "matrix.safetensors")["scores"]


@pytest.mark.sweep
def test_replay_by_own_step_is_that_of_the_recipe(own: InfluenceWorkplace) -> None:
    found = matrix(own)
    manifest = own.manifest()
    (facts,) = manifest["influence"]["fit"]
    assert facts["training"] == {"step": "own.py:step", "seed": SEED, "batches": "of a function"}
    assert {"own.py:step", "own.py:state", "own.py:batches"} <= manifest["hashes"]["code"].keys()
    recipe = {"optimizer": "sgd", "learning_rate": RATE, "seed": SEED, "initial": "initial.safetensors"}
    own.section["training"] = recipe | {"epochs": EPOCHS, "batch_size": BATCH}
    built_in = matrix(own)
    torch.testing.assert_close(found, built_in, rtol=1e-10, atol=1e-12)
    own.section["training"] = recipe | {"batches": "own.py:batches"}
    assert torch.equal(matrix(own), built_in)


@pytest.mark.sweep
def test_replay_by_own_step_that_ends_elsewhere_is_refused(own: InfluenceWorkplace) -> None:
    save_file(trained(own).state_dict(), own.folder / "end.safetensors")
    own.config["model"]["checkpoint"] = "end.safetensors"
    assert own.influence("--no-report").code == 0
    (own.folder / "own.py").write_text(OWN.replace(f"p - {RATE}", "p - 0.09"))
    outcome = own.influence("--no-report", "--overwrite")
    assert outcome.code == 3
    assert "does not end at end.safetensors: its end is 0." in outcome.err


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"step": "own.py:wrong"}, 2, "influence.training.step: own.py:wrong can't be called as"),
        ({"step": "own.py:missing"}, 2, "own.py has no 'missing'"),
        ({"step": "own.py:failing"}, 3, "the training step own.py:failing raised"),
        ({"batches": "own.py:too_high"}, 3, f"own.py:too_high returned the row {ROWS} for step 0"),
        ({"batches": "own.py:of_data"}, 3, "own.py:of_data returned float32 [3, 2] for step 0"),
        ({"batches": "own.py:none"}, 3, "own.py:none returned no step"),
        ({"batches": "own.py:unseeded"}, 3, "own.py:unseeded are others when they are asked for again"),
    ],
)
def test_replay_code_of_own_refused(
    own: InfluenceWorkplace, change: dict[str, Any], code: int, words: str
) -> None:
    own.section["training"] |= change
    outcome = own.influence("--no-report")
    assert outcome.code == code, outcome.err
    assert words in " ".join(outcome.err.split())
    if "has no" not in words:
        assert all(part in outcome.err for part in ("expected ", "", "hint: "))


def test_validate_names_code_of_a_training_run_that_is_missing(own: InfluenceWorkplace) -> None:
    own.section["training"]["batches"] = "own.py:missing"
    own.influence("--no-report")  # writes the config
    outcome = own.command("validate", "config.yaml")
    assert outcome.code == 2
    assert "influence.training.batches" in outcome.out + outcome.err


# -- where states are kept, and what it will take ------------------------------------------------------------


@pytest.mark.sweep
def test_replay_with_states_on_disk_is_bit_identical(own: InfluenceWorkplace) -> None:
    in_memory = matrix(own)
    own.section["training"]["states"] = "disk"
    assert torch.equal(matrix(own), in_memory)
    assert not [path for path in own.folder.rglob("*") if path.name.startswith("tmp")]


def test_replay_by_several_processes_is_refused(replay: InfluenceWorkplace) -> None:
    with pytest.raises(ConfigError, match="can't be shared by several processes"):
        replay.first_of_two()
    assert not (replay.folder / "out").exists()
