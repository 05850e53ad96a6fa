"""Datasets: the same rows whatever the file's format and the blocks in which they are read, and every fault
with its row.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.data.sources import csv_files
from psgrad.data.sources.load import Samples, load_data
from psgrad.errors import EXIT_RUNTIME, EXIT_USAGE, ConfigError, DataError, PsgradError

ROWS = 11
PIXELS = np.arange(ROWS * 6, dtype=np.float64).reshape(ROWS, 2, 3) / 7
TOKENS = np.arange(ROWS * 4, dtype=np.int32).reshape(ROWS, 4)
LABELS = np.arange(ROWS, dtype=np.uint8) % 3
NAMES = np.array([f"s{row}" for row in range(ROWS)])


def load(folder: Path, name: str, **options: Any) -> Samples:
    return load_data(DataConfig(path=name, **options), folder)


def error(folder: Path, name: str, kind: type[PsgradError] = DataError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load(folder, name, **options).take(range(1))
    return str(caught.value)


def write_npz(folder: Path, **columns: Any) -> str:
    np.savez(folder / "data.npz", **columns)
    return "data.npz"


def write_parquet(folder: Path, columns: dict[str, Any], rows_per_group: int = 4) -> str:
    pq.write_table(pa.table(columns), folder / "data.parquet", row_group_size=rows_per_group)
    return "data.parquet"


def write_csv(folder: Path, text: str) -> str:
    (folder / "data.csv").write_text(text, encoding="utf-8")
    return "data.csv"


def write_all_formats(folder: Path) -> None:
    write_npz(folder, pixels=PIXELS, tokens=TOKENS, label=LABELS, uid=NAMES)
    write_parquet(folder, {"pixels": PIXELS.tolist(), "tokens": list(TOKENS), "label": LABELS, "uid": NAMES})
    save_file(
        {
            "pixels": torch.tensor(PIXELS),
            "tokens": torch.tensor(TOKENS),
            "label": torch.tensor(LABELS),
            "uid": torch.arange(ROWS) + 100,
        },
        folder / "data.safetensors",
    )


# -- What is read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["npz", "parquet", "safetensors"])
@pytest.mark.parametrize("block", [1, 3, 4, ROWS])
def test_arrays_come_back_in_blocks_of_any_size(tmp_path: Path, suffix: str, block: int) -> None:
    write_all_formats(tmp_path)
    samples = load(tmp_path, f"data.{suffix}", inputs=["pixels", "tokens"], target="label", id="uid")
    blocks = [samples.take(range(start, min(start + block, ROWS))) for start in range(0, ROWS, block)]
    pixels, tokens = (torch.cat(parts) for parts in zip(*(one.inputs for one in blocks), strict=True))

    assert len(samples) == ROWS
    assert torch.equal(pixels, torch.tensor(PIXELS, dtype=torch.float32))
    assert torch.equal(tokens, torch.tensor(TOKENS, dtype=torch.int64))
    assert (pixels.dtype, tokens.dtype) == (torch.float32, torch.int64)
    assert torch.equal(
        torch.cat([one.target for one in blocks if one.target is not None]),
        torch.tensor(LABELS, dtype=torch.int64),
    )
    assert samples.targets.tolist() == LABELS.tolist()
    assert samples.ids.tolist() == (
        list(range(100, 100 + ROWS)) if suffix == "safetensors" else NAMES.tolist()
    )


def test_targets_with_axes_are_not_held(tmp_path: Path) -> None:
    write_all_formats(tmp_path)
    for suffix in ("npz", "parquet", "safetensors"):
        samples = load(tmp_path, f"data.{suffix}", inputs="pixels", target="tokens")
        block = samples.take(range(2, 4))
        assert samples.targets is None
        assert block.target.tolist() == TOKENS[2:4].tolist()


def test_types_of_numbers(tmp_path: Path) -> None:
    columns = {
        "half": np.ones(2, dtype=np.float16),
        "wide": np.array([1e300, 1.0]),
        "bytes": np.array([255, 0], dtype=np.uint8),
        "flag": np.array([True, False]),
    }
    samples = load(tmp_path, write_npz(tmp_path, **columns), inputs=list(columns))
    half, wide, small, flag = samples.take(range(2)).inputs
    assert [tensor.dtype for tensor in (half, wide, small, flag)] == [
        torch.float32,
        torch.float32,
        torch.int64,
        torch.bool,
    ]
    assert small.tolist() == [255, 0]
    assert wide.isinf().tolist() == [True, False]


def test_bfloat16_safetensors(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3, 2, dtype=torch.bfloat16)}, tmp_path / "data.safetensors")
    assert load(tmp_path, "data.safetensors", inputs="x").take(range(1, 3)).inputs[0].dtype == torch.float32


def test_a_list_column_among_scalars_makes_a_tensor_of_each(tmp_path: Path) -> None:
    name = write_parquet(tmp_path, {"a": [1.0, 2.0], "v": [[1, 2], [3, 4]]})
    assert [tensor.shape for tensor in load(tmp_path, name, inputs=["a", "v"]).take(range(2)).inputs] == [
        (2,),
        (2, 2),
    ]


def test_parquet_fixed_size_lists_and_categories(tmp_path: Path) -> None:
    name = write_parquet(
        tmp_path,
        {
            "v": pa.array([[1.0, 2.0]] * 5, pa.list_(pa.float32(), 2)),
            "y": pa.array([0, 1, 0, 1, 2]).dictionary_encode(),
            "id": pa.array(list("abcde")).dictionary_encode(),
        },
        rows_per_group=2,
    )
    samples = load(tmp_path, name, inputs="v", target="y", id="id")
    assert samples.take(range(1, 4)).inputs[0].shape == (3, 2)
    assert samples.ids.tolist() == list("abcde")
    assert samples.targets.tolist() == [0, 1, 0, 1, 2]


def test_an_empty_cell_among_fractions_is_nan(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.5, None, 3.0], "y": [0.5, 1.0, None]})
    frame.to_parquet(tmp_path / "data.parquet")
    frame.to_csv(tmp_path / "data.csv", index=False)
    for suffix in ("parquet", "csv"):
        samples = load(tmp_path, f"data.{suffix}", inputs=["a"], target="y")
        assert samples.take(range(3)).inputs[0].isnan().flatten().tolist() == [False, True, False]
        assert np.isnan(samples.targets).tolist() == [False, False, True]


# -- Any rows ------------------------------------------------------------------------------------------------


def taken(samples: Samples, rows: list[int]) -> tuple[list[Tensor], Tensor | None]:
    """The rows as `take` gives them, after a look at each of them as `read` does."""
    block = samples.take(np.array(rows))
    alone = [samples.take([row]) for row in rows]
    for place, values in enumerate(block.inputs):
        expected = torch.cat([one.inputs[place] for one in alone])
        assert values.dtype == expected.dtype
        assert torch.equal(values, expected)
    assert (block.target is None) == (alone[0].target is None)
    if block.target is not None:
        assert torch.equal(block.target, torch.cat([one.target for one in alone if one.target is not None]))
    return list(block.inputs), block.target


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    write_all_formats(folder)
    write_csv(folder, "\n".join(["a,b,label", *(f"{row / 7},{row},{row % 3}" for row in range(ROWS))]))
    return folder


@pytest.mark.parametrize("suffix", ["npz", "parquet", "safetensors", "csv"])
@given(rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=2 * ROWS))
def test_any_rows_in_any_order(formats: Path, suffix: str, rows: list[int]) -> None:
    inputs = ["a", "b"] if suffix == "csv" else ["pixels", "tokens"]
    arrays, target = taken(load(formats, f"data.{suffix}", inputs=inputs, target="label"), rows)

    assert target.tolist() == LABELS[rows].tolist()
    if suffix != "csv":
        assert torch.equal(arrays[0], torch.tensor(PIXELS[rows], dtype=torch.float32))
        assert torch.equal(arrays[1], torch.tensor(TOKENS[rows], dtype=torch.int64))


@pytest.mark.parametrize("rows", [[], [-1], [ROWS], [[1]]])
def test_rows_that_are_not_there(tmp_path: Path, rows: list[Any]) -> None:
    write_all_formats(tmp_path)
    for suffix in ("npz", "parquet", "safetensors"):
        with pytest.raises(IndexError, match=f"from 0 to {ROWS - 1}"):
            load(tmp_path, f"data.{suffix}", inputs="pixels").take(np.array(rows))


def test_rows_are_taken_from_row_groups_with_categories_of_their_own(tmp_path: Path) -> None:
    table = pa.table({"v": [[1.0], [2.0], [3.0], [4.0]], "y": pa.array([7, 8, 9, 7]).dictionary_encode()})
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=1)
    block = load(tmp_path, "data.parquet", inputs="v", target="y").take(np.array([3, 1, 2]))
    assert block.inputs[0].tolist() == [[4], [2], [3]]
    assert block.target.tolist() == [7, 8, 9]


# -- Whom rows belong to -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["npz", "parquet", "safetensors"])
def test_units_are_a_column_in_which_ids_occur_more_than_once(tmp_path: Path, suffix: str) -> None:
    users = np.array([3, 3, 1, 3, 2, 1, 1, 1, 9, 9, 2])
    write_npz(tmp_path, x=np.zeros(ROWS), user=users)
    write_parquet(tmp_path, {"x": np.zeros(ROWS), "user": users})
    save_file({"x": torch.zeros(ROWS), "user": torch.tensor(users)}, tmp_path / "data.safetensors")
    config = DataConfig(path=Path(f"data.{suffix}"), inputs="x")

    units = load_data(config, tmp_path, unit="user").units
    assert units.dtype == np.int64
    assert units.tolist() == users.tolist()
    assert load_data(config, tmp_path).units is None
    with pytest.raises(ConfigError, match="has no column 'usr'; did you mean user"):
        load_data(config, tmp_path, unit="usr")


def test_a_row_that_belongs_to_nobody(tmp_path: Path) -> None:
    csv = DataConfig(path=Path(write_csv(tmp_path, "x,user\n1,a\n2,\n")), inputs="x")
    parquet = DataConfig(path=Path(write_parquet(tmp_path, {"x": [1, 2], "user": [5, None]})), inputs="x")
    for config in (csv, parquet):
        with pytest.raises(DataError, match="row 1 of the column 'user' is empty"):
            load_data(config, tmp_path, unit="user")


@pytest.mark.parametrize("suffix", ["npz", "parquet", "jsonl"])
@pytest.mark.parametrize("blank", ["", " ", "\u00a0\t"])
def test_users_whose_ids_are_blank_are_not_one_user(tmp_path: Path, suffix: str, blank: str) -> None:
    users = ["a", blank, "b", blank]
    write_npz(tmp_path, x=np.zeros(4), user=np.array(users))
    write_parquet(tmp_path, {"x": np.zeros(4), "user": users})
    lines = [json.dumps({"x": 0.0, "user": user}) for user in users]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    for unit, id in (("user", None), (None, "user")):
        config = DataConfig(path=Path(f"data.{suffix}"), inputs="x", id=id)
        with pytest.raises(DataError, match="row 1 of the column 'user' is empty"):
            load_data(config, tmp_path, unit=unit)


def test_users_whose_ids_differ_in_a_nul_at_their_end_are_not_one_user(tmp_path: Path) -> None:
    write_parquet(tmp_path, {"x": [0.0, 0.0], "user": ["a", "a\0"]})
    with pytest.raises(DataError, match="the id in row 1 of 'user' ends with a NUL character"):
        load_data(DataConfig(path=Path("data.parquet"), inputs="x"), tmp_path, unit="user")


# -- CSV -----------------------------------------------------------------------------------------------------


def test_csv_with_all_its_oddities(tmp_path: Path) -> None:
    text = '\ufeff"id",a,"the b",note,y\r\n007, 1 ,1e-3,"x, ""y""\nz",1\r\n8,-2,nan,,2\r\n'
    samples = load(tmp_path, write_csv(tmp_path, text), inputs=["a", "the b"], target="y", id="id")

    assert samples.ids.tolist() == ["007", "8"]
    vectors = samples.take(range(2)).inputs[0]
    torch.testing.assert_close(vectors, torch.tensor([[1, 1e-3], [-2, float("nan")]]), equal_nan=True)
    assert samples.targets.tolist() == [1, 2]


def test_csv_types_do_not_depend_on_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK_BYTES", 64)
    rows = [f"{row},{row},{row}" for row in range(50)] + ["a50,50,0.5", "51,51,51"]
    samples = load(
        tmp_path, write_csv(tmp_path, "\n".join(["id,a,b", *rows])), inputs=["b"], target="a", id="id"
    )

    assert len(samples) == 52
    assert samples.ids.tolist() == [row.split(",")[0] for row in rows]
    assert samples.targets.dtype == np.int64
    values = torch.cat(
        [samples.take(range(start, min(start + 7, 52))).inputs[0] for start in range(0, 52, 7)]
    ).flatten()
    assert values.tolist() == [*map(float, range(50)), 0.5, 51.0]


def test_csv_faults_far_from_the_start_are_reported_with_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK_BYTES", 64)
    good = [f"{row},{row}" for row in range(100)]

    def told(last: str, **options: Any) -> str:
        return error(
            tmp_path, write_csv(tmp_path, "\n".join(["a,b", *good, last])), inputs="a", target="b", **options
        )

    assert "data.csv can't be read as csv: CSV parse error: Row #102: Expected 2 columns, got 1" in told("1")
    assert "Row #102: Expected 2 columns, got 3" in told("1,2,3")
    assert "data.csv has mixed types: '0' and 'NA'" in told("1,NA")
    assert "'a' is of type text; row 100 holds 'NA' in " in told("NA,1")
    assert "row 100 of the column 'b' is empty" in told("1,")
    assert "one id in 'a' occurs more than once: 7 in rows 7, 100" in told("7,1", id="a")


def test_a_full_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pa.ipc, "new_file", full)
    assert "has no room for" in (message := error(tmp_path, write_csv(tmp_path, "a\n1\n"), inputs="a"))
    assert "hint: set TMPDIR" in message


# -- Faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet", "safetensors"])
def test_missing_empty_damaged_and_pointer_files(tmp_path: Path, suffix: str) -> None:
    name = f"data.{suffix}"
    with pytest.raises(ConfigError, match="there is no dataset") as caught:
        load(tmp_path, name, inputs="a")
    assert caught.value.exit_code == EXIT_USAGE
    (tmp_path / name).touch()
    assert "is empty" in error(tmp_path, name, inputs="a")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n")
    assert "is a git-lfs pointer" in error(tmp_path, name, inputs="a")
    if suffix != "csv":
        (tmp_path / name).write_bytes(b"PAR1 and other words")
        message = error(tmp_path, name, inputs="a")
        assert any(
            words in message for words in ("is damaged", "is no npz archive", "can't be read as parquet")
        )


@pytest.mark.parametrize("suffix", ["npz", "parquet", "safetensors"])
def test_truncated_files(tmp_path: Path, suffix: str) -> None:
    write_all_formats(tmp_path)
    path = tmp_path / f"data.{suffix}"
    content = path.read_bytes()
    for end in range(8, len(content), len(content) // 20):
        path.write_bytes(content[:end])
        with pytest.raises(DataError) as caught:
            load(tmp_path, path.name, inputs="pixels", target="label")
        assert caught.value.exit_code == EXIT_RUNTIME


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet", "safetensors"])
@pytest.mark.parametrize("role", ["inputs", "target", "id"])
def test_missing_columns_are_reported_with_the_nearest(tmp_path: Path, suffix: str, role: str) -> None:
    write_all_formats(tmp_path)
    write_csv(tmp_path, "pixels,label,uid\n1,2,3\n")
    message = error(tmp_path, f"data.{suffix}", ConfigError, **({"inputs": "pixels"} | {role: "lable"}))
    assert (
        f"data.{suffix} has no column 'lable'; did you mean label?; expected one of its columns: " in message
    )


def test_empty_datasets(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(0, 2)}, tmp_path / "data.safetensors")
    names = ["data.safetensors", write_npz(tmp_path, a=np.zeros((0, 2))), write_csv(tmp_path, "a,b\n")]
    names.append(write_parquet(tmp_path, {"a": pa.array([], pa.float64())}))
    for name in names:
        assert f"{name} has no rows; expected at least one sample" in error(tmp_path, name, inputs="a")


def test_duplicate_ids_are_named(tmp_path: Path) -> None:
    ids = np.array(["a", "b", "a", "c", "b", "a", "a"])
    table = {"x": np.zeros(7), "id": ids}
    for name in (
        write_npz(tmp_path, **table),
        write_parquet(tmp_path, table),
        write_csv(tmp_path, "\n".join(["x,id", *(f"0,{text}" for text in ids)])),
    ):
        message = error(tmp_path, name, inputs="x", id="id")
        assert "2 ids in 'id' occur more than once: 'a' in rows 0, 2, 5; expected an id of its own" in message


def test_ids_that_are_missing_or_no_ids(tmp_path: Path) -> None:
    name = write_parquet(tmp_path, {"x": [1.0, 2.0], "id": ["a", None], "price": [1.5, 2.5]})
    assert "row 1 of the column 'id' is empty" in error(tmp_path, name, inputs="x", id="id")
    assert "the ids in 'price' are of type float" in error(tmp_path, name, inputs="x", id="price")
    for kind in (torch.float64, torch.bfloat16):
        save_file({"x": torch.zeros(2), "id": torch.arange(2, dtype=kind)}, tmp_path / "data.safetensors")
        assert "the ids in 'id' are of type float" in error(tmp_path, "data.safetensors", inputs="x", id="id")
    name = write_npz(tmp_path, x=np.zeros(2), id=np.zeros((2, 2), dtype=int))
    assert "the ids in 'id' are lists" in error(tmp_path, name, inputs="x", id="id")


def test_unequal_lengths(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3), "b": torch.zeros(4)}, tmp_path / "data.safetensors")
    for name in (write_npz(tmp_path, a=np.zeros(3), b=np.zeros(4)), "data.safetensors"):
        assert "have different numbers of rows: a has 3, b" in error(tmp_path, name, inputs="a", target="b")


def test_a_single_number_is_no_column(tmp_path: Path) -> None:
    save_file({"a": torch.tensor(3.0)}, tmp_path / "data.safetensors")
    for name in (write_npz(tmp_path, a=np.float32(3)), "data.safetensors"):
        assert "'a' in " in (message := error(tmp_path, name, inputs="a"))
        assert "is a single number" in message


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


def test_objects_in_npz_are_never_unpickled(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    name = write_npz(tmp_path, a=np.array([Payload(canary), 1], dtype=object), b=np.zeros(2))

    message = error(tmp_path, name, inputs="a")

    assert "holds an array of Python objects, which is a pickle; it was not opened" in message
    assert not canary.exists()
    assert len(load(tmp_path, name, inputs="b")) == 2
    with np.load(tmp_path / name, allow_pickle=True) as file:
        _ = file["a"]
    assert canary.exists()


def test_a_bare_npy_file(tmp_path: Path) -> None:
    with (tmp_path / "data.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    assert "is no npz archive" in error(tmp_path, "data.npz", inputs="a")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[1, 2], [3]]], "row 2 of the column 'v' has lists of 1 and 2"),
        ([[1, 2], [3, 4], None, [5, 6]], "row 2 of the column 'v' is empty"),
        ([[1, 2], [3, 4], [5, 6], [7, None]], "row 3 of the column 'v' is empty"),
        ([[1, 2], [3, 4], [], [7]], "row 2 of the column 'v' is an empty list"),
    ],
)
@pytest.mark.parametrize("rows_per_group", [1, 2, 4])
def test_lists_that_can_not_be_used(
    tmp_path: Path, rows: list[Any], expected: str, rows_per_group: int
) -> None:
    name = write_parquet(tmp_path, {"v": rows}, rows_per_group)
    assert expected in error(tmp_path, name, inputs="v")


@pytest.mark.parametrize(
    "column",
    [["text", "more"], pd.to_datetime(["2024-01-01", "2024-01-02"]), [["a"], ["b"]], [{"x": 1}, {"x": 2}]],
)
def test_columns_that_are_no_numbers(tmp_path: Path, column: Any) -> None:
    name = write_parquet(tmp_path, {"x": [1, 2], "words": pa.array(column)})
    names_of_classes = {"inputs": "x", "target": "words"} if not isinstance(column[0], str) else {}
    for roles in ({"inputs": "words"}, {"inputs": ["x", "words"]}, names_of_classes):
        if not roles:
            continue
        message = error(tmp_path, name, **roles)
        assert "'words' is of type " in message
        assert "expected numbers" in message


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    assert "has 2 columns named 'a'" in error(tmp_path, write_csv(tmp_path, "a,a\n1,2\n"), inputs="a")


@pytest.mark.parametrize("suffix", ["npz", "parquet", "safetensors"])
def test_the_fingerprint_changes_with_the_data(tmp_path: Path, suffix: str) -> None:
    write_all_formats(tmp_path)
    first = load(tmp_path, f"data.{suffix}", inputs="pixels").fingerprint
    assert load(tmp_path, f"data.{suffix}", inputs="tokens").fingerprint == first
    write_npz(tmp_path, pixels=PIXELS + 1)
    write_parquet(tmp_path, {"pixels": (PIXELS + 1).tolist()})
    save_file({"pixels": torch.tensor(PIXELS + 1)}, tmp_path / "data.safetensors")
    assert load(tmp_path, f"data.{suffix}", inputs="pixels").fingerprint != first


# -- Factories -----------------------------------------------------------------------------------------------

DATASETS = """\
import numpy as np
import torch
from torch.utils.data import TensorDataset

