"""`psgrad plan` as a user meets it: the table and its totals, JSON, and that it goes through no dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from psgrad.engine.gradients import machine
from psgrad.reports.words import amount, duration
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
    outcome = planned(reluctant)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].split("  ")[0] == "parameter"
    assert [line.split()[:4] for line in lines[1:5]] == [
        ["0.weight", "5x4", "Product", "outer"],
        ["0.bias", "5", "Dense", "direct"],
        ["2.weight", "3x5", "Product", "outer"],
        ["2.bias", "3", "Dense", "direct"],
    ]
    totals = {line.split()[0]: line for line in lines[6:]}
    assert list(totals) == ["chunk", "time", "memory", "weights", "replay", "materialised", "machine"]
    assert f"for {ROWS:,} samples" in totals["chunk"]
    assert "resident" in totals["weights"]
    assert "no parameter" in totals["materialised"]
    assert "built in" in totals["machine"]
    assert not (reluctant.folder / "out").exists()
    assert outcome.err == ""


def test_json_says_the_same(reluctant: Workplace) -> None:
    outcome = planned(reluctant, "--json", "--set", "engine.chunk_size=100")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert (found["rows"], found["chunk_size"], found["obstacle"]) == (ROWS, 100, None)
    assert [row["parameter"] for row in found["parameters"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert found["input_bytes"] == 100 * (4 * 4 + 8)
    assert found["parameter_bytes"] == 4 * (5 * 4 + 5 + 3 * 5 + 3)
    assert found["total_bytes"] == found["peak_bytes"] + found["input_bytes"] + found["parameter_bytes"]
    assert found["seconds"] == pytest.approx(ROWS / 100 * found["chunk_seconds"])
    assert not found["replayed"]
    assert "50 whole chunks" in found["replay_reason"]


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


def test_parameters_that_are_materialised_are_named(reluctant: Workplace) -> None:
    reluctant.use_model("""\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return x @ self.weight.cumsum(1).t()
""")
    outcome = planned(reluctant)
    assert outcome.code == 0, outcome.err
    assert "materialised weight" in outcome.out


@pytest.mark.long
def test_a_first_plan_measures_and_keeps_the_machine(
    reluctant: Workplace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(machine.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "psgrad.workflows.plan.measure", machine.built_in
    )  # what it measures is tested elsewhere
    first, second = planned(reluctant), planned(reluctant)
    assert first.err.startswith("measuring ")
    assert second.err == "" or "measuring" in second.err  # built-in constants are those of no machine
    kept = list((tmp_path / "cache" / "psgrad").glob("*.json"))
    assert len(kept) == 1
    assert str(kept[0]) in second.out
    machine.use(None)


def test_constants_of_ones_own_are_read(reluctant: Workplace) -> None:
    (reluctant.folder / "mine.json").write_text(json.dumps({"name": "mine"}))
    outcome = planned(reluctant, "--set", "engine.machine=mine.json")
    assert outcome.code == 2
    assert "engine.machine: " in outcome.err
    assert "'attention' is missing" in outcome.err
    assert outcome.out == ""
    machine.use(None)


def test_a_model_that_fails_is_reported_as_by_analyze(reluctant: Workplace) -> None:
    reluctant.use_model("""\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 3)

    def forward(self, x):
        return self.layer(x)
