"""`psgrad validate`: every mistake that can be known without running, all at once, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.workplace import ROWS, Outcome, Workplace


def validated(workplace: Workplace, *options: str) -> Outcome:
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    return workplace.command("validate", "config.yaml", *options)


def refused(workplace: Workplace, code: int, *words: str, options: tuple[str, ...] = ()) -> str:
    outcome = validated(workplace, *options)
    assert outcome.code == code, outcome.err
    for word in words:
        assert word in outcome.err, outcome.err
    assert "Traceback" not in outcome.err
    assert "internal error" not in outcome.err
    return outcome.err


# -- What is right -------------------------------------------------------------------------------------------


def test_what_was_found_is_reported(workplace: Workplace) -> None:
    outcome = validated(workplace)
    assert outcome.code == 0, outcome.err
    assert f"data: data.npz: {ROWS} rows; x float32 [4], y int64, uid <U6" in outcome.out
    numbers = sum(tensor.numel() for tensor in workplace.model.state_dict().values())
    assert f"model.checkpoint: model.safetensors: 4 tensors, {numbers} numbers" in outcome.out
    assert "no problems found" in outcome.out
    assert not (workplace.folder / "out").exists()


@pytest.mark.long
def test_deep_tells_losses_and_memory(workplace: Workplace) -> None:
    outcome = validated(workplace, "--deep")
    assert outcome.code == 0, outcome.err
    inputs, target = torch.from_numpy(workplace.arrays["x"]), torch.from_numpy(workplace.arrays["y"])
    losses = torch.nn.functional.cross_entropy(workplace.model(inputs), target, reduction="none")
    assert f"losses: {losses.min():.4g} to {losses.max():.4g} over {ROWS} rows" in outcome.out
    assert "self-check: worst relative error" in outcome.out
    assert "memory: about" in outcome.out


def test_json_is_one_object(workplace: Workplace) -> None:
    workplace.config["data"]["target"] = "label"
    workplace.config["model"]["checkpoint"] = "gone.safetensors"
    outcome = validated(workplace, "--json")
    assert outcome.code == 2
    found = json.loads(outcome.out)
    assert found["schema_version"] == 1
    assert found["valid"] is False
    assert [problem["where"] for problem in found["problems"]] == ["model.checkpoint", "data"]
    assert found["problems"][1]["expected"] == "one of its columns: x, y, uid"


# -- All at once ---------------------------------------------------------------------------------------------


def test_mistakes_of_the_config_and_of_what_it_names_are_reported_together(workplace: Workplace) -> None:
    workplace.config["engine"] = {"chunksize": 3, "dtype": "float8"}
    workplace.config["model"]["factory"] = "model.py:mpl"
    workplace.config["data"] |= {"target": "label", "id": "name"}
    workplace.config["analyze"] = {"measures": ["el2m", {"name": "el2n", "steps": 3}]}
    err = refused(workplace, 2, "has 7 problems")
    for words in (
        "chunk_size?",
        "engine.dtype",
        "did you mean mlp?",
        "no column 'label'",
        "no column 'name'",
        "did you mean el2n?",
        "steps",
    ):
        assert words in err


def test_what_analyze_would_say_is_said_in_the_same_words(workplace: Workplace) -> None:
    workplace.config["data"]["target"] = "label"
    told = workplace.analyze().err.removeprefix("error: ").splitlines()
    err = refused(workplace, 2)
    assert all(line.strip() in err for line in told)


# -- The model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "kwargs", "words"),
    [
        ("models.py:mlp", {}, "there is no file models.py"),
        (
            "model.py:mlp",
            {"hiden": 3},
            "the kwargs of model.py:mlp don't fit it: got an unexpected keyword argument 'hiden'",
        ),
        ("no_such_package.nets:mlp", {}, "there is no module 'no_such_package'"),
        ("model.py:F", {}, None),  # an import is a name, too
        ("torch.nn:Identity", {}, None),
    ],
)
def test_factories(workplace: Workplace, factory: str, kwargs: dict[str, Any], words: str | None) -> None:
    workplace.config["model"] |= {"factory": factory, "kwargs": kwargs}
    if words is None:
        assert validated(workplace).code == 0
    else:
        refused(workplace, 2, words)


def test_code_is_not_run(workplace: Workplace) -> None:
    (workplace.folder / "model.py").write_text(
        "open('ran', 'w')\nraise SystemExit\ndef mlp(hidden=5):\n    pass\n"
    )
    assert validated(workplace).code == 0
    assert not (workplace.folder / "ran").exists()


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    from nets import mlp\nexcept ImportError:\n    def mlp(): ...\n",
        "from nets import *\n",
        "globals()['mlp'] = int\n",
        "if True:\n    mlp = int\n",
        "def __getattr__(name): ...\n",
    ],
)
def test_names_that_may_be_there_are_no_mistake(workplace: Workplace, source: str) -> None:
    (workplace.folder / "model.py").write_text(source)
    assert validated(workplace).code == 0


def test_code_that_is_no_python(workplace: Workplace) -> None:
    (workplace.folder / "model.py").write_text("def mlp(:\n")
    refused(workplace, 3, "importing model.py would raise SyntaxError", "line 1")
    (workplace.folder / "model.py").write_bytes(b"\x00\xff" * 50)
    refused(workplace, 3, "importing model.py would raise")


# -- Checkpoints ---------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint(workplace: Workplace) -> None:
    path = workplace.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    refused(workplace, 3, "the checkpoint model.safetensors is damaged")


def test_a_checkpoint_of_another_model_is_found_by_deep(workplace: Workplace) -> None:
    state = workplace.model.state_dict()
    state["2.bias"] = torch.zeros(7)
    save_file(state, workplace.folder / "model.safetensors")
    assert validated(workplace).code == 0
    refused(workplace, 3, "2.bias", "[7]", options=("--deep",))


def test_a_pickle_is_said_to_be_unchecked(workplace: Workplace) -> None:
    torch.save(workplace.model.state_dict(), workplace.folder / "model.pt")
    workplace.config["model"]["checkpoint"] = "model.pt"
    outcome = validated(workplace)
    assert outcome.code == 0
    assert "what model.pt holds is checked with --deep" in outcome.err
    assert "--deep" not in validated(workplace, "--deep").err


def test_rows_of_a_folder_of_images_are_counted(workplace: Workplace) -> None:
    for number in range(3):
        (workplace.folder / "images" / "a").mkdir(parents=True, exist_ok=True)
        (workplace.folder / "images" / "a" / f"{number}.png").write_bytes(b"")
    workplace.config["data"] = {"images": "images"}
    assert "data: images: 3 rows; image image" in validated(workplace).out


def test_rows_not_counted_is_not_said_where_all_are_read(workplace: Workplace) -> None:
    count = 1001  # more than the header reads
    frame = pd.DataFrame(np.zeros((count, 4)), columns=list("abcd")).assign(y=np.arange(count) % 3)
    frame.to_csv(workplace.folder / "rows.csv", index=False)
    workplace.config["data"] = {"path": "rows.csv", "inputs": list("abcd"), "target": "y"}
    assert "rows not counted" in validated(workplace).out
    deep = validated(workplace, "--deep").out
    assert "rows not counted" not in deep
    assert "rows: 1,001" in deep


def test_a_gate_without_a_reference_is_said_to_be_undecided(workplace: Workplace) -> None:
    workplace.config["gate"] = {"max_outliers": 2}
    outcome = validated(workplace)
    assert outcome.code == 0
    assert "gate.max_outliers can't be passed (exit code 4): without a reference" in outcome.err


def test_a_gate_that_its_reference_can_not_decide_is_said_to_be_so(workplace: Workplace) -> None:
    rows = {"x": np.zeros((500, 4), np.float32), "y": np.zeros(500, np.int64), "uid": np.arange(500)}
    np.savez(workplace.folder / "trusted.npz", **rows)
    workplace.save(**{name: np.concatenate([value] * 2) for name, value in rows.items() if name != "uid"})
    workplace.save(uid=np.arange(1000))
    workplace.config["analyze"] = {"outliers": {"reference": {"data": {"path": "trusted.npz"}}}}
    workplace.config["gate"] = {"max_outliers": 2}
    said = validated(workplace).err
    # With 500 trusted samples p is at least 1 / 501; .1 * k / 1000 reaches that from k = 20 on.
    assert "gate.max_outliers can't be passed (exit code 4): 0 outliers, and 2 may be;" in said
    assert "fewer than 20 outliers can't be told from chance" in said
    assert "or gate.max_outliers: 19" in said
    workplace.config["gate"] = {"max_outliers": 19}
    assert "can't be passed" not in validated(workplace).err
    workplace.config["analyze"]["outliers"]["group_by"] = "class"
    assert "can't be passed" not in validated(workplace, "--set", "gate.max_outliers=2").err


def test_an_index_whose_shard_is_missing_or_lacks_a_tensor(workplace: Workplace) -> None:
    workplace.config["model"]["checkpoint"] = "model.safetensors.index.json"
    index = {
        "weight_map": {
            **dict.fromkeys(workplace.model.state_dict(), "model.safetensors"),
            "3.bias": "gone.safetensors",
        }
    }
    (workplace.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(workplace, 2, "there is no shard gone.safetensors")
    index["weight_map"]["3.bias"] = "model.safetensors"
    (workplace.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(workplace, 3, "says that 3.bias is in model.safetensors, and it is not")


@pytest.mark.parametrize("section", ["analyze", "influence"])
def test_checkpoints_of_one_training_have_the_same_tensors(workplace: Workplace, section: str) -> None:
    state = workplace.model.state_dict()
    save_file({**state, "0.bias": torch.zeros(9)}, workplace.folder / "later.safetensors")
    save_file(
        {name: tensor for name, tensor in state.items() if name != "2.bias"},
        workplace.folder / "less.safetensors",
    )
    paths = ["model.safetensors", "later.safetensors", "less.safetensors"]
    workplace.config[section] = {
        "checkpoints": [{"path": path} for path in paths] if section == "influence" else paths
    }
    err = refused(
        workplace,
        3,
        "has 2 problems",
        "later.safetensors has 0.bias [9] instead of [5]",
        "less.safetensors lacks 2.bias",
    )
    assert f"{section}.checkpoints.1" in err


# -- The data ------------------------------------------------------------------------------------------------


def write_data(workplace: Workplace, kind: str, **columns: Any) -> None:
    content = {
        "x": workplace.arrays["x"],
        "y": workplace.arrays["y"],
        "uid": workplace.arrays["uid"],
        **columns,
    }
    path = workplace.folder / f"data.{kind}"
    if kind == "npz":
        np.savez(path, **content)
    elif kind == "safetensors":
        save_file(
            {
                name: torch.as_tensor(np.arange(len(v)) if v.dtype.kind == "U" else v)
                for name, v in content.items()
            },
            path,
        )
    else:
        frame = pd.DataFrame({name: list(v) if v.ndim > 1 else v for name, v in content.items()})
        if kind == "csv":
            frame.assign(x=workplace.arrays["x"][:, 0] if "x" not in columns else columns["x"]).to_csv(
                path, index=False
            )
        else:
            frame.to_parquet(path)
    workplace.config["data"]["path"] = path.name


@pytest.mark.parametrize("kind", ["npz", "csv", "parquet", "safetensors"])
def test_headers_of_every_format(workplace: Workplace, kind: str) -> None:
    write_data(workplace, kind)
    outcome = validated(workplace)
    assert outcome.code == 0, outcome.err
    assert f"data.{kind}: {ROWS} rows" in outcome.out
    workplace.config["data"]["target"] = "z"
    refused(workplace, 2, "has no column 'z'", "one of its columns:")


@pytest.mark.parametrize("kind", ["npz", "csv", "parquet"])
def test_text_where_numbers_should_be(workplace: Workplace, kind: str) -> None:
    write_data(workplace, kind, y=np.array(["cat", "dog", "cow"])[workplace.arrays["y"]])
    assert validated(workplace).code == 0  # names of classes
    workplace.config["loss"] = "mse"
    refused(workplace, 3, "'y' is of type", "encode classes as 0, 1, 2")


@pytest.mark.parametrize("kind", ["npz", "csv", "parquet", "safetensors"])
def test_damaged_and_empty_files(workplace: Workplace, kind: str) -> None:
    write_data(workplace, kind)
    path = workplace.folder / f"data.{kind}"
    content = path.read_bytes()
    if kind != "csv":
        path.write_bytes(content[: len(content) // 2])
        refused(workplace, 3, f"data.{kind}")
    path.write_bytes(b"")
    refused(workplace, 3, f"the dataset data.{kind} is empty")
    path.write_bytes(b"\xff\x00\xfe" * 100)
    refused(workplace, 3, f"data.{kind}")


def test_classes_as_fractions(workplace: Workplace) -> None:
    write_data(workplace, "npz", y=workplace.arrays["y"] + 0.5)
    assert validated(workplace).code == 0  # they may be whole
    workplace.config["loss"] = "nll"
    write_data(workplace, "npz", y=np.ones((ROWS, 3)))
    refused(workplace, 3, "the targets 'y' are of type float64", "whole numbers, one per label")


def test_many_files_whose_columns_differ(workplace: Workplace) -> None:
    for number, x in enumerate(([0.5, 1], ["a", "b"])):
        frame = pd.DataFrame({"x": x, "y": [0, 1], "uid": [2 * number, 2 * number + 1]})
        frame.to_parquet(workplace.folder / f"part-{number}.parquet")
    workplace.config["data"]["path"] = "part-*.parquet"
    refused(workplace, 3, "'x' is of type")
    workplace.config["data"]["path"] = ["part-0.parquet", "part-2.parquet"]
    refused(workplace, 2, "there is no dataset part-2.parquet")
    pd.DataFrame({"x": [1, 2], "y": [0.5, 1], "uid": [2, 3]}).to_parquet(workplace.folder / "part-1.parquet")
    workplace.config["data"]["path"] = "part-*.parquet"
    assert "part-*.parquet: 4 rows" in validated(workplace).out


def test_lengths_ids_and_objects(workplace: Workplace) -> None:
    write_data(workplace, "npz", y=workplace.arrays["y"][:-1])
    refused(workplace, 3, "different numbers of rows", f"y has {ROWS - 1}")
    write_data(workplace, "npz", uid=np.zeros((ROWS, 2)))
    refused(workplace, 3, f"the ids 'uid' in data.npz have the shape [{ROWS}, 2]")
    write_data(workplace, "npz", uid=np.array([None] * ROWS))
    refused(workplace, 3, "array of Python objects")


def test_a_large_file_is_not_read(workplace: Workplace) -> None:
    """Only the header of 400 MB that are not there: a file with a hole."""
    path = workplace.folder / "large.safetensors"
    header = {"x": {"dtype": "F32", "shape": [100_000_000], "data_offsets": [0, 400_000_000]}}
    header["y"] = {"dtype": "I64", "shape": [100_000_000], "data_offsets": [400_000_000, 1_200_000_000]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 1_200_000_000)
    workplace.config["data"] = {"path": path.name, "inputs": "x", "target": "y"}
    assert "100,000,000 rows" in validated(workplace).out


# -- What else a config names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"analyze": {"measures": ["nothing_of_the_kind"]}}, "there is no measure 'nothing_of_the_kind'"),
        ({"analyze": {"measures": ["mine.py:Mine"]}}, "there is no file mine.py"),
        ({"analyze": {"outliers": {"detectors": ["isolation_forrest"]}}}, "did you mean isolation_forest?"),
        ({"analyze": {"outliers": {"reference": "gone.json"}}}, "there is no baseline gone.json"),
        ({"analyze": {"outliers": {"reference": "gone"}}}, "gone holds no run of psgrad"),
        (
            {"analyze": {"outliers": {"reference": {"data": {"path": "gone.npz"}}}}},
            "there is no dataset gone.npz",
        ),
        ({"gate": {"ignore": "gone.yaml"}}, "there is no ignore list gone.yaml"),
        ({"influence": {"method": "ekfak"}}, "did you mean ekfac?"),
        ({"influence": {"method": {"name": "trak", "dimensions": 3}}}, "did you mean dimension?"),
        (
            {"influence": {"queries": {"path": "gone.npz", "inputs": "x", "target": "y"}}},
            "there is no dataset gone.npz",
        ),
        ({"loss": "losses.py:mine"}, "there is no file losses.py"),
    ],
)
def test_what_is_not_there(workplace: Workplace, section: dict[str, Any], words: str) -> None:
    workplace.config |= section
    outcome = validated(workplace)
    assert outcome.code in (2, 3)
    assert words in outcome.err


def test_a_baseline_that_is_yet_to_be_saved_is_no_problem(workplace: Workplace) -> None:
    workplace.config["gate"] = {"baseline": "baseline.json", "new_only": True}
    outcome = validated(workplace)
    assert outcome.code == 0
    assert "there is no baseline baseline.json yet" in outcome.err
    (workplace.folder / "baseline.json").write_text("{}")
    refused(workplace, 3, "baseline.json")


@pytest.mark.long
@pytest.mark.parametrize("names", [["a", "b"], ["a", "b", "c", "d"]])
def test_class_names_that_are_not_one_for_each_output_are_found_by_deep(
    workplace: Workplace, names: list[str]
) -> None:
    workplace.config["data"]["class_names"] = names
    words = f"data.class_names has {len(names)} names, {', '.join(names)}, and the model has 3 outputs"
    refused(workplace, 2, words, options=("--deep",))
    workplace.config["data"]["class_names"] = ["a", "b", "c"]
    assert validated(workplace, "--deep").code == 0


def test_options_of_measures_have_values_that_deep_checks(workplace: Workplace) -> None:
    workplace.config["analyze"] = {"measures": [{"name": "hessian_trace", "probes": "many"}]}
    assert validated(workplace).code == 0
    refused(workplace, 2, "hessian_trace.probes", "whole number", options=("--deep",))


# -- The output ----------------------------------------------------------------------------------------------


def test_an_earlier_run_is_noted_and_a_strangers_folder_refused(workplace: Workplace) -> None:
    folder = workplace.folder / "out"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    refused(workplace, 2, "not empty and does not hold a psgrad run")
    (folder / "manifest.json").write_text('{"tool": "psgrad", "command": "analyze", "state": "failed"}')
    outcome = validated(workplace)
    assert outcome.code == 0
    assert "out holds a run of psgrad analyze (failed): --resume goes on with it" in outcome.err
    refused(workplace, 2, "exists and is not a folder", options=("--output", "config.yaml"))


def test_a_disk_without_room_is_reported(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    refused(workplace, 3, "has 1,000 bytes left", "another disk")


# -- The config itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["validate", "analyze", "plan", "influence", "dp-step"])
@pytest.mark.parametrize("kind", ["folder", "binary", "empty", "list", "huge", "missing", "unreadable name"])
def test_files_that_are_no_config(workplace: Workplace, command: str, kind: str) -> None:
    path = workplace.folder / "it.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "unreadable name":
        path = Path("a\x00b")
    elif kind != "missing":
        content = {
            "binary": b"\x00\xff\x80" * 99,
            "empty": b"",
            "list": b"- 1\n",
            "huge": b"# " + b"x" * (2 << 20),
        }
        path.write_bytes(content[kind])
    workplace.command(command, str(path)).refused(2)


def test_image_folders(workplace: Workplace) -> None:
    (workplace.folder / "images" / "cat").mkdir(parents=True)
    workplace.config["data"] = {"images": "images"}
    refused(workplace, 3, "images has no rows")
    (workplace.folder / "images" / "cat" / "0.png").write_bytes(b"")
    outcome = validated(workplace)
    assert outcome.code == 0, outcome.err
    workplace.config["data"] |= {"target": "lable"}
    refused(workplace, 2, "images has no column 'lable'; did you mean label?")
    (workplace.folder / "images" / "metadata.csv").write_text("file_name,y\ncat/0.png,1\n")
    workplace.config["data"] = {"images": "images", "target": "z"}
    refused(workplace, 2, "metadata.csv has no column 'z'", "one of its columns: image, y")
    workplace.config["data"] = {"images": "nowhere"}
    refused(workplace, 2, "data.images: there is no folder nowhere")


def test_datasets_of_the_library(workplace: Workplace) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": workplace.arrays["x"].tolist(), "y": workplace.arrays["y"].tolist()}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(workplace.folder / "set")
    workplace.config["data"] = {"dataset": "set", "inputs": "x", "target": "y"}
    outcome = validated(workplace)
    assert outcome.code == 0, outcome.err
    assert f"set: {ROWS} rows; x list" in outcome.out
    workplace.config["data"]["inputs"] = "z"
    refused(workplace, 2, "set has no column 'z'")
    workplace.config["data"] |= {"inputs": "x", "split": "test"}
    refused(workplace, 2, "has no rows 'test'")
    workplace.config["data"] |= {"dataset": "someone/something"}
    refused(workplace, 2, "someone/something is not in the local cache of datasets")
