"""How many bytes each of several processes reads of a dataset: those of the rows that it computes. What needs
all rows (the file's hash, the lengths of lists, the types of columns) is found by one process of each host.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psgrad.cli import main
from tests.forked_ranks import fork_ranks, slow_chunks
from tests.workplace import CLASSES, Workplace

ROWS, CHUNK, WIDTH = 64, 4, 16_384
RANKS = 4
SLOW = 0.15  # seconds for a chunk, so that each process gets rows
# The mean of a long row makes the few features of the model.
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x.float().unflatten(1, (4, -1)).mean(2))
"""
Array = npt.NDArray[Any]


def parquet_of_lists(folder: Path, x: Array, y: Array) -> dict[str, Any]:
    table = pa.table({"x": list(x), "y": y})
    pq.write_table(
        table, folder / "rows.parquet", row_group_size=CHUNK, compression="none", use_dictionary=False
    )
    return {"path": "rows.parquet", "inputs": "x", "target": "y"}


def tar_of_arrays(folder: Path, x: Array, y: Array) -> dict[str, Any]:
    with tarfile.open(folder / "rows.tar", "w") as archive:
        for row, label in enumerate(y):
            content = io.BytesIO()
            np.save(content, x[row])
            for column, each in (("npy", content.getvalue()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{row:04d}.{column}")
                member.size = len(each)
                archive.addfile(member, io.BytesIO(each))
    return {"path": "rows.tar", "inputs": "npy", "target": "cls"}


def compressed_tar_of_arrays(folder: Path, x: Array, y: Array) -> dict[str, Any]:
    data = tar_of_arrays(folder, x, y)
    content = (folder / data["path"]).read_bytes()
    (folder / "rows.tar.gz").write_bytes(gzip.compress(content, compresslevel=1))
    return {**data, "path": "rows.tar.gz"}


def jsonl_of_lists(folder: Path, x: Array, y: Array) -> dict[str, Any]:
    lines = (json.dumps({"x": x[row].tolist(), "y": int(y[row])}) for row in range(ROWS))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return {"path": "rows.jsonl", "inputs": "x", "target": "y"}


def bytes_read() -> int:
    """Bytes that this process has read of files; those of mapped files are not among them."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["rchar"])


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.skipif(sys.platform != "linux", reason="bytes read are counted as Linux tells them")
@pytest.mark.parametrize(
    ("save", "times"),
    [
        (parquet_of_lists, 5.5),
        (tar_of_arrays, 5.7),
        pytest.param(compressed_tar_of_arrays, 5.0, marks=pytest.mark.sweep),
        (jsonl_of_lists, 5.0),
    ],
)
def test_processes_read_what_is_needed_of_all_rows_once_together(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, save: Callable[..., dict[str, Any]], times: float
) -> None:
    """All of them together: the dataset for its hash, for the lengths of lists, for the types of columns in
    tar, and for their rows, and a few rows for checks.

    times: the size of the numbers. If one process more read all rows, it would be one more, at least.
    """
    source = np.random.default_rng(0)
    x = source.integers(0, 100, (ROWS, WIDTH)).astype(np.float32)
    workplace.config["data"] = save(workplace.folder, x, source.integers(0, CLASSES, ROWS))
    workplace.use_model(MODEL)
    workplace.config["engine"] = {"chunk_size": CHUNK}
    workplace.config["analyze"] = {"top": 1}
    monkeypatch.setattr("psgrad.commands.analyze._PICTURES", 1)  # rows shown would be half of so few
    workplace.succeeded("--no-report", "--output", "one")  # what it imports, the others need not read

    def run(rank: int) -> None:
        slow_chunks(monkeypatch, SLOW)
        sys.argv = ["psgrad", "analyze", "config.yaml", "--no-report", "--output", "several"]
        before = bytes_read()
        try:
            main()
        finally:
            Path(f"read-{rank}").write_text(str(bytes_read() - before))

    ended = fork_ranks(workplace.folder, RANKS, run)
    assert [rank.code for rank in ended] == [0] * RANKS, ended
    read = [int((workplace.folder / f"read-{rank}").read_text()) for rank in range(RANKS)]
    one, several = (
        pd.read_parquet(workplace.folder / each / "samples.parquet") for each in ("one", "several")
    )
    pd.testing.assert_frame_equal(several, one, check_exact=True)
    assert sum(read) < times * x.nbytes, [each / x.nbytes for each in read]