class Items(list):
    '''A dataset of the given items.'''

def pairs(count=3, first=0.0):
    x = torch.arange(count * 2.0).reshape(count, 2)
    x[:1] += first
    return TensorDataset(x, torch.arange(count))
def dicts():
    item = lambda i: {"x": np.full(2, i), "m": [True], "y": float(i), "name": f"n{i}", "n": torch.tensor(i)}
    return Items(item(i) for i in range(3))
def triples(): return Items((torch.ones(2), 3, i) for i in range(3))
def alone(): return Items(torch.full((2,), float(i)) for i in range(3))
class Owned(Items): pass
def owned(users="abca", count=4):
    items = Owned((torch.full((2,), float(i)), i) for i in range(count))
    items.users = list(users)
    return items
def twins(): return Items({"x": torch.ones(2), "name": "same"} for i in range(3))
def ragged(): return Items((torch.ones(2 if i < 2 else (2, 3)), 0) for i in range(3))
def crooked(): return Items([([[1, 2], [3]], 0)])
def objects(): return Items([(object(), 0)])
def texts(): return Items([(np.array(["a"]), 0)])
def empty(): return Items()
def number(): return 3
class Raising(Items):
    def __getitem__(self, row):
        if row == 2:
            raise OSError("the picture is gone")
        return super().__getitem__(row)
