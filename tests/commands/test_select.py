"""`psgrad select`: the rows that a run chooses are copied, or their ids written; the others with a reason."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psgrad.config import DataConfig
from psgrad.data.sources.selection import content_of, whole_rows
from tests.influence_workplace import InfluenceWorkplace
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
    outcome = place.command("select", "out", "--where", where, "--output", output, *options).succeeded()
    assert outcome.out == f"{output}\n"


def kept_rows(samples: pd.DataFrame) -> list[int]:
    rows = samples.loc[samples["percentile"] < 80, "index"].tolist()
    assert 3 < len(rows) < ROWS
    return rows


def test_select_csv_rows_keep_the_spelling_of_cells(workplace: Workplace) -> None:
    lines = csv_lines(workplace)
    (workplace.folder / "data.csv").write_text("\n".join(lines))  # no newline at the end
    kept = kept_rows(analyzed(workplace, "data.csv"))
    with Path("data.csv").open(newline="") as file:
        cells = list(csv.reader(file))
    for name, rows, options in (
        ("clean.csv", kept, ()),
        ("dropped.csv", sorted({*range(ROWS)} - {*kept}), ("--drop",)),
    ):
        selected(workplace, "percentile < 80", name, *options)
        with Path(name).open(newline="") as file:
            assert list(csv.reader(file)) == [cells[0], *(cells[1 + row] for row in rows)]
    selected(workplace, "percentile < 80", "clean.jsonl")
    found = [json.loads(line) for line in Path("clean.jsonl").read_text().splitlines()]
    assert found == [dict(zip(cells[0], cells[1 + row], strict=True)) for row in kept]


def test_select_jsonl_rows_of_two_compressed_files(workplace: Workplace) -> None:
    rows = [{**row, "more": {"x": [1]}} for row in frame_of(workplace).to_dict("records")]
    rows[0]["only here"] = "é\n"
    lines = list(map(json.dumps, rows))
    for name, part in (("part-0", lines[:10]), ("part-1", lines[10:])):
        with gzip.open(workplace.folder / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n\n".join(part))
    kept = kept_rows(analyzed(workplace, "part-*.jsonl.gz"))
    selected(workplace, "percentile < 80", "clean.jsonl")
    written = (workplace.folder / "clean.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == [rows[row] for row in kept]


def test_select_parquet_rows_keep_types_metadata_and_columns_that_were_not_read(workplace: Workplace) -> None:
    frame = frame_of(workplace).assign(when=pd.Timestamp("2026-01-02"), tags=pd.Series([["x"]] * ROWS))
    frame["code"] = frame["code"].astype("category")
    frame.to_parquet("data.parquet", row_group_size=7)
    kept = kept_rows(analyzed(workplace, "data.parquet"))
    selected(workplace, "percentile < 80", "clean.parquet")
    assert pq.read_schema("clean.parquet").equals(pq.read_schema("data.parquet"), check_metadata=True)
    assert pq.read_table("clean.parquet").equals(pq.read_table("data.parquet").take(kept))
    selected(workplace, "percentile < 80", "clean.jsonl")
    found = [json.loads(line) for line in Path("clean.jsonl").read_text().splitlines()]
    assert [(row["code"], row["tags"]) for row in found] == [(frame["code"][row], ["x"]) for row in kept]


@pytest.mark.parametrize("suffix", ["json", "arrow"])
def test_select_rows_of_json_and_arrow(workplace: Workplace, suffix: str) -> None:
    frame = frame_of(workplace)
    if suffix == "json":
        (workplace.folder / "data.json").write_text(json.dumps({"data": frame.to_dict("records")}))
    else:
        table = pa.Table.from_pandas(frame)
        with pa.ipc.new_stream("data.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    wanted = frame.iloc[kept_rows(analyzed(workplace, f"data.{suffix}"))]
    selected(workplace, "percentile < 80", "clean.parquet")
    found = pd.read_parquet("clean.parquet")
    assert found["uid"].tolist() == wanted["uid"].tolist()
    assert found["code"].tolist() == wanted["code"].tolist()
    assert np.array_equal(found[COLUMNS].to_numpy(), wanted[COLUMNS].to_numpy())


@pytest.mark.parametrize("name", ["data.csv", "data.tsv"])
def test_select_no_row_keeps_the_columns(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a,b\n1,2\n3,4\n".replace(",", "\t" if name == "data.tsv" else ","))
    data = DataConfig.model_validate({"path": name, "inputs": "a", "target": "b"})
    rows, _ = whole_rows(data, tmp_path, ())
    assert content_of(rows, ".csv") == b"a,b\n"
    assert pq.read_table(pa.BufferReader(content_of(rows, ".parquet"))).column_names == ["a", "b"]
    assert content_of(rows, ".jsonl") == b""


def test_select_lines_of_text(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("one\n\ntwo\nthree")
    data = DataConfig.model_validate({"path": "rows.txt", "text": "text"})
    found, _ = whole_rows(data, tmp_path, (0, 2))
    assert content_of(found, ".jsonl") == b'{"text": "one"}\n{"text": "three"}\n'


def test_ids_of_rows_of_arrays_come_in_each_format(workplace: Workplace) -> None:
    workplace.succeeded("--no-report")
    kept = kept_rows(workplace.samples())
    wanted = pd.DataFrame({"id": workplace.arrays["uid"][kept], "index": kept}).to_dict("list")
    for suffix in ("txt", "csv", "jsonl", "parquet"):
        selected(workplace, "percentile < 80", f"clean.{suffix}")
    assert Path("clean.txt").read_text().splitlines() == wanted["id"]
    assert pd.read_csv("clean.csv").to_dict("list") == wanted
    assert pd.read_json("clean.jsonl", lines=True).to_dict("list") == wanted
    assert pd.read_parquet("clean.parquet").to_dict("list") == wanted


def test_images_of_a_folder_come_as_a_list(workplace: Workplace) -> None:
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
    selected(workplace, "label == 1", "dogs.txt")
    assert Path("dogs.txt").read_text().split() == ["dog/5.png", "dog/6.png", "dog/7.png"]
    (workplace.folder / "pictures" / "dog" / "5.png").unlink()
    outcome = workplace.command("select", "out", "--where", "label == 1", "--output", "more.txt")
    outcome.refused(3, "are not those of the run in out")


def test_highest_of_the_rows_for_which_a_condition_holds_and_the_others_with_a_reason(
    workplace: Workplace,
) -> None:
    workplace.succeeded("--no-report")
    samples = workplace.samples()
    ones = samples[samples["target"] == 1].sort_values("grad_norm", ascending=False)
    options = ("--by", "grad_norm", "--top", "2", "--rejected", "others.csv")
    selected(workplace, "label == 1", "highest.csv", *options)
    assert set(pd.read_csv("highest.csv")["id"]) == set(ones["id"][:2])
    others = pd.read_csv("others.csv").set_index("id")["reason"]
    assert set(others.index) == set(samples["id"]) - set(ones["id"][:2])
    assert others[ones["id"].iloc[2]] == "rank 3 by grad_norm, not among the highest 2"
    assert others[samples["id"][samples["target"] != 1].iloc[0]] == "not label == 1"
    selected(workplace, "label == 1", "rest.txt", *options[:4], "--drop", "--rejected", "two.jsonl")
    assert set(Path("rest.txt").read_text().split()) == set(others.index)
    assert (
        pd.read_json("two.jsonl", lines=True)["reason"].tolist()
        == ["label == 1 and among the highest 2 by grad_norm"] * 2
    )


def test_share_of_the_highest_leaves_out_what_is_not_a_number(workplace: Workplace) -> None:
    workplace.save(x=np.where(np.arange(ROWS)[:, None] == 3, np.nan, workplace.arrays["x"]))
    workplace.succeeded("--no-report")
    norms = workplace.samples()["grad_norm"]
    workplace.command("select", "out", "--by", "grad_norm", "--top", "100%", "--output", "a.txt").succeeded()
    assert Path("a.txt").read_text().split() == workplace.samples()["id"][norms.notna()].tolist()
    assert len(norms) == norms.notna().sum() + 1


def test_rows_by_their_influence(place: InfluenceWorkplace) -> None:
    place.ranked("--no-report")
    place.command("select", "out", "--by", "influence", "--top", "25%", "--output", "top.csv").succeeded()
    training = pd.read_parquet("out/self_influence.parquet")
    assert set(pd.read_csv("top.csv")["id"]) == set(training.nlargest(6, "overall")["id"])


def test_rows_that_were_not_measured_are_left_out_and_reported(workplace: Workplace) -> None:
    workplace.succeeded("--no-report", "--limit", "9")
    outcome = workplace.command("select", "out", "--where", "label >= 0", "--output", "some.csv")
    assert "PARTIAL: 15 rows that the run did not measure are left out" in outcome.err
    assert pd.read_csv("some.csv")["id"].tolist() == workplace.arrays["uid"][:9].tolist()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("label =! 1", "clean.csv"), 2, "--where: 'label =! 1' is no condition"),
        (("lable == 1", "clean.csv"), 2, "there is no column 'lable'; did you mean label?"),
        (("label == 1", "clean.npz"), 2, "clean.npz ends in .npz"),
        (("label == 1", "clean"), 2, "clean has no suffix"),
        (("label == 1", "clean.csv", "--rejected", "a.yaml"), 2, "a.yaml ends in .yaml"),
        (("label == 1", "clean.csv", "--rejected", "./clean.csv"), 2, "both name clean.csv"),
        (("label == 1", "clean.csv", "--by", "grad_norm"), 2, "--by and --top belong together"),
        (("label == 1", "clean.csv", "--by", "id", "--top", "2"), 2, "no column of numbers 'id'"),
        (("label == 1", "clean.csv", "--by", "loss", "--top", "0"), 2, "--top 0 is no amount"),
        (("label == 1", "clean.csv", "--by", "loss", "--top", "200%"), 2, "--top 200% is no amount"),
        (("label == 1", "config.yaml"), 2, "config.yaml ends in .yaml"),
        (("label == 1", "there.csv"), 2, "there.csv exists"),
    ],
)
def test_what_can_not_be_selected_is_reported(
    workplace: Workplace, options: tuple[str, ...], code: int, words: str
) -> None:
    workplace.succeeded("--no-report")
    (workplace.folder / "there.csv").write_bytes(b"mine")
    before = sorted(path.name for path in workplace.folder.iterdir())
    where, output, *rest = options
    workplace.command("select", "out", "--where", where, "--output", output, *rest).refused(code, words)
    assert sorted(path.name for path in workplace.folder.iterdir()) == before
    assert (workplace.folder / "there.csv").read_bytes() == b"mine"


def test_changed_source_is_refused(workplace: Workplace) -> None:
    workplace.succeeded("--no-report")
    workplace.save(y=workplace.arrays["y"][::-1].copy())
    outcome = workplace.command("select", "out", "--where", "label == 1", "--output", "clean.csv")
    outcome.refused(
        3, "data.npz, are not those of the run in out", "run it again on the files as they are now"
    )


def test_file_of_the_dataset_is_not_replaced(workplace: Workplace) -> None:
    (workplace.folder / "data.csv").write_text("\n".join(csv_lines(workplace)))
    analyzed(workplace, "data.csv")
    outcome = workplace.command(
        "select", "out", "--where", "label == 1", "--output", "data.csv", "--overwrite"
    )
    outcome.refused(2, "data.csv is a file of the dataset itself")
