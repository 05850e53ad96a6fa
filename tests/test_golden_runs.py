"""The golden runs leave the same numbers, columns, files and pages as before. What is different on purpose is
written by `python -m tests.golden_runs`, and read in the difference of golden_runs.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forked_ranks import fork_ranks, run_ranks
from tests.golden_runs import EXPECTED, KILL, RUNS, Place, left_by, npz_measures, summary, with_measures

pytestmark = pytest.mark.long

NEEDS = {"jsonl_text": "transformers", "adapter": "peft", "image_folder": "PIL"}
# float32 on another machine, and what is summed in another order.
RELATIVE, ABSOLUTE = 1e-4, 1e-6


def expected(run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))[run]
    return found


def differences(now: Any, then: Any, name: str = "") -> Iterator[str]:
    """Each place at which two summaries differ, and what is there."""
    if isinstance(now, dict) and isinstance(then, dict):
        for key in sorted(now.keys() | then.keys()):
            if key in now and key in then:
                yield from differences(now[key], then[key], f"{name} > {key}")
            else:
                yield f"{name} > {key} is {'new' if key in now else 'missing'}"
    elif isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        for place, (new, old) in enumerate(zip(now, then, strict=True)):
            yield from differences(new, old, f"{name} > {place}")
    elif isinstance(now, int | float) and isinstance(then, int | float):
        if now != pytest.approx(then, rel=RELATIVE, abs=ABSOLUTE):
            yield f"{name}: {now} was {then}"
    elif now != then:
        yield f"{name}: {now} was {then}"


@pytest.mark.every(1)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_run_leaves_the_stored_numbers_columns_files_and_pages(
    run: Callable[[Place], None], tmp_path: Path
) -> None:
    if run.__name__ in NEEDS:
        pytest.importorskip(NEEDS[run.__name__])
    assert list(differences(left_by(run, tmp_path), expected(run.__name__))) == []


def test_run_killed_in_its_second_pass_is_resumed_to_the_stored_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    with_measures(place)

    def killed(rank: int) -> None:
        monkeypatch.setenv(KILL, "1")
        npz_measures(place)

    (ended,) = fork_ranks(tmp_path, 1, killed)
    assert ended.code == -9, ended.err
    place.command("analyze", "config.yaml", "--resume")
    assert list(differences(summary(tmp_path), expected("npz_measures"))) == []


def test_run_of_two_processes_leaves_the_stored_numbers(tmp_path: Path) -> None:
    with_measures(Place(tmp_path))
    ended = run_ranks(
        tmp_path, 2, "analyze", str(tmp_path / "config.yaml"), "--output", str(tmp_path / "out")
    )
    assert [rank.code for rank in ended] == [0, 0], ended
    assert list(differences(summary(tmp_path), expected("npz_measures"))) == []


def test_planted_differences_are_found() -> None:
    then = {"files": ["a", "b"], "table": {"rows": 2, "loss": [1.0, 2.0], "id": ["x", "y"]}}
    now = {"files": ["a"], "table": {"rows": 2, "loss": [1.0, 2.001], "id": ["x", "z"], "new": []}}
    assert len(list(differences(now, then))) == 4
    assert list(differences(then, then)) == []
