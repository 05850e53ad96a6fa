"""Folders that an earlier psgrad wrote: a run of `analyze`, an influence index and a private run, opened by
this one. `stored/make.py` made them.
"""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dp_accounting
import pandas as pd
import pytest
import torch
from dp_accounting.rdp import RdpAccountant

import psgrad
from tests.workplace import ROWS, Workplace

STORED = Path(__file__).parent / "stored"
VERSIONS = sorted(path.name for path in STORED.iterdir() if path.is_dir() and path.name != "__pycache__")


@pytest.fixture(params=VERSIONS)
def stored(workplace: Workplace, request: pytest.FixtureRequest) -> Workplace:
    """The current folder has a copy of all that one version stored."""
    shutil.copytree(STORED / request.param, workplace.folder, dirs_exist_ok=True)
    return workplace


def content(path: str) -> Any:
    return json.loads(Path(path).read_bytes())


def files_of(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_stored_folders_are_small() -> None:
    assert sum(path.stat().st_size for path in STORED.rglob("*") if path.is_file()) < 300_000


@pytest.mark.long
def test_stored_run_report(stored: Workplace) -> None:
    outcome = stored.command("report", "analyze")
    assert outcome.code == 0, outcome.err
    page = Path("analyze/report.html").read_text()
    assert "row-11" in page
    assert "margin" in page
    assert len(list(Path("analyze/plots").iterdir())) > 0


def test_stored_run_check(stored: Workplace) -> None:
    findings = Path("analyze/findings.jsonl").read_bytes()
    outcome = stored.command("check", "analyze")
    assert outcome.code == content("analyze/check.json")["exit_code"] == 4  # there is no reference
    assert stored.command("check", "analyze", "--set", "gate.max_outliers=null").code == 0
    assert Path("analyze/findings.jsonl").read_bytes() == findings


@pytest.mark.long
def test_stored_run_diff_with_a_run_of_today(stored: Workplace) -> None:
    assert stored.command("analyze", "config.yaml", "--output", "today").code == 0
    outcome = stored.command("diff", "analyze", "today")
    assert outcome.code == 0, outcome.err
    result = psgrad.diff("analyze", "today")
    assert result.counts["common"] == ROWS
    assert result.spearman == pytest.approx(1)
    then, now = pd.read_parquet("analyze/samples.parquet"), pd.read_parquet("today/samples.parquet")
    assert list(then) == list(now)
    pd.testing.assert_frame_equal(then, now, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_stored_run_manifest_has_the_keys_of_today(stored: Workplace) -> None:
    assert stored.command("analyze", "config.yaml", "--output", "today").code == 0
    then, now = content("analyze/manifest.json"), content("today/manifest.json")
    assert list(then) == [key for key in now if key in then]  # a manifest has more keys today, too
    assert set(then["identity"]) <= set(now["identity"])  # a config has more keys today
    for group in ("data", "engine"):
        assert then[group].keys() <= now[group].keys(), group
    for group in ("outliers", "counts", "model", "hashes", "self_check"):
        assert set(then[group]) == set(now[group]), group
    for name in ("measures.json", "check.json", "inputs/inputs.json", "identity.json"):
        assert _shape(content(f"analyze/{name}")) == _shape(content(f"today/{name}")), name


def _shape(value: Any) -> Any:
    """The keys of nested objects, in their order."""
    return {key: _shape(each) for key, each in value.items()} if isinstance(value, dict) else None


def test_stored_run_resume_of_a_finished_run(stored: Workplace) -> None:
    before = files_of("analyze")
    outcome = stored.command("analyze", "config.yaml", "--resume")
    if content("analyze/manifest.json")["versions"] | {"python": ""} == {
        "psgrad": psgrad.__version__,
        "torch": torch.__version__,
        "python": "",
    }:
        assert outcome.code == 0, outcome.err  # nothing is computed again
        assert files_of("analyze") == before
    else:
        outcome.refused(2, "was begun with something else", "versions: was")


@pytest.mark.long
def test_stored_index_answers_queries(stored: Workplace) -> None:
    before = files_of("index")
    outcome = stored.command("influence", "config.yaml", "--output", "scores")
    if content("index/index.json")["fingerprint"]["packages"]["torch"] == version("torch"):
        assert outcome.code == 0, outcome.err
        scores = pd.read_parquet("scores/scores.parquet")
        assert (
            stored.command(
                "influence", "config.yaml", "--output", "again", "--set", "influence.index=null"
            ).code
            == 0
        )
        again = pd.read_parquet("again/scores.parquet")
        pd.testing.assert_frame_equal(scores, again, rtol=1e-3, atol=1e-5, check_column_type=False)
    else:
        outcome.refused(3, "is of something else")
    assert files_of("index") == before


@pytest.mark.long
def test_stored_private_run_resume(stored: Workplace) -> None:
    before = content("dp-step/public/step.json")
    assert (before["steps"], before["planned_steps"]) == (2, 4)
    lines = Path("dp-step/public/ledger.jsonl").read_bytes()
    arguments = ("dp-step", "config.yaml", "--output", "dp-step", "--steps", "2", "--resume")
    outcome = stored.command(*arguments)
    assert outcome.code == 0, outcome.err
    ledger = Path("dp-step/public/ledger.jsonl").read_bytes()
    assert ledger.startswith(lines)
    kinds = [json.loads(line)["kind"] for line in ledger.splitlines()]
    assert kinds == ["header", "step", "step", "resume", "step", "step"]
    step = content("dp-step/public/step.json")
    assert list(step) == list(before)
    assert step["steps"] == 4
    paid = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(2.0))
    accountant = RdpAccountant().compose(paid, 4)
    assert step["epsilon_rdp"] == pytest.approx(accountant.get_epsilon(0.01), rel=0.05)
    assert step["epsilon_rdp"] == pytest.approx(before["planned_epsilon_rdp"], rel=1e-9)
    assert step["epsilon_pld"] == pytest.approx(before["planned_epsilon_pld"], rel=1e-9)
    steps = pd.read_parquet("dp-step/private/NOT_PRIVATE_steps.parquet")
    assert steps["step"].tolist() == [1, 2, 3, 4]
