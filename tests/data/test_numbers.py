"""Columns as tensors: labels by name, rows of unequal length, inputs by keyword, weights, several targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.config.config import LossConfig
from psgrad.data.loss import resolve_loss
from psgrad.data.rows import Samples
from psgrad.data.sources.load import load_data
from psgrad.errors import ConfigError, DataError, PsgradError


def load(folder: Path, path: str, loss: str = "cross_entropy", **options: Any) -> Samples:
    criterion = resolve_loss(LossConfig(name=loss), folder)
    return load_data(DataConfig(path=Path(path), **options), folder, criterion=criterion)


def error(folder: Path, path: str, kind: type[PsgradError] = DataError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load(folder, path, **options).take(range(1))
    return str(caught.value)


def write(folder: Path, suffix: str, **columns: Any) -> str:
    path = folder / f"data.{suffix}"
    if suffix == "npz":
        np.savez(path, **{name: np.array(values) for name, values in columns.items()})
    elif suffix == "parquet":
        pq.write_table(pa.table(columns), path, row_group_size=2)
    elif suffix == "csv":
        rows = [",".join(columns), *(",".join(map(cell, row)) for row in zip(*columns.values(), strict=True))]
        path.write_text("\n".join(rows))
    else:
        rows = zip(*columns.values(), strict=True)
        path.write_text("\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows))
    return path.name


def cell(value: Any) -> str:
    return "" if value is None else str(value)


FORMATS = pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "npz"])
LISTS_IN = pytest.mark.parametrize("suffix", ["jsonl", "parquet"])


# -- Labels --------------------------------------------------------------------------------------------------


@FORMATS
def test_names_of_classes_are_numbered_in_sorted_order(tmp_path: Path, suffix: str) -> None:
    name = write(tmp_path, suffix, x=[1, 2, 3, 4], y=["dog", "cat", "dog", "emu"])
    samples = load(tmp_path, name, inputs="x", target="y")
    assert samples.targets.tolist() == [1, 0, 1, 2]
    assert samples.class_names == ("cat", "dog", "emu")
    assert samples.notes == ("y: labels in sorted order: 0 cat, 1 dog, 2 emu",)
    target = samples.take(np.array([3, 0])).target
    assert (target.tolist(), target.dtype) == ([2, 1], torch.int64)


@FORMATS
def test_names_of_classes_are_numbered_as_in_class_names(tmp_path: Path, suffix: str) -> None:
    name = write(tmp_path, suffix, x=[1, 2, 3], y=["dog", "cat", "dog"])
    samples = load(tmp_path, name, inputs="x", target="y", class_names=["dog", "emu", "cat"])
    assert samples.targets.tolist() == [0, 2, 0]
    message = error(tmp_path, name, inputs="x", target="y", class_names=["dog", "catt"])
    assert "the label 'cat' in row 1" in message
    assert ", 1 of 3 rows, is no class; did you mean catt?; expected one of dog, catt" in message


@FORMATS
def test_truth_values_and_whole_fractions_are_labels(tmp_path: Path, suffix: str) -> None:
    name = write(tmp_path, suffix, x=[1, 2], flag=[True, False], f=[1.0, 0.0], h=[0.5, 1.0])
    for column in ("flag", "f"):
        samples = load(tmp_path, name, inputs="x", target=column)
        assert (samples.targets.tolist(), samples.targets.dtype) == ([1, 0], np.int64)
    for loss, column in (("bce_with_logits", "flag"), ("mse", "f"), ("cross_entropy", "h")):
        targets = load(tmp_path, name, loss, inputs="x", target=column).targets
        assert targets.dtype == np.float32


@FORMATS
def test_two_names_are_probabilities_for_a_loss_of_those(tmp_path: Path, suffix: str) -> None:
    name = write(tmp_path, suffix, x=[1, 2, 3], y=["yes", "no", "yes"], z=["a", "b", "c"])
    targets = load(tmp_path, name, "bce_with_logits", inputs="x", target="y").targets
    assert (targets.tolist(), targets.dtype) == ([1.0, 0.0, 1.0], np.float32)
    message = error(tmp_path, name, loss="bce_with_logits", inputs="x", target="z")
    assert "the labels 'z' have 3 names: a, b, c" in message
    assert "'y' is of type text" in error(tmp_path, name, loss="mse", inputs="x", target="y")


def test_a_missing_name_of_a_class(tmp_path: Path) -> None:
    for suffix in ("csv", "jsonl", "parquet"):
        name = write(tmp_path, suffix, x=[1, 2], y=["a", None])
        assert "the label 'y' is missing in row 1" in error(tmp_path, name, inputs="x", target="y")


# -- Rows of unequal length ----------------------------------------------------------------------------------

LISTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9]]


@LISTS_IN
def test_lists_of_unequal_length_are_padded_and_keep_their_lengths(tmp_path: Path, suffix: str) -> None:
    name = write(tmp_path, suffix, ids=LISTS, y=[0, 1, 0, 1])
    samples = load(tmp_path, name, inputs="ids", target="y")
    block = samples.take(range(1, 3))
    assert block.inputs[0].tolist() == [[4, 0], [5, 6]]
    assert block.lengths.tolist() == [[1], [2]]
    assert samples.ragged.axes == (((0, 0),), ())
    assert not samples.ragged.masked
    taken = samples.take(np.array([3, 1, 3]))
    assert taken.inputs[0].tolist() == [[7, 8, 9], [4, 0, 0], [7, 8, 9]]
    assert taken.lengths.tolist() == [[3], [1], [3]]


@LISTS_IN
def test_columns_of_the_same_lengths_share_them_and_labels_are_padded_with_what_does_not_count(
    tmp_path: Path, suffix: str
) -> None:
    other = [[1] * (5 - len(each)) for each in LISTS]
    name = write(tmp_path, suffix, ids=LISTS, more=[[0.5 * i for i in each] for each in LISTS], z=other)
    samples = load(tmp_path, name, "token_cross_entropy", inputs=["ids", "z", "more"], target="ids")
    assert samples.ragged.axes == (((0, 0),), ((0, 1),), ((0, 0),), ((0, 0),))
    assert samples.ragged.padding == (0, 0, 0, -100)
    block = samples.take(range(2))
    assert block.target.tolist() == [[1, 2, 3], [4, -100, -100]]
    assert block.inputs[2].tolist() == [[0.5, 1.0, 1.5], [2.0, 0.0, 0.0]]


def test_lists_of_lists_with_one_ragged_axis(tmp_path: Path) -> None:
    rows = [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]]
    for suffix in ("jsonl", "parquet"):
        samples = load(tmp_path, write(tmp_path, suffix, x=rows, y=[0, 1]), inputs="x", target="y")
        assert samples.ragged.axes[0] == ((0, 0),)
        assert samples.take(range(2)).inputs[0].tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


@LISTS_IN
def test_lists_of_one_length_are_not_ragged(tmp_path: Path, suffix: str) -> None:
    samples = load(tmp_path, write(tmp_path, suffix, x=[[1, 2], [3, 4]], y=[0, 1]), inputs="x", target="y")
    assert samples.ragged is None
    assert samples.take(range(2)).lengths is None


@LISTS_IN
def test_the_length_of_a_column_and_inputs_by_keyword(tmp_path: Path, suffix: str) -> None:
    name = write(tmp_path, suffix, ids=LISTS, y=[0, 1, 0, 1], s=[0.5, 1, 2, 3])
    inputs = {"tokens": "ids", "lengths": {"length_of": "ids"}, "scale": "s"}
    samples = load(tmp_path, name, inputs=inputs, target="y")
    assert samples.keywords == ("tokens", "lengths", "scale")
    _, lengths, scale = samples.take(np.array([1, 0])).inputs
    assert (lengths.tolist(), lengths.dtype) == ([1, 3], torch.int64)
    assert scale.tolist() == [1.0, 0.5]
    message = error(tmp_path, name, inputs={"x": {"length_of": "s"}}, target="y")
    assert "length_of: 's' is of type double; expected a column of lists" in message


# -- Stacks, weights, targets --------------------------------------------------------------------------------


@FORMATS
def test_a_list_of_columns_of_numbers_is_one_tensor_and_a_mapping_one_of_each_and_a_bare_name_a_scalar(
    tmp_path: Path, suffix: str
) -> None:
    name = write(tmp_path, suffix, a=[1, 2], b=[0.5, 1.5], y=[0, 1])
    apart, together = [[1, 2], [0.5, 1.5]], [[[1.0, 0.5], [2.0, 1.5]]]
    for inputs, expected in (
        (["a", "b"], apart if suffix == "npz" else together),
        ({"a": "a", "b": "b"}, apart),
        ("a", [[1, 2]]),
        (["a"], [[1, 2]] if suffix == "npz" else [[[1.0], [2.0]]]),
    ):
        found = load(tmp_path, name, inputs=inputs).take(range(2)).inputs
        assert [x.tolist() for x in found] == expected


@FORMATS
def test_several_targets_are_one_tensor(tmp_path: Path, suffix: str) -> None:
    name = write(tmp_path, suffix, x=[1, 2], y=[3, 4], w=[0.5, 1.5])
    samples = load(tmp_path, name, "mse", inputs="x", target=["y", "w"])
    assert samples.targets is None
    target = samples.take(range(2)).target
    assert target.tolist() == [[3.0, 0.5], [4.0, 1.5]]


@FORMATS
def test_weights_are_the_last_input(tmp_path: Path, suffix: str) -> None:
    name = write(tmp_path, suffix, x=[1, 2, 3], y=[3, 4, 5], w=[0.5, 1.5, 0.0], bad=[1, -1, 2.5])
    samples = load(tmp_path, name, "mse", inputs="x", target="y", weight="w")
    assert samples.weighted
    assert [x.tolist() for x in samples.take(np.array([1, 0])).inputs] == [[2, 1], [1.5, 0.5]]
    samples = load(tmp_path, name, "mse", inputs="x", target="y", weight="bad")
    with pytest.raises(DataError, match=r"the weight 'bad' is -1 in row 1.*; expected a finite number"):
        samples.take(range(3))


# -- Items of a factory --------------------------------------------------------------------------------------

SETS = """\
import numpy as np
import torch

