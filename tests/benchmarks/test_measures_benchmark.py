"""The benchmark of measures, once at a size that takes no time."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from psgrad.plugins import MEASURES, own_classes

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_ways_run_and_every_measure_is_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    try:
        script = importlib.import_module("measures")
        problem = script.Digits(12)
        kinds = script.kinds(problem, list(own_classes(MEASURES)))
        assert sorted(name for names in kinds.values() for name in names) == list(own_classes(MEASURES))
        assert {"margin", "cosine_to_class_mean", "noise_scale", "el2n"} <= set(kinds["one pass"])
        assert "input_gradient" in kinds["own passes"]
        assert kinds["second derivatives"] == ["hessian_top_eigenvalue", "hessian_trace"]
        ways = {
            "norms": lambda: problem.run([]),
            "two": lambda: problem.run(script.with_needed(["margin", "cosine_to_class_mean"])),
        }
        timings = script.time_in_turn(ways, 3)
    finally:
        for name in set(sys.modules) - before:
            if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    assert timings["norms"].ratio == pytest.approx(1)
    assert timings["norms"].processor_ratio == 1
    assert timings["two"].lower_quartile <= timings["two"].median <= timings["two"].upper_quartile


def test_the_page_has_the_stored_figures() -> None:
    stored = json.loads((FOLDER / "results" / "measures-cpu.json").read_text(encoding="utf-8"))
    tables = json.loads((FOLDER / "results" / "tables-cpu.json").read_text(encoding="utf-8"))
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"take {stored['seconds']['all: one pass']['ratio']:.2f} times the norm pass all together" in page
    assert f"a norm pass takes {1e3 * stored['seconds']['norms']['median']:.0f} ms" in page
    seconds = {name: f"{command['seconds']:.1f} s" for name, command in tables["commands"].items()}
    assert (
        f"`check` {seconds['check A']}, `report` {seconds['report A']}, `diff` {seconds['diff A B']}" in page
    )
    assert all(command["passed"] for command in tables["commands"].values())
