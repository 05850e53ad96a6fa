"""Rows of files as Arrow tables: columns of any type, and faults with their file and line."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import feather
from pydantic import ValidationError
from safetensors.torch import save_file

from psgrad.config import DataConfig
from psgrad.data.sources import json_files
from psgrad.data.sources.load import load_data, open_rows
from psgrad.data.sources.table_rows import TableRows
from psgrad.errors import ConfigError, DataError, PsgradError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
TABLE = {
    "text": ["a", " b ", "c, d", "é", "e"],
    "y": [0, 1, 2, 1, 0],
    "x": [0.5, 1.5, -2.0, 1e10, 3.25],
    "ids": [[1, 2], [3], [], [4, 5, 6], [7]],
    "chat": [CHAT, CHAT[:1], CHAT, CHAT, CHAT],
    "uid": ["r0", "r1", "r2", "r3", "r4"],
}


def opened(folder: Path, path: Any, **options: Any) -> TableRows:
    return open_rows(DataConfig(path=path, **options), folder)


def error(folder: Path, path: Any, kind: type[PsgradError] = DataError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        opened(folder, path, **options)
    return str(caught.value)


# -- What is read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_rows_of_columns_of_any_type(tmp_path: Path, name: str) -> None:
    write_format(tmp_path / "data.jsonl", TABLE)
    pq.write_table(pa.table(TABLE), tmp_path / "data.parquet", row_group_size=2)
    rows = opened(tmp_path, name, text="text", messages="chat", target=["x", "ids", "y"], id="uid")

    assert rows.count == 5
    assert rows.take(range(1, 4)).to_pydict() == {key: TABLE[key][1:4] for key in rows.schema.names}
    assert rows.take(np.array([4, 0, 4, 2])).column("text").to_pylist() == ["e", "a", "e", "c, d"]
    assert rows.column("chat").to_pylist() == TABLE["chat"]
    assert rows.fingerprint == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert rows.source == str(tmp_path / name)


def test_texts_in_csv_keep_their_blanks_and_ids_their_spelling(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text('text,y,uid\n a ,1, 007 \n"b, c",0,8\n,1,9\n')
    table = opened(tmp_path, "data.csv", text="text", target="y", id="uid").take(range(3))
    assert table.column("text").to_pylist() == [" a ", "b, c", ""]
    assert table.column("uid").to_pylist() == [" 007 ", "8", "9"]
    assert table.column("y").type == pa.int64()


def test_names_of_classes_in_csv_are_text_and_truth_values_are_bool(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("x,y,z\n1,yes,True\n2,no,false\n")
    assert opened(tmp_path, "data.csv", inputs="x", target="y").column("y").to_pylist() == ["yes", "no"]
    assert opened(tmp_path, "data.csv", inputs="x", target="z").column("z").to_pylist() == [True, False]


def test_jsonl_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('\ufeff{"x": 1}\n\n  \n{"x": 2}\r\n{"x": 3}', encoding="utf-8")
    rows = opened(tmp_path, "data.jsonl", inputs="x")
    assert rows.column("x").to_pylist() == [1, 2, 3]


def test_key_that_comes_twice_is_an_error_in_json(tmp_path: Path) -> None:
    """json itself takes the last of them."""
    (tmp_path / "data.jsonl").write_text('{"x": 1}\n{"x": 2, "y": {"a": 1, "a": 2}}\n')
    message = error(tmp_path, "data.jsonl", inputs="x")
    assert "data.jsonl, line 2 is no JSON: the key 'a' comes twice" in message
    (tmp_path / "data.json").write_text('[{"x": 1, "x": 2}]')
    assert "data.json is no JSON: the key 'x' comes twice" in error(tmp_path, "data.json", inputs="x")


def test_jsonl_types_that_later_rows_widen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "_ROWS", 2)
    values = [{"x": None, "v": []}, {"x": 1}, {"x": 2, "v": [1]}, {"x": 2.5, "v": [0.5], "s": {"a": 1}}]
    values += [{"x": 3, "v": None, "s": {"b": "t"}}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, values)))
    rows = opened(tmp_path, "data.jsonl", target=["x", "v"], text="s")
    assert rows.schema.field("x").type == pa.float64()
    assert rows.column("x").to_pylist() == [None, 1.0, 2.0, 2.5, 3.0]
    assert rows.column("v").to_pylist() == [[], None, [1.0], [0.5], None]
    assert rows.column("s").to_pylist()[3:] == [{"a": 1, "b": None}, {"a": None, "b": "t"}]


# -- What can't be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[1]", "line 2 holds a list; expected an object {...} in each line"),
        ('"a"', "line 2 holds a text"),
        ("3", "line 2 holds a number"),
        ("null", "line 2 holds null"),
        ('{"x": ', "line 2 is no JSON: Expecting value"),
        ('{"x": "a"}', "the column 'x' has mixed types: "),
        ('{"x": true}', "the column 'x' has mixed types: "),
        ('{"x": [1]}', "the column 'x' has mixed types: "),
        ('{"x": [1, "a"]}', "the column 'x' has mixed types: "),
        ('{"x": 18446744073709551616}', "the column 'x' holds more than a 64-bit"),
        ('{"x": "\\ud800"}', "the column 'x' h"),
    ],
)
@pytest.mark.parametrize("rows_per_part", [1, 4096])
def test_jsonl_lines_that_can_not_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: str, rows_per_part: int
) -> None:
    monkeypatch.setattr(json_files, "_ROWS", rows_per_part)
    (tmp_path / "data.jsonl").write_text(f'{{"x": 1}}\n{line}\n')
    assert expected.replace("{0}", str(tmp_path / "data.jsonl")) in error(tmp_path, "data.jsonl", inputs="x")


def test_jsonl_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"x": 1}\n{"x": "\xff"}\n')
    said = error(tmp_path, "data.jsonl", inputs="x")
    assert "data.jsonl can't be read as text: 'utf-8' codec can't decode byte 0xff in position 16" in said
    assert "expected text in UTF-8\n  hint: convert it, such as with: iconv -f LATIN1 -t UTF-8" in said
    (tmp_path / "data.jsonl").write_bytes('{"x": 1}\n'.encode("utf-16"))
    assert "can't be read as text" in error(tmp_path, "data.jsonl", inputs="x")


def test_csv_that_is_not_text(tmp_path: Path) -> None:
    for rows in ([b"x,\xe9", b"1,2"], [b"x,y", b"1,2", b"\xe9,6"], [b"x,y", *[b"3,4"] * 500_000, b"5,\xe9"]):
        (tmp_path / "data.csv").write_bytes(b"\n".join(rows))
        said = error(tmp_path, "data.csv", inputs="x", id="y" if len(rows) > 3 else None)
        assert "data.csv can't be read as text" in said
        assert "iconv" in said


@pytest.mark.parametrize("change", ["byte order mark", "CRLF", "no line break at the end"])
def test_jsonl_of_other_systems_has_the_same_rows(change: str, tmp_path: Path) -> None:
    lines = b'{"x": 1, "y": "a"}\n{"x": 2, "y": "b"}\n'
    changed = {"byte order mark": b"\xef\xbb\xbf" + lines, "CRLF": lines.replace(b"\n", b"\r\n")}
    (tmp_path / "data.jsonl").write_bytes(changed.get(change, lines.rstrip()))
    samples = load_data(DataConfig(path=Path("data.jsonl"), inputs="x", target="y"), tmp_path)
    assert samples.take(range(2)).inputs[0].tolist() == [1, 2]
    assert samples.class_names == ("a", "b")


def test_csv_of_another_separator_is_reported(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("x;y\n1;0\n")
    said = error(tmp_path, "data.csv", ConfigError, inputs="x", target="y")
    assert "has no column 'x'; expected one of its columns: x;y" in said
    assert "and not by ';'" in said


# -- Formats -------------------------------------------------------------------------------------------------


def write_format(path: Path, columns: dict[str, list[Any]]) -> None:
    """Columns in the format of the file's suffix, compressed as its last suffix says."""
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    table, form = pa.table(columns), path.with_suffix("").suffix if path.suffix in CODECS else path.suffix
    content = {
        ".jsonl": lambda: "\n".join(map(json.dumps, records)),
        ".json": lambda: json.dumps(records if path.stem != "nested" else {"data": records}),
        ".csv": lambda: pd.DataFrame(columns).to_csv(index=False),
        ".tsv": lambda: pd.DataFrame(columns).to_csv(index=False, sep="\t"),
    }
    if form == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif form == ".feather":
        feather.write_feather(table, path, chunksize=2)
    elif form == ".arrow":
        opening = pa.ipc.new_stream if path.stem == "stream" else pa.ipc.new_file
        with opening(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    elif form == ".npz":
        np.savez(path, **{name: np.array(values) for name, values in columns.items()})
    elif form == ".safetensors":
        save_file({name: torch.tensor(values) for name, values in columns.items()}, path)
    else:
        with pa.output_stream(str(path), compression=CODECS.get(path.suffix)) as file:
            file.write(content[form]().encode())


CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
FORMATS = ["data.jsonl", "data.json", "nested.json", "data.csv", "data.tsv", "data.parquet", "data.feather"]
FORMATS += ["data.arrow", "stream.arrow", "data.jsonl.gz", "data.csv.zst", "data.tsv.bz2", "data.json.lz4"]


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_holds_the_same_rows(tmp_path: Path, name: str) -> None:
    columns = {name: TABLE[name] for name in ("text", "x", "y", "uid")}
    write_format(tmp_path / name, columns)
    rows = opened(tmp_path, name, text="text", target=["x", "y"], id="uid")
    assert rows.column("x").to_pylist() == columns["x"]
    assert rows.take(range(1, 5)).to_pydict() == {key: columns[key][1:5] for key in rows.schema.names}
    assert rows.take(np.array([3, 0, 3])).column("text").to_pylist() == ["é", "a", "é"]
    message = error(tmp_path, name, ConfigError, inputs="xx")
    assert f"{name} has no column 'xx'; did you mean x?" in message


def test_txt_lines_are_the_rows_of_the_column_text(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("one\n\ntwo two\r\n")
    rows = opened(tmp_path, "data.txt", text="text")
    assert rows.take(range(2)).to_pydict() == {"text": ["one", "two two"]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"a": 1}', 'holds an object; expected a list of objects, or {"data": [...]} with one'),
        ("[1]", "data.json, entry 0 holds a number"),
        ('{"x": 1}\n{"x": 2}', "name the file .jsonl"),
        ('[{"x": 1}', "is no JSON: Expecting"),
    ],
)
def test_json_that_is_no_list_of_objects(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "data.json").write_text(content)
    assert expected in error(tmp_path, "data.json", inputs="x")


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.csv.zst", "data.arrow", "data.feather"])
def test_files_that_were_cut(tmp_path: Path, name: str) -> None:
    write_format(tmp_path / name, {"x": list(np.random.default_rng(0).random(5000))})
    content = (tmp_path / name).read_bytes()
    for size in (9, len(content) // 2):
        (tmp_path / name).write_bytes(content[:size])
        assert "can't be read" in error(tmp_path, name, inputs="x")


def test_compressed_files_of_formats_that_compress_themselves(tmp_path: Path) -> None:
    (tmp_path / "data.parquet.gz").write_bytes(gzip.compress(b"x"))
    assert "is compressed, which is not read for .parquet" in error(tmp_path, "data.parquet.gz", inputs="x")


# -- Many files ----------------------------------------------------------------------------------------------


def write_parts(folder: Path, name: str, parts: list[dict[str, list[Any]]]) -> None:
    for number, part in enumerate(parts):
        write_format(folder / name.replace("*", str(number)), part)


MANY = ["part-*.jsonl", "part-*.parquet", "part-*.csv.gz", "part-*.arrow", "part-*.npz", "part-*.safetensors"]


@pytest.mark.parametrize("name", MANY)
def test_many_files_are_one_dataset(tmp_path: Path, name: str) -> None:
    parts = [{"x": [1, 2], "y": [0, 1]}, {"x": [0.5], "y": [2]}, {"x": [7, 8, 9], "y": [0, 0, 1]}]
    write_parts(tmp_path, name, parts)
    x = [1.0, 2.0, 0.5, 7.0, 8.0, 9.0]
    listed: Any = [Path(name.replace("*", str(number))) for number in (2, 0)]
    for path, expected in ((Path(name), x), (listed, [7.0, 8.0, 9.0, 1.0, 2.0])):
        rows = opened(tmp_path, path, inputs="x", target="y")
        assert rows.column("x").to_pylist() == expected
        assert rows.take(range(1, 5)).column("x").to_pylist() == expected[1:5]
        places = np.array([4, 0, 3, 4])
        assert rows.take(places).column("x").to_pylist() == [expected[place] for place in places]
        samples = load_data(DataConfig(path=path, inputs="x", target="y"), tmp_path)
        assert samples.take(places).inputs[0].tolist() == [expected[place] for place in places]
    assert f"{tmp_path / 'part-'}" in opened(tmp_path, Path(name), inputs="x").place(3)
    assert "part-2" in opened(tmp_path, Path(name), inputs="x").place(3)


@pytest.mark.parametrize(
    "name", ["part-*.jsonl", "part-*.json", "part-*.parquet", "part-*.csv", "part-*.arrow"]
)
def test_a_file_without_rows_among_others(tmp_path: Path, name: str) -> None:
    empty: dict[str, list[Any]] = {"x": [], "y": []}
    write_parts(tmp_path, name, [{"x": [0.5], "y": [0]}, empty, {"x": [2.5], "y": [1]}])
    if name.endswith("jsonl"):
        (tmp_path / "part-1.jsonl").write_text("\n\n")
    config = DataConfig(path=Path(name), inputs="x", target="y")
    assert load_data(config, tmp_path).take(range(2)).inputs[0].tolist() == [0.5, 2.5]
    write_parts(tmp_path, name, [empty, empty, empty])
    for number in range(3 if name.endswith("jsonl") else 0):
        (tmp_path / f"part-{number}.jsonl").write_text("\n")
    with pytest.raises(PsgradError, match=r"part-0\.\w+ and 2 more has no rows"):
        load_data(config, tmp_path)


@pytest.mark.parametrize("name", MANY)
def test_a_file_among_others_that_can_not_be_read(tmp_path: Path, name: str) -> None:
    write_parts(tmp_path, name, [{"x": [row + 0.5] * 40, "y": [0] * 40} for row in range(3)])
    middle = tmp_path / name.replace("*", "1")
    middle.write_bytes(b"\xff\xfe\x00 broken \x00" * 20)
    message = error(tmp_path, Path(name), PsgradError, inputs="x", target="y")
    assert str(middle) in message
    assert "part-0" not in message
    middle.write_bytes(b"")
    assert f"the dataset {middle} is empty" in error(tmp_path, Path(name), inputs="x", target="y")
    middle.unlink()
    assert "there is no dataset" in error(
        tmp_path, [Path(name.replace("*", "0")), Path(middle.name)], ConfigError, inputs="x", target="y"
    )


def test_the_fingerprint_of_many_files_covers_each_and_their_order(tmp_path: Path) -> None:
    write_parts(tmp_path, "*.jsonl", [{"x": [1]}, {"x": [2]}])
    names = [Path("0.jsonl"), Path("1.jsonl")]
    before = opened(tmp_path, names, inputs="x").fingerprint
    assert opened(tmp_path, Path("*.jsonl"), inputs="x").fingerprint == before
    assert opened(tmp_path, names[::-1], inputs="x").fingerprint != before
    write_parts(tmp_path, "*.jsonl", [{"x": [1]}, {"x": [3]}])
    assert opened(tmp_path, names, inputs="x").fingerprint != before


def test_columns_that_differ_between_files(tmp_path: Path) -> None:
    write_parts(tmp_path, "*.jsonl", [{"x": [1], "id": ["a"]}, {"x": ["b"], "id": ["b"]}])
    message = error(tmp_path, Path("*.jsonl"), inputs="x")
    assert "the column 'x' has mixed types: int64 in " in message
    assert f"0.jsonl, string in {tmp_path / '1.jsonl'}" in message
    (tmp_path / "1.jsonl").write_text('{"z": 1}')
    assert "1.jsonl has no column 'x'" in error(tmp_path, Path("*.jsonl"), ConfigError, inputs="x")


def test_arrays_that_differ_in_shape_between_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "0.npz", x=np.zeros((2, 3), np.float32))
    np.savez(tmp_path / "1.npz", x=np.zeros((2, 4), np.float32))
    assert "the column 'x' has mixed types: " in error(tmp_path, Path("*.npz"), inputs="x")


