"""Datasets of the datasets library: folders of save_to_disk, cached ids, splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgrad.config import DataConfig
from psgrad.data.sources.load import load_data, open_rows
from psgrad.data.sources.table_rows import TableRows
from psgrad.errors import ConfigError, DataError, PsgradError

datasets = pytest.importorskip("datasets")

COUNT = 10


def table(first: int = 0) -> Any:
    rows = {
        "text": [f"t{i}" for i in range(first, first + COUNT)],
        "x": [[float(i)] * (1 + i % 2) for i in range(COUNT)],
        "label": [i % 2 for i in range(COUNT)],
    }
    kinds = datasets.Features(
        text=datasets.Value("string"),
        x=datasets.Sequence(datasets.Value("float32")),
        label=datasets.ClassLabel(names=["neg", "pos"]),
    )
    return datasets.Dataset.from_dict(rows, kinds)


def opened(folder: Path, name: str, **options: Any) -> TableRows:
    return open_rows(DataConfig(dataset=name, text="text", target="label", **options), folder)


def error(folder: Path, name: str, kind: type[PsgradError] = ConfigError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        opened(folder, name, **options)
    return str(caught.value)


def test_a_folder_of_one_dataset(tmp_path: Path) -> None:
    table().save_to_disk(tmp_path / "set")
    rows = opened(tmp_path, "set")
    assert rows.take(range(2, 4)).to_pydict() == {"label": [0, 1], "text": ["t2", "t3"]}
    assert rows.take(np.array([5, 1, 5])).column("text").to_pylist() == ["t5", "t1", "t5"]
    assert rows.class_names == {"label": ("neg", "pos")}
    assert rows.place(3) == "the dataset set, row 3"
    samples = load_data(DataConfig(dataset="set", inputs="x", target="label"), tmp_path)
    assert samples.class_names == ("neg", "pos")
    assert samples.take(range(2)).inputs[0].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert samples.ragged is not None


def test_labels_with_names_in_another_order_than_the_classes_are_refused(tmp_path: Path) -> None:
    """Of tokens, too, as lists."""
    columns = {"x": [1.0, 2.0, 3.0], "label": [0, 1, 0], "tags": [[0, 2], [1, -100], []]}
    names = datasets.ClassLabel(names=["O", "PER", "LOC"])
    tags = datasets.Sequence(datasets.ClassLabel(names=names.names))
    kinds = datasets.Features(x=datasets.Value("float32"), label=names, tags=tags)
    datasets.Dataset.from_dict(columns, kinds).save_to_disk(tmp_path / "set")
    order = ["LOC", "O", "PER"]
    for target in ("label", "tags"):
        config = DataConfig(dataset="set", inputs="x", target=target, class_names=order)
        with pytest.raises(DataError, match=r"have 'O' as class 0, which is class 1 .*") as caught:
            load_data(config, tmp_path)
        assert "align_labels_with_mapping" in str(caught.value)
    for known in (names.names, ["nobody", "knows", "these"]):
        config = DataConfig(dataset="set", inputs="x", target="label", class_names=known)
        assert load_data(config, tmp_path).take(range(3)).target.tolist() == [0, 1, 0]  # type: ignore[union-attr]


def test_splits_of_a_folder(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": table(), "test": table(100)}).save_to_disk(tmp_path / "set")
    assert opened(tmp_path, "set", split="test").column("text").to_pylist()[0] == "t100"
    assert opened(tmp_path, "set", split="train[:20%]").column("text").to_pylist() == ["t0", "t1"]
    assert opened(tmp_path, "set", split="train[8:]+test[:1]").column("text").to_pylist() == [
        "t8",
        "t9",
        "t100",
    ]
    message = error(tmp_path, "set")
    assert "data.split is missing: " in message
    assert "has the splits train, test; expected one of them, or a part such as train[:10%]" in message
    assert "has no rows 'tain'; did you mean train?" in error(tmp_path, "set", split="tain")
    assert "has no rows 'train[:x]'" in error(tmp_path, "set", split="train[:x]")


def test_the_fingerprint_is_of_the_rows_that_are_used(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": table(), "test": table(100)}).save_to_disk(tmp_path / "set")
    found = {
        split: opened(tmp_path, "set", split=split).fingerprint for split in ("train", "train[:5]", "test")
    }
    assert len(set(found.values())) == 3
    assert opened(tmp_path, "set", split="train").fingerprint == found["train"]
    table().shuffle(seed=0).save_to_disk(tmp_path / "shuffled")
    assert opened(tmp_path, "shuffled").fingerprint != found["train"]


def test_folders_that_are_no_datasets(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    assert "is not one that datasets' save_to_disk writes" in error(tmp_path, "set")
    (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "x.arrow"}]}))
    assert "can't be read as a folder of save_to_disk" in error(tmp_path, "set", DataError)
    assert "there is no folder " in error(tmp_path, "./sett")
    (tmp_path / "a.txt").write_text("x")
    assert "data files are data.path" in error(tmp_path, "a.txt")


def test_an_id_that_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    message = error(tmp_path, "nobody/nothing", split="train")
    assert "data.dataset: nobody/nothing is not in the local cache of datasets" in message
    assert "hint: call datasets.load_dataset once to download it" in message


def test_a_cached_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"text": "t{i}", "label": {i}}}' for i in range(5)))
    cache = tmp_path / "cache"
    datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(cache), split="train"
    )
    (made,) = cache.glob("json/*/*/*/dataset_info.json")
    target = cache / "somebody___some_set" / "default" / "0.0.0" / ("0" * 40)
    target.parent.mkdir(parents=True)
    made.parent.rename(target)
    for each in target.glob("json-*.arrow"):
        each.rename(target / each.name.replace("json-", "some_set-"))
    info = json.loads((target / "dataset_info.json").read_text())
    info |= {"builder_name": "json", "dataset_name": "some_set", "config_name": "default"}
    info["splits"]["train"]["dataset_name"] = "some_set"
    (target / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    before = datasets.config.HF_HUB_OFFLINE
    rows = opened(tmp_path, "somebody/some_set", split="train[:2]")
    assert rows.take(range(2)).to_pydict() == {"label": [0, 1], "text": ["t0", "t1"]}
    assert before == datasets.config.HF_HUB_OFFLINE
