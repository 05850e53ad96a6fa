"""How values read, on the terminal and on the page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from psgrad.reports.words import (
    count,
    identifier,
    label,
    number,
    percent,
    percentile,
    value_words,
    values_line,
)


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
    assert [percentile(value) for value in (100.0, 99.9999, 99.994, 50.0)] == [
        "100.00",
        "99.9999",
        "99.99",
        "50.00",
    ]


def test_percent_is_all_or_nothing_for_these_alone() -> None:
    found = [percent(share) for share in (0.612, 1.0, 0.0, 0.9997, 0.99996, 0.9999999, 0.0004, 1.7)]
    assert found == ["61.2%", "100.0%", "0.0%", "99.97%", "99.996%", "99.99999%", "0.04%", "170.0%"]
    assert [percent(share, 0) for share in (2 / 3, 0.9957, 1.0, 0.003)] == ["67%", "99.6%", "100%", "0.3%"]


def test_values_of_the_data_stand_as_they_are() -> None:
    values = (
        94105.0,
        12.460000038146973,
        0.1184,
        1001,
        "red",
        None,
        float("nan"),
        2.5e7 + 0.5,
        -3.0,
        1e-9,
        float("inf"),
    )
    assert [value_words(value) for value in values] == [
        "94105",
        "12.46",
        "0.1184",
        "1001",
        "red",
        "–",
        "–",
        "2.5e+07",
        "-3",
        "1e-09",
        "inf",
    ]
    assert values_line((("postcode", 94105.0), ("age", 39))) == "postcode 94105, age 39"


def test_counts_and_ids() -> None:
    assert count(1) == "1 sample"
    assert count(1797) == "1,797 samples"
    assert identifier("a\nb") == "a\\nb"
    assert len(identifier("x" * 1000)) == 80
