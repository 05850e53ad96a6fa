"""The options of `psgrad analyze`, with real runs of a small model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from psgrad.reports.analyze_tables import class_statistics
from tests.workplace import ROWS, Workplace

LIGHT = ("--no-report", "--progress", "none")


def test_json_is_one_object_on_stdout(workplace: Workplace) -> None:
    workplace.config["analyze"] = {"measures": ["el2n"], "top": 5}
    outcome = workplace.succeeded(*LIGHT, "--json")
    found = json.loads(outcome.out)
    frame = workplace.samples()
    assert found["schema_version"] == 1
    assert (found["samples"], found["in_dataset"], found["partial"]) == (ROWS, ROWS, False)
    assert [each["id"] for each in found["top"]] == frame.sort_values("rank")["id"].tolist()[:5]
    assert [each["grad_norm"] for each in found["top"]] == pytest.approx(
        sorted(frame["grad_norm"], reverse=True)[:5], rel=1e-12
    )
    assert found["check"]["exit_code"] == 0
    assert set(found["measures"]) == {"el2n"}


def test_numbers_that_are_not_finite_are_null(workplace: Workplace) -> None:
    rows = workplace.arrays["x"].copy()
    rows[3] = np.nan
    workplace.save(x=rows)

    def no_constants(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(workplace.analyze(*LIGHT, "--json").out, parse_constant=no_constants)
    assert found["nonfinite"] == 1


@pytest.mark.parametrize("options", [(), ("-q",), ("-q", "--json")])
def test_samples_that_are_not_finite_are_named(workplace: Workplace, options: tuple[str, ...]) -> None:
    rows = workplace.arrays["x"].copy()
    rows[[3, 7]] = np.nan
    workplace.save(x=rows)
    outcome = workplace.analyze(*LIGHT, "--no-report", *options)
    ids = [str(workplace.arrays["uid"][row]) for row in (3, 7)]
    assert f"warning: not finite, in loss or gradient: {', '.join(ids)}" in outcome.err.splitlines()
    if "-q" in options:
        assert outcome.err.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_check_leaves_with_the_gates_exit_code(workplace: Workplace, options: tuple[str, ...]) -> None:
    rows = workplace.arrays["x"].copy()
    rows[3] = np.inf
    workplace.save(x=rows)
    assert workplace.analyze(*LIGHT, *options).code == 0  # without --check nothing is judged by its exit code
    outcome = workplace.analyze(*LIGHT, *options, "--overwrite", "--check")
    assert outcome.code == 1
    assert "nonfinite" in outcome.out
    if options:
        assert json.loads(outcome.out)["check"]["exit_code"] == 1
    assert (
        workplace.analyze(*LIGHT, *options, "--overwrite", "--check", "--set", "gate.nonfinite=ignore").code
        == 0
    )


@pytest.mark.long
def test_limit_is_a_number_or_a_fraction(workplace: Workplace) -> None:
    outcome = workplace.succeeded("--no-report", "--limit", "7")
    assert f"PARTIAL: the first 7 of {ROWS} samples" in outcome.err
    assert len(workplace.samples()) == 7
    workplace.succeeded(*LIGHT, "--limit", "0.5", "--overwrite")
    assert len(workplace.samples()) == ROWS // 2
    for wrong in ("0", "-3", "1.5", "nan", "some"):
        outcome = workplace.analyze(*LIGHT, "--overwrite", f"--limit={wrong}")
        assert outcome.code == 2, wrong
        assert "Traceback" not in outcome.err


@pytest.mark.long
def test_quiet_says_nothing_but_errors(workplace: Workplace) -> None:
    assert workplace.succeeded("--no-report", "-q").err == ""
    assert "error: " in workplace.analyze("-q", "--set", "engine.verify=-1").err


def test_resume_of_a_finished_run_gives_that_run(workplace: Workplace) -> None:
    first = workplace.succeeded(*LIGHT)
    before = (workplace.folder / "out" / "manifest.json").read_bytes()
    again = workplace.succeeded(*LIGHT, "--resume")
    assert again.out == first.out
    assert (workplace.folder / "out" / "manifest.json").read_bytes() == before
    assert workplace.analyze("--resume", "--overwrite").code == 2


def test_samples_that_are_not_judged_are_not_counted_as_not_finite(workplace: Workplace) -> None:
    """A label that counts for nothing has no margin: its sample has a finite gradient, and no score."""
    x, y = workplace.arrays["x"].copy(), workplace.arrays["y"].copy()
    x[5], y[[3, 4]] = np.nan, -100
    workplace.save(x=x, y=y)
    workplace.config["analyze"] = {"measures": ["margin"], "outliers": {"score": "margin", "tail": "lower"}}
    record = json.loads(workplace.succeeded("--no-report", "--json").out)
    frame = workplace.samples()
    assert frame["status"].value_counts().to_dict() == {"ok": ROWS - 3, "skipped": 2, "nonfinite": 1}
    assert record["nonfinite"] == workplace.manifest()["counts"]["nonfinite"] == 1
    of_class = class_statistics(frame)
    assert of_class["nonfinite"].sum() == 1
    assert of_class.loc[-100, ["samples", "nonfinite", "listed", "median_norm"]].tolist() == [2, 0, 0, 0.0]


@pytest.mark.long
def test_sample_draws_rows_by_the_seed_and_resumes_as_the_same(workplace: Workplace) -> None:
    workplace.succeeded(*LIGHT)
    whole = workplace.samples()
    outcome = workplace.succeeded(*LIGHT, "--limit", "0.5", "--sample", "--overwrite")
    assert f"PARTIAL: {ROWS // 2} of {ROWS} samples, drawn at random by seed 0" in outcome.err
    drawn = workplace.samples()
    rows = drawn["dataset_row"].tolist()
    assert rows == sorted(set(rows))
    assert rows != list(range(ROWS // 2))
    assert drawn["index"].tolist() == list(range(ROWS // 2))
    assert drawn["id"].tolist() == whole["id"].iloc[rows].tolist()
    assert drawn["grad_norm"].to_numpy() == pytest.approx(whole["grad_norm"].iloc[rows].to_numpy(), rel=1e-6)
    assert (workplace.manifest()["sampled_by"], workplace.manifest()["counts"]["in_dataset"]) == (0, ROWS)
    assert workplace.analyze(*LIGHT, "--limit", "0.5", "--sample", "--resume").code == 0
    outcome = workplace.analyze(*LIGHT, "--limit", "0.5", "--resume")
    outcome.refused(2, "rows are drawn at random")
    other = ("--limit", "0.5", "--sample", "--set", "analyze.seed=1")
    workplace.analyze(*LIGHT, *other, "--resume").refused(2, "analyze.seed was 0 and is 1")
    workplace.succeeded(*LIGHT, *other, "--overwrite")
    assert workplace.samples()["dataset_row"].tolist() != rows
    assert workplace.command("select", "out", "--where", "label == 1", "--output", "ones.csv").code == 0
    ones = workplace.samples().query("target == 1")
    assert pd.read_csv("ones.csv")["id"].tolist() == ones["id"].tolist()


def test_sample_needs_a_limit(workplace: Workplace) -> None:
    workplace.analyze(*LIGHT, "--sample").refused(2, "--sample was given without --limit")
