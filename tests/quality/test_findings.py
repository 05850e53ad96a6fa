"""Which rule names which sample, by which fingerprint, and how many are kept."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from psgrad.config import GateConfig
from psgrad.quality import findings
from psgrad.quality.findings import counts_of, in_order, levels_of, listed_findings, named_samples
from psgrad.run.results import Finding, Location
from psgrad.run.results.manifest import read_manifest
from tests.verdicts import NO_REFERENCE, REFERENCE, table


def found(
    frame: pd.DataFrame, outliers: dict[str, object] = REFERENCE, gate: GateConfig | None = None
) -> list[Finding]:
    ordered = in_order(named_samples(frame, read_manifest({"outliers": outliers})), frame)
    return list(
        listed_findings(ordered, frame, gate or GateConfig(), "grad_norm", Location("data.csv"), {2: 7})
    )


def test_findings_order() -> None:
    frame = table(8, listed=(2, 5, 7), nonfinite=(1,), zero=(0,))
    assert [(each.rule, each.id) for each in found(frame)] == [
        ("nonfinite", "s1"),
        ("outlier", "s7"),
        ("outlier", "s5"),
        ("outlier", "s2"),
        ("zero-gradient", "s0"),
    ]
    assert {each.rule for each in found(frame, NO_REFERENCE)} == {"nonfinite", "zero-gradient", "review"}


def test_finding_location_and_values() -> None:
    one = found(table(4, listed=(2,)))[0]
    assert (one.location, one.index, one.reasons, one.values) == (
        Location("data.csv", 7),
        2,
        ("first", "second"),
        {"grad_norm": 3.0, "loss": 0.3},
    )
    assert "grad_norm 3" in one.message
    nan = found(table(4, nonfinite=(3,)))[0]
    assert nan.values == {"grad_norm": None, "loss": None}
    assert (nan.location, "grad_norm nan" in nan.message) == (Location("data.csv"), True)


def test_finding_fingerprint_of_rule_and_sample() -> None:
    frame = table(6, listed=(1, 4), zero=(1,))
    moved = (
        frame.iloc[::-1]
        .assign(index=np.arange(6), grad_norm=lambda each: each["grad_norm"] * 3)
        .reset_index(drop=True)
    )
    before, after = ({(each.rule, each.id): each.fingerprint for each in found(of)} for of in (frame, moved))
    assert before == after
    assert len(set(before.values())) == 3


def test_finding_fingerprints_of_equal_samples() -> None:
    prints = ["aa", "bb", "aa", "aa", "cc"]
    frame = table(5, listed=(0, 1, 2, 3), prints=prints)
    digests = {each.index: each.fingerprint for each in found(frame)}
    assert len(set(digests.values())) == 4
    # The third of them is the third, also where the first two are not named.
    assert found(table(5, listed=(3,), prints=prints))[0].fingerprint == digests[3]
    # And who stands alone has the digest of the first.
    assert found(table(1, listed=(0,), prints=["aa"]))[0].fingerprint == digests[0]


def test_finding_levels_follow_the_gate() -> None:
    assert levels_of(GateConfig())["outlier"] == "warning"
    assert (
        levels_of(GateConfig(max_outliers=0))["outlier"]
        == levels_of(GateConfig(max_fraction=0.5))["outlier"]
        == "error"
    )
    assert [
        levels_of(GateConfig(nonfinite=each))["nonfinite"] for each in ("error", "warning", "ignore")
    ] == ["error", "warning", "note"]


def test_findings_limit_per_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "FINDINGS_OF_A_RULE", 3)
    frame = table(20, listed=tuple(range(10)), nonfinite=(15, 16, 17, 18))
    named = named_samples(frame, read_manifest({"outliers": REFERENCE}))
    kept = in_order(named, frame)
    assert kept["rule"].tolist() == ["nonfinite"] * 3 + ["outlier"] * 3
    assert kept["id"].tolist()[3:] == ["s9", "s8", "s7"]
    assert (counts_of(named)["outlier"]["new"], counts_of(named)["nonfinite"]["new"]) == (10, 4)
