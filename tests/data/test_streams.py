"""Datasets that can only be read from the beginning: their first rows are copied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import IterableDataset

import psgrad
from psgrad.config import DataConfig
from psgrad.data.sources import streams
from psgrad.data.sources.load import load_data, open_rows
from psgrad.errors import ConfigError, DataError
from tests.workplace import Workplace

datasets = pytest.importorskip("datasets")

ROWS = 30
READ: list[int] = []


class Endless(IterableDataset[Any]):
    """Rows without an end, each of which is counted."""

    def __init__(self, named: bool = False, broken: int = -1) -> None:
        self._named, self._broken = named, broken

    def __iter__(self) -> Iterator[Any]:
        row = 0
        while True:
            READ.append(row)
            if row == self._broken:
                raise OSError("the line is cut")
            x = torch.full((4,), float(row)) / 10
            yield {"x": x, "y": row % 3, "name": f"n{row}"} if self._named else (x, row % 3)
            row += 1


class Few(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.full((4,), float(row)), row % 3) for row in range(5))


def library_stream(**options: Any) -> Any:
    found = datasets.Dataset.from_dict(
        {"x": [[float(i), 1.0] for i in range(ROWS)], "y": [i % 2 for i in range(ROWS)]}
    )
    return found.to_iterable_dataset(**options)


def made(tmp_path: Path, name: str, **options: Any) -> Any:
    return load_data(DataConfig(factory=f"{__name__}:{name}", **options), tmp_path)


def write_lines(folder: Path, rows: int = ROWS) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"x": [i / 7, 1.0, 0.0, 2.0], "y": i % 3, "more": "w" * 50}) for i in range(rows)]
    (folder / "train.jsonl").write_text("\n".join(lines))


def test_iterable_torch_dataset_is_copied_up_to_stream_rows(tmp_path: Path) -> None:
    READ.clear()
    samples = made(tmp_path, "Endless", stream_rows=10)
    assert len(READ) == 11  # one more, to know that there are more
    assert samples.read(0, 10).inputs[0][:, 0].tolist() == pytest.approx([row / 10 for row in range(10)])
    assert samples.read(0, 10).target.tolist() == [row % 3 for row in range(10)]
    assert samples.take(np.array([7, 2])).target.tolist() == [1, 2]
    assert samples.notes == ("data.stream_rows: the first 10 rows of a stream that has more",)
    assert len(READ) == 11
    named = made(
        tmp_path, "Endless", stream_rows=4, kwargs={"named": True}, inputs="x", target="y", id="name"
    )
    assert named.ids.tolist() == ["n0", "n1", "n2", "n3"]
    few = made(tmp_path, "Few")
    assert (len(few), few.notes) == (5, ())


def test_iterable_torch_dataset_is_read_by_workers(tmp_path: Path) -> None:
    samples = made(tmp_path, "Endless", stream_rows=12, workers=2)
    assert samples.read(0, 12).target.tolist() == [row % 3 for row in range(12)]


def test_the_fingerprint_of_a_stream_is_of_its_rows(tmp_path: Path) -> None:
    contents = [made(tmp_path, "Endless", stream_rows=rows).content(5) for rows in (5, 5, 6)]
    assert contents[0] == contents[1]
    write_lines(tmp_path / "a")
    config = DataConfig(dataset="a", split="train", streaming=True, inputs="x", target="y", stream_rows=20)
    before = load_data(config, tmp_path).fingerprint
    assert load_data(config, tmp_path).fingerprint == before
    changed = (tmp_path / "a" / "train.jsonl").read_text().replace('"y": 2', '"y": 1', 1)
    (tmp_path / "a" / "train.jsonl").write_text(changed)
    assert load_data(config, tmp_path).fingerprint != before


@pytest.mark.parametrize("part", [4, 4096])
@pytest.mark.parametrize("most", [7, 8, ROWS, 100])
def test_library_stream_of_a_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, part: int
) -> None:
    monkeypatch.setattr(streams, "_ROWS_PER_PART", part)
    samples = made(tmp_path, "library_stream", inputs="x", target="y", stream_rows=most)
    count = min(most, ROWS)
    assert samples.read(0, count).inputs[0].tolist() == [[float(i), 1.0] for i in range(count)]
    assert samples.read(0, count).target.tolist() == [i % 2 for i in range(count)]
    assert bool(samples.notes) == (most < ROWS)
    with pytest.raises(ConfigError, match="has no column 'z'"):
        made(tmp_path, "library_stream", inputs="z")


def test_stream_of_rows_whose_types_are_known_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_ROWS_PER_PART", 2)
    values: list[Any] = [None, None, 1, 2, 0.5, None]
    stream = datasets.IterableDataset.from_generator(lambda: ({"x": each} for each in values))
    rows = streams.StreamedRows(stream, ["x"], 10, "the stream")
    assert rows.read(0, 6).column("x").to_pylist() == values
    for place, message in (
        (5, "fractions in the stream, row 4, text in the stream, row 5"),
        (3, "whole numbers in the stream, row 2, text in the stream, row 3"),
    ):
        values[place] = "word"
        with pytest.raises(DataError, match=f"the column 'x' has mixed types: {message}"):
            streams.StreamedRows(stream, ["x"], 10, "the stream")
    values[2:] = ["word", "word"]
    values[:2] = [1, 2]
    with pytest.raises(DataError, match="from row 0 on, text in the stream, from row 2 on"):
        streams.StreamedRows(stream, ["x"], 10, "the stream")


def test_streamed_folder_keeps_the_columns_that_are_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "a")
    config = DataConfig(dataset="a", streaming=True, inputs="x", target="y", stream_rows=8)
    rows = open_rows(config, tmp_path)
    assert (rows.count, rows.schema.names) == (8, ["x", "y"])
    assert rows.read(3, 5).column("y").to_pylist() == [0, 1]
    assert rows.place(3) == "the dataset a, row 3"


def test_streams_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"reading the dataset of .*:Endless raised OSError: the line is cut"):
        made(tmp_path, "Endless", kwargs={"broken": 3})
    (tmp_path / "own.py").write_text(
        "from torch.utils.data import IterableDataset\n\n\nclass Locked(IterableDataset):\n"
        "    def __iter__(self):\n        yield lambda: 1\n"
    )
    with pytest.raises(DataError, match=r"row 0 of the dataset of own\.py:Locked can't be kept") as caught:
        load_data(DataConfig(factory="own.py:Locked"), tmp_path)
    assert "next step: return a map-style Dataset" in str(caught.value)
    datasets.Dataset.from_dict({"x": [1.0]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match="is a folder of save_to_disk, which is mapped into memory"):
        open_rows(DataConfig(dataset="saved", streaming=True, inputs="x"), tmp_path)
    write_lines(tmp_path / "a")
    with pytest.raises(ConfigError, match="is a part of a split, and a stream is read from its beginning"):
        open_rows(DataConfig(dataset="a", streaming=True, inputs="x", split="train[:5]"), tmp_path)
    with pytest.raises(ConfigError, match="can't be streamed: "):
        open_rows(DataConfig(dataset="nobody/nothing", streaming=True, inputs="x"), tmp_path)
    with pytest.raises(ValueError, match="config, split and streaming belong to dataset"):
        DataConfig(path=Path("a.csv"), inputs="x", streaming=True)


@pytest.mark.long
def test_analyze_of_a_stream_has_the_numbers_of_the_copied_rows(workplace: Workplace) -> None:
    write_lines(workplace.folder / "a")
    workplace.config["data"] = {
        "dataset": "a", "streaming": True, "stream_rows": 20, "inputs": "x", "target": "y",
    }  # fmt: skip
    workplace.succeeded("--no-report")
    found = workplace.samples()
    outcome = workplace.command("validate", "config.yaml")
    assert outcome.code == 0, outcome.err
    assert len(found) == 20
    assert (
        "data.stream_rows: the first 20 rows of a stream that has more"
        in workplace.manifest()["data"]["notes"]
    )
    outcome = workplace.analyze("--no-report", "--resume")
    assert outcome.code == 0, outcome.err
    assert workplace.analyze("--no-report", "--overwrite", "--limit", "6").code == 0
    assert workplace.manifest()["counts"]["in_dataset"] == 6
    workplace.config["data"] = {"path": "a/train.jsonl", "inputs": "x", "target": "y"}
    workplace.succeeded("--no-report", "--overwrite")
    plain = workplace.samples()
    assert found["grad_norm"].tolist() == pytest.approx(plain["grad_norm"][:20].tolist(), rel=1e-6)


@pytest.mark.long
def test_iterable_datasets_as_objects(workplace: Workplace) -> None:
    result = psgrad.analyze(model=workplace.model, data=Few(), loss="cross_entropy", report=False)
    assert isinstance(result.samples, pd.DataFrame)
    assert len(result.samples) == 5
