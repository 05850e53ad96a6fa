"""`psgrad select` of rows of the datasets library, of image folders, of tars and of code."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from tests.workflows.test_select import kept_rows, selected
from tests.workplace import ROWS, Workplace

WHERE = "percentile < 80"


def analyzed(place: Workplace, data: dict[str, Any], *options: str) -> list[int]:
    """The rows of the dataset for which WHERE holds."""
    place.config["data"] = data
    place.succeeded("--no-report", "--overwrite", *options)
    return kept_rows(place.samples())


def library_table(place: Workplace) -> Any:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        x=datasets.Sequence(datasets.Value("float32")),
        y=datasets.ClassLabel(names=["a", "b", "c"]),
        uid=datasets.Value("string"),
        note=datasets.Value("string"),
    )
    columns = {"x": place.arrays["x"].tolist(), "y": place.arrays["y"].tolist()}
    columns |= {"uid": place.arrays["uid"].tolist(), "note": [f"é{row}" for row in range(ROWS)]}
    return datasets.Dataset.from_dict(columns, kinds)


def test_rows_of_the_datasets_library_come_back_in_each_format(workplace: Workplace) -> None:
    datasets = pytest.importorskip("datasets")
    table = library_table(workplace)
    table.save_to_disk("set")
    kept = analyzed(workplace, {"dataset": "set", "inputs": "x", "target": "y", "id": "uid"})
    wanted = table.select(kept)
    selected(workplace, WHERE, "clean")
    found = datasets.load_from_disk("clean")
    assert found.features == table.features
    assert found.to_list() == wanted.to_list()
    assert not list(Path().glob(".clean*"))
    selected(workplace, WHERE, "clean.parquet")
    assert datasets.Dataset.from_parquet("clean.parquet", cache_dir="cache").to_list() == wanted.to_list()
    assert pq.read_schema("clean.parquet").metadata == table.features.arrow_schema.metadata
    selected(workplace, WHERE, "clean.jsonl")
    assert [json.loads(line) for line in Path("clean.jsonl").read_text().splitlines()] == wanted.to_list()
    selected(workplace, WHERE, "rest.arrow", "--drop")
    dropped = [row for row in range(ROWS) if row not in kept]
    assert pa.ipc.open_file("rest.arrow").read_all().to_pylist() == table.select(dropped).to_list()
    workplace.command("select", "out", "--where", WHERE, "--output", "clean", "--overwrite").refused(
        2, "clean exists", "name another folder"
    )
    workplace.command("select", "out", "--where", WHERE, "--output", "clean.npz").refused(
        2, "the rows are those of the dataset set", "for a folder of save_to_disk"
    )


def test_a_part_of_a_split_and_a_dataset_that_was_changed(workplace: Workplace) -> None:
    datasets = pytest.importorskip("datasets")
    table = library_table(workplace)
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk("set")
    kept = analyzed(workplace, {"dataset": "set", "split": "train[4:]", "inputs": "x", "target": "y"})
    selected(workplace, WHERE, "clean.jsonl")
    uids = [json.loads(line)["uid"] for line in Path("clean.jsonl").read_text().splitlines()]
    assert uids == [f"row-{4 + row:02d}" for row in kept]
    shutil.rmtree("set")
    gone = workplace.command("select", "out", "--where", WHERE, "--output", "more.jsonl")
    gone.refused(2, "data.dataset: set is not in the local cache", "or a folder of save_to_disk")
    turned = table.select(range(ROWS)[::-1])
    datasets.DatasetDict({"train": turned, "test": table.select([0])}).save_to_disk("set")
    changed = workplace.command("select", "out", "--where", WHERE, "--output", "more.jsonl")
    changed.refused(3, "are not those of the run in out")


def test_columns_that_json_can_not_have(workplace: Workplace) -> None:
    pytest.importorskip("datasets")
    table = library_table(workplace)
    table.add_column("raw", [b"x"] * ROWS).save_to_disk("set")
    analyzed(workplace, {"dataset": "set", "inputs": "x", "target": "y"})
    outcome = workplace.command("select", "out", "--where", WHERE, "--output", "clean.jsonl")
    outcome.refused(
        3, "clean.jsonl can't hold the columns raw (binary)", "expected: a .parquet or .arrow file"
    )
    assert not Path("clean.jsonl").exists()


def pictures(place: Workplace, metadata: bool) -> dict[str, bytes]:
    """name -> content of the images in a new folder: a folder a class, or with a metadata file."""
    from PIL import Image

    random, found = np.random.default_rng(0), {}
    for number in range(10):
        name = f"img/{number}.png" if metadata else f"{'cat' if number < 5 else 'dog'}/{number}.png"
        path = place.folder / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (4, 4, 3), dtype=np.uint8)).save(path)
        found[name] = path.read_bytes()
    if metadata:
        lines = [f'{name},{row % 2},"a ""b"" {row}"' for row, name in enumerate(found)]
        (place.folder / "pictures" / "metadata.csv").write_text(
            "\n".join(["file_name,kind,note", *lines]) + "\n"
        )
    place.use_model(
        "class Model(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(48, 2))\n"
    )
    return found


@pytest.mark.long
@pytest.mark.parametrize("metadata", [False, True])
def test_images_are_copied_into_a_folder(workplace: Workplace, metadata: bool) -> None:
    images = pictures(workplace, metadata)
    data: dict[str, Any] = {"images": "pictures", "size": [4, 4]}
    kept = analyzed(workplace, data | ({"target": "kind"} if metadata else {}))
    selected(workplace, WHERE, "clean")
    found = {path.relative_to("clean").as_posix(): path.read_bytes() for path in Path("clean").rglob("*.*")}
    if metadata:
        lines = Path("pictures/metadata.csv").read_text().splitlines()
        assert found.pop("metadata.csv").decode().splitlines() == [lines[0], *(lines[1 + r] for r in kept)]
    assert found == {name: images[name] for row, name in enumerate(images) if row in kept}
    again = kept_rows(workplace.samples())
    workplace.config["data"]["images"] = "clean"
    workplace.succeeded("--no-report", "--overwrite")
    assert len(workplace.samples()) == len(again)
    inside = workplace.command("select", "out", "--where", WHERE, "--output", "clean/more")
    inside.refused(2, "is in the folder of images itself")


def write_tars(place: Workplace, suffix: str) -> list[tuple[str, bytes]]:
    """The files of the rows in two archives, beside one that is no row."""
    files: list[tuple[str, bytes]] = []
    for number, rows in enumerate((range(10), range(10, ROWS))):
        with (
            pa.output_stream(f"part-{number}.tar{suffix}") as stream,
            tarfile.open(fileobj=stream, mode="w|") as archive,
        ):
            for row in rows:
                values = io.BytesIO()
                np.save(values, place.arrays["x"][row])
                label = str(place.arrays["y"][row]).encode()
                for name, content in (
                    (f"{row:03d}.npy", values.getvalue()),
                    (f"{row:03d}.cls", label),
                    ("README", b"?"),
                ):
                    member = tarfile.TarInfo(name)
                    member.size, member.mtime = len(content), 1_700_000_000 + row
                    archive.addfile(member, io.BytesIO(content))
                    files += [(name, content)] if name != "README" else []
    return files


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_of_tars_come_back_in_one(workplace: Workplace, suffix: str) -> None:
    files = write_tars(workplace, suffix)
    data = {"path": f"part-*.tar{suffix}", "inputs": "npy", "target": "cls", "id": "__key__"}
    kept = {f"{row:03d}" for row in analyzed(workplace, data)}
    for name in ("clean.tar", "clean.tar.zst"):
        selected(workplace, WHERE, name)
        with pa.input_stream(name) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            found = [(each.name, each.mtime, archive.extractfile(each).read()) for each in archive]
        assert [(name, content) for name, _, content in found] == [
            each for each in files if each[0][:3] in kept
        ]
        assert [when - 1_700_000_000 for _, when, _ in found] == [int(each[0][:3]) for each in found]
    workplace.command("select", "out", "--where", WHERE, "--output", "a.jsonl").refused(
        2, "those of .tar files"
    )


FACTORY = """\
import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, row):
        generator = torch.Generator().manual_seed(row)
        return {"x": torch.randn(4, generator=generator), "y": row % 3, "name": f"n{row}"}