def test_ids_in_many_csv_files_are_text_where_one_has_text(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("x,uid\n1,7\n")
    (tmp_path / "1.csv").write_text("x,uid\n1,007\n")
    rows = opened(tmp_path, Path("*.csv"), inputs="x", id="uid")
    assert rows.column("uid").to_pylist() == ["7", "007"]


def test_globs_without_files_and_files_named_twice(tmp_path: Path) -> None:
    assert "*.jsonl: no file has such a name" in error(tmp_path, Path("*.jsonl"), ConfigError, inputs="x")
    write_parts(tmp_path, "*.jsonl", [{"x": [1]}])
    message = error(tmp_path, [Path("0.jsonl"), Path("*.jsonl")], ConfigError, inputs="x")
    assert "0.jsonl twice; expected each file once" in message


def test_a_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    write_format(tmp_path / "a[1].jsonl", {"x": [5]})
    assert opened(tmp_path, Path("a[1].jsonl"), inputs="x").column("x").to_pylist() == [5]


def test_tar_is_refused_with_the_way_to_a_folder_of_its_rows() -> None:
    with pytest.raises(ValidationError, match=r"a tar, which is not read; .*load_dataset\('webdataset'"):
        DataConfig(path=Path("a.tar.gz"), inputs="x")


def test_files_of_several_formats() -> None:
    with pytest.raises(ValidationError, match="the files are of several formats, csv and jsonl"):
        DataConfig(path=[Path("a.csv"), Path("b.jsonl.gz")], inputs="x")
