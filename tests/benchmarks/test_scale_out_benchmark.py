"""The page of benchmarks has the stored figures of scale_out.py, whose constants are the defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psgrad.engine.execution.cluster import Cluster, Workload, simulate
from psgrad.workflows import plan

FOLDER = Path(__file__).parents[2] / "benchmarks"
STORED = json.loads((FOLDER / "results" / "scale-out-cpu.json").read_text(encoding="utf-8"))
IMAGE_BYTES = 110_000  # of the measured images
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("job", STORED["jobs"])
def test_the_page_has_the_stored_efficiencies(job: str) -> None:
    slow, fast = STORED["jobs"][job]["ranks"], STORED["jobs"][job]["faster"]
    cells = [
        job,
        *(f"{slow[ranks]['efficiency']:.3f}" for ranks in ("64", "512")),
        slow["512"]["bottleneck"],
        *(f"{fast[ranks]['efficiency']:.2f}" for ranks in ("64", "512")),
        fast["512"]["bottleneck"],
    ]
    assert f"| {' | '.join(cells)} |" in PAGE


def test_the_page_has_the_measured_seconds() -> None:
    one, two = STORED["measured"]["1"], STORED["measured"]["2"]
    assert f"take {two['measured']:.1f} s where one takes {one['measured']:.1f}" in " ".join(PAGE.split())
    assert f"The simulation says {two['simulated']:.1f} and {one['simulated']:.1f} s" in PAGE
    assert one["passed"]
    assert two["passed"]


def test_the_defaults_are_the_measured_constants() -> None:
    measured, defaults = STORED["constants"], Cluster()
    assert defaults.startup == pytest.approx(measured["startup"][1], abs=0.05)
    assert defaults.request == pytest.approx(measured["request"], rel=0.02)
    assert {name: getattr(defaults, name) for name in STORED["assumed"]} == STORED["assumed"]


def test_the_plan_has_the_measured_seconds() -> None:
    measured, constants = STORED["looks"], STORED["constants"]
    assert pytest.approx(constants["table"], rel=0.01) == plan._TABLE_SECONDS
    assert pytest.approx(constants["report"], abs=0.05) == plan._REPORT_SECONDS
    image = plan._IMAGE_SECONDS + IMAGE_BYTES * plan._BYTE_SECONDS
    assert pytest.approx(measured["byte"], rel=0.01) == plan._BYTE_SECONDS
    assert image == pytest.approx(measured["image"], rel=0.01)
    assert pytest.approx(measured["name"], rel=0.03) == plan._NAME_SECONDS


def test_the_stored_jobs_look_at_the_whole_dataset() -> None:
    for job in STORED["jobs"].values():
        work = Workload(**job["work"])
        assert work.hashed_bytes == work.rows * work.read
        assert work.hash_seconds >= work.hashed_bytes * STORED["looks"]["byte"]


def test_the_file_says_on_which_day_what_was_measured() -> None:
    assert set(STORED["when"]) == {"runs, constants and chunks", "looks"}
    page = " ".join(PAGE.split())
    assert (
        f"Runs, constants and chunks were measured on {STORED['when']['runs, constants and chunks']}" in page
    )
    assert f"the first look on {STORED['when']['looks']}" in page


def test_the_page_has_the_least_efficiencies_and_how_far_the_simulation_is_off() -> None:
    every = [job["ranks"] for job in STORED["jobs"].values()]
    least = [min(ranks[count]["efficiency"] for ranks in every) for count in ("64", "512")]
    assert f"at least {least[0]:.3f} on 64 ranks and {least[1]:.3f} on 512" in PAGE
    assert all(each["passed"] for ranks in every for each in ranks.values())
    below = [
        1 - STORED["measured"][count]["simulated"] / STORED["measured"][count]["measured"] for count in "12"
    ]
    assert f"{100 * below[0]:.0f} % below one measured process and {100 * below[1]:.0f} % below two" in PAGE


@pytest.mark.parametrize("job", STORED["jobs"])
@pytest.mark.parametrize("ranks", ["1", "8", "512"])
def test_the_stored_times_are_those_of_the_simulation(job: str, ranks: str) -> None:
    """So that the figures are of this version's scheduler."""
    stored = STORED["jobs"][job]
    found = simulate(Workload(**stored["work"]), Cluster(**stored["cluster"]), int(ranks))
    assert found.seconds == pytest.approx(stored["ranks"][ranks]["seconds"], rel=1e-9)
