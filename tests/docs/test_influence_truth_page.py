"""benchmarks/influence-truth.md, from results that are stored and from made-up ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools import influence_page
from tools.influence_page import PAGE, RESULTS, TITLES, best_and_cheapest, generated, verdict

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "influence_settings.py"


def row(name: str, mean: float, behind: float, kind: str = "psgrad", seconds: float | None = 1.0) -> Any:
    """behind: how far it is behind the middle one of the order."""
    around = [mean - 0.01, mean + 0.01], [behind - 0.02, behind + 0.02]
    return {"name": name, "kind": kind, "mean": mean, "interval": around[0], "behind": behind} | {
        "behind_interval": around[1],
        "cpu_seconds": seconds,
        "memory": None if seconds is None else 3 * 2**20,
    }


CONTENT = {
    "words": "A network",
    "parameters": 4810,
    "training_rows": 1437,
    "epochs": 80,
    "loss": {"training": 0.25, "queries": 0.5},
    "subsets": 100,
    "seeds": 3,
    "share": 0.5,
    "queries": 300,
    "truth_cpu_seconds": 20.0,
    "ceiling": {"single": 0.81, "best": 0.96},
    "machine": {"processor": "a processor", "torch": "2.13"},
    "order": ["checkpoints", "models", "model"],
    "not_run": {"slow": "it takes minutes"},
    "notes": ["Measured on a Tuesday."],
    "intervals": "jackknife",
    "rows": [
        row("checkpoints", 0.75, -0.05, seconds=9.0),
        row("models", 0.7, 0.0, seconds=8.0),
        row("model", 0.69, 0.01, seconds=2.0),
        row("quick", 0.3, 0.4, seconds=0.1),
        row("other library's", 0.8, -0.1, "rival"),
        row("control: random", 0.0, 0.7, "control", None),
    ],
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with the result of one setting."""
    (tmp_path / "influence-published.json").write_text("[]")
    (tmp_path / "influence-setting-cnn-cpu.json").write_text(json.dumps(CONTENT))
    return tmp_path


def cells(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_setting_without_a_result_is_not_measured(results: Path) -> None:
    text = generated(results)
    assert text.count("Not measured yet. This command measures it") == len(TITLES) - 1
    assert "--setting digits --json benchmarks/results/influence-setting-digits-cpu.json" in text
    assert cells(text, "Digits network")[1] == "not measured yet"


def test_intervals_of_an_earlier_version_are_named(results: Path) -> None:
    assert "the version before" not in generated(results)
    earlier = {key: value for key, value in CONTENT.items() if key != "intervals"}
    (results / "influence-setting-cnn-cpu.json").write_text(json.dumps(earlier))
    assert "the version before: intervals are basic bootstrap" in generated(results)


def test_the_table_of_a_setting(results: Path) -> None:
    text = generated(results)
    assert cells(text, "checkpoints") == ["checkpoints", "psgrad", "0.750 (0.740 to 0.760)", "9.0", "3"]
    assert cells(text, "random")[1:3] == ["control", "0.000 (-0.010 to 0.010)"]
    assert "- slow: it takes minutes." in text
    assert "one thread, torch 2.13.\nMeasured on a Tuesday." in text


def test_the_order_is_by_intervals_of_differences(results: Path) -> None:
    assert cells(generated(results), "Convolutional network")[4:] == ["yes", "not decided"]
    assert [verdict(*interval) for interval in ((0.01, 0.1), (-0.1, 0.1), (-0.2, -0.1))] == [
        "yes",
        "not decided",
        "no",
    ]


def test_the_cheapest_has_nine_tenths_of_the_best_score(results: Path) -> None:
    best, cheapest = best_and_cheapest(CONTENT["rows"])  # type: ignore[arg-type]
    assert (best["name"], cheapest["name"]) == ("checkpoints", "model")


def test_each_setting_of_the_script_is_on_the_page() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    settings = text[text.index("SETTINGS:") : text.index("# -- Scores")]
    assert set(re.findall(r'^    "(\w+)":', settings, flags=re.MULTILINE)) == set(TITLES)


def test_stored_results_are_whole() -> None:
    """What is stored has the rows that the page names, and finite numbers."""
    for path in RESULTS.glob("influence-setting-*-cpu.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert path.stem == f"influence-setting-{content['setting']}-cpu"
        assert set(content["order"]) <= {row["name"] for row in content["rows"]}
        numbers = [number for row in content["rows"] for number in (row["mean"], *row["interval"])]
        assert all(-1 <= number <= 1 for number in numbers)
    assert influence_page.page(PAGE.read_text(encoding="utf-8")) == PAGE.read_text(encoding="utf-8")
