"""`psgrad dp-report` on a run: its numbers are those of its ledger, from public files alone, and files that
contradict each other are noticed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import pytest
from dp_accounting import pld

from tests.private_workplace import PrivateWorkplace
from tests.workplace import Outcome, Workplace


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.fixture
def private(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, finished: dict[str, Path], tmp_path_factory: Any
) -> PrivateWorkplace:
    """A workplace with a run of 4 of 20 steps, which is made once."""
    monkeypatch.setattr("psgrad.reports.figures.Plot.png", lambda plot: b"a figure")
    private = PrivateWorkplace(workplace)
    if not finished:
        private.succeeded("--steps", "4")
        finished["run"] = tmp_path_factory.mktemp("finished") / "out"
        shutil.copytree(private.run_folder, finished["run"])
    else:
        shutil.copytree(finished["run"], private.run_folder)
    return private


def report(private: PrivateWorkplace, *options: str) -> Outcome:
    return private.workplace.command("dp-report", "out", *options)


def told(private: PrivateWorkplace) -> dict[str, Any]:
    outcome = report(private, "--json").succeeded()
    content: dict[str, Any] = json.loads(outcome.out)
    return content


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **values}))


@pytest.mark.long
def test_dp_report_has_the_numbers_of_dp_accounting(private: PrivateWorkplace) -> None:
    found = told(private)
    accountant = pld.PLDAccountant()
    accountant.compose(dpa.PoissonSampledDpEvent(0.5, dpa.GaussianDpEvent(2.0)), 4)
    assert found["epsilon"] == pytest.approx(accountant.get_epsilon(0.01), rel=1e-6)
    for delta, epsilon in found["epsilons"]:
        truth = accountant.get_epsilon(delta)
        assert truth * (1 - 1e-9) <= epsilon <= truth * 1.01
    for false, true in found["attacks"]:
        # of a test at the best threshold between the loss distributions' points
        best = min(
            accountant.get_delta(each / 100) + 2.718281828459045 ** (each / 100) * false
            for each in range(800)
        )
        assert true <= best * 1.001
        assert true >= best * 0.9
    assert all(epsilon is None or epsilon >= 2 * found["epsilon"] for _, epsilon in found["groups"])


@pytest.mark.long
def test_dp_report_needs_public_files_alone(private: PrivateWorkplace) -> None:
    before, page = told(private), private.run_folder / "public" / "report.html"
    whole = page.read_bytes()
    for path in private.run_folder.iterdir():
        if path.name != "public":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert told(private) == before
    assert page.read_bytes() == whole
    assert b"What a claim must name" in whole
    assert b"<script" not in whole
    assert str(private.folder).encode() not in whole


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"epsilon_pld": 0.001}, "step.json has epsilon_pld 0.001"),
        ({"delta": 0.001}, "differ in delta"),
        ({"steps": 3}, "step.json counts 3 steps, and the ledger has 4"),
        ({"model_sha256": "0" * 64}, "is not the file that step.json was written with"),
        ({"ledger": {"ledger_position": 9, "ledger_sha256": ""}}, "belongs to another ledger"),
    ],
)
def test_dp_report_of_files_that_contradict_each_other(
    private: PrivateWorkplace, values: dict[str, Any], words: str
) -> None:
    change(private.run_folder / "public" / "step.json", **values)
    outcome = report(private)
    assert outcome.code == 1
    assert words in outcome.err
    assert words.replace("'", "&#39;") in (private.run_folder / "public" / "report.html").read_text()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"steps": "many"}'])
def test_dp_report_of_a_statement_that_is_none(private: PrivateWorkplace, content: str) -> None:
    (private.run_folder / "public" / "step.json").write_text(content)
    report(private).refused(3, "step.json")


def test_dp_report_of_numbers_of_other_types_is_refused(private: PrivateWorkplace) -> None:
    change(private.run_folder / "public" / "step.json", noise_std="much")
    report(private).refused(3, "noise_std: Input should be a valid number", "put the files back")


def test_dp_report_of_a_damaged_ledger_is_refused(private: PrivateWorkplace) -> None:
    path = private.run_folder / "public" / "ledger.jsonl"
    path.write_text("".join([*path.read_text().splitlines(keepends=True)[:2], "{}\n"]))
    report(private).refused(3, "is damaged: line 3")


@pytest.mark.long
def test_dp_report_shows_a_public_audit_of_the_same_setting_alone(private: PrivateWorkplace) -> None:
    step = private.step()
    audit = {
        **{key: step[key] for key in ("relation", "scheme", "unit", "mechanism", "delta")},
        **{"epsilon": 0.25, "accounted": 1.5, "confidence": 0.95, "steps": 4, "verdict": "consistent"},
    }
    folder = private.folder / "out-audit" / "public"
    folder.mkdir(parents=True)
    (folder / "audit.json").write_text(json.dumps(audit))
    assert "epsilon at least 0.25 with 0.95 confidence" in report(private).out
    (folder / "audit.json").write_text(json.dumps({**audit, "delta": 0.5}))
    assert "another setting (delta)" in report(private).out
    (folder / "audit.json").unlink()
    secret = folder.parent / "private" / "NOT_PRIVATE_audit.json"
    secret.parent.mkdir()
    secret.write_text(json.dumps(audit))
    assert "is NOT PRIVATE: left out" in report(private).out
    assert "0.25" not in report(private).out


@pytest.mark.long
def test_dp_report_opens_what_a_run_leaves_open(private: PrivateWorkplace) -> None:
    assert {*told(private)["pitfalls"]} == {"several runs on the data", "stopping early"}
    assumed = {each["name"]: each["status"] for each in told(private)["assumptions"]}
    assert assumed["contribution"] == "checked"
    assert assumed["Python state"] == "assumed"
