"""`psgrad validate`: all mistakes of a config at once, then the first of what it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
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


def test_validate_says_what_it_found_and_writes_nothing(workplace: Workplace) -> None:
    outcome = validated(workplace).succeeded()
    inputs, target = torch.from_numpy(workplace.arrays["x"]), torch.from_numpy(workplace.arrays["y"])
    losses = torch.nn.functional.cross_entropy(workplace.model(inputs), target, reduction="none")
    assert f"losses: {losses.min():.4g} to {losses.max():.4g} over {ROWS} rows" in outcome.out
    numbers = sum(tensor.numel() for tensor in workplace.model.state_dict().values())
    assert f"model: {numbers} trained numbers in 4 parameters, on " in outcome.out
    assert f"data: data.npz: {ROWS} rows" in outcome.out
    assert "self-check: worst relative error" in outcome.out
    assert "no problems found" in outcome.out
    assert not (workplace.folder / "out").exists()


def test_validate_json_is_one_object(workplace: Workplace) -> None:
    workplace.config["engine"] = {"chunksize": 3}
    workplace.config["data"]["target"] = 3
    outcome = validated(workplace, "--json")
    assert outcome.code == 2
    found = json.loads(outcome.out)
    assert (found["schema_version"], found["valid"]) == (1, False)
    assert [problem["exit_code"] for problem in found["problems"]] == [2, 2]
    assert "chunk_size" in found["problems"][1]["message"]


def test_validate_lists_all_mistakes_of_the_config_at_once(workplace: Workplace) -> None:
    workplace.config["engine"] = {"chunksize": 3, "dtype": "float8"}
    workplace.config["analyze"] = {"measures": ["el2m"], "outliers": {"detectors": ["isolation_forrest"]}}
    workplace.config["influence"] = {"method": "ekfak"}
    workplace.config["loss"] = "mean_squared"
    words = ("chunk_size?", "engine.dtype", "did you mean el2n?", "did you mean isolation_forest?")
    refused(workplace, 2, "has 6 problems", *words, "did you mean ekfac?", "there is no loss 'mean_squared'")


def test_validate_says_what_analyze_says_in_the_same_words(workplace: Workplace) -> None:
    workplace.config["data"]["target"] = "label"
    words = workplace.analyze().err.removeprefix("error: ").splitlines()
    err = refused(workplace, 2)
    assert all(line.strip() in err for line in words)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"model": {"factory": "models.py:mlp"}}, "there is no file models.py"),
        ({"model": {"factory": "model.py:mpl"}}, "did you mean mlp?"),
        ({"model": {"factory": "no_such_package.nets:mlp"}}, "there is no module 'no_such_package'"),
        ({"model": {"factory": "model.py:mlp", "kwargs": {"hiden": 3}}}, "the kwargs of model.py:mlp"),
        ({"model": {"factory": "model.py:mlp", "checkpoint": "gone.pt"}}, "there is no checkpoint gone.pt"),
        ({"data": {"path": "gone.npz", "inputs": "x", "target": "y"}}, "there is no dataset gone.npz"),
        ({"analyze": {"measures": ["mine.py:Mine"]}}, "there is no file mine.py"),
        ({"analyze": {"measures": [{"name": "hessian_trace", "probes": "many"}]}}, "hessian_trace.probes"),
        ({"analyze": {"checkpoints": ["gone.safetensors"]}}, "there is no checkpoint gone.safetensors"),
        ({"analyze": {"outliers": {"reference": "gone.json"}}}, "there is no baseline gone.json"),
        ({"analyze": {"outliers": {"reference": "gone"}}}, "gone holds no run of psgrad"),
        ({"analyze": {"outliers": {"reference": {"data": {"path": "gone.npz"}}}}}, "a run of their own"),
        ({"gate": {"ignore": "gone.yaml"}}, "there is no ignore list gone.yaml"),
        ({"influence": {"method": {"name": "trak", "dimensions": 3}}}, "did you mean dimension?"),
        ({"influence": {"queries": {"path": "gone.npz"}}}, "there is no dataset gone.npz"),
        ({"loss": "losses.py:mine"}, "there is no file losses.py"),
        ({"loss": {"name": "huber", "beta": 2.0}}, "it takes delta"),
    ],
)
def test_validate_names_what_is_not_there(workplace: Workplace, section: dict[str, Any], words: str) -> None:
    workplace.config |= section
    outcome = validated(workplace)
    assert outcome.code in (2, 3)
    assert words in outcome.err, outcome.err


def test_validate_finds_damaged_and_misfitting_files(workplace: Workplace) -> None:
    weights, state = workplace.folder / "model.safetensors", workplace.model.state_dict()
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-20])
    refused(workplace, 3, "the checkpoint model.safetensors is damaged")
    save_file({**state, "2.bias": torch.zeros(7)}, weights)
    refused(workplace, 3, "2.bias", "[7]")
    weights.write_bytes(whole)
    (workplace.folder / "data.npz").write_bytes(b"")
    refused(workplace, 3, "the dataset data.npz is empty")
    (workplace.folder / "model.py").write_text("def mlp(:\n")
    refused(workplace, 3, "importing model.py raised SyntaxError")


def test_validate_says_that_a_gate_can_not_be_decided(workplace: Workplace) -> None:
    workplace.config["gate"] = {"max_outliers": 2}
    words = "gate.max_outliers can't be passed (exit code 4): "
    assert f"{words}without a reference" in validated(workplace).err
    rows = {"x": np.zeros((500, 4), np.float32), "y": np.zeros(500, np.int64), "uid": np.arange(500)}
    np.savez(workplace.folder / "trusted.npz", **rows)
    workplace.save(**{name: np.concatenate([value] * 2) for name, value in rows.items() if name != "uid"})
    workplace.save(uid=np.arange(1000))
    workplace.measured_apart("trusted.npz")
    workplace.config["analyze"] = {"outliers": {"reference": "trusted"}}
    # With 500 trusted samples p is at least 1 / 501; .1 * k / 1000 reaches that from k = 20 on.
    assert f"{words}0 outliers, and 2 may be; but fewer than 20 outliers" in validated(workplace).err
    workplace.config["gate"] = {"max_outliers": 19}
    assert "can't be passed" not in validated(workplace).err


def test_validate_reads_the_baseline_of_the_gate(workplace: Workplace) -> None:
    workplace.config["gate"] = {"baseline": "baseline.json"}
    outcome = validated(workplace)
    assert outcome.code == 0
    assert "there is no baseline baseline.json yet" in outcome.err
    (workplace.folder / "baseline.json").write_text("{}")
    refused(workplace, 3, "baseline.json")


def test_validate_notes_an_earlier_run_and_refuses_a_folder_of_others(workplace: Workplace) -> None:
    folder = workplace.folder / "out"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    refused(workplace, 2, "not empty and does not hold a psgrad run")
    (folder / "manifest.json").write_text('{"tool": "psgrad", "command": "analyze", "state": "failed"}')
    outcome = validated(workplace)
    assert outcome.code == 0
    assert "out holds a run of psgrad analyze (failed): --resume goes on with it" in outcome.err
    refused(workplace, 2, "exists and is not a folder", options=("--output", "config.yaml"))


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
