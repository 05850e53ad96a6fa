"""`psgrad plan` as a user meets it: the table and its totals, JSON, and that it goes through no dataset."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.workplace import Outcome, Workplace

ROWS = 5000


def planned(workplace: Workplace, *options: str) -> Outcome:
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    return workplace.command("plan", "config.yaml", *options)


@pytest.fixture
def reluctant(workplace: Workplace) -> Workplace:
    """A dataset of which only the first few rows can be read."""
    (workplace.folder / "rows.py").write_text(f"""\
import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return {ROWS}

    def __getitem__(self, row):
        if 8 <= row < {ROWS - 8}:  # the last ones are looked at, for the dataset's fingerprint
            raise RuntimeError("this row is not for planning")
        return {{"x": torch.arange(4.0) + row, "y": row % 3}}
""")
    workplace.config["data"] = {"factory": "rows.py:Rows", "inputs": "x", "target": "y"}
    return workplace


@pytest.mark.long
def test_the_table_and_the_totals_go_to_stdout(reluctant: Workplace) -> None:
    outcome = planned(reluctant).succeeded()
    lines = outcome.out.splitlines()
    assert lines[0].split("  ")[0] == "parameter"
    assert [line.split()[:4] for line in lines[1:5]] == [
        ["0.weight", "5x4", "Product", "outer"],
        ["0.bias", "5", "Dense", "direct"],
        ["2.weight", "3x5", "Product", "outer"],
        ["2.bias", "3", "Dense", "direct"],
    ]
    totals = {line.split()[0]: line for line in lines[6:]}
    assert list(totals) == ["chunk", "time", "memory", "weights", "replay", "materialised"]
    assert f"for {ROWS:,} samples" in totals["chunk"]
    assert "resident" in totals["weights"]
    assert "no parameter" in totals["materialised"]
    assert not (reluctant.folder / "out").exists()
    assert outcome.err == ""


def test_json_says_the_same(reluctant: Workplace) -> None:
    outcome = planned(reluctant, "--json", "--set", "engine.chunk_size=100").succeeded()
    found = json.loads(outcome.out)
    assert (found["rows"], found["chunk_size"]) == (ROWS, 100)
    assert [row["parameter"] for row in found["parameters"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert found["input_bytes"] == 100 * (4 * 4 + 8)
    assert found["parameter_bytes"] == 4 * (5 * 4 + 5 + 3 * 5 + 3)
    assert found["total_bytes"] == found["peak_bytes"] + found["input_bytes"] + found["parameter_bytes"]
    assert found["seconds"] == pytest.approx(ROWS / 100 * found["chunk_seconds"])
    assert found["replayed"]
    assert "50 chunks of one size are worth a program" in found["replay_reason"]


@pytest.mark.long
def test_memory_sizes_the_chunk(reluctant: Workplace) -> None:
    reluctant.config["model"] = {"factory": "model.py:mlp", "kwargs": {"hidden": 2000}}
    found = [
        json.loads(planned(reluctant, "--json", "--set", f"engine.memory={budget}MB").out)
        for budget in (4, 8)
    ]
    for plan, budget in zip(found, (4e6, 8e6), strict=True):
        assert 0.8 * budget < plan["peak_bytes"] + plan["input_bytes"] <= budget
    assert found[0]["chunk_size"] < found[1]["chunk_size"]


def test_a_model_that_fails_is_reported_as_by_analyze(reluctant: Workplace) -> None:
    reluctant.use_model("def Model():\n    return nn.Sequential(nn.Linear(7, 3))\n")
    planned(reluctant).refused(3, "row 0")
