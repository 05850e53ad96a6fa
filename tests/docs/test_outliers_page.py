"""The page on outliers: its config, its columns, its options, and the numbers that it claims."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from psgrad.cli.app import app
from psgrad.config import load_config
from psgrad.plugins import DETECTORS, own_classes
from psgrad.quality.baselines import SAVED_ROWS
from psgrad.quality.conformal import resolution
from psgrad.run.results import SAMPLE_COLUMNS
from tests.docs.pages import ROOT, stored, table_below

TEXT = (ROOT / "docs" / "explanation" / "outliers.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "benchmarks" / "outliers.md").read_text(encoding="utf-8")
MEASURED_WORDS = " ".join(MEASURED.split())
CONFIG = ROOT / "configs" / "digits-gate.yaml"
STORED = stored("outliers-cpu")


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}".replace("%", " %")


def test_the_config_of_the_page_is_the_example_and_shows_every_key(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(version.*?)```", TEXT, flags=re.DOTALL)
    assert block
    (tmp_path / "config.yaml").write_text(block[1], encoding="utf-8")
    page, example = load_config(tmp_path / "config.yaml"), load_config(CONFIG)
    assert page.analyze == example.analyze
    assert page.gate == example.gate
    assert page.data == example.data
    assert page.analyze.outliers.model_fields_set == set(type(page.analyze.outliers).model_fields)


def test_every_column_is_on_the_page_in_order() -> None:
    named = [name for row in table_below(TEXT, "## The columns") for name in re.findall(r"`(\w+)`", row[0])]
    assert named == list(SAMPLE_COLUMNS)


def test_the_page_knows_the_limits_of_the_code() -> None:
    assert f"{SAVED_ROWS:,} samples" in " ".join(TEXT.split())
    for name in own_classes(DETECTORS):
        assert f"`{name}`" in TEXT


@pytest.mark.long
def test_the_example_flags_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts differ by a digit or two from machine to machine."""
    monkeypatch.setattr("psgrad.reports.analyze_page.write_report", lambda result, write: None)
    done = CliRunner().invoke(app, ["analyze", str(CONFIG), "--output", str(tmp_path / "run")])
    assert done.exit_code == 0, done.stderr
    frame = pd.read_parquet(tmp_path / "run" / "samples.parquet")
    flipped = frame["id"].isin(pd.read_json(CONFIG.parent / "digits" / "flipped.json")["id"])
    flagged = frame["is_outlier_issue"]
    said = re.search(
        r"flags (\d+) of ([\d,]+) digits\. (\d+) labels were flipped on purpose, and (\d+) of them are among"
        r" the flagged; "
        r"the other (\d+) are sound\. That is a share of (0\.\d\d)",
        " ".join(TEXT.split()),
    )
    assert said
    count, judged, wrong, hits, false, share = (float(each.replace(",", "")) for each in said.groups())
    assert (judged, wrong) == (len(frame), flipped.sum())
    assert count == hits + false
    assert share == round(false / count, 2)
    assert flagged.sum() == pytest.approx(count, abs=3)
    assert (flagged & flipped).sum() == pytest.approx(hits, abs=3)


def test_the_resolution_is_that_of_the_code() -> None:
    for known, *limits in table_below(TEXT, "### What a reference can show"):
        for tests, limit in zip((200, 1000, 10_000, 100_000), limits, strict=True):
            smallest = resolution({"all": tests}, {"all": int(known.replace(",", ""))}, 0.1).smallest
            assert limit == ("none" if smallest is None else f"{smallest:,}")


@pytest.mark.parametrize("setting", ["both trained on", "both held out"])
def test_the_measured_tables_are_the_stored_ones(setting: str) -> None:
    found = STORED["found"][setting]
    rows = table_below(MEASURED, f"## {setting.capitalize()}")
    assert [row[0] for row in rows] == list(found["0"])
    for rule, clean, *rest in rows:
        assert clean == shown(found["0"][rule]["flagged"])
        assert rest == [
            shown(found[share][rule][key])
            for share in ("0.03", "0.1")
            for key in ("flagged", "fdr", "worst", "recall")
        ]


def test_the_table_of_what_is_not_exchangeable_is_the_stored_one() -> None:
    for rule, *cells in table_below(MEASURED, "## Not exchangeable"):
        settings = ("only the judged", "only the reference")
        assert cells == [
            shown(STORED["found"][each]["0.03"][rule][key])
            for each in settings
            for key in ("flagged", "fdr", "worst", "recall")
        ]


def test_what_the_page_says_of_the_tables_holds() -> None:
    def of(setting: str, share: str, rule: str) -> dict[str, Any]:
        content: dict[str, Any] = STORED["found"][setting][share][rule]
        return content

    false: list[float] = []
    for setting in ("both trained on", "both held out"):
        for share in ("0", "0.03", "0.1"):
            for score in ("grad_norm", "loss"):
                found = of(setting, share, f"conformal, {score}")
                false.append(found["fdr"])
                # A mean of shares between 0 and `worst` has at most this standard error (Bhatia and Davis).
                error = math.sqrt(found["fdr"] * (found["worst"] - found["fdr"]) / STORED["rounds"])
                assert found["fdr"] <= STORED["fdr"] + 2 * error
        assert of(setting, "0.1", "MAD, log norm")["recall"] == 0
    flipped = [each for each in false if each]
    assert f"{shown(sum(flipped) / len(flipped))} on average over the {len(flipped)} cells" in MEASURED_WORDS
    assert sum(flipped) / len(flipped) <= STORED["fdr"]
    for setting in ("only the judged", "only the reference"):
        assert all(
            of(setting, "0", f"conformal, {score}")["flagged"] < 0.001 for score in ("grad_norm", "loss")
        )
    clean = of("both trained on", "0", "MAD, norm")["flagged"]
    assert f"flags {shown(clean)} of the digits where **nothing** is wrong" in MEASURED_WORDS
    assert f"flags {shown(clean)} of digits of which **nothing** is wrong" in " ".join(TEXT.split())
    norm, loss = (
        of("both held out", "0.03", f"conformal, {score}")["recall"] for score in ("grad_norm", "loss")
    )
    for words in (MEASURED_WORDS, " ".join(TEXT.split())):
        assert f"recall is {shown(norm)} by the norm, and {shown(loss)} by the loss" in words
    assert (
        of("only the reference", "0.03", "conformal, grad_norm")["fdr"]
        > of("both held out", "0.03", "conformal, grad_norm")["fdr"]
    )
    assert (
        of("only the judged", "0.03", "conformal, loss")["recall"]
        < of("both held out", "0.03", "conformal, loss")["recall"]
    )
    assert of("both trained on", "0.03", "mean + 3 sigma, norm")["recall"] > 0.9
    assert of("both trained on", "0.1", "mean + 3 sigma, norm")["recall"] < 0.5
    sizes = STORED["sizes"]
    assert sizes["both trained on"] == {"trusted": 600, "judged": 1197}
    assert sizes["both held out"] == {"trusted": 500, "judged": 597}
    assert f"{STORED['rounds']} rounds" in MEASURED_WORDS
