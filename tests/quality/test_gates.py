"""What may pass: limits, what can't be told, the ignore list and the baseline."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from psgrad.config import GateConfig
from psgrad.errors import ConfigError, DataError
from psgrad.quality.baselines import changed, gone, mark_known, read_baseline, written
from psgrad.quality.findings import counts_of, in_order, named_samples, read_ignore_list, with_states
from psgrad.quality.gates import evaluate
from psgrad.run.results import GateOutcome
from psgrad.run.results.check import Baseline, Known
from psgrad.run.results.manifest import read_manifest
from tests.verdicts import NO_REFERENCE, REFERENCE, table

TODAY = datetime.date(2026, 6, 15)


def named(frame: pd.DataFrame, facts: dict[str, Any] | None = REFERENCE) -> pd.DataFrame:
    return named_samples(frame, read_manifest({"outliers": facts}))


def outcomes(
    frame: pd.DataFrame,
    gate: GateConfig,
    facts: dict[str, Any] | None = REFERENCE,
    rows: pd.DataFrame | None = None,
) -> dict[str, GateOutcome]:
    rows = named(frame, facts) if rows is None else rows
    judged = read_manifest({"outliers": facts}).outliers
    found = evaluate(gate, in_order(rows, frame), counts_of(rows), judged, len(frame))
    return {each.rule: each for each in found}


@pytest.mark.parametrize(("limit", "outcome"), [(0, "failed"), (1, "failed"), (2, "passed"), (3, "passed")])
def test_gate_max_outliers(limit: int, outcome: str) -> None:
    assert outcomes(table(listed=(3, 4)), GateConfig(max_outliers=limit))["max_outliers"].outcome == outcome


def test_gate_max_fraction() -> None:
    # 0.29 * 100 is 28.999999999999996.
    frame = table(100, listed=tuple(range(29)))
    assert outcomes(frame, GateConfig(max_fraction=0.29))["max_fraction"].outcome == "passed"
    assert outcomes(frame, GateConfig(max_fraction=0.289))["max_fraction"].outcome == "failed"


@pytest.mark.parametrize(
    ("facts", "why", "step"),
    [(NO_REFERENCE, "there is no reference", "analyze.outliers.reference"), (None, "and no verdict", "")],
)
def test_gate_without_reference_not_evaluable(facts: dict[str, Any] | None, why: str, step: str) -> None:
    outcome = outcomes(table(listed=(3,)), GateConfig(max_outliers=5), facts)["max_outliers"]
    assert (outcome.outcome, outcome.found) == ("not evaluable", None)
    assert why in outcome.message
    assert f"Next step: give {step}" in outcome.message


def test_gate_small_reference_not_evaluable() -> None:
    facts = {**REFERENCE, "smallest_flaggable": 20, "counts": {"tested": 8000}}
    small = outcomes(table(8000), GateConfig(max_outliers=5), facts)["max_outliers"]
    assert small.outcome == "not evaluable"
    # (n + 1) >= tested / (fdr * 6), as 1 / (n + 1) is the smallest p-value.
    assert "fewer than 20" in small.message
    assert "13,334 samples" in small.message
    assert "lets 19 outliers pass" in small.message
    assert outcomes(table(8000), GateConfig(max_outliers=19), facts)["max_outliers"].outcome == "passed"
    # What is flagged beyond the limit is flagged.
    listed = table(8000, listed=tuple(range(30)))
    assert outcomes(listed, GateConfig(max_outliers=5), facts)["max_outliers"].outcome == "failed"


def test_gate_small_reference_with_baseline() -> None:
    facts = {**REFERENCE, "smallest_flaggable": 20}
    frame = table(100, listed=tuple(range(25)))
    known = tuple(Known(each, "outlier", "") for each in named(frame)["fingerprint"])
    rows = mark_known(named(frame), Baseline(known))
    gate = GateConfig(max_outliers=0, baseline=Path("b.json"))
    assert outcomes(frame, gate, facts, rows)["max_outliers"].outcome == "passed"
    assert outcomes(table(100), gate, facts)["max_outliers"].outcome == "not evaluable"


@pytest.mark.parametrize(("rule", "outcome"), [("error", "failed"), ("warning", "passed"), ("ignore", None)])
def test_gate_nonfinite(rule: Any, outcome: str | None) -> None:
    result = outcomes(table(nonfinite=(2,)), GateConfig(nonfinite=rule)).get("nonfinite")
    assert (result.outcome if result else None) == outcome


# -- The ignore list -----------------------------------------------------------------------------------------


def ignore_list(folder: Path, text: str) -> Path:
    (folder / "ignore.yaml").write_text(text)
    return folder / "ignore.yaml"


def test_ignore_list_entries_do_not_count(tmp_path: Path) -> None:
    frame = table(10, listed=(1, 2, 3), zero=(1,))
    print_of_2 = named(frame).set_index(["rule", "id"]).loc[("outlier", "s2"), "fingerprint"]
    entries = read_ignore_list(
        ignore_list(
            tmp_path,
            f"- {{id: s1, rule: outlier, reason: looked at}}\n- {{fingerprint: {print_of_2}, reason: fine,"
            " expires: 2026-06-15}\n- {id: s3, reason: for a while, expires: 2026-06-14}\n- {id: nobody,"
            " reason: gone}\n",
        )
    )
    rows, warnings = with_states(named(frame), entries, TODAY)
    states = {
        (rule, each): state for rule, each, state in zip(rows["rule"], rows["id"], rows["state"], strict=True)
    }
    assert states == {
        ("outlier", "s1"): "ignored",
        ("outlier", "s2"): "ignored",
        ("outlier", "s3"): "new",
        ("zero-gradient", "s1"): "new",
    }
    assert [str(tmp_path / "ignore.yaml") in each for each in warnings] == [True, True]
    assert "ignore.yaml:3: id 's3' expired on 2026-06-14: 1 of its findings count again" in warnings[0]
    assert "ignore.yaml:4: id 'nobody' names nothing that was found; it can go" in warnings[1]
    assert rows.set_index(["rule", "id"]).loc[("outlier", "s2"), "ignored_because"] == "fine"
    assert outcomes(frame, GateConfig(max_outliers=0), rows=rows)["max_outliers"].found == 1


def test_ignore_list_number_as_id(tmp_path: Path) -> None:
    entries = read_ignore_list(ignore_list(tmp_path, "- {id: 11, reason: x}\n- {id: '12', reason: x}\n"))
    rows, warnings = with_states(named(table(3, listed=(0, 1, 2), ids=[10, 11, 12])), entries, TODAY)
    assert (rows["state"].tolist(), warnings) == (["new", "ignored", "ignored"], [])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{id: a}", "ignore.yaml:1: reason: missing; it is required: why this may pass"),
        ("{id: a, reason: ' '}", "the reason is blank"),
        ("{id: a, reason: ''}", "the reason is blank"),
        ("{id: [a], reason: x}", "ignore.yaml:1: id: got a list, expected a text or a whole number"),
        ("{id: a, fingerprint: b, reason: x}", "give exactly one of id"),
        ("{reason: x}", "give exactly one of id"),
        ("{id: a, reson: x, reason: x}", "reson: unknown key; did you mean reason?"),
        ("{id: a, reason: x, expires: soon}", "expected a date such as 2026-12-31"),
        ("{id: a, reason: x, rule: outlyer}", "did you mean outlier?"),
        ("just text", "expected a group of keys"),
    ],
)
def test_ignore_list_invalid_entry(tmp_path: Path, entry: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_ignore_list(ignore_list(tmp_path, f"- {entry}\n"))
    assert words in str(caught.value)
    assert "ignore.yaml:1" in str(caught.value)


def test_ignore_list_missing_or_invalid(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no ignore list"):
        read_ignore_list(tmp_path / "ignore.yaml")
    with pytest.raises(ConfigError, match="holds a group of keys"):
        read_ignore_list(ignore_list(tmp_path, "ignore: []"))
    assert read_ignore_list(ignore_list(tmp_path, "# nothing yet\n")) == ()


# -- Baselines -----------------------------------------------------------------------------------------------


def test_baseline_only_shrinks_by_default() -> None:
    before = changed(None, named(table(10, listed=(1, 2, 3))), {}, {"scores": 1}, Path("b"), grow=False)
    assert (before.taken, before.refused, before.first, len(before.baseline.findings)) == (3, 0, True, 3)
    later = named(table(10, listed=(2, 3, 4), nonfinite=(5,)))
    shrunk = changed(before.baseline, later, {}, {"scores": 2}, Path("b"), grow=False)
    assert (shrunk.dropped, shrunk.taken, shrunk.refused) == (1, 0, 2)
    assert {each.id for each in shrunk.baseline.findings} == {"s2", "s3"}
    assert (shrunk.baseline.reference, shrunk.reference_kept) == ({"scores": 1}, True)
    grown = changed(before.baseline, later, {}, {"scores": 2}, Path("b"), grow=True)
    assert (grown.dropped, grown.taken, grown.refused) == (1, 2, 0)
    assert {each.id for each in grown.baseline.findings} == {"s2", "s3", "s4", "s5"}
    assert grown.baseline.reference == {"scores": 2}


def test_baseline_excludes_ignored_and_review_list(tmp_path: Path) -> None:
    entries = read_ignore_list(ignore_list(tmp_path, "- {id: s1, reason: x}\n"))
    rows, _ = with_states(named(table(10, listed=(1, 2))), entries, TODAY)
    assert [each.id for each in changed(None, rows, {}, None, Path("b"), grow=False).baseline.findings] == [
        "s2"
    ]
    assert (
        changed(
            None, named(table(10, listed=(1, 2)), NO_REFERENCE), {}, None, Path("b"), grow=False
        ).baseline.findings
        == ()
    )


def test_baseline_round_trip(tmp_path: Path) -> None:
    saved = changed(
        None,
        named(table(10, listed=(1, 2), nonfinite=(7,))),
        {"samples": 10},
        {"score": "loss"},
        Path("b"),
        grow=False,
    ).baseline
    (tmp_path / "b.json").write_text(json.dumps(written(saved)))
    read = read_baseline(tmp_path / "b.json")
    assert (set(read.findings), read.run, read.reference) == (
        set(saved.findings),
        {"samples": 10},
        {"score": "loss"},
    )
    later = named(table(10, listed=(2, 3)))
    assert gone(later, read) == 2
    assert mark_known(later, read)["state"].tolist() == ["known", "new"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "can't be read as a baseline"),
        ("[]", "no mark of a baseline"),
        ('{"tool": "psgrad", "kind": "run"}', "no mark of a baseline"),
        ('{"tool": "psgrad", "kind": "baseline", "version": 2}', "format version 2"),
        (
            '{"tool": "psgrad", "kind": "baseline", "version": 1, "findings": [{"rule": "outlier"}]}',
            "its findings are damaged",
        ),
        ('{"tool": "psgrad", "kind": "baseline", "version": 1}', "its findings are damaged"),
    ],
)
def test_baseline_invalid_file(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read_baseline(tmp_path / "b.json")
    assert words in str(caught.value)
