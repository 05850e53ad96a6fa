"""Rows of files as Arrow tables: columns of any type, and faults with their file and line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError, PsgradError
from psgrad.inputs.sources import objects
from psgrad.inputs.sources.load import Rows, load_data, open_rows

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
TABLE = {
    "text": ["a", " b ", "c, d", "é", "e"],
    "y": [0, 1, 2, 1, 0],
    "x": [0.5, 1.5, -2.0, 1e10, 3.25],
    "ids": [[1, 2], [3], [], [4, 5, 6], [7]],
    "chat": [CHAT, CHAT[:1], CHAT, CHAT, CHAT],
    "uid": ["r0", "r1", "r2", "r3", "r4"],
}


def opened(folder: Path, path: Any, **options: Any) -> Rows:
    return open_rows(DataConfig(path=path, **options), folder)


def error(folder: Path, path: Any, kind: type[PsgradError] = DataError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        opened(folder, path, **options)
    return str(caught.value)


def write_jsonl(path: Path, columns: dict[str, list[Any]]) -> None:
    lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def flat_columns(*names: str) -> dict[str, list[Any]]:
    return {name: TABLE[name] for name in names}


# -- What is read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_rows_of_columns_of_any_type(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "data.jsonl", TABLE)
    pq.write_table(pa.table(TABLE), tmp_path / "data.parquet", row_group_size=2)
    rows = opened(tmp_path, name, text="text", messages="chat", inputs=["x", "ids"], target="y", id="uid")

    assert rows.count == 5
    assert rows.read(1, 4).to_pydict() == {key: TABLE[key][1:4] for key in rows.schema.names}
    assert rows.take(np.array([4, 0, 4, 2])).column("text").to_pylist() == ["e", "a", "e", "c, d"]
    assert rows.column("chat").to_pylist() == TABLE["chat"]
    assert rows.fingerprint == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert rows.source == str(tmp_path / name)


def test_texts_in_csv_keep_their_blanks_and_ids_their_spelling(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text('text,y,uid\n a ,1, 007 \n"b, c",0,8\n,1,9\n')
    table = opened(tmp_path, "data.csv", text="text", target="y", id="uid").read(0, 3)
    assert table.column("text").to_pylist() == [" a ", "b, c", ""]
    assert table.column("uid").to_pylist() == ["007", "8", "9"]
    assert table.column("y").type == pa.int64()


def test_names_of_classes_in_csv_are_text_and_truth_values_are_bool(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("x,y,z\n1,yes,True\n2,no,false\n")
    assert opened(tmp_path, "data.csv", inputs="x", target="y").column("y").to_pylist() == ["yes", "no"]
    assert opened(tmp_path, "data.csv", inputs="x", target="z").column("z").to_pylist() == [True, False]


def test_jsonl_blank_lines_are_no_rows_and_places_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('\ufeff{"x": 1}\n\n  \n{"x": 2}\r\n{"x": 3}', encoding="utf-8")
    rows = opened(tmp_path, "data.jsonl", inputs="x")
    assert rows.column("x").to_pylist() == [1, 2, 3]
    assert [rows.place(row) for row in range(3)] == [
        f"{tmp_path / 'data.jsonl'}, line {line}" for line in (1, 4, 5)
    ]


def test_jsonl_types_that_later_rows_widen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_ROWS_PER_PART", 2)
    values = [{"x": None, "v": []}, {"x": 1}, {"x": 2, "v": [1]}, {"x": 2.5, "v": [0.5], "s": {"a": 1}}]
    values += [{"x": 3, "v": None, "s": {"b": "t"}}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, values)))
    rows = opened(tmp_path, "data.jsonl", inputs=["x", "v"], text="s")
    assert rows.schema.field("x").type == pa.float64()
    assert rows.column("x").to_pylist() == [None, 1.0, 2.0, 2.5, 3.0]
    assert rows.column("v").to_pylist() == [[], None, [1.0], [0.5], None]
    assert rows.column("s").to_pylist()[3:] == [{"a": 1, "b": None}, {"a": None, "b": "t"}]


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet", "data.csv"])
def test_samples_are_made_of_the_rows_of_every_format(tmp_path: Path, name: str) -> None:
    columns = flat_columns("x", "y", "uid")
    write_jsonl(tmp_path / "data.jsonl", columns)
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (tmp_path / "data.csv").write_text("\n".join(lines))
    samples = load_data(DataConfig(path=Path(name), inputs="x", target="y", id="uid"), tmp_path)
    assert samples.ids.tolist() == TABLE["uid"]
    assert samples.targets is not None
    assert samples.targets.tolist() == TABLE["y"]
    np.testing.assert_array_equal(samples.read(0, 5).inputs[0], np.float32(TABLE["x"]))


# -- What can't be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[1]", "line 2 holds a list\n  expected: an object {...} in each line"),
        ('"a"', "line 2 holds a text"),
        ("3", "line 2 holds a number"),
        ("null", "line 2 holds null"),
        ('{"x": ', "line 2 is no JSON: Expecting value"),
        ('{"x": "a"}', "the column 'x' has mixed types: whole numbers in {0}, line 1, text in {0}, line 2"),
        ('{"x": true}', "has mixed types: whole numbers in {0}, line 1, true and false in {0}, line 2"),
        (
            '{"x": [1]}',
            "has mixed types: whole numbers in {0}, line 1, lists of whole numbers in {0}, line 2",
        ),
        ('{"x": 18446744073709551616}', "'x' holds 18446744073709551616 in {0}, line 2, more than a 64-bit"),
    ],
)
@pytest.mark.parametrize("rows_per_part", [1, 4096])
def test_jsonl_lines_that_can_not_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: str, rows_per_part: int
) -> None:
    monkeypatch.setattr(objects, "_ROWS_PER_PART", rows_per_part)
    (tmp_path / "data.jsonl").write_text(f'{{"x": 1}}\n{line}\n')
    assert expected.replace("{0}", str(tmp_path / "data.jsonl")) in error(tmp_path, "data.jsonl", inputs="x")


def test_jsonl_lists_of_mixed_types(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"x": [1]}\n{"x": [1, "a"]}\n')
    message = error(tmp_path, "data.jsonl", inputs="x")
    assert f"'x' holds a list of mixed types in {tmp_path / 'data.jsonl'}, line 2" in message


def test_jsonl_without_the_column(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"label": 1}\n')
    message = error(tmp_path, "data.jsonl", ConfigError, inputs="lable")
    assert "data.jsonl has no column 'lable'; did you mean label?" in message


def test_jsonl_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"x": 1}\n{"x": "\xff"}\n')
    assert "expected: text in UTF-8" in error(tmp_path, "data.jsonl", inputs="x")


def test_csv_labels_that_are_numbers_and_words(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("x,y\n1,0\n2,1\n3,NA\n")
    message = error(tmp_path, "data.csv", inputs="x", target="y")
    assert "the column 'y' has mixed types: row 0 holds '0', row 2 holds 'NA'" in message


def test_arrays_have_no_rows_of_text(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros(2))
    assert "holds arrays of numbers\n  expected: a table" in error(
        tmp_path, "data.npz", ConfigError, text="x"
    )
