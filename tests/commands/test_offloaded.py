"""Every command with weights in their file finds what it finds with weights in memory, to the last bit; and
what goes wrong on the way is named, and keeps the finished rows.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from psgrad import plugins
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.execution.weight_sources import WeightFile
from psgrad.engine.execution.weight_supply import Supply
from tests.hugging_face import tiny_model
from tests.influence_workplace import InfluenceWorkplace
from tests.private_workplace import EXACT, PrivateWorkplace
from tests.workplace import ROWS, Outcome, Workplace, run_command

# without those that need checkpoints, or a training run to compute again
METHODS = sorted(set(plugins.own_classes(plugins.METHODS)) - {"tracin"})
Run = Callable[..., list[Path]]


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with weights in memory and in their file, and returns both folders."""
    return partial(_both_ways, partial(run_command, monkeypatch, capfd))


def _both_ways(run: Callable[..., Outcome], place: Any, *command: str) -> list[Path]:
    folders = []
    for where in ("resident", "offloaded"):
        place.config["engine"] = {**place.config.get("engine", {}), "parameters": where}
        place.config["output"] = where
        (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
        run(*command).succeeded()
        folders.append(place.folder / where)
    return folders


def assert_same_bits(one: Path, other: Path, *patterns: str) -> None:
    for pattern in patterns:
        tables = sorted(one.glob(pattern))
        assert tables, pattern
        for table in tables:
            expected, found = (pd.read_parquet(each / table.relative_to(one)) for each in (one, other))
            pd.testing.assert_frame_equal(found, expected, check_exact=True)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_measures(workplace: Workplace, both_ways: Run, dtype: str) -> None:
    own = plugins.own_classes(plugins.MEASURES)
    measures = sorted(name for name in own if not name.startswith("token_"))
    weights = load_file(workplace.folder / "model.safetensors")
    for number in range(3):
        steps = {name: value * (number + 2) for name, value in weights.items()}
        save_file(steps, workplace.folder / f"step-{number}.safetensors")
    workplace.config["analyze"] = {"measures": measures, "checkpoints": "step-*.safetensors"}
    workplace.config["engine"] = {"chunk_size": 5, "verify": 2, "dtype": dtype}
    one, other = both_ways(workplace, "analyze", "config.yaml", "--no-report")
    assert_same_bits(one, other, "samples.parquet", "parameters.parquet")
    manifests = [json.loads((each / "manifest.json").read_text()) for each in (one, other)]
    assert [each["engine"].get("parameters") for each in manifests] == [None, "offloaded"]
    assert manifests[0]["hashes"] == manifests[1]["hashes"]


@pytest.mark.long
@pytest.mark.parametrize("task", ["sequence-classification", "causal-lm"])
def test_pretrained_model_has_the_same_numbers_and_identity(
    tmp_path: Path, both_ways: Run, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    tiny_model(task, tmp_path / "model")
    ids = np.random.default_rng(0).integers(7, 300, (ROWS, 9))
    np.savez(tmp_path / "data.npz", ids=ids, y=ids if task == "causal-lm" else ids[:, 0] % 2)
    config = {
        "version": 1,
        "model": {"pretrained": "model", "task": task},
        "data": {"path": "data.npz", "inputs": {"input_ids": "ids"}, "target": "y"},
        "engine": {"chunk_size": 5},
    }
    monkeypatch.chdir(tmp_path)
    place = SimpleNamespace(config=config, folder=tmp_path)
    one, other = both_ways(place, "analyze", "config.yaml", "--no-report")
    assert_same_bits(one, other, "samples.parquet", "parameters.parquet")
    manifests = [json.loads((each / "manifest.json").read_text()) for each in (one, other)]
    assert manifests[1]["engine"]["parameters"] == "offloaded"
    assert manifests[1]["engine"]["recomputed"]
    assert manifests[0]["hashes"] == manifests[1]["hashes"]


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("method", METHODS)
def test_influence_method(place: InfluenceWorkplace, both_ways: Run, method: str, dtype: str) -> None:
    place.config["engine"] = {"chunk_size": 4, "dtype": dtype}
    place.config["influence"] |= {"method": method, "queries": {"worst": 3}}
    one, other = both_ways(place, "influence", "config.yaml", "--no-report", "--matrix")
    assert_same_bits(one, other, "scores.parquet")
    matrices = [load_file(each / "matrix.safetensors")["scores"] for each in (one, other)]
    assert (matrices[0] == matrices[1]).all()


@pytest.mark.sweep
def test_influence_over_checkpoints_and_from_an_index(place: InfluenceWorkplace, both_ways: Run) -> None:
    for number in range(2):
        place.save_checkpoint(f"step-{number}.safetensors", number)
    place.config["engine"] = {"chunk_size": 4}
    checkpoints = [{"path": f"step-{number}.safetensors", "learning_rate": 0.5} for number in range(2)]
    place.config["influence"] |= {"method": "tracin", "checkpoints": checkpoints}
    assert_same_bits(*both_ways(place, "influence", "config.yaml", "--no-report"), "scores.parquet")
    place.config["influence"] = {"queries": place.section["queries"], "method": "projected_influence"}
    for where in ("resident", "offloaded"):
        place.config["engine"]["parameters"] = where
        place.config["influence"]["index"] = {"path": f"index-{where}", "dimension": 8}
        assert place.index().code == 0
        place.config["output"] = f"of-index-{where}"
        assert place.influence("--no-report").code == 0
    one, other = (place.folder / f"of-index-{where}" for where in ("resident", "offloaded"))
    assert_same_bits(one, other, "scores.parquet")


@pytest.mark.long
def test_parts_and_their_merge(workplace: Workplace) -> None:
    workplace.config["engine"] = {"chunk_size": 5}
    workplace.config["analyze"] = {"measures": [{"name": "noise_scale", "resamples": 0}, "relative_norm"]}
    workplace.succeeded("--no-report", "--output", "whole")
    workplace.config["engine"]["parameters"] = "offloaded"
    for number in (2, 1):
        workplace.succeeded("--part", f"{number}/2", "--output", "parts")
    assert workplace.command("merge", "parts", "--no-report").code == 0
    assert_same_bits(workplace.folder / "whole", workplace.folder / "parts", "samples.parquet")


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_private_step_keeps_what_it_trains_in_memory(
    workplace: Workplace, both_ways: Run, dtype: str
) -> None:
    place = PrivateWorkplace(workplace)
    place.config["engine"] = {"dtype": dtype}
    place.config["privacy"] |= EXACT | {"steps": 2, "trainable": ["2.*"]}
    one, other = both_ways(place, "dp-step", "config.yaml")
    models = [load_file(each / "public/model.safetensors") for each in (one, other)]
    assert models[0].keys() == models[1].keys()
    assert all(models[1][name].dtype == value.dtype for name, value in models[0].items())
    assert all((models[1][name] == value).all() for name, value in models[0].items())


@pytest.mark.long
def test_disk_that_fails_in_the_middle_keeps_the_finished_rows(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails from the third chunk on. With a disk that works the run goes on to the same table."""
    workplace.config["engine"] = {"chunk_size": 4, "parameters": "offloaded", "verify": 0}
    monkeypatch.setattr("psgrad.commands.analyze_passes._ROWS_PER_SHARD", 4)
    workplace.succeeded("--no-report", "--output", "whole")
    read_into, place, chunks = WeightFile.read_into, Stream._to_device, 0

    def counted(stream: Stream, block: Any) -> Any:
        nonlocal chunks
        chunks += 1
        return place(stream, block)

    def fails_later(file: WeightFile, target: Any, offset: int) -> None:
        if chunks >= 3:
            broken.setattr(os, "preadv", fails)
        read_into(file, target, offset)

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Stream, "_to_device", counted)
        broken.setattr(WeightFile, "read_into", fails_later)
        broken.setattr(Supply, "_make_room", lambda supply, size: supply._kept.clear())
        ended = workplace.analyze("--no-report")
    assert ended.code == 3
    assert "model.safetensors can't be read: Input/output error" in ended.err
    assert "Traceback" not in ended.err
    assert len(list((workplace.folder / "out").glob("parts/samples/*.parquet"))) == 2
    workplace.succeeded("--no-report", "--resume")
    assert workplace.samples().equals(workplace.samples("whole"))


def test_weight_that_is_larger_than_its_share_of_the_memory_is_named(workplace: Workplace) -> None:
    with (workplace.folder / "model.py").open("a") as file:
        file.write("\n\ndef wide():\n    return mlp(70_000)\n")
    weights = {"0.weight": (70_000, 4), "0.bias": (70_000,), "2.weight": (3, 70_000), "2.bias": (3,)}
    zeros = {name: np.zeros(shape, np.float32) for name, shape in weights.items()}
    save_file(zeros, workplace.folder / "model.safetensors")
    workplace.config["model"]["factory"] = "model.py:wide"
    workplace.config["engine"] = {"parameters": "offloaded", "memory": "2MiB"}
    words = workplace.refused(2, "the weight 0.weight takes 1.12 MB", "half of engine.memory")
    assert "set engine.memory to 2.24 MB or more" in words