def raising(): return Raising((torch.ones(2), 0) for i in range(3))
class Lengthless(Items):
    def __len__(self): raise NotImplementedError("no idea")
def lengthless(): return Lengthless()
def fails(): raise ValueError("no such split")
"""


@pytest.fixture
def factory(tmp_path: Path) -> Any:
    (tmp_path / "sets.py").write_text(DATASETS)

    def make(name: str, unit: str | None = None, **options: Any) -> Samples:
        return load_data(DataConfig(factory=f"sets.py:{name}", **options), tmp_path, unit)

    return make


def shapes(samples: Samples) -> tuple[list[Any], Any]:
    block = samples.take(range(2))
    return [list(tensor.shape) for tensor in block.inputs], (
        None if block.target is None else block.target.tolist()
    )


def test_items_that_are_tuples(factory: Any) -> None:
    pairs = factory("pairs")
    assert shapes(pairs) == ([[2, 2]], [0, 1])
    assert pairs.take(range(1, 3)).inputs[0].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert (pairs.ids.tolist(), pairs.targets) == ([0, 1, 2], None)
    assert shapes(factory("triples")) == ([[2, 2], [2]], [0, 1])
    assert shapes(factory("alone")) == ([[2, 2]], None)


def test_items_that_are_dicts(factory: Any) -> None:
    samples = factory("dicts", inputs=["x", "m"], target="y", id="name")
    block = samples.take(range(3))
    assert [tensor.dtype for tensor in block.inputs] == [torch.int64, torch.bool]
    assert isinstance(block.target, Tensor)
    assert block.target.dtype == torch.float32
    assert samples.ids.tolist() == ["n0", "n1", "n2"]
    assert factory("dicts", inputs="x", id="n").ids.tolist() == [0, 1, 2]
    assert shapes(factory("dicts", inputs="x", target="x"))[0] == [[2, 2]]


def test_the_fingerprint_of_a_dataset(factory: Any, tmp_path: Path) -> None:
    def fingerprint(**kwargs: Any) -> str:
        return str(factory("pairs", kwargs=kwargs).fingerprint)

    before = fingerprint()
    assert fingerprint() == before
    assert fingerprint(count=4) != before
    (tmp_path / "sets.py").write_text(DATASETS.replace("first=0.0", "first=1.0"))
    assert fingerprint() != before


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("empty", DataError, "the dataset of sets.py:empty has no rows"),
        ("number", DataError, "the factory sets.py:number returned an object of type int"),
        ("lengthless", DataError, "the length of the dataset of sets.py:lengthless raised"),
        ("raising", DataError, "row 2 of the dataset of sets.py:raising raised OSError: the picture is gone"),
        ("ragged", DataError, "row 2 of the dataset of sets.py:ragged has the shapes [[2, 3], []], row 0"),
        ("crooked", DataError, "'input 0' in row 0 is ragged"),
        ("objects", DataError, "'input 0' in row 0 is of type object"),
        ("texts", DataError, "'input 0' is of type <U1"),
        ("fails", DataError, "the factory sets.py:fails raised ValueError: no such split"),
        ("piars", ConfigError, "did you mean pairs"),
        ("dicts", ConfigError, "are dicts, and data.inputs does not say which columns the model reads"),
    ],
)
def test_datasets_that_can_not_be_used(
    factory: Any, name: str, kind: type[PsgradError], expected: str
) -> None:
    with pytest.raises(kind) as caught:
        factory(name).take(range(3))
    assert expected in str(caught.value)


def test_names_that_a_dataset_does_not_have(factory: Any) -> None:
    with pytest.raises(ConfigError, match="has no column 'names'; did you mean name"):
        factory("dicts", inputs="x", id="names")
    with pytest.raises(ConfigError, match="has no column 'z'"):
        factory("dicts", inputs="z")
    with pytest.raises(
        ConfigError,
        match=r"have no names for data\.inputs to select\n  hint: leave out data.inputs, data.target",
    ):
        factory("pairs", inputs="x", target="y")
    with pytest.raises(ConfigError, match=r"have no names for data\.id to select"):
        factory("pairs", id="x")
    with pytest.raises(DataError, match="one id in 'name' occurs more than once: 'same' in rows 0, 1, 2"):
        _ = factory("twins", inputs="x", id="name").ids


def test_units_of_a_dataset_are_in_its_items(factory: Any) -> None:
    found = factory("dicts", unit="name", inputs="x")
    assert found.units.tolist() == ["n0", "n1", "n2"]
    assert factory("dicts", inputs="x").units is None
    assert found.fingerprint != factory("dicts", inputs="x").fingerprint
    with pytest.raises(ConfigError, match=r"have no names for privacy\.unit\.column to select"):
        factory("pairs", unit="users")
    with pytest.raises(ConfigError, match="has no column 'user'; expected one of its columns: x, m"):
        factory("dicts", unit="user", inputs="x")
