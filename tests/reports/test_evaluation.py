"""What an evaluation prints, draws and writes as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from psgrad.reports.evaluation import decimals, write_evaluation
from psgrad.reports.evaluation_plots import evaluation_plots
from psgrad.run.results.influence_evaluation import EvaluationResult, Retrained, evaluation_content
from psgrad.run.results.manifest import read_manifest

UNIT = "rise of the query's loss, in nats"


def lds_result(**changes: Any) -> EvaluationResult:
    names, control = ["influence", "gradient_dot", "same [red] label"], [False, False, True]
    table = pd.DataFrame(
        {
            "method": names,
            "control": control,
            "mean": [0.58, 0.15, 0.14],
            "low": [0.57, 0.14, 0.13],
            "high": [0.59, 0.16, 0.15],
            "ahead": [np.nan, 0.43, 0.44],
            "ahead_low": [np.nan, 0.42, 0.43],
            "ahead_high": [np.nan, 0.44, 0.45],
            "undefined": [0, 0, 3],
        }
    )
    done = Retrained(
        *(300, 3, 390),
        subsets=100,
        fraction=0.5,
        ceiling=0.958,
        single_seed=0.79,
        reliability=0.918,
    )
    content: dict[str, Any] = {
        "kind": "lds",
        "method": "influence",
        "table": table,
        "retrained": done,
        "details": pd.DataFrame(),
        "unit": UNIT,
        "folder": Path("runs/x-lds"),
        "notes": ["left out: tracin, as \x1b[31mit is"],
    }
    return EvaluationResult(**{**content, **changes})


def loo_result() -> EvaluationResult:
    numbers = [0.9997, 0.999, 0.9999, 0.99, 1.057, 1e-5, 0.9996]
    columns = ["pearson", "low", "high", "spearman", "slope", "intercept", "pooled"]
    rows = [
        {"method": "influence", "control": False, **dict(zip(columns, numbers, strict=True)), "undefined": 0},
        {"method": "random", "control": True, **dict.fromkeys(columns, np.nan), "undefined": 4},
    ]
    done = Retrained(2, 1, 3, removals=2, highest=1)
    points = pd.DataFrame(
        {"train_id": ["a", "b"], "query_id": ["q", "q"], "predicted": [0.1, -0.2], "actual": [0.11, -0.19]}
    )
    return lds_result(kind="loo", table=pd.DataFrame(rows), retrained=done, points=points)


def removal_result() -> EvaluationResult:
    lead = ["ahead", "ahead_low", "ahead_high"]
    rows = [
        {"method": name, "control": control, "removed": k, "rise": rise * k, "low": 0.0, "high": rise * k * 2}
        | dict(zip(lead, [1.0, 0.5, 1.5] if control else [np.nan] * 3, strict=True))
        for name, control, rise in (("random", True, 0.01), ("influence", False, 0.03))
        for k in (10, 50)
    ]
    return lds_result(kind="removal", table=pd.DataFrame(rows), retrained=Retrained(20, 5, 900))


RESULTS = {"lds": lds_result, "loo": loo_result, "removal": removal_result}


def printed(result: EvaluationResult, style: str = "terminal") -> str:
    stream = io.StringIO()
    write_evaluation(result, style, stream)
    return stream.getvalue()


def test_the_table_has_the_best_first_with_intervals_leads_and_the_ceiling() -> None:
    lines = printed(lds_result()).splitlines()
    rows = [line.split()[0] for line in lines if line.startswith(("influence", "gradient_dot", "same"))]
    assert rows == ["influence", "gradient_dot", "same"]
    text = "\n".join(lines)
    for words in (
        "390 models: 100 subsets of 50% of the rows, 3 seeds each",
        f"300, each by the {UNIT}",
        "best reachable 0.958 (one seed agrees with another to 0.790",
        "lead of influence",
        "0.570 to 0.590",
        "same [red] label (control)",
        "runs/x-lds",
    ):
        assert words in text
    assert "\x1b" not in text  # no escape sequence of a note reaches the terminal


def test_decimals_are_no_1_where_the_number_is_none() -> None:
    assert [decimals(value, 3) for value in (0.9996, -0.9996, 1.0, 1.0004, 0.0004)] == [
        "0.999",
        "-0.999",
        "1.000",
        "1.000",
        "0.000",
    ]


def test_the_tables_of_the_other_kinds() -> None:
    loo = printed(loo_result())
    assert "not known" in loo
    assert "1.0570" in loo
    removal = [
        line.split()
        for line in printed(removal_result()).splitlines()
        if line.startswith(("influence", "random"))
    ]
    assert [row[0] for row in removal] == ["influence", "influence", "random", "random"]
    assert [row[1] for row in removal[:2]] == ["10", "50"]


@pytest.mark.parametrize("kind", list(RESULTS))
def test_json_has_the_configs_method_by_flat_names_and_every_method_by_its_own(kind: str) -> None:
    content = json.loads(printed(RESULTS[kind](), "json"))
    found = content[kind]
    assert (content["kind"], content["method"], content["unit"]) == (kind, "influence", UNIT)
    mine = found["methods"]["influence"]
    assert mine.pop("control") is False
    assert {name: found[name] for name in mine} == mine
    expected = {"lds": "mean", "loo": "slope", "removal": "curve"}[kind]
    assert found[expected] is not None


def test_names_of_json() -> None:
    lds = evaluation_content(lds_result())["lds"]
    assert (lds["mean"], lds["interval"], lds["ceiling"]) == (0.58, [0.57, 0.59], 0.958)
    assert lds["methods"]["gradient_dot"]["ahead_interval"] == [0.42, 0.44]
    assert lds["methods"]["influence"]["ahead"] is None
    assert isinstance(lds["methods"]["gradient_dot"]["undefined"], int)
    loo = evaluation_content(loo_result())["loo"]
    assert (loo["pearson"], loo["slope"], loo["methods"]["random"]["slope"], loo["ceiling"]) == (
        0.9997,
        1.057,
        None,
        None,
    )
    curve = evaluation_content(removal_result())["removal"]["curve"]
    assert [entry["removed"] for entry in curve] == [10, 50]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("lds", []),
        ("loo", ["predicted_and_actual"]),
        ("removal", ["evaluation"]),
    ],
)
def test_figures(kind: str, names: list[str]) -> None:
    plots = evaluation_plots(RESULTS[kind]())
    assert [plot.name for plot in plots] == names
    assert all(plot.png(40).startswith(b"\x89PNG") for plot in plots)


def test_scores_without_a_unit_are_not_drawn_as_predicted_amounts() -> None:
    relative = {"influence": {"predicts_removal": False, "unit": "relative, no unit"}}
    for manifest, label, lines in (({}, "predicted rise of", 1), (relative, "(relative, no unit)", 0)):
        plot = evaluation_plots(replace(loo_result(), manifest=read_manifest(manifest)))[0]
        (axes,) = plot.figure.axes
        assert label in axes.get_xlabel()
        assert sum(line.get_label() == "as predicted" for line in axes.lines) == lines
        assert ("On the dashed line" in plot.caption) == bool(lines)


def test_points_and_their_line() -> None:
    drawn = evaluation_plots(loo_result())[0].figure.axes[0].lines
    np.testing.assert_allclose(drawn[0].get_xdata(), [0.1, -0.2])
    np.testing.assert_allclose(drawn[2].get_ydata(), [1e-5 - 1.057 * 0.2, 1e-5 + 1.057 * 0.1])