class Counted(list):
    calls = []
    def __getitem__(self, row):
        self.calls.append(row)
        return super().__getitem__(row)

def counted(count=60):
    Counted.calls.clear()
    return Counted({"x": torch.full((3,), float(i)), "y": i % 2, "uid": f"r{i}"} for i in range(count))

def ragged(count=40):
    return [(torch.arange(1 + i % 3), torch.ones(2), float(i % 2)) for i in range(count)]

def named():
    return [{"x": [0.5], "y": each, "w": 2.0, "ids": [1] * n} for n, each in ((1, "b"), (2, "a"))]

def broken():
    class Broken(Counted):
        def __getitem__(self, row):
            if row == 5:
                raise OSError("the picture is gone")
            return super().__getitem__(row)
    return Broken((torch.ones(1), 0) for i in range(10))

def library(text=False):
    import datasets
    rows = {"x": [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]], "y": [0, 1, 0], "t": ["a", "b", "c"]}
    kinds = datasets.Features(
        x=datasets.Sequence(datasets.Value("float32")),
        y=datasets.ClassLabel(names=["no", "yes"]),
        t=datasets.Value("string"),
    )
    return datasets.Dataset.from_dict(rows, kinds)
"""


def made(folder: Path, name: str, **options: Any) -> Samples:
    (folder / "sets.py").write_text(SETS)
    criterion = resolve_loss(LossConfig(name="cross_entropy"), folder)
    return load_data(DataConfig(factory=f"sets.py:{name}", **options), folder, criterion=criterion)


@pytest.mark.parametrize("identified", [True, False])
def test_each_item_of_a_dataset_is_made_once(tmp_path: Path, identified: bool) -> None:
    samples = made(tmp_path, "counted", inputs="x", target="y", id="uid" if identified else None)
    before = samples.content(60)
    blocks = [samples.take(range(start, start + 7)) for start in range(0, 56, 7)] + [
        samples.take(range(56, 60))
    ]
    assert torch.cat([block.inputs[0] for block in blocks])[:, 0].tolist() == list(range(60))
    assert sorted(samples._dataset.calls) == list(range(60))  # type: ignore[attr-defined]
    assert samples.content(60) == before
    assert (
        made(tmp_path, "counted", inputs="x", target="y", id="uid" if identified else None).content()
        == before
    )


def test_items_of_unequal_length_are_padded(tmp_path: Path) -> None:
    samples = made(tmp_path, "ragged")
    assert samples.ragged.axes == (((0, 0),), (), ())
    block = samples.take(range(1, 4))
    assert block.inputs[0].tolist() == [[0, 1, 0], [0, 1, 2], [0, 0, 0]]
    assert block.lengths.tolist() == [[2], [3], [1]]
    assert (block.target.tolist(), block.target.dtype) == ([1, 0, 1], torch.int64)


def test_an_item_that_can_not_be_read_is_an_error_of_its_row(tmp_path: Path) -> None:
    broken = made(tmp_path, "broken")
    assert len(broken.content()) == 64
    assert len(broken.take(range(5)).inputs[0]) == 5
    with pytest.raises(DataError, match=r"row 5 of .* raised OSError: the picture is gone"):
        broken.take(range(5, 8))
    assert len(broken.take(range(6, 10)).inputs[0]) == 4


def test_items_with_names_weights_and_lengths(tmp_path: Path) -> None:
    inputs = {"x": "x", "n": {"length_of": "ids"}}
    with pytest.raises(ConfigError, match=r"the target 'y' in row 0 of .* is 'b', the name of a class"):
        made(tmp_path, "named", inputs=inputs, target="y")
    samples = made(tmp_path, "named", inputs=inputs, target="y", weight="w", class_names=["a", "b"])
    block = samples.take(range(2))
    assert [x.tolist() for x in block.inputs] == [[[0.5], [0.5]], [1, 2], [2.0, 2.0]]
    assert samples.keywords == ("x", "n")
    assert samples.weighted
    assert isinstance(block.target, Tensor)
    assert block.target.tolist() == [1, 0]


@pytest.mark.long
def test_a_library_dataset_that_a_factory_returns(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    samples = made(tmp_path, "library", inputs="x", target="y")
    block = samples.take(range(2))
    assert block.inputs[0].tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert samples.class_names == ("no", "yes")
    assert samples.targets.tolist() == [0, 1, 0]
    with pytest.raises(ConfigError, match=r"the dataset of sets.py:library has no column 'z'"):
        made(tmp_path, "library", inputs="z")