"""


@pytest.mark.long
def test_ids_of_rows_that_code_makes_come_back(workplace: Workplace) -> None:
    (workplace.folder / "rows.py").write_text(FACTORY)
    data = {"factory": "rows.py:Rows", "inputs": "x", "target": "y", "id": "name"}
    kept = analyzed(workplace, data)
    selected(workplace, WHERE, "clean.txt")
    assert Path("clean.txt").read_text().splitlines() == [f"n{row}" for row in kept]
    selected(workplace, WHERE, "clean.csv")
    selected(workplace, WHERE, "clean.parquet")
    selected(workplace, WHERE, "clean.jsonl")
    wanted = pd.DataFrame({"id": [f"n{row}" for row in kept], "index": kept})
    for found in (
        pd.read_csv("clean.csv"),
        pd.read_parquet("clean.parquet"),
        pd.read_json("clean.jsonl", lines=True),
    ):
        assert found.to_dict("list") == wanted.to_dict("list")
    analyzed(workplace, data, "--limit", "8", "--sample")
    selected(workplace, "index >= 0", "drawn.csv")
    assert pd.read_csv("drawn.csv")["index"].tolist() == workplace.samples()["dataset_row"].tolist()
    outcome = workplace.command("select", "out", "--where", WHERE, "--output", "clean.npz")
    outcome.refused(2, "the rows come from rows.py:Rows, which is no file", "for the ids of the rows")
    outcome = workplace.command("select", "out", "--where", WHERE, "--output", "clean")
    outcome.refused(2, "clean has no suffix")


@pytest.mark.long
def test_rows_of_several_files_of_arrays_come_back_in_one(workplace: Workplace) -> None:
    for number, rows in enumerate((slice(0, 9), slice(9, ROWS))):
        part = {name: each[rows] for name, each in workplace.arrays.items()}
        np.savez(f"part-{number}.npz", **part)
        save_file({"x": part["x"], "y": part["y"]}, f"part-{number}.safetensors")
    kept = analyzed(workplace, {"path": "part-*.npz", "inputs": "x", "target": "y", "id": "uid"})
    selected(workplace, WHERE, "clean.npz")
    with np.load("clean.npz") as found:
        assert {name: found[name].tolist() for name in found} == {
            name: each[kept].tolist() for name, each in workplace.arrays.items()
        }
    kept = analyzed(workplace, {"path": "part-*.safetensors", "inputs": "x", "target": "y"})
    selected(workplace, WHERE, "clean.safetensors")
    assert np.array_equal(load_file("clean.safetensors")["x"], workplace.arrays["x"][kept])
