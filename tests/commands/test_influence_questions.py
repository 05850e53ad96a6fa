"""Questions about several rows at once, against numpy on all scores: groups, contrasts, the largest score
over queries.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.commands.test_influence_evaluation import EvaluationWorkplace
from tests.influence_workplace import QUERIES, InfluenceWorkplace
from tests.workplace import ROWS

GROUPS = np.array([f"doc-{row % 5}" for row in range(ROWS)])


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> EvaluationWorkplace:
    found = EvaluationWorkplace(tmp_path, monkeypatch, capfd)
    found.start()
    found.save(doc=GROUPS)
    monkeypatch.setattr("psgrad.commands.influence_evaluate.evaluation_plots", lambda result: [])
    return found


def ran(place: InfluenceWorkplace, *options: str) -> str:
    outcome = place.influence("--no-report", *options).succeeded()
    return outcome.out


# -- groups --------------------------------------------------------------------------------------------------


def test_influence_groups_sum_the_scores_of_their_rows(place: EvaluationWorkplace) -> None:
    place.section["groups"] = "doc"
    out = ran(place)
    products, found = place.products(), place.table("groups")
    for group, rows in found.groupby("group"):
        own = products[group == GROUPS].sum(0)
        for row in rows.itertuples():
            wanted = own.mean() if row.query_index == -1 else own[row.query_index]
            assert row.score == pytest.approx(wanted, rel=1e-6)
            assert row.rows == (group == GROUPS).sum()
    assert set(found[found["query_index"] == -1]["group"]) == set(GROUPS)
    assert "Groups that help most" in out
    assert "doc-1" in out


# -- contrasts ------------------------------------------------------------------------------------------


def test_influence_contrast_is_the_difference_of_two_columns(place: EvaluationWorkplace) -> None:
    place.section["contrast"] = [["query-3", "query-1"]]
    assert "query-3 minus query-1" in ran(place, "--top", "4")
    products, found = place.products(), place.table("contrasts")
    difference = products[:, 3] - products[:, 1]
    helps = found[found["rank"] > 0]
    assert helps["train_index"].tolist() == np.argsort(-difference)[:4].tolist()
    np.testing.assert_allclose(found["score"], difference[found["train_index"]], rtol=1e-6)
    np.testing.assert_allclose(found["score_second"], products[found["train_index"], 1], rtol=1e-6)


# -- what to do next -----------------------------------------------------------------------------------------


def test_influence_harmful_rows_are_a_list_with_predicted_changes(place: EvaluationWorkplace) -> None:
    ran(place)
    overall = place.products().mean(1)
    found = pd.read_csv(place.folder / "out" / "harmful.csv")
    order = np.argsort(overall)
    order = order[overall[order] < 0]
    assert found["index"].tolist() == order.tolist()
    np.testing.assert_allclose(found["predicted_change"], np.cumsum(overall[order]), rtol=1e-5)


def test_influence_answers_are_in_the_json(place: EvaluationWorkplace) -> None:
    place.section.update({"groups": "doc", "contrast": [["query-0", "query-1"]]})
    content = json.loads(ran(place, "--json"))
    assert {row["group"] for row in content["groups"]} == set(GROUPS)
    assert content["contrasts"][0]["first"] == "query-0"


# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "options", "named"),
    [
        ({"groups": "doc"}, (), "influence.groups need"),
        ({"contrast": [["query-0", "query-1"]]}, (), "influence.contrast need"),
        ({"groups": "doc"}, ("--matrix",), "influence.groups, --matrix need"),
    ],
)
def test_influence_all_scores_beyond_memory(
    place: EvaluationWorkplace,
    monkeypatch: pytest.MonkeyPatch,
    section: dict[str, object],
    options: tuple[str, ...],
    named: str,
) -> None:
    """One copy of the scores fits, and four do not."""
    place.section.update(section)
    free = 8 * ROWS * QUERIES * 2
    monkeypatch.setattr("psgrad.commands.influence_scores.free_host_memory", lambda: free)
    outcome = place.influence("--no-report", *options)
    outcome.refused(
        3, f"all {ROWS} x {QUERIES} scores take", named, f"ask about {QUERIES // 2} of the queries"
    )