""")
    outcome = planned(reluctant)
    assert outcome.code == 3
    assert "row 0" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (18_156_000, "18.2 MB"), (3e12, "3 TB"), (5e15, "5e+03 TB")],
)
def test_bytes_have_units(size: float, text: str) -> None:
    assert amount(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12.3 ms"), (4.56, "4.56 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_seconds_have_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plan_of_processes_follows_the_simulation(reluctant: Workplace) -> None:
    """Two processes take the rows in half of the time, beside their startup."""
    reluctant.config["analyze"] = {"measures": ["cosine_to_mean"]}
    found = json.loads(planned(reluctant, "--json", "--processes", "2").out)
    assert found["processes"]["processes"] == 2
    spent, work = found["processes"]["spent"], found["seconds"]
    assert spent["computing"] == pytest.approx(work / 2, rel=0.2)
    assert found["processes"]["seconds"] == pytest.approx(sum(spent.values()))
    assert spent[found["processes"]["bottleneck"]] == max(
        spent[name] for name in spent if name != "computing"
    )
    # cosine_to_mean gathers the sum of the gradients, in float64
    parameters = found["parameter_bytes"] / 4
    assert found["processes"]["gathered_bytes"] >= 8 * parameters
    assert found["processes"]["network_bytes"] == 2 * found["processes"]["gathered_bytes"]


def test_plan_of_processes_counts_what_is_read_for_hashes_and_by_each_host(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 processes are eight hosts, each of which converts the file, and takes no sample here."""
    monkeypatch.setattr("psgrad.workflows.plan.SAMPLES", 0)
    found = json.loads(planned(workplace, "--json", "--processes", "64").out)
    size = (workplace.folder / "data.npz").stat().st_size
    rows = found["rows"] * (found["input_bytes"] / found["chunk_size"] + 200)
    wanted = 8 * (found["parameter_bytes"] + size) + size + rows
    assert found["processes"]["storage_bytes"] == pytest.approx(wanted, abs=1)
    assert 0 < found["processes"]["spent"]["identity"] < 1e-3


FLAT = """
def Model():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
"""


@pytest.mark.long
def test_plan_of_processes_counts_the_first_look_at_images(workplace: Workplace) -> None:
    """At all of them, as large as the mean of a few."""
    image = pytest.importorskip("PIL.Image")
    (workplace.folder / "images").mkdir()
    rows, sizes = 392, (10_000, 20_000)  # of which 8 are looked at, as many of each size
    for number, size in enumerate(sizes):
        file = workplace.folder / "images" / f"{number}.png"
        image.new("L", (2, 2), number).save(file)
        file.write_bytes(file.read_bytes().ljust(size, b"\0"))
    lines = ["file_name,label,uid", *(f"{row % 2}.png,{row % 3},{row}" for row in range(rows))]
    (workplace.folder / "images" / "metadata.csv").write_text("\n".join(lines))
    workplace.use_model(FLAT)
    workplace.config["data"] = {"images": "images", "target": "label", "id": "uid"}
    found = json.loads(planned(workplace, "--json", "--processes", "1").out)
    every = rows * sum(sizes) / 2
    written = rows * 200 + found["parameter_bytes"]
    assert found["processes"]["storage_bytes"] == pytest.approx(2 * every + written, abs=1)
    looking = rows * (194e-6 + 2 * 3.6e-6) + every * 0.83e-9
    assert found["processes"]["spent"]["identity"] == pytest.approx(looking, rel=1e-6)


def test_plan_of_processes_is_four_lines(reluctant: Workplace) -> None:
    lines = planned(reluctant, "--processes", "64").out.splitlines()[-4:]
    assert lines[0].startswith("processes    64: ")
    assert "efficiency" in lines[0]
    assert "over the network" in lines[1]
    assert lines[2] == "             weights resident, 172 B in each"
    assert lines[3].startswith("assumed      machines like this one, 1.25 GB/s between two processes")


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (872, "resident, 172 B"),
        (871, "sharded over 2 processes, 246 B in each; 112 B"),
        (350, "offloaded, 87 B in each; 172 B"),
    ],
)
def test_plan_of_processes_says_where_weights_live(
    reluctant: Workplace, monkeypatch: pytest.MonkeyPatch, free: int, words: str
) -> None:
    """The checkpoint's file has 436 bytes, the largest weight 80."""
    monkeypatch.setattr("psgrad.workflows.residence.free_memory", lambda device: free)
    found = planned(reluctant, "--processes", "2").out
    assert f"weights {words}" in found


def test_plan_of_no_process_is_refused(reluctant: Workplace) -> None:
    outcome = planned(reluctant, "--processes", "0")
    assert outcome.code == 2
    assert "--processes" in outcome.err
