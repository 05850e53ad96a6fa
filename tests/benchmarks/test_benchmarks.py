"""The benchmark scripts' own arithmetic, and each script once at a size that takes no time."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A benchmark by name; they import one another as scripts do."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))

    def named(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield named
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def tiny(script: Any) -> Any:
    """A case of a perceptron of a few numbers."""
    norms, models = script("norms"), script("models")
    return norms.Case("tiny", lambda: models.mlp((6, 5, 10)), lambda: norms.draw_vectors(7, 6))


# -- memory --------------------------------------------------------------------------------------------------


def test_the_timeline_has_what_tensors_take(script: Any) -> None:
    memory = script("memory")

    def way() -> torch.Tensor:
        one = torch.empty(1000, dtype=torch.float64)
        two = torch.empty(500, dtype=torch.float64)
        del one
        three = torch.empty(250, dtype=torch.float64)
        return torch.cat([two, three])

    changes, kept = memory.timeline(way)
    peak, place = memory.highest(changes)
    assert peak == 8 * (1000 + 500)
    assert [size for _, size, _ in memory.alive(changes[:place])] == [8000, 4000]
    assert sum(size * count for _, size, count in memory.alive(changes)) == 8 * kept.numel()


def test_the_memory_of_each_way_of_a_tiny_case(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = script("memory")
    monkeypatch.setitem(memory.CASES, "tiny", tiny(script))
    peaks = memory.measure("tiny", torch.device("cpu"), own_process=False)
    assert list(peaks) == ["plain", "torch.func", "norms", "clipped"]
    gradients = 4 * (6 * 5 + 5 + 5 * 10 + 10)  # what plain leaves behind
    assert peaks["plain"].allocated >= gradients
    assert peaks["clipped"].allocated >= gradients
    assert peaks["torch.func"].allocated >= 7 * gradients


# -- rivals --------------------------------------------------------------------------------------------------


def test_right_rivals_are_taken_and_wrong_ones_are_named(script: Any) -> None:
    rivals, contenders = script("rivals"), script("contenders")
    problem = rivals.pose(tiny(script), torch.device("cpu"))
    ours = contenders.psgrad(problem)
    assert rivals.check_ours(problem, ours) < 1e-5
    expected = {task: way() for task, way in ours.items()}
    for build in (contenders.torch_func, contenders.torch_func_in_chunks):
        found = rivals.prepared(problem, build, expected)
        assert found
        assert all(callable(way) for way in found.values())

    def wrong(problem: Any) -> dict[str, Any]:
        def fails() -> None:
            raise NotImplementedError("no rule for this layer\nand more")

        return {
            "norms": lambda: 1.01 * expected["norms"],
            "clipped": lambda: [x * 1.01 for x in expected["clipped"]],
            "materialised": fails,
        }

    refused = rivals.prepared(problem, wrong, expected)
    assert refused["norms"] == refused["clipped"] == "wrong: relative error 1e-02"
    assert refused["materialised"] == "not supported: NotImplementedError: no rule for this layer"


def test_psgrad_is_held_against_the_loop_before_anything_is_timed(script: Any) -> None:
    rivals, contenders = script("rivals"), script("contenders")
    problem = rivals.pose(tiny(script), torch.device("cpu"))
    ours = contenders.psgrad(problem)
    with pytest.raises(AssertionError, match="nothing is timed"):
        rivals.check_ours(problem, ours | {"norms": lambda: 1.001 * ours["norms"]()})


def test_the_verdict_is_on_the_best_rival(script: Any) -> None:
    rivals, norms = script("rivals"), script("norms")
    times = {"plain": 1.0, "psgrad": 2.0, "slow": 9.0, "quick": 2.5}
    timings = {name: norms.Timing(value, value, value, value) for name, value in times.items()}
    verdict = rivals.judge("norms", timings)
    assert (verdict.best, verdict.speedup, verdict.passed) == ("quick", 1.25, False)
    assert rivals.judge("materialised", timings).passed


# -- scaling -------------------------------------------------------------------------------------------------


def test_the_exponent_of_a_power_law(script: Any) -> None:
    scaling = script("scaling")
    sizes = (1, 10, 100, 1000)
    fitted = scaling.fit(sizes, [3e-4 * size**1.25 for size in sizes])
    assert fitted.exponent == pytest.approx(1.25)
    assert fitted.error == pytest.approx(0, abs=1e-9)
    # by hand: logarithms 0, 1, 2 of size and 0, 2, 1 of time have slope 1/2, and residuals -1/2, 1, -1/2
    crooked = scaling.fit((1, 10, 100), (1, 100, 10))
    assert (crooked.exponent, crooked.error) == (pytest.approx(0.5), pytest.approx(0.75**0.5))


@pytest.mark.long
def test_scaling_runs_and_draws(script: Any, tmp_path: Path) -> None:
    scaling, norms = script("scaling"), script("norms")
    device = torch.device("cpu")
    found = {
        name: scaling.measure(scaling.Axis(name, sizes, jobs), 1, device)
        for name, sizes, jobs in (
            ("samples", (3, 5), scaling.over_samples),
            ("depth", (1, 2), scaling.over_depth),
        )
    }
    assert found["samples"]["series"]["fixed"]["bar"] == [0.97, 1.03]
    assert list(found["depth"]["series"]) == ["norms", "plain"]
    scaling.draw(found, norms.machine(device), tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


# -- a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("part", ["tutorial", "networks", "transformers", "graphs", "offloaded", "copies"])
def test_each_part_of_the_figures_of_a_gpu_runs_at_a_small_size(script: Any, part: str) -> None:
    found = script("gpu").PARTS[part](torch.device("cpu"), True)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.long
def test_texts_on_a_gpu_are_replayed_at_a_small_size(script: Any) -> None:
    found = script("gpu").PARTS["texts"](torch.device("cpu"), True)
    assert json.loads(json.dumps(found)) == found
    assert not found["rivals that are not timed"]
    chunks = found["chunks"]["auto"]
    assert chunks["chunks_replayed"] > 0.5 * chunks["chunks"]
    assert all(rate > 0 for rate in found["tokens a second"].values())


@pytest.mark.long
def test_adapters_on_a_gpu_are_replayed_at_a_small_size(script: Any) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra quantised is not installed")
    found = script("gpu").PARTS["adapters"](torch.device("cpu"), True)
    assert json.loads(json.dumps(found)) == found
    for kind in ("bfloat16", "4 bits"):
        each = found[f"small, {kind}"]
        assert {"plain", "norms", "norms, recorded"} <= each["tokens a second"].keys()
        assert each["chunks"]["chunks_replayed"] == each["chunks"]["chunks"] - 3 > 0


@pytest.mark.long
def test_private_steps_on_a_gpu_are_right_at_a_small_size(script: Any) -> None:
    found = script("gpu").PARTS["private"](torch.device("cpu"), True)
    assert json.loads(json.dumps(found)) == found
    assert list(found) == ["GPT-2", "GPT-2, head not tied", "BERT-base", "ViT-B"]
    assert all(each["relative errors"]["psgrad"] < 1e-5 for each in found.values())


@pytest.mark.sweep
def test_a_part_that_fails_leaves_the_others(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(FOLDER / "gpu.py"), "--small", "--json", str(file), "--only", "copies"]
    done = subprocess.run([*command, "--device", "mps"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "failed" in json.loads(file.read_text())["parts"]["copies"]
