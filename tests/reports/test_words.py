"""How values read, on the terminal and on the page."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pandas as pd
import pytest

from psgrad.reports.terminal import print_table, summary, top_table
from psgrad.reports.words import count, identifier, label, number, percentile
from tests.reports import frames


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.23456, "1.235"),
        (1.2e-7, "1.2e-07"),
        (0, "0"),
        (np.float32(2.5), "2.5"),
        (None, "–"),
        (np.nan, "–"),
        (pd.NA, "–"),
        (np.inf, "inf"),
    ],
)
def test_numbers(value: Any, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "names", "text"),
    [
        (3, None, "3"),
        (1, ["cat", "dog"], "dog"),
        (np.int64(1), ["cat", "dog"], "dog"),
        (1.0, ["cat", "dog"], "dog"),
        (7, ["cat", "dog"], "7"),
        (-1, ["cat", "dog"], "-1"),
        (0.25, ["cat", "dog"], "0.25"),
        (2.0, None, "2"),
        (True, None, "True"),
        ("a\x1bb", None, "a\\x1bb"),
        (None, ["cat"], "–"),
        (pd.NA, ["cat"], "–"),
        (np.nan, ["cat"], "–"),
        ("x" * 99, None, "x" * 39 + "…"),
    ],
)
def test_labels(value: Any, names: list[str] | None, text: str) -> None:
    assert label(value, names) == text


def test_a_percentile_is_100_only_for_the_largest() -> None:
    assert [percentile(value) for value in (100.0, 99.9999, 99.994, 50.0)] == ["100.00", "99.9999", "99.99", "50.00"]


def test_counts_and_ids() -> None:
    assert count(1) == "1 sample"
    assert count(1797) == "1,797 samples"
    assert identifier("a\nb") == "a\\nb"
    assert len(identifier("x" * 1000)) == 80


def test_the_table_in_a_pipe_is_plain_and_uncut() -> None:
    samples = frames.classification(30, nonfinite=1)
    samples["id"] = [f"[red]{'long' * 15}\x1b[31m{index}" for index in range(30)]
    stream = io.StringIO()
    print_table(top_table(frames.result(samples, class_names=["[b]zero[/b]"] * 10), 20), stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 21
    assert "\x1b" not in stream.getvalue()
    assert all("[red]" + "long" * 15 + "\\x1b[31m" in line for line in lines[1:])
    assert all("[b]zero[/b]" in line for line in lines[1:])


def test_a_run_without_finite_rows_still_has_a_table_and_a_summary() -> None:
    result = frames.result(frames.classification(5, nonfinite=5), manifest={})
    stream = io.StringIO()
    print_table(top_table(result, 20), stream)
    assert stream.getvalue().split()[:2] == ["rank", "id"]
    assert "5 samples, 0 in the review list" in summary(result)
    assert "5 with a loss or gradient that is not finite" in summary(result)
