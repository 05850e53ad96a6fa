"""Every command that processes share finds with sharded weights what one process finds with weights in its
memory, to the last bit of each row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from psgrad import plugins
from psgrad.engine.execution import sharded
from psgrad.engine.execution.sharded import WeightParts
from tests.commands.same_runs import assert_same_runs
from tests.forked_ranks import EndedRank, Plant, die, hasty, run_ranks
from tests.influence_workplace import InfluenceWorkplace
from tests.private_workplace import EXACT, PrivateWorkplace
from tests.workplace import Workplace

# without those that need checkpoints, or a training run to compute again
METHODS = sorted(set(plugins.own_classes(plugins.METHODS)) - {"tracin", "source", "replay"})
MEASURES = ["noise_scale", "relative_norm", "cosine_to_class_mean", "gradient_x_input", "el2n", "ntk"]


@pytest.fixture(autouse=True)
def all_weights_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "WHOLE_BELOW", 0)
    hasty(monkeypatch)


def ranks(place: Any, size: int, *command: str, plant: Plant = lambda rank: None) -> list[EndedRank]:
    """A command with sharded weights, in a folder named sharded."""
    place.config["engine"] = {**place.config.get("engine", {}), "parameters": "sharded"}
    place.config["output"] = "sharded"
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    return run_ranks(place.folder, size, *command, plant=plant)


def succeeded(place: Any, size: int, *command: str) -> Path:
    """The folder of a command with sharded weights, of which ranks have sent parts."""

    def plant(rank: int) -> None:
        request = WeightParts.request

        def noted(parts: WeightParts, questions: Any, into: Any) -> None:
            request(parts, questions, into)
            (place.folder / f"received-{rank}").write_text(str(parts.received))

        WeightParts.request = noted  # type: ignore[method-assign]

    ended = ranks(place, size, *command, plant=plant)
    assert [rank.code for rank in ended] == [0] * size, [rank.err for rank in ended]
    assert all(int((place.folder / f"received-{rank}").read_text()) > 0 for rank in range(size))
    return Path(place.folder) / "sharded"


@pytest.mark.long
def test_analyze_with_second_passes_and_checkpoints(workplace: Workplace) -> None:
    weights = load_file(workplace.folder / "model.safetensors")
    for number in range(2):
        steps = {name: value * (number + 2) for name, value in weights.items()}
        save_file(steps, workplace.folder / f"step-{number}.safetensors")
    workplace.config["analyze"] = {"measures": MEASURES, "checkpoints": "step-*.safetensors"}
    workplace.config["engine"] = {"chunk_size": 5, "verify": 2}
    workplace.succeeded("--no-report")
    found = succeeded(workplace, 2, "analyze", "config.yaml", "--no-report")
    assert_same_runs(workplace.folder / "out", found)
    manifest = json.loads((found / "manifest.json").read_text())
    assert (manifest["engine"]["parameters"], manifest["engine"]["shard_ranks"]) == ("sharded", 2)
    assert manifest["hashes"] == json.loads((workplace.folder / "out/manifest.json").read_text())["hashes"]


@pytest.mark.long
def test_analyze_in_float64_over_three_ranks_of_which_one_has_no_rows(workplace: Workplace) -> None:
    """Two chunks for three ranks."""
    workplace.config["engine"] = {"chunk_size": 12, "dtype": "float64"}
    workplace.succeeded("--no-report")
    found = succeeded(workplace, 3, "analyze", "config.yaml", "--no-report")
    assert_same_runs(workplace.folder / "out", found)


@pytest.mark.long
def test_analyze_over_two_groups_of_two_ranks(workplace: Workplace) -> None:
    workplace.config["engine"] = {"chunk_size": 3, "shard_ranks": 2}
    workplace.succeeded("--no-report")
    found = succeeded(workplace, 4, "analyze", "config.yaml", "--no-report")
    assert_same_runs(workplace.folder / "out", found)


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [pytest.param(each, marks=[] if each == "ekfac" else pytest.mark.sweep, id=each) for each in METHODS],
)
def test_influence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    place = InfluenceWorkplace(tmp_path, monkeypatch, capfd)
    place.prepare()
    place.config["engine"] = {"chunk_size": 4, "dtype": "float64"}
    place.config["influence"] |= {"method": method, "queries": {"worst": 3}}
    place.config["output"] = "out"
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    command = ("influence", "config.yaml", "--no-report", "--matrix")
    assert run_ranks(place.folder, 1, *command)[0].code == 0
    found = succeeded(place, 2, *command)
    one, other = (load_file(each / "matrix.safetensors")["scores"] for each in (place.folder / "out", found))
    torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recompute", "norms_apart"),
    [
        pytest.param("none", 0.0, id="bit-identical"),
        # where blocks run again, norms are those of the pass that keeps no factors: another float32 sum
        pytest.param("auto", 1e-6, id="blocks run again"),
    ],
)
def test_index_has_the_gradients_of_one_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    recompute: str,
    norms_apart: float,
) -> None:
    place = InfluenceWorkplace(tmp_path, monkeypatch, capfd)
    place.prepare()
    place.config["engine"] = {"chunk_size": 4, "recompute": recompute}
    index = {"path": "one", "dimension": 8, "rows_per_shard": 4, "dtype": "float64"}
    place.config["influence"] |= {"index": index, "method": "projected_influence"}
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    assert run_ranks(place.folder, 1, "influence", "index", "config.yaml")[0].code == 0
    place.config["influence"]["index"]["path"] = "several"
    succeeded(place, 2, "influence", "index", "config.yaml")
    files = sorted(each.relative_to("one") for each in Path("one").rglob("*.safetensors"))
    assert files
    for file in files:
        one, other = (load_file(Path(folder) / file) for folder in ("one", "several"))
        assert one.keys() == other.keys()
        apart = 1e-12 if file.name == "sums.safetensors" else 0  # which are added in another order
        for name, value in one.items():
            bound = norms_apart if name == "square_norm" else apart
            torch.testing.assert_close(other[name], value, rtol=bound, atol=apart)


@pytest.mark.long
def test_dp_step_with_frozen_weights(workplace: Workplace) -> None:
    place = PrivateWorkplace(workplace)
    place.config["privacy"] |= EXACT | {"steps": 2, "trainable": ["2.*"]}
    place.config["engine"] = {"dtype": "float64"}
    place.config["output"] = "out"
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    assert run_ranks(place.folder, 1, "dp-step", "config.yaml")[0].code == 0
    found = succeeded(place, 2, "dp-step", "config.yaml")
    models = [load_file(each / "public/model.safetensors") for each in (place.folder / "out", found)]
    assert models[0].keys() == models[1].keys()
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_a_rank_that_dies_is_named_and_the_run_goes_on_in_one_process(workplace: Workplace) -> None:
    workplace.config["engine"] = {"chunk_size": 4}
    workplace.succeeded("--no-report")

    def dies(rank: int) -> None:
        answer = WeightParts._answer
        answered = 0

        def dying(parts: WeightParts, question: torch.Tensor) -> torch.Tensor:
            nonlocal answered
            answered += 1
            if rank == 1 and answered > 6:
                die()
            return answer(parts, question)

        WeightParts._answer = dying  # type: ignore[method-assign]

    first, _ = ranks(workplace, 2, "analyze", "config.yaml", "--no-report", plant=dies)
    assert first.code == 3
    assert "rank 1 has sent no heartbeat" in first.err
    assert "Traceback" not in first.err
    assert first.seconds < 20
    workplace.config["engine"]["parameters"] = "resident"
    workplace.succeeded("--no-report", "--resume")
    assert_same_runs(workplace.folder / "out", workplace.folder / "sharded")


def test_sharded_weights_of_one_process_stay_in_their_file(workplace: Workplace) -> None:
    workplace.succeeded("--no-report")
    workplace.config["engine"] = {"parameters": "sharded"}
    workplace.succeeded("--no-report", "--output", "again")
    pd.testing.assert_frame_equal(workplace.samples(), workplace.samples("again"), check_exact=True)
    manifest = json.loads((workplace.folder / "again/manifest.json").read_text())
    assert manifest["engine"]["parameters"] == "offloaded"


@pytest.mark.long
def test_ranks_that_can_not_be_divided_into_groups(workplace: Workplace) -> None:
    workplace.config["engine"] = {"shard_ranks": 2}
    ended = ranks(workplace, 3, "analyze", "config.yaml", "--no-report")
    assert [rank.code for rank in ended] == [2, 2, 2]
    said = "".join(rank.err for rank in ended)  # by the first that fails
    assert said.count("engine.shard_ranks: 2, and there are 3 ranks") == 1
