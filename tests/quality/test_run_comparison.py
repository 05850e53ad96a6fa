"""What changed between two tables, against plain loops over their samples."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from psgrad.commands.diff import diff
from psgrad.errors import DataError
from psgrad.quality.run_comparison import changes_of, counts_of, matched, spearman
from psgrad.reports.comparison import (
    render_comparison,
    sentences,
    tables,
)
from psgrad.reports.words import number, percentile
from tests.nasty import NASTY, NOT_IN_PARQUET
from tests.verdicts import finished, table


def frame(scores: dict[str, float], listed: str = "") -> pd.DataFrame:
    """A judged table of samples by name, in this order."""
    made = table(
        len(scores),
        listed=tuple(place for place, name in enumerate(scores) if name in listed),
        ids=list(scores),
    )
    return made.assign(grad_norm=list(scores.values()), loss=list(scores.values()))


def both(a: pd.DataFrame, b: pd.DataFrame, tail: str = "upper") -> pd.DataFrame:
    return matched(a, b, "grad_norm", tail)


def test_comparison_matches_samples_by_id() -> None:
    a = frame({"a": 1.0, "b": 2.0, "c": 3.0, "gone": 9.0}, listed="c")
    b = frame({"new": 5.0, "c": 1.0, "b": 2.0, "a": 3.0}, listed="ab")
    one = both(a, b)
    assert counts_of(one) == {
        "samples_a": 4,
        "samples_b": 4,
        "common": 3,
        "came": 1,
        "went": 1,
        "rose": 1,
        "fell": 1,
        "entered": 2,
        "left": 1,
    }
    changes = changes_of(one, "upper", 5).set_index("change")
    assert changes["id"].to_dict() == {"came": "new", "went": "gone", "rose": "a", "fell": "c"}
    assert changes.loc["rose", ["row_a", "row_b", "score_a", "score_b", "list"]].tolist() == [
        0,
        3,
        1.0,
        3.0,
        "entered",
    ]
    assert changes.loc["rose", "moved"] == pytest.approx(200 / 3)
    assert changes.loc["fell", "list"] == "left"
    assert spearman(one["score_a"], one["score_b"]) == pytest.approx(-1.0)


def test_comparison_lower_tail() -> None:
    a, b = frame({"a": 1.0, "b": 2.0, "c": 3.0}), frame({"a": 1.0, "b": 2.0, "c": 0.5})
    assert changes_of(both(a, b, "lower"), "lower", 1).query("change == 'rose'")["id"].tolist() == ["c"]
    assert changes_of(both(a, b), "upper", 1).query("change == 'fell'")["id"].tolist() == ["c"]


def test_comparison_matches_duplicates_by_content() -> None:
    a = table(4, prints=["x", "x", "y", "x"])
    b = table(3, prints=["x", "y", "x"])
    counts = counts_of(both(a, b))
    assert (counts["common"], counts["went"], counts["came"]) == (3, 1, 0)


def test_comparison_samples_without_score() -> None:
    one = both(table(4, nonfinite=(3,)), table(4, nonfinite=(0,)))
    counts = counts_of(one)
    assert (counts["common"], int(one["moved"].notna().sum()), counts["left"], counts["entered"]) == (
        4,
        2,
        1,
        1,
    )


@given(
    scores=st.lists(
        st.tuples(st.floats(0.1, 9), st.floats(0.1, 9), st.booleans(), st.booleans()),
        min_size=1,
        max_size=25,
    )
)
def test_comparison_equals_the_loop(scores: list[tuple[float, float, bool, bool]]) -> None:
    names = [f"s{number}" for number in range(len(scores))]
    in_a = {name: each[0] for name, each in zip(names, scores, strict=True) if each[2]}
    in_b = {name: each[1] for name, each in zip(names, scores, strict=True) if each[3]}
    one = both(frame(in_a), frame(dict(reversed(in_b.items()))))
    common = [name for name in names if name in in_a and name in in_b]
    counts = counts_of(one)
    assert (counts["common"], counts["came"], counts["went"]) == (
        len(common),
        len(in_b) - len(common),
        len(in_a) - len(common),
    )
    place = {
        run: scipy.stats.rankdata([scores[name] for name in common])
        for run, scores in (("a", in_a), ("b", in_b))
    }
    moved = 100 * (place["b"] - place["a"]) / max(len(common), 1)
    assert one.set_index("id").loc[common, "moved"].to_numpy() == pytest.approx(moved)
    assert (counts["rose"], counts["fell"]) == (int((moved > 1e-9).sum()), int((moved < -1e-9).sum()))


# -- The whole way -------------------------------------------------------------------------------------------


def test_comparison_of_different_measurements_warns(tmp_path: Path) -> None:
    known = {"modules": "m", "code": {}}
    weights = {"weights": "3" * 64, **known}
    a = finished(
        tmp_path / "a", table(5), model={"sha256": "1" * 64}, hashes=weights, data={"fingerprint": "6" * 64}
    )
    b = finished(
        *(tmp_path / "b", table(5)),
        model={"sha256": "2" * 64},
        hashes={"weights": "4" * 64, **known},
        counts={"samples": 5, "in_dataset": 9},
        data={"fingerprint": "5" * 64},
    )
    warnings = diff(a, b).warnings
    assert "checkpoint: '111" in warnings[0]
    assert (
        warnings[1]
        == "the models differ: the hashes of their weights are 333333333333 (A) and 444444444444 (B)"
    )
    assert warnings[2] == "the data differ: their hashes are 666666666666 (A) and 555555555555 (B)"
    assert warnings[3] == "B is PARTIAL: it looked at the first 5 of 9 samples (--limit)"
    assert diff(a, a).warnings == ()
    assert diff(a, a).spearman == pytest.approx(1.0)


def test_comparison_number_format(tmp_path: Path) -> None:
    """A correlation of 1 is the same order and nothing less, and percentiles have two digits."""
    a, b = finished(tmp_path / "a", table(400)), finished(tmp_path / "b", table(400))
    same = diff(a, b)
    assert "rank correlation (Spearman) 1; 0 rose" in sentences(same)[1]
    assert "rank correlation (Spearman) 0.9999;" in sentences(replace(same, spearman=0.99996))[1]
    moved = finished(
        tmp_path / "c", table(400).assign(grad_norm=lambda frame: np.roll(frame["grad_norm"], 7))
    )
    result = diff(a, moved)
    cells = [row.cells for table in tables(result) for row in table.rows]
    assert cells
    assert all(re.fullmatch(r"\d+\.\d\d", cell) for row in cells for cell in row[3:5])
    known = {str(row["id"]): row for row in result.changes.to_dict("records")}
    for row in cells:
        change = known[row[0]]
        assert list(row[1:3]) == [number(change["score_a"]), number(change["score_b"])]
        assert list(row[3:5]) == [percentile(change["percentile_a"]), percentile(change["percentile_b"])]
        assert row[5] == f"{change['percentile_b'] - change['percentile_a']:+.2f}"


def test_comparison_of_different_scores_uses_norms(tmp_path: Path) -> None:
    a = finished(tmp_path / "a", table(5))
    b = finished(tmp_path / "b", table(5), config={"analyze": {"outliers": {"score": "loss"}}})
    result = diff(a, b)
    assert (
        result.score,
        "judged by different scores, grad_norm (upper) and loss (upper)" in result.warnings[0],
    ) == ("grad_norm", True)


def test_comparison_without_common_sample_refused(tmp_path: Path) -> None:
    a, b = finished(tmp_path / "a", table(3)), finished(tmp_path / "b", table(3, ids=["x", "y", "z"]))
    with pytest.raises(DataError, match="have no sample in common"):
        diff(a, b)


@pytest.mark.parametrize("style", ["terminal", "json"])
def test_comparison_nasty_ids(style: str, tmp_path: Path) -> None:
    ids = [text for name, text in NASTY.items() if name not in NOT_IN_PARQUET]
    frames = table(len(ids), ids=ids), table(len(ids), ids=ids[::-1])
    a, b = (finished(tmp_path / name, each) for name, each in zip("ab", frames, strict=True))
    text = render_comparison(diff(a, b, top=100), style)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert not any(line.lstrip().startswith("::") for line in text.splitlines())
