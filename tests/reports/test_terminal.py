"""The end of a run on a terminal: what nobody has is left out, and no text of the data reaches the terminal
as a command.
"""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest

from psgrad.reports.analyze_terminal import summary, top_table
from psgrad.reports.terminal import print_table
from psgrad.run.results import AnalyzeResult
from tests.nasty import NASTY
from tests.reports import frames


class Screen(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


def _printed(result: AnalyzeResult, n: int = 5, stream: io.StringIO | None = None) -> str:
    stream = stream or io.StringIO()
    print_table(top_table(result, n), stream)
    return stream.getvalue()


def test_q_values_stand_beside_loss_and_norm_where_there_was_a_reference() -> None:
    samples = frames.classification(60)
    assert "q-value" not in _printed(frames.result(samples.assign(q_value=np.nan)))
    found = _printed(
        frames.result(samples.assign(q_value=np.where(samples["rank"].fillna(0) == 1, 0.0123, 0.5)))
    )
    heading, first, second, *_ = found.splitlines()
    assert heading.split() == [
        "rank",
        "id",
        "label",
        "prediction",
        "loss",
        "gradient",
        "norm",
        "percentile",
        "q-value",
    ]
    assert first.split()[-1] == "0.0123"
    assert second.split()[-1] == "0.5"


def test_the_summary_tells_a_verdict_from_a_list() -> None:
    samples = frames.classification(60, nonfinite=2)
    assert "1 in the review list (a list to look at, not a verdict), 2 with a loss" in summary(
        frames.result(samples)
    )
    against = {
        "decided_by": "reference",
        "evaluable": True,
        "fdr": 0.1,
        "resolution": "30 trusted samples can tell 2 or more",
    }
    found = summary(frames.result(samples, manifest={"outliers": against}))
    assert "1 unlike the reference at a false discovery rate of 0.1, 2 with a loss" in found
    assert "resolution limit: 30 trusted samples can tell 2 or more" in found
    against |= {"evaluable": False, "why_not": "too few"}
    assert "not evaluable: too few" in summary(frames.result(samples, manifest={"outliers": against}))


def test_the_score_that_decides_and_the_group_are_shown() -> None:
    samples = frames.classification(60).assign(margin=1.25, group=["a", "b"] * 30)
    found = _printed(frames.result(samples, manifest={"outliers": {"score": "margin"}}))
    assert {"margin", "group"} <= set(found.splitlines()[0].split())
    assert "1.25" in found.splitlines()[1]


@pytest.mark.parametrize("what", NASTY)
def test_nasty_ids_and_groups_command_no_terminal_and_stay_within_its_width(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = NASTY[what]
    samples = frames.classification(3, nonfinite=0)
    samples["id"] = pd.Series([f"{text}{row}" for row in range(3)], dtype=object)
    samples["group"] = pd.Series([text, "b", "c"], dtype=object)
    result = frames.result(samples.assign(q_value=0.5), inputs=None, class_names=[text] * 10)
    piped = _printed(result)
    assert all(letter.isprintable() for letter in piped.replace("\n", ""))
    assert len(piped.splitlines()) < 12
    shown = _printed(result, stream=Screen())
    plain = shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert all(letter.isprintable() for letter in plain.replace("\n", ""))


def test_the_summary_counts_samples_without_a_rank() -> None:
    samples = frames.classification(20)
    assert "skipped" not in summary(frames.result(samples))
    status = np.where(samples.index < 3, "skipped", samples["status"])
    found = summary(frames.result(samples.assign(status=status)))
    assert "3 samples without a rank (status: skipped); the column reasons says why" in found
