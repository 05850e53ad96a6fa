"""What the ranks of several hosts read of a dataset before its rows are computed: all of them together read
it once, and each host a sample. The ranks here play hosts: each has a temporary folder of its own, which is
what the processes of one host share.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from psgrad.data.sources.file_hashes import file_hashes as hashes_of
from psgrad.data.sources.source_rows import TableRows, pieces_of

from psgrad.cli.processes import joined
from psgrad.config import DataConfig
from psgrad.config.config import LossConfig
from psgrad.data import image_samples
from psgrad.data.loss import resolve_loss
from psgrad.data.sources import file_hashes, source_rows, table_samples
from psgrad.data.sources.load import load_data, open_rows
from psgrad.engine.execution.rank_pieces import RankPieces
from psgrad.errors import PsgradError
from tests.commands.test_rows_read_by_ranks import bytes_read
from tests.forked_ranks import die, fork_ranks, hasty, run_ranks, slow_chunks
from tests.workplace import CLASSES, Workplace

BLOCK, SAMPLES, SAMPLE = 1 << 18, 8, 1 << 12
RANKS = 4
LARGE, PARTS = "large.bin", [f"part-{number}.bin" for number in range(9)]
SIZE = 30 * BLOCK + 9 * (BLOCK // 2)
FEW = 1 << 16  # bytes that a rank reads of other things

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bytes read are counted as Linux tells them")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK", BLOCK), ("SMALL", BLOCK), ("SAMPLES", SAMPLES), ("SAMPLE", SAMPLE)):
        monkeypatch.setattr(file_hashes, name, value)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A file of many blocks, and many of less than one, by paths relative to the current folder."""
    source = np.random.default_rng(0)
    (tmp_path / LARGE).write_bytes(source.bytes(30 * BLOCK - 7))
    for name in PARTS:
        (tmp_path / name).write_bytes(source.bytes(BLOCK // 2))
    monkeypatch.chdir(tmp_path)
    return [Path(LARGE), *map(Path, PARTS)]


def be_on_a_host(folder: Path, rank: int, per_host: int = 1) -> None:
    """Let this process be a rank of a host, and each piece that it makes take a moment, so that other ranks
    get some.
    """
    host = folder / f"host-{rank // per_host}"
    host.mkdir(exist_ok=True)
    tempfile.tempdir = str(host)
    socket.gethostname = lambda: host.name
    os.environ["LOCAL_RANK"] = str(rank % per_host)
    made = RankPieces.__call__

    def slowly(self: RankPieces, name: str, count: int, make: Callable[[int], bytes]) -> Any:
        def later(place: int) -> bytes:
            time.sleep(0.05)
            return make(place)

        return made(self, name, count, later)

    RankPieces.__call__ = slowly  # type: ignore[method-assign]


def found_on_hosts(
    folder: Path, work: Callable[[], Any], per_host: int = 1, lead: float = 0.0
) -> list[tuple[Any, int]]:
    """What a function returns in each rank, and the bytes that the rank has read meanwhile.

    lead: seconds that rank 0 begins before the others.
    """

    def run(rank: int) -> None:
        be_on_a_host(folder, rank, per_host)
        with joined(folder) as group:
            assert group is not None
            time.sleep(lead if rank else 0)
            before = bytes_read()
            found = work()
            read = bytes_read() - before
            group.meet("all have found it")
        (folder / f"found-{rank}").write_text(json.dumps([found, read]))

    ended = fork_ranks(folder, RANKS, run)
    assert [rank.code for rank in ended] == [0] * RANKS, ended
    return [json.loads((folder / f"found-{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.long
@pytest.mark.parametrize("per_host", [1, 2])
def test_files_are_read_once_by_all_hosts_together(tmp_path: Path, files: list[Path], per_host: int) -> None:
    found = found_on_hosts(tmp_path, lambda: hashes_of(files), per_host)
    alone = hashes_of(files)
    assert [hashes for hashes, _ in found] == [alone] * RANKS
    read = [count for _, count in found]
    samples = RANKS // per_host * SAMPLES * SAMPLE
    assert SIZE - 7 <= sum(read) < SIZE + samples + RANKS * FEW, read
    assert max(read) < SIZE / 2, read


@pytest.mark.sweep
def test_a_rank_that_comes_alone_hashes_all_and_who_comes_late_reads_a_sample(
    tmp_path: Path, files: list[Path]
) -> None:
    """Such as rank 0, which writes the hashes of files that no other rank needs."""
    first, *others = found_on_hosts(tmp_path, lambda: hashes_of(files), lead=6.0)
    assert first[1] >= SIZE - 7
    for hashes, read in others:
        assert hashes == first[0]
        assert read < SAMPLES * SAMPLE + FEW


def test_a_hash_is_that_of_the_bytes_and_above_a_block_that_of_the_blocks_hashes(files: list[Path]) -> None:
    content = files[0].read_bytes()
    blocks = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
    lines = "\n".join(hashlib.sha256(block).hexdigest() for block in blocks)
    large, *parts = hashes_of(files)
    assert large == hashlib.sha256(lines.encode()).hexdigest()
    assert parts == [hashlib.sha256(each.read_bytes()).hexdigest() for each in files[1:]]


def test_a_file_of_one_block_has_the_hash_that_sha256sum_prints(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(BLOCK))
    assert hashes_of([tmp_path / "x"]) == [hashlib.sha256(bytes(BLOCK)).hexdigest()]


def test_a_block_is_a_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one would be other hashes than those of stored runs."""
    monkeypatch.undo()
    assert file_hashes.BLOCK == 2**30


@pytest.mark.long
def test_a_rank_that_dies_with_a_piece_ends_the_run(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for a piece that does not come."""
    hasty(monkeypatch)

    def run(rank: int) -> None:
        be_on_a_host(tmp_path, rank)
        with joined(tmp_path):
            if rank == 1:
                monkeypatch.setattr(file_hashes, "_digest", lambda block: die())
            hashes_of(files)

    first, second, third = fork_ranks(tmp_path, 3, run)
    assert second.code == -signal.SIGKILL
    assert first.code == third.code == 99  # the error has left the function
    assert "rank 1 has sent no heartbeat" in first.err + third.err  # the one that noticed first says it
    assert max(first.seconds, third.seconds) < 30


# -- hosts with other files ----------------------------------------------------------------------------------

ROWS, WIDTH = 64, 1024
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x.float().flatten(1)[:, :4])
"""
IMAGE = "images/61.png"
OTHERS = [f"images/{row:02d}.png" for row in range(8, ROWS)]  # not the first, which each rank reads


def save_rows(folder: Path, rows: int = ROWS, seed: int = 0) -> dict[str, Any]:
    x = np.random.default_rng(seed).normal(size=(rows, WIDTH))
    np.savez(folder / "rows.npz", x=x, y=np.arange(rows) % CLASSES)
    return {"path": "rows.npz", "inputs": "x", "target": "y"}


def save_images(folder: Path) -> dict[str, Any]:
    """Named in a file, which says nothing of what is in them."""
    source = np.random.default_rng(0)
    (folder / "images").mkdir()
    names = [f"{row:02d}.png" for row in range(ROWS)]
    for name in names:
        Image.fromarray(source.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / "images" / name)
    lines = [f"{name},{row % CLASSES}" for row, name in enumerate(names)]
    (folder / "images" / "metadata.csv").write_text("\n".join(["file_name,label", *lines]))
    return {"images": "images", "target": "label"}


def other_images(folder: Path) -> None:
    for name in OTHERS:
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / name)


def no_images(folder: Path) -> None:
    for name in OTHERS:
        (folder / name).unlink()


COPIES = "a machine with a copy of its own"
CHANGED = (".png in row", "was changed while the run read it, or is another one on this machine", COPIES)
GONE = (".png in row", "can't be read: No such file or directory now; it was not so", COPIES)
CHANGES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], tuple[str, ...]]] = {
    "content": (
        save_rows,
        lambda folder: save_rows(folder, seed=1),
        ("the file rows.npz on host-1 differs from the one on host-0 expected:", "machines with copies"),
    ),
    "size": (
        save_rows,
        lambda folder: save_rows(folder, rows=ROWS - 1),
        ("the file rows.npz on host-1 differs from the one on host-0: 517,", " bytes, and 525,"),
    ),
    "images": (save_images, other_images, CHANGED),
    "no images": (save_images, no_images, GONE),
}


@pytest.mark.long
@pytest.mark.every(4)
@pytest.mark.parametrize("name", CHANGES)
def test_a_host_with_another_file_is_refused_by_name(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save, change, words = CHANGES[name]
    workplace.use_model(MODEL)
    workplace.config["data"] = save(workplace.folder)
    workplace.config["engine"] = {"chunk_size": 4}
    workplace.config["output"] = str(workplace.folder / "out")
    workplace.succeeded("--no-report")  # it is right alone
    copied = workplace.folder / "copy"
    shutil.copytree(workplace.folder, copied)
    change(copied)
    monkeypatch.setattr(image_samples, "_ROWS_PER_PART", ROWS // 4)

    def plant(rank: int) -> None:
        be_on_a_host(workplace.folder, rank)
        slow_chunks(monkeypatch, 0.05)
        if rank:
            os.chdir(copied)
            monkeypatch.setattr(RankPieces, "__call__", second(RankPieces.__call__))

    ended = run_ranks(
        workplace.folder, 2, "analyze", "config.yaml", "--no-report", "--overwrite", plant=plant
    )
    said = " ".join(ended[1].err.split())
    assert [rank.code for rank in ended] == [3, 3], ended
    for word in words:
        assert word in said, said
    assert "Traceback" not in ended[0].err + ended[1].err
    assert not (workplace.folder / "out" / "samples.parquet").exists()


def second(call: Callable[..., Any]) -> Callable[..., Any]:
    """Pieces that a rank begins with after the other one."""

    def later(self: RankPieces, *arguments: Any) -> Any:
        time.sleep(0.5)
        return call(self, *arguments)

    return later


# -- all rows are looked at --------------------------------------------------------------------------------


def counted(
    monkeypatch: pytest.MonkeyPatch, of: Any, name: str, count: Callable[..., int] = lambda *_: 1
) -> list[int]:
    """The sum of what `count` says of the arguments of each call of a function."""
    found, called = [0], getattr(of, name)

    def call(*arguments: Any) -> Any:
        found[0] += count(*arguments)
        return called(*arguments)

    monkeypatch.setattr(of, name, call)
    return found


@pytest.mark.long
@pytest.mark.parametrize("per_host", [1, 2])
def test_images_are_looked_at_once_by_all_hosts_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_host: int
) -> None:
    data = DataConfig(**save_images(tmp_path))
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / IMAGE)  # in colour: it is not the first
    (tmp_path / "images" / "07.png").write_bytes(b"no image")
    loss = resolve_loss(LossConfig(name="cross_entropy"), tmp_path)
    monkeypatch.setattr(image_samples, "_ROWS_PER_PART", 2)
    looks = counted(monkeypatch, image_samples, "opened")

    def load() -> Any:
        looks[0] = 0
        samples = load_data(data, tmp_path, criterion=loss)
        with pytest.raises(PsgradError, match=r"07\.png"):
            samples.read(7, 8)
        pixels = samples.read(60, 62).inputs[0].sum().item()
        return [samples.fingerprint, list(samples.notes), pixels], looks[0]

    found = [each for each, _ in found_on_hosts(tmp_path, load, per_host)]
    alone, every = load()
    assert every == ROWS
    assert [told for told, _ in found] == [alone] * RANKS
    assert sum(looked for _, looked in found) == ROWS
    assert 0 < min(looked for _, looked in found) <= max(looked for _, looked in found) < ROWS / 2


@pytest.mark.long
@pytest.mark.parametrize("per_host", [1, 2])
def test_lengths_of_lists_are_read_once_by_all_hosts_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_host: int
) -> None:
    lengths = 1 + np.arange(ROWS) % 5
    table = pa.table({"x": [[0.5] * length for length in lengths], "y": np.arange(ROWS) % CLASSES})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=3)
    data = DataConfig(path="rows.parquet", inputs="x", target="y")
    loss = resolve_loss(LossConfig(name="cross_entropy"), tmp_path)
    monkeypatch.setattr(table_samples, "_ROWS_PER_PART", 2)
    looked_at = counted(monkeypatch, table_samples, "_shapes", lambda array, *_: len(array))

    def load() -> Any:
        looked_at[0] = 0
        samples = load_data(data, tmp_path, criterion=loss)
        assert samples.ragged is not None
        return [samples.fingerprint, samples.read(0, ROWS).lengths.flatten().tolist()], looked_at[0]

    found = [each for each, _ in found_on_hosts(tmp_path, load, per_host)]
    alone, every = load()
    assert [told for told, _ in found] == [alone] * RANKS
    assert alone[1] == lengths.tolist()
    assert every == sum(looked for _, looked in found) == ROWS
    assert 0 < min(looked for _, looked in found) <= max(looked for _, looked in found) < ROWS / 2


def test_pieces_begin_where_groups_of_rows_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no group is read by two ranks; of a file without groups they may begin anywhere."""
    table = pa.table({"x": np.arange(10), "y": np.arange(10) % CLASSES})
    for name in ("a", "b"):
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=4)
    data = DataConfig(path=["a.parquet", "b.parquet"], inputs="x", target="y")
    monkeypatch.setattr(source_rows, "pieces_wanted", lambda: 16)
    rows = open_rows(data, tmp_path)
    assert [*rows.groups] == [0, 4, 8, 10, 14, 18]
    parts = [range(0, 4), range(4, 8), range(8, 10), range(10, 14), range(14, 18), range(18, 20)]
    assert pieces_of(rows, 1) == parts
    assert pieces_of(rows, 9) == [range(0, 8), range(8, 18), range(18, 20)]
    assert pieces_of(TableRows(table, []), 3) == [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
