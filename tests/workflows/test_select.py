"""`psgrad select`: the rows that a run chooses are copied in the source's format, untouched."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

import psgrad
from psgrad.storage.durable_files import written_atomically
from tests.workplace import ROWS, Workplace

COLUMNS = ["a", "b", "c", "d"]


def frame_of(place: Workplace) -> pd.DataFrame:
    frame = pd.DataFrame(place.arrays["x"].round(3), columns=COLUMNS)
    frame["code"] = [f"{row:03d}" for row in range(ROWS)]
    return frame.assign(y=place.arrays["y"], uid=place.arrays["uid"])


def csv_lines(place: Workplace) -> list[str]:
    """Lines with odd spellings: quoted line breaks, leading zeros, 1e0."""
    frame = frame_of(place)
    lines = [
        f'{r.a},{r.b},"{r.c}",1e0,{r.code},"say ""hi""\nthere",{r.y},{r.uid}' for r in frame.itertuples()
    ]
    return ["a,b,c,d,code,note,y,uid", *lines]


def analyzed(place: Workplace, path: str, *options: str) -> pd.DataFrame:
    place.config["data"] = {"path": path, "inputs": COLUMNS, "target": "y", "id": "uid"}
    place.succeeded("--no-report", "--overwrite", *options)
    return place.samples()


def selected(place: Workplace, where: str, output: str, *options: str) -> None:
    outcome = place.command("select", "out", "--where", where, "--output", output, *options)
    assert outcome.code == 0, outcome.err
    assert outcome.out == f"{output}\n"


def kept_rows(samples: pd.DataFrame) -> list[int]:
    rows = samples.loc[samples["percentile"] < 80, "index"].tolist()
    assert 3 < len(rows) < ROWS
    return rows


def test_csv_rows_keep_every_byte(workplace: Workplace) -> None:
    lines = csv_lines(workplace)
    (workplace.folder / "data.csv").write_text("\n".join(lines))  # no newline at the end
    kept = kept_rows(analyzed(workplace, "data.csv"))
    selected(workplace, "percentile < 80", "clean.csv")
    assert (workplace.folder / "clean.csv").read_text() == "\n".join(
        [lines[0], *(lines[1 + r] for r in kept), ""]
    )
    selected(workplace, "percentile < 80", "dropped.csv", "--drop")
    dropped = sorted({*range(ROWS)} - {*kept})
    expected = "\n".join([lines[0], *(lines[1 + row] for row in dropped), ""])
    assert (workplace.folder / "dropped.csv").read_text() == expected


def test_jsonl_lines_of_two_compressed_files_are_copied(workplace: Workplace) -> None:
    lines = [json.dumps({**row, "more": {"x": [1]}}) for row in frame_of(workplace).to_dict("records")]
    for name, part in (("part-0", lines[:10]), ("part-1", lines[10:])):
        with gzip.open(workplace.folder / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n\n".join(part))
    kept = kept_rows(analyzed(workplace, "part-*.jsonl.gz"))
    selected(workplace, "percentile < 80", "clean.jsonl")
    assert (workplace.folder / "clean.jsonl").read_text().splitlines() == [lines[row] for row in kept]
    selected(workplace, "percentile < 80", "clean.jsonl.gz")
    with gzip.open(workplace.folder / "clean.jsonl.gz", "rt") as file:
        assert file.read().splitlines() == [lines[row] for row in kept]


def test_parquet_keeps_types_metadata_and_columns_that_were_not_read(workplace: Workplace) -> None:
    frame = frame_of(workplace).assign(when=pd.Timestamp("2026-01-02"), tags=[["x"]] * ROWS)
    frame["code"] = frame["code"].astype("category")
    frame.to_parquet("data.parquet", row_group_size=7)
    kept = kept_rows(analyzed(workplace, "data.parquet"))
    selected(workplace, "percentile < 80", "clean.parquet")
    assert pq.read_schema("clean.parquet").equals(pq.read_schema("data.parquet"), check_metadata=True)
    wanted = pq.read_table("data.parquet").take(kept)
    assert pq.read_table("clean.parquet").equals(wanted)
    selected(workplace, "percentile < 80", "clean.arrow")
    assert pa.ipc.open_file("clean.arrow").read_all().equals(wanted)


def write_json(place: Workplace) -> None:
    content = {"data": frame_of(place).to_dict("records"), "license": "none"}
    (place.folder / "data.json").write_text(json.dumps(content))


def write_stream(place: Workplace) -> None:
    table = pa.Table.from_pandas(frame_of(place))
    with pa.ipc.new_stream("data.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def write_tsv(place: Workplace) -> None:
    frame_of(place).to_csv("data.tsv", sep="\t", index=False)


READ: dict[str, tuple[Callable[[Workplace], None], Callable[[str], pd.DataFrame]]] = {
    "json": (write_json, lambda path: pd.DataFrame(json.loads(Path(path).read_text())["data"])),
    "arrow": (write_stream, lambda path: pa.ipc.open_file(path).read_pandas()),
    "feather": (lambda place: frame_of(place).to_feather("data.feather"), pd.read_feather),
    "tsv": (write_tsv, lambda path: pd.read_csv(path, sep="\t", dtype={"code": str})),
}


@pytest.mark.long
@pytest.mark.parametrize("suffix", READ)
def test_other_tables_come_back(workplace: Workplace, suffix: str) -> None:
    write, read = READ[suffix]
    write(workplace)
    kept = kept_rows(analyzed(workplace, f"data.{suffix}"))
    selected(workplace, "percentile < 80", f"clean.{suffix}")
    found, wanted = read(f"clean.{suffix}"), frame_of(workplace).iloc[kept]
    assert found["uid"].tolist() == wanted["uid"].tolist()
    assert found["code"].tolist() == wanted["code"].tolist()
    assert np.array_equal(found[COLUMNS].to_numpy("f4"), wanted[COLUMNS].to_numpy("f4"))


@pytest.mark.long
def test_arrays_come_back(workplace: Workplace) -> None:
    workplace.succeeded("--no-report")
    kept = kept_rows(workplace.samples())
    selected(workplace, "percentile < 80", "clean.npz")
    with np.load("clean.npz") as found:
        assert {name: found[name].tolist() for name in found} == {
            name: each[kept].tolist() for name, each in workplace.arrays.items()
        }
    save_file({"x": workplace.arrays["x"], "y": workplace.arrays["y"]}, "data.safetensors", {"by": "me"})
    workplace.config["data"] = {"path": "data.safetensors", "inputs": "x", "target": "y"}
    workplace.succeeded("--no-report", "--overwrite")
    selected(workplace, "percentile < 80", "clean.safetensors")
    assert np.array_equal(load_file("clean.safetensors")["x"], workplace.arrays["x"][kept])


def test_images_of_a_folder_come_back_as_a_list(workplace: Workplace) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(8):
        folder = workplace.folder / "pictures" / ("cat" if number < 5 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    workplace.use_model(
        "class Model(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(48, 2))\n"
    )
    workplace.config["data"] = {"images": "pictures", "size": [4, 4]}
    workplace.succeeded("--no-report")
    assert len(workplace.samples()) == 8
    selected(workplace, "label == 1", "dogs.txt")
    assert (workplace.folder / "dogs.txt").read_text().split() == ["dog/5.png", "dog/6.png", "dog/7.png"]
    selected(workplace, "label == 1", "cats.csv", "--drop")
    cats = pd.read_csv("cats.csv")
    assert cats.columns.tolist() == ["file_name", "label"]
    assert cats["file_name"].tolist() == [f"cat/{number}.png" for number in range(5)]
    workplace.command("select", "out", "--where", "label == 1", "--output", "a.npz").refused(2, "a .txt file")
    (workplace.folder / "pictures" / "dog" / "5.png").unlink()
    outcome = workplace.command("select", "out", "--where", "label == 1", "--output", "more.txt")
    outcome.refused(3, "are not those of the run in out")


def test_rows_that_were_not_measured_are_left_out_and_reported(workplace: Workplace) -> None:
    workplace.succeeded("--no-report", "--limit", "9")
    outcome = workplace.command("select", "out", "--where", "label >= 0", "--output", "some.npz")
    assert "PARTIAL: 15 rows that the run did not measure are left out" in outcome.err
    with np.load("some.npz") as found:
        assert found["uid"].tolist() == workplace.arrays["uid"][:9].tolist()


def test_select_from_python(workplace: Workplace) -> None:
    workplace.succeeded("--no-report")
    found = psgrad.select("out", "target == 1", output="ones.npz")
    assert (found.rows, found.in_dataset) == (int((workplace.arrays["y"] == 1).sum()), ROWS)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("label =! 1", "clean.npz"), 2, "--where: 'label =! 1' is no condition"),
        (("lable == 1", "clean.npz"), 2, "there is no column 'lable'; did you mean label?"),
        (("label == 1", "clean.csv"), 2, "clean.csv ends in .csv, and the rows are those of .npz files"),
        (("label == 1", "data.npz", "--overwrite"), 2, "data.npz is a file of the dataset itself"),
        (("label == 1", "config.yaml"), 2, "config.yaml ends in .yaml"),
        (("label == 1", "there.npz"), 2, "there.npz exists"),
        (("label == 1", "no/such/folder/clean.npz"), 3, "can't be written: No such file or directory"),
    ],
)
def test_what_can_not_be_selected_is_reported(
    workplace: Workplace, options: tuple[str, ...], code: int, words: str
) -> None:
    workplace.succeeded("--no-report")
    (workplace.folder / "there.npz").write_bytes(b"mine")
    before = sorted(path.name for path in workplace.folder.iterdir())
    where, output, *rest = options
    workplace.command("select", "out", "--where", where, "--output", output, *rest).refused(code, words)
    assert sorted(path.name for path in workplace.folder.iterdir()) == before
    assert (workplace.folder / "there.npz").read_bytes() == b"mine"


def test_changed_source_is_refused(workplace: Workplace) -> None:
    workplace.succeeded("--no-report")
    workplace.save(y=workplace.arrays["y"][::-1].copy())
    outcome = workplace.command("select", "out", "--where", "label == 1", "--output", "clean.npz")
    outcome.refused(3, "data.npz, are not those of the run in out", "run psgrad analyze again")


def test_file_that_fails_half_way_is_not_there(tmp_path: Path) -> None:
    target = tmp_path / "file"

    def fail() -> None:
        with written_atomically(target) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []
