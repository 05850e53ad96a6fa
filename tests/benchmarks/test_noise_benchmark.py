"""The benchmark of the noise, once at a size that takes no time, and what is stored of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.test_benchmarks import FOLDER
from tests.benchmarks.test_benchmarks import script as script


def test_the_benchmark_of_the_noise_runs(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    noise, norms = script("noise"), script("norms")
    monkeypatch.setattr(norms, "SHORTEST_TIMING", 0.0)
    noise.main(["--parameters", "3000", "--rounds", "1", "--json", str(tmp_path / "noise.json")])
    found = json.loads((tmp_path / "noise.json").read_text(encoding="utf-8"))
    timings = found["step"]["seconds"]
    assert found["step"]["share"] == pytest.approx(timings["noise"]["median"] / timings["private"]["median"])
    assert set(timings) == {"plain", "private", "without noise", "noise"}
    assert (
        f"of the private step; at most 25%: {'pass' if found['step']['share'] <= 0.25 else 'FAIL'}"
        in capsys.readouterr().out
    )


def test_the_stored_result_keeps_its_bar() -> None:
    stored = json.loads((FOLDER / "results" / "noise-cpu.json").read_text(encoding="utf-8"))
    assert stored["step"]["parameters"] > 9_900_000
    assert stored["step"]["share"] <= stored["step"]["bar"] == 0.25
    seconds = stored["normals"]["seconds"]
    assert seconds["psgrad aes"]["median"] < seconds["plain"]["median"]
