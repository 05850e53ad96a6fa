"""Every change by which a run becomes another one, before every command that goes on with a run or leans on
one: refused, or told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from psgrad.commands.analyze import analyze
from psgrad.commands.check import save_baseline
from psgrad.commands.dp_step import dp_step
from psgrad.commands.influence import influence
from psgrad.commands.influence_index import influence_index
from psgrad.errors import ConfigError, PsgradError
from psgrad.run.results import Progress
from psgrad.run.results.privacy import DPStepResult
from tests.identity_workplace import CHANGES, Change, IdentityWorkplace
from tests.private_workplace import PRIVACY, leave_out_slow_parts


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IdentityWorkplace:
    monkeypatch.setattr("psgrad.reports.analyze_page.write_report", lambda result, write: None)
    monkeypatch.setattr("psgrad.commands.analyze_passes._ROWS_PER_SHARD", 4)
    leave_out_slow_parts(monkeypatch)
    return IdentityWorkplace(tmp_path, monkeypatch)


# Of the commands that run to their end after a change.
SOME = [
    "a buffer that is not persistent",
    "an argument",
    "a module that the model imports",
    "a number of a row",
]


def stop(progress: Progress) -> None:
    if progress.done == 12:
        raise KeyboardInterrupt


def refusal(name: str, change: Change, place: IdentityWorkplace, command: Any) -> str:
    """What a command says when it is refused after a change, which is taken back."""
    change.apply(place)
    try:
        command()
    except PsgradError as error:
        place.restore()
        return str(error)
    raise AssertionError(f"{name}: accepted")


@pytest.mark.long
def test_analyze_resume_refuses_every_change_and_accepts_none(
    place: IdentityWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = analyze(place.read(output="whole")).samples
    with pytest.raises(KeyboardInterrupt):
        analyze(place.read(), progress=stop)
    for name, change in CHANGES.items():
        said = refusal(name, change, place, lambda: analyze(place.read(), resume=True))
        assert "rows of two runs can't be mixed" in said, name
        assert change.words in said, f"{name}: {said}"
        assert len(pd.read_parquet(place.folder / "out" / "parts" / "samples")) == 12
    place.edit("measure.py", "2 *", "3 *")
    with pytest.raises(ConfigError, match=r"code of measure.py:Twice was"):
        analyze(place.read(), resume=True)
    place.restore()  # every file is newer than the run
    config = place.read(output=str(place.folder / "out"))
    monkeypatch.chdir("/")
    pd.testing.assert_frame_equal(analyze(config, resume=True).samples, whole)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["run", "baseline"])
def test_reference_refuses_other_weights_and_tells_other_code(place: IdentityWorkplace, kind: str) -> None:
    analyze(place.read(output="known"))
    save_baseline(place.folder / "known", output=place.folder / "known.json")
    place.config["analyze"]["outliers"] = {"reference": {"run": "known", "baseline": "known.json"}[kind]}
    place.settle()
    for name, change in ((name, CHANGES[name]) for name in SOME):
        if change.part in ("weights", "config"):
            said = refusal(name, change, place, lambda: analyze(place.read(), overwrite=True))
            assert "can't be compared" in said, name
        elif change.part != "data":  # a reference is of other data
            change.apply(place)
            caveats = analyze(place.read(), overwrite=True).manifest.judged.caveats
            assert any("was measured with other code" in each for each in caveats), f"{name}: {caveats}"
            place.restore()
    caveats = analyze(place.read(), overwrite=True).manifest.judged.caveats
    assert not any("code" in each or "hash" in each for each in caveats)


@pytest.mark.long
def test_index_open_and_resume_refuse_every_change(place: IdentityWorkplace) -> None:
    place.config["influence"] = {
        "queries": {"rows": [0, 1]},
        "method": "gradient_dot",
        "index": {"path": "index", "projection": "none", "rows_per_shard": 7},
    }
    place.settle()
    influence_index(place.read())
    for name, change in CHANGES.items():
        for command in (
            lambda: influence(place.read(), report=False),
            lambda: influence_index(place.read(), resume=True),
        ):
            said = refusal(name, change, place, command)
            assert "the index" in said, f"{name}: {said}"
            assert "is of something else: fingerprint." in said, f"{name}: {said}"
    influence(place.read(), report=False)
    influence_index(place.read(), resume=True)


@pytest.mark.sweep
def test_dp_step_resume_refuses_every_change_but_weights_that_the_checkpoint_replaces(
    place: IdentityWorkplace,
) -> None:
    place.config["privacy"] = dict(PRIVACY)
    place.settle()

    def resume() -> DPStepResult:
        return dp_step(place.read(), resume=True)

    dp_step(place.read())
    ledger = place.folder / "out" / "public" / "ledger.jsonl"
    paid = ledger.read_bytes()
    replaced = [
        name for name, change in CHANGES.items() if change.part == "weights" and "attribute" not in name
    ]
    for name in CHANGES.keys() - replaced:
        said = refusal(name, CHANGES[name], place, resume)
        assert "began with" in said or "is that of another run" in said, f"{name}: {said}"
    assert ledger.read_bytes() == paid
    for name in replaced:
        CHANGES[name].apply(place)
        assert any("comes with other weights" in note for note in resume().notes), name
        place.restore()
    assert not any("weights" in note for note in resume().notes)
