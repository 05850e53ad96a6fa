"""Conditions on columns: comparisons are taken, and nothing that runs code."""

from __future__ import annotations

import pandas as pd
import pytest

from psgrad.config.values import names_in_condition
from psgrad.errors import ConfigError
from psgrad.run.results.analyze import rows_where

FRAME = pd.DataFrame(
    {
        "id": ["a", "b", "c", "d"],
        "label": [0, 1, 2, 3],
        "loss": [0.5, float("nan"), 2.0, -1.0],
        "index": range(4),
    }
)


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("label == 3", "d"),
        ("label in [0, 2] and loss > 1", "c"),
        ("not (label == 0 or label == 1)", "cd"),
        ("-2 < loss <= 0.5", "ad"),
        ("id in ('a', 'd') and id != 'a'", "d"),
        ("label not in [1, 2, 3]", "a"),
        ("loss != loss", "b"),
        ("index >= 2\n and\n label < 3", "c"),
    ],
)
def test_condition_keeps_the_rows_that_python_would(condition: str, kept: str) -> None:
    chosen = rows_where(FRAME, condition, "--where")
    assert "".join(FRAME["id"][chosen]) == kept
    by_python = [
        eval(" ".join(condition.split()), {}, row._asdict())
        for row in FRAME.rename_axis("n").itertuples(index=False)
    ]
    assert chosen.tolist() == by_python


@pytest.mark.parametrize(
    "condition",
    [
        "__import__('os').system('true')",
        "label.__class__ == 3",
        "label[0] == 1",
        "@secret == 1",
        "label == 3; loss > 1",
        "(lambda: 1)() == 1",
        "[x for x in id] == 1",
        "label == 3 if loss else 2",
        "label + 1 == 3",
        "f'{label}' == '3'",
        "label := 3",
        "b'1' == label",
        "",
    ],
)
def test_what_is_no_comparison_is_refused(condition: str) -> None:
    with pytest.raises(ValueError, match="expected comparisons of columns with values"):
        names_in_condition(condition)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("lable == 3", "there is no column 'lable'; did you mean label? known: id, label, loss, index"),
        ("id > loss", "can't be answered"),
        ("id > 3", "id holds texts, and 3 is none"),
        ("loss > 0 and label == 'dog'", "label holds numbers, and 'dog' is none"),
        ("label in [1, '3']", "label holds numbers, and '3' is none"),
        ("not 0 == id", "id holds texts, and 0 is none"),
        ("label", "is not true or false of each row"),
        ("3", "is not true or false of each row"),
    ],
)
def test_condition_that_does_not_fit_the_table_is_reported(condition: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_where(FRAME, condition, "--where")
    assert words in str(caught.value)
    assert str(caught.value).startswith("--where")
