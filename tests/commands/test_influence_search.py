"""`influence.index_search: approximate`: it finds the rows that an exact scan of the index ranks, says which
share of them, and gives them the same scores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from psgrad.run.row_lists import RowLists
from tests.influence_workplace import InfluenceWorkplace
from tests.workplace import CLASSES, FEATURES, ROWS

pytest.importorskip("faiss", reason="faiss is not installed: pip install 'psgrad[faiss]'")

MANY = 300
# As many as the square root of the number of rows, of the 24 and of the 300.
ALL_LISTS = {"kind": "approximate", "probes": 5}
ALL_OF_MANY = {"kind": "approximate", "probes": 17}
FEW_LISTS = {"kind": "approximate", "probes": 1}


@pytest.fixture
def place(influence_place: InfluenceWorkplace) -> InfluenceWorkplace:
    index = {"path": "index", "projection": "none", "features": "margin", "rows_per_shard": 7}
    influence_place.section.update(index=index, top=3)
    return influence_place


def with_many_rows(place: InfluenceWorkplace, seed: int = 3) -> None:
    random = np.random.default_rng(seed)
    place.save(
        x=random.normal(size=(MANY, FEATURES)).astype(np.float32),
        y=random.integers(0, CLASSES, MANY),
        uid=np.array([f"row-{row:03}" for row in range(MANY)]),
    )


def exact(place: InfluenceWorkplace, *options: str) -> pd.DataFrame:
    place.section.pop("index_search", None)
    return in_order(place.ranked("--overwrite", "--no-report", *options))


def approximate(place: InfluenceWorkplace, search: Any = "approximate", *options: str) -> pd.DataFrame:
    place.section["index_search"] = search
    return in_order(place.ranked("--overwrite", "--no-report", *options))


def in_order(scores: pd.DataFrame) -> pd.DataFrame:
    return scores.sort_values(["query_index", "rank"]).reset_index(drop=True)


def search_facts(place: InfluenceWorkplace) -> dict[str, Any]:
    found: dict[str, Any] = place.manifest()["influence"]["search"]
    return found


def training_table(place: InfluenceWorkplace) -> pd.DataFrame:
    return pd.read_parquet(place.folder / "out" / "self_influence.parquet")


# -- The rows that are found ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("method", ["gradient_dot", "gradient_cosine", "projected_influence", "trak"])
def test_index_search_of_all_lists_is_the_exact_scan(
    place: InfluenceWorkplace, method: str, form: str
) -> None:
    with_many_rows(place)
    place.section["method"] = method
    place.section["index"]["dtype"] = form
    assert place.index().code == 0
    expected, whole = exact(place), training_table(place)
    found = approximate(place, ALL_OF_MANY)
    pd.testing.assert_frame_equal(found, expected, rtol=1e-12, atol=0)
    facts = search_facts(place)
    assert (facts["recall"], facts["lowest_recall"], facts["recall_of_all"]) == (1, 1, 1)
    assert (facts["lists"], facts["probes"], facts["measured"], facts["queries"]) == (17, 17, 5, 5)
    training = training_table(place)
    known = training["overall"].notna()
    assert 3 < known.sum() == facts["rows_scored"] < MANY
    pd.testing.assert_frame_equal(training[known], whole[known], rtol=1e-12, atol=1e-15)
    pd.testing.assert_frame_equal(training.drop(columns="overall"), whole.drop(columns="overall"))


@pytest.mark.long
def test_index_search_of_one_checkpoint_by_tracin(place: InfluenceWorkplace) -> None:
    place.section["method"] = "tracin"
    place.section["checkpoints"] = [{"path": "model.safetensors", "learning_rate": 0.1}]
    assert place.index().code == 0
    expected = exact(place)
    pd.testing.assert_frame_equal(approximate(place, ALL_LISTS), expected, rtol=1e-12, atol=0)


@pytest.mark.sweep
def test_index_search_of_few_lists_says_what_it_misses(place: InfluenceWorkplace) -> None:
    with_many_rows(place)
    place.section["method"] = "trak"
    assert place.index().code == 0
    whole = exact(place, "--top", str(MANY)).set_index(["query_index", "train_index"])["score"]
    expected = exact(place)
    found = approximate(place, FEW_LISTS)
    scores = found.set_index(["query_index", "train_index"])["score"]
    np.testing.assert_allclose(scores, whole[scores.index], rtol=1e-12)  # no score is an approximate one
    facts = search_facts(place)

    def recall(query: int) -> float:
        rows, wanted = (set(each[each["query_index"] == query]["train_index"]) for each in (found, expected))
        return len(rows & wanted) / len(wanted)

    each = [recall(query) for query in range(5)]
    assert facts["recall"] == pytest.approx(np.mean(each))
    assert facts["lowest_recall"] == pytest.approx(min(each))
    assert facts["recall_of_all"] == pytest.approx(recall(-1))
    assert 0 < facts["recall"] < 0.9, "a case that misses rows"
    warning = f"approximate search misses rows: recall@3 is {facts['recall']:.0%}"
    assert any(each.startswith(warning) for each in place.manifest()["influence"]["warnings"])
    outcome = place.influence("--overwrite", "--no-report")
    assert warning in outcome.err
    assert f"approximate search, recall@3 {facts['recall']:.0%}: so many of the 3 strongest" in outcome.out
    assert f"{facts['rows_scored']} of 300 training examples found and scored" in outcome.err
    said = json.loads(place.influence("--overwrite", "--no-report", "--json").out)
    assert said["search"] == facts


@pytest.mark.long
def test_index_search_few_queries_are_all_measured(place: InfluenceWorkplace) -> None:
    assert place.index().code == 0
    approximate(place, ALL_LISTS)
    assert "all 5 queries were also answered by reading all" in str(place.manifest()["influence"]["warnings"])


@pytest.mark.long
def test_index_search_leaves_out_rows_that_are_not_finite(place: InfluenceWorkplace) -> None:
    x = place.arrays["x"].copy()
    x[3, 0] = np.nan
    place.save(x=x)
    assert place.index().code == 0
    expected = exact(place)
    pd.testing.assert_frame_equal(approximate(place, ALL_LISTS), expected, rtol=1e-12, atol=0)
    assert training_table(place).loc[3, "status"] == "nonfinite"


# -- Lists that are kept -------------------------------------------------------------------------------------


LISTS = Path("index") / "checkpoint-000" / "lists.faiss"


@pytest.mark.sweep
def test_index_search_makes_its_lists_once(place: InfluenceWorkplace) -> None:
    assert place.index().code == 0
    place.section["index_search"] = ALL_LISTS
    outcome = place.influence("--no-report")
    assert "5 lists of neighbouring rows are made: there are none yet" in outcome.err
    made = (place.folder / LISTS).stat().st_mtime_ns
    assert "are made" not in place.influence("--overwrite", "--no-report").err
    assert (place.folder / LISTS).stat().st_mtime_ns == made
    place.section["method"] = "gradient_cosine"
    assert "were made of other rows, or with other settings" in place.influence("--overwrite").err


def with_lists_of_other_rows(place: InfluenceWorkplace) -> pd.DataFrame:
    """The exact table of an index that has lists of an earlier one beside it, with as many rows."""
    with_many_rows(place, seed=4)
    assert place.index().code == 0
    approximate(place, ALL_OF_MANY)
    kept = (place.folder / LISTS).read_bytes()
    with_many_rows(place)
    assert place.index("--overwrite").code == 0
    assert not (place.folder / LISTS).exists(), "an index that is replaced takes its lists with it"
    expected = exact(place)
    (place.folder / LISTS).write_bytes(kept)
    return expected


@pytest.mark.sweep
def test_index_search_makes_lists_of_other_rows_anew(place: InfluenceWorkplace) -> None:
    expected = with_lists_of_other_rows(place)
    before = (place.folder / LISTS).read_bytes()
    pd.testing.assert_frame_equal(approximate(place, ALL_OF_MANY), expected, rtol=1e-12, atol=0)
    assert (place.folder / LISTS).read_bytes() != before


@pytest.mark.sweep
def test_index_search_makes_damaged_lists_anew(place: InfluenceWorkplace) -> None:
    assert place.index().code == 0
    expected = exact(place)
    approximate(place, ALL_LISTS)
    path = place.folder / LISTS
    whole = path.read_bytes()
    for damaged, words in (
        (whole[: len(whole) // 2], "holds other numbers than were written"),
        (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "holds other numbers than were written"),
        (b"", "were made of other rows"),
    ):
        path.write_bytes(damaged)
        outcome = place.influence("--overwrite", "--no-report")
        assert words in outcome.err
        assert path.read_bytes() == whole
        pd.testing.assert_frame_equal(
            in_order(pd.read_parquet(place.folder / "out" / "scores.parquet")), expected, rtol=1e-12, atol=0
        )


def test_index_search_lists_from_a_file_find_the_same_rows(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(40, 5)).astype(np.float32)
    lists = RowLists.built(3, rows, [(np.arange(25), rows[:25]), (np.arange(25, 40), rows[25:])])
    lists.store(tmp_path, "rows")
    again, why = RowLists.stored(tmp_path, "rows")
    assert again is not None and not why  # noqa: PT018
    np.testing.assert_array_equal(again.search(rows, 4, 2), lists.search(rows, 4, 2))
    products = rows.astype(np.float16).astype(np.float32) @ rows.T
    np.testing.assert_array_equal(lists.search(rows, 4, 3), np.argsort(-products.T, 1)[:, :4])


@pytest.mark.long
def test_index_search_follows_an_update(place: InfluenceWorkplace) -> None:
    assert place.index().code == 0
    approximate(place, ALL_LISTS)
    random = np.random.default_rng(5)
    more = {
        "x": random.normal(size=(9, FEATURES)).astype(np.float32),
        "y": random.integers(0, CLASSES, 9),
        "uid": np.array([f"more-{row}" for row in range(9)]),
    }
    rows = [30, *range(12, ROWS), *range(2, 10), 24, 25]
    changed = {name: np.concatenate([place.arrays[name], more[name]])[rows] for name in more}
    np.savez(place.folder / "data.npz", **changed)
    assert place.index("--update").code == 0
    expected = exact(place)
    pd.testing.assert_frame_equal(approximate(place, ALL_LISTS), expected, rtol=1e-12, atol=0)
    assert "more-6" in set(expected["train_id"])


# -- What is refused -----------------------------------------------------------------------------------------


def test_index_search_without_faiss(place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.index().code == 0
    place.section["index_search"] = "approximate"
    monkeypatch.setitem(sys.modules, "faiss", None)
    place.influence().refused(
        2,
        "influence.index_search: approximate needs faiss, and there is no module faiss",
        "pip install 'psgrad[faiss]'; or set influence.index_search: exact",
    )
    assert not (place.folder / "out").exists()
    validated = place.command("validate", "config.yaml")
    assert validated.code == 2
    assert "approximate needs faiss, and there is no module faiss" in validated.err


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--matrix",), "--matrix"),
        (("--processes", "2"), "several processes"),
    ],
)
def test_index_search_refuses(place: InfluenceWorkplace, options: tuple[str, ...], what: str) -> None:
    assert place.index().code == 0
    place.section["index_search"] = "approximate"
    place.influence(*options).refused(
        2,
        f"influence.index_search: approximate does not go with {what}",
        f"set influence.index_search: exact, or leave {what} out",
    )


def test_index_search_refuses_lists_that_do_not_fit(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.index().code == 0
    place.section["index_search"] = "approximate"
    monkeypatch.setattr("psgrad.commands.influence_search.free_host_memory", lambda: 1000)
    place.influence().refused(
        3,
        "lists of 24 rows of 43 numbers take",
        "index_search: exact",
    )
