"""Memory runs out in one rank of several: that rank takes smaller chunks by itself, the others go on as
before, and the tables are those of one process.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.numpy import load_file

from psgrad.engine.execution.loading import Chunk, Loader
from tests.commands.test_private_ranks import SEEDED, assert_released_alike, private  # noqa: F401
from tests.forked_ranks import EndedRank, run_ranks, slow_chunks
from tests.influence_workplace import InfluenceWorkplace
from tests.private_workplace import PrivateWorkplace

FITS = 2  # rows
CLOSE = 1e-10  # relative: rows in other chunks, in float64
SLOW = 0.2  # seconds for a chunk of rank 0, so that it leaves rows to rank 1
LATE = 60  # seconds until which rank 1 has its first chunk, however busy the machine is


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> InfluenceWorkplace:
    found = InfluenceWorkplace(tmp_path, monkeypatch, capfd)
    found.prepare()
    found.config["engine"] = {"chunk_size": 4, "dtype": "float64", "verify": 0}
    return found


def too_large(chunk: Chunk) -> None:
    """The allocator's own error for a chunk of more rows than fit."""
    if len(chunk) > FITS:
        torch.empty(1 << 60, dtype=torch.uint8)


def little_memory(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Chunk], None]) -> Callable[[int], None]:
    """A plant: `fails` is called with each chunk of rank 1, before it is computed. Rank 0 begins after it:
    else it may take all rows on a busy machine.
    """
    began = multiprocessing.get_context("fork").Event()

    def plant(rank: int) -> None:
        if rank == 0:
            slow_chunks(monkeypatch, SLOW)
        placed = Loader.to_device

        def place(loader: Loader, chunk: Chunk) -> Any:
            if rank == 0:
                assert began.wait(LATE), "rank 1 got no chunk"
            else:
                began.set()
                fails(chunk)
            return placed(loader, chunk)

        monkeypatch.setattr(Loader, "to_device", place)

    return plant


def run(place: InfluenceWorkplace, plant: Callable[[int], None], *words: str) -> list[EndedRank]:
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    ended = run_ranks(place.folder, 2, *words, plant=plant)
    assert [rank.code for rank in ended] == [0, 0], ended
    return ended


def assert_same_table(one: Path, other: Path) -> None:
    wanted, found = pd.read_parquet(one), pd.read_parquet(other)
    pd.testing.assert_frame_equal(found, wanted, rtol=CLOSE, atol=CLOSE)


@pytest.mark.sweep
def test_analyze_rank_out_of_memory_backs_off_alone(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.config["analyze"] = {"measures": ["relative_norm", "cosine_to_mean"]}
    run(place, little_memory(monkeypatch, too_large), "analyze", "config.yaml", "--output", "two")
    assert place.command("analyze", "config.yaml", "--output", "one").code == 0
    for table in ("samples.parquet", "parameters.parquet"):
        assert_same_table(place.folder / "one" / table, place.folder / "two" / table)
    backed_off, other = ((place.folder / f"two/logs/rank-{rank}.log").read_text() for rank in (1, 0))
    assert "out of memory on rows" in backed_off
    assert "out of memory" not in other


WIDE = """
class Model(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 1 << 20), nn.Tanh(), nn.Linear(1 << 20, 3))
"""
MIB = 1 << 20


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="the memory in use is read as Linux tells it")
def test_analyze_rank_with_a_limit_of_the_system_backs_off_alone(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An activation of a row takes 8 MiB, of a chunk 384 MiB: more than a process has free in one piece,
    which no limit of the system keeps it from using again.
    """
    place.use_model(WIDE)
    place.config["engine"] |= {"chunk_size": 48}
    rows = {name: np.tile(value, (4, *[1] * (value.ndim - 1))) for name, value in place.arrays.items()}
    rows["x"] = rows["x"] * np.linspace(1, 2, len(rows["x"]))[:, None]  # no ties in the ranking
    place.save(**rows)
    place.config["data"] |= {"id": None}

    def limit(chunk: Chunk) -> None:
        if resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            used = int(status["VmData"].split()[0]) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (used + 128 * MIB, resource.RLIM_INFINITY))

    run(place, little_memory(monkeypatch, limit), "analyze", "config.yaml", "--no-report", "--output", "two")
    assert place.command("analyze", "config.yaml", "--no-report", "--output", "one").code == 0
    assert_same_table(place.folder / "one/samples.parquet", place.folder / "two/samples.parquet")
    assert "out of memory on rows" in (place.folder / "two/logs/rank-1.log").read_text()


@pytest.mark.long
def test_index_rank_out_of_memory_backs_off_alone(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = {"path": "two", "dimension": 8, "rows_per_shard": 4, "dtype": "float64"}
    place.config["influence"] |= {"index": index, "method": "projected_influence"}
    words = ("influence", "index", "config.yaml")
    run(place, little_memory(monkeypatch, too_large), *words)
    assert "out of memory on rows" in (place.folder / "two/logs/rank-1.log").read_text()
    assert place.command(*words, "--set", "influence.index.path=one").code == 0
    files = sorted((place.folder / "one").rglob("gradients*"))
    assert len(files) == 6
    for file in files:
        other = load_file(place.folder / "two" / file.relative_to(place.folder / "one"))
        for name, value in load_file(file).items():
            np.testing.assert_allclose(other[name], value, rtol=CLOSE, atol=CLOSE)


@pytest.mark.sweep
def test_dp_step_rank_out_of_memory_backs_off_alone(
    private: PrivateWorkplace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private.config["engine"] = {"chunk_size": 4, "dtype": "float64"}
    words = ["dp-step", "config.yaml", "--steps", "3", *SEEDED, "--output"]
    run(private.workplace, little_memory(monkeypatch, too_large), *words, "two")  # type: ignore[arg-type]
    private.succeeded("--steps", "3", *SEEDED, "--output", "one")
    assert_released_alike(private.folder / "one", private.folder / "two", 1e-12)
    log = private.folder / "two/private/NOT_PRIVATE_rank-1.log"
    assert "out of memory on rows" in log.read_text()
