"""`psgrad influence` from its config to its files: what is ranked, what is left out, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from tests.engine.influence.problems import SoftmaxRegression
from tests.influence_workplace import QUERIES, InfluenceWorkplace, loop_of_gradients
from tests.workplace import CLASSES, FEATURES, ROWS

# -- What comes out ------------------------------------------------------------------------------------------


def test_each_query_has_its_strongest_of_either_sign(place: InfluenceWorkplace) -> None:
    ranked = place.ranked("--top", "4")
    products = place.products()
    assert list(ranked.columns) == ["query_id", "query_index", "rank", "train_id", "train_index", "score"]
    for query in range(QUERIES):
        rows = ranked[ranked["query_index"] == query]
        assert set(rows["query_id"]) == {f"query-{query}"}
        order = np.argsort(-products[:, query], kind="stable")
        helping, hurting = (
            rows[rows["rank"] > 0].sort_values("rank"),
            rows[rows["rank"] < 0].sort_values("rank", ascending=False),
        )
        assert helping["train_index"].tolist() == [row for row in order if products[row, query] > 0][:4]
        assert hurting["train_index"].tolist() == [row for row in order[::-1] if products[row, query] < 0][:4]
        np.testing.assert_allclose(helping["score"], products[helping["train_index"], query], rtol=1e-4)
        assert helping["train_id"].tolist() == [f"row-{row:02d}" for row in helping["train_index"]]
    everyone = ranked[ranked["query_index"] == -1]
    assert everyone[everyone["rank"] == 1]["train_index"].item() == products.mean(1).argmax()
    assert set(everyone["query_id"]) == {"(all)"}


@pytest.mark.long
@pytest.mark.report
def test_the_files_of_a_run(place: InfluenceWorkplace) -> None:
    ranked = place.ranked("--matrix")
    products, folder = place.products(), place.folder / "out"
    matrix = load_file(folder / "matrix.safetensors")
    np.testing.assert_allclose(matrix["scores"], products, rtol=1e-4, atol=1e-6)
    assert matrix["train_index"].tolist() == list(range(ROWS))
    assert matrix["query_index"].tolist() == list(range(QUERIES))
    assert len(pd.read_csv(folder / "scores.csv")) == len(ranked)
    training, queries = place.table("self_influence"), place.table("queries")
    own = loop_of_gradients(place.model, place.arrays["x"], place.arrays["y"]).square().sum(1).numpy()
    np.testing.assert_allclose(training["self_influence"], own, rtol=1e-4)
    np.testing.assert_allclose(training["grad_norm"] ** 2, own, rtol=1e-4)
    np.testing.assert_allclose(training["overall"], products.mean(1), rtol=1e-3, atol=1e-6)
    logits = place.model(torch.tensor(place.queries["x"]).double())
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(place.queries["y"]), reduction="none")
    np.testing.assert_allclose(queries["measurement"], losses.detach(), rtol=1e-4)
    assert queries["prediction"].tolist() == logits.argmax(1).tolist()
    assert "score_distributions.png" in {path.name for path in (folder / "plots").iterdir()}
    assert "<html" in (folder / "report.html").read_text()


def test_a_margin_explains_with_the_sign_of_help(place: InfluenceWorkplace) -> None:
    """What raises the margin helps, as does what lowers the loss."""
    place.section["measurement"] = "margin"
    found = place.matrix()["scores"]
    said = place.manifest()["influence"]
    assert said["sign"] == "positive: the training example helps the query; negative: it hurts"
    assert said["unit"].startswith("fall of the query's margin, in nats, if one gradient step")
    assert said["predicts_removal"] is False
    products = place.products()
    with torch.no_grad():
        wrong = 1 - torch.softmax(place.model(torch.tensor(place.queries["x"]).double()), 1)
    # The gradient of the loss is that of minus the margin, times the probability of being wrong.
    np.testing.assert_allclose(
        found,
        products / wrong[torch.arange(QUERIES), torch.tensor(place.queries["y"])].numpy(),
        rtol=1e-4,
        atol=1e-6,
    )


def test_chosen_parameters_alone_count(place: InfluenceWorkplace) -> None:
    place.section["parameters"] = ["2.*"]
    found = place.matrix()["scores"]
    last = slice(-18, None)  # 2.weight [3, 5] and 2.bias [3]
    training = loop_of_gradients(place.model, place.arrays["x"], place.arrays["y"])[:, last]
    queries = loop_of_gradients(place.model, place.queries["x"], place.queries["y"])[:, last]
    np.testing.assert_allclose(found, (training @ queries.T).numpy(), rtol=1e-4, atol=1e-6)


def test_queries_may_be_rows_of_the_training_data(place: InfluenceWorkplace) -> None:
    place.section["queries"] = {"rows": [7, 2]}
    ranked = place.ranked("--matrix")
    assert ranked["query_id"].drop_duplicates().tolist() == ["row-07", "row-02", "(all)"]
    matrix = load_file(place.folder / "out" / "matrix.safetensors")
    assert matrix["query_index"].tolist() == [7, 2]
    training = loop_of_gradients(place.model, place.arrays["x"], place.arrays["y"])
    np.testing.assert_allclose(
        matrix["scores"], (training @ training[[7, 2]].T).numpy(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.long
def test_queries_in_small_blocks_are_ranked_as_at_once(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = place.matrix()["scores"]
    at_once = place.table("scores")
    monkeypatch.setattr("psgrad.commands.influence_scores.queries_at_once", lambda setup: 2)
    np.testing.assert_allclose(place.matrix()["scores"], matrix, rtol=1e-5, atol=1e-9)
    in_blocks = place.table("scores")
    pd.testing.assert_frame_equal(at_once, in_blocks, rtol=1e-5, atol=1e-9)


def test_relative_influence_is_that_of_its_definition(place: InfluenceWorkplace) -> None:
    place.section["normalize"] = "self_influence"
    found = place.matrix()["scores"]
    norms = loop_of_gradients(place.model, place.arrays["x"], place.arrays["y"]).norm(dim=1).numpy()
    np.testing.assert_allclose(found, place.products() / norms[:, None], rtol=1e-4, atol=1e-6)
    said = place.manifest()["influence"]
    assert said["predicts_removal"] is False
    assert said["unit"].endswith("by the square root of the training example's influence on itself")


# -- Several checkpoints -------------------------------------------------------------------------------------


def test_tracin_adds_up_checkpoints_by_their_learning_rate(place: InfluenceWorkplace) -> None:
    expected, each = 0.0, []
    for name, seed, rate in (("a.safetensors", 3, 0.5), ("b.safetensors", 4, 0.125)):
        place.save_checkpoint(name, seed)
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        each.append(rate * place.products(model))
        expected = expected + each[-1]
    place.section["method"] = "tracin"
    place.section["checkpoints"] = [
        {"path": "a.safetensors", "learning_rate": 0.5},
        {"path": "b.safetensors", "learning_rate": 0.125},
    ]
    ranked = place.ranked("--matrix", "--top", "3")
    found = load_file(place.folder / "out" / "matrix.safetensors")["scores"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    for row in ranked[ranked["query_index"] >= 0].itertuples():
        alone = [scores[:, row.query_index] for scores in each]
        assert row.score_std == pytest.approx(
            np.std([scores[row.train_index] for scores in alone], ddof=1), rel=1e-3
        )
        side = 1 if row.rank > 0 else -1
        among = [
            row.train_index in np.argsort(-side * scores)[:3] and side * scores[row.train_index] > 0
            for scores in alone
        ]
        assert row.rank_stability == np.mean(among)


@pytest.mark.long
def test_two_checkpoints_are_not_the_first_one_twice(place: InfluenceWorkplace) -> None:
    matrices = []
    place.save_checkpoint("a.safetensors", 3)
    place.save_checkpoint("b.safetensors", 4)
    for names in (["a.safetensors"], ["b.safetensors"], ["a.safetensors", "b.safetensors"]):
        place.section["checkpoints"] = names
        matrices.append(place.matrix()["scores"])
    alike = [scores / np.sqrt(np.mean(scores**2, axis=0)) for scores in matrices[:2]]
    np.testing.assert_allclose(matrices[2], (alike[0] + alike[1]) / 2, rtol=1e-4, atol=1e-7)
    assert not np.allclose(matrices[0], matrices[1])
    influence = place.manifest()["influence"]
    assert influence["unit"].startswith("relative, no unit: the mean over checkpoints")
    assert influence["predicts_removal"] is False
    queries = place.table("queries")
    expected = [np.corrcoef(*(each[:, query] for each in matrices[:2]))[0, 1] for query in range(5)]
    np.testing.assert_allclose(queries["agreement"], expected, rtol=1e-4)


# -- An index ------------------------------------------------------------------------------------------------


def with_index(place: InfluenceWorkplace, **options: Any) -> None:
    place.section["index"] = {"path": "index", "projection": "none", "rows_per_shard": 7} | options


@pytest.mark.long
def test_an_index_answers_as_the_data_do(place: InfluenceWorkplace) -> None:
    without = place.ranked()
    with_index(place)
    built = place.index().succeeded()
    assert built.out.strip() == "index"
    (place.folder / "data.npz").touch()
    pd.testing.assert_frame_equal(place.ranked("--overwrite"), without, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_an_index_that_is_half_built_is_refused_and_gone_on_with(place: InfluenceWorkplace) -> None:
    with_index(place)
    assert place.index().code == 0
    (place.folder / "index" / "checkpoint-000" / "gradients-00001.safetensors").unlink()
    place.influence().refused(
        3, "the index index is half built: 4 of 5 files are written", "psgrad influence index CONFIG --resume"
    )
    place.index().refused(2, "the index folder index holds an earlier index", "--resume", "--overwrite")
    assert place.index("--resume").code == 0
    assert len(place.ranked())


def test_an_index_has_no_answer_by_methods_that_need_curvature(place: InfluenceWorkplace) -> None:
    with_index(place)
    assert place.index().code == 0
    place.section["method"] = "influence"
    place.influence().refused(
        3, "an index has no answer by influence", "choose one of these, or leave influence.index out"
    )


# -- Rows that are not finite --------------------------------------------------------------------------------


def test_rows_that_are_not_finite_are_named_left_out_and_counted(place: InfluenceWorkplace) -> None:
    x, xq = place.arrays["x"].copy(), place.queries["x"].copy()
    x[[3, 8], 0], xq[1, 0] = np.nan, np.inf
    place.save(x=x)
    place.save_queries(x=xq)
    outcome = place.influence("--matrix").succeeded()
    assert "excluded 2 of 24 training examples" in outcome.err
    assert "not finite: row-03, row-08" in outcome.err
    assert "excluded 1 of 5 queries, whose loss or gradient is not finite: query-1" in outcome.err
    counts = place.manifest()["counts"]
    assert counts == {"training_examples": 24, "training_nonfinite": 2, "queries": 5, "queries_nonfinite": 1}
    matrix = load_file(place.folder / "out" / "matrix.safetensors")
    assert matrix["train_index"].tolist() == [row for row in range(ROWS) if row not in (3, 8)]
    assert matrix["query_index"].tolist() == [0, 2, 3, 4]
    assert np.isfinite(matrix["scores"]).all()
    expected = place.products()[np.ix_(matrix["train_index"], matrix["query_index"])]
    np.testing.assert_allclose(matrix["scores"], expected, rtol=1e-4, atol=1e-6)
    training = place.table("self_influence")
    assert training.loc[training["status"] == "nonfinite", "index"].tolist() == [3, 8]
    assert training.loc[[3, 8], "overall"].isna().all()
    ranked = place.table("scores")
    assert not set(ranked["train_index"]) & {3, 8}
    assert set(ranked["query_id"]) == {"query-0", "query-2", "query-3", "query-4", "(all)"}


def test_an_index_has_no_score_for_rows_that_are_not_finite(place: InfluenceWorkplace) -> None:
    x = place.arrays["x"].copy()
    x[3, 0] = np.nan
    place.save(x=x)
    with_index(place)
    built = place.index()
    assert "1 rows have a gradient that is not finite, and no score: 3" in built.err
    assert 3 not in set(place.ranked()["train_index"])
    assert place.manifest()["counts"]["training_nonfinite"] == 1


def test_nothing_finite_at_all_is_an_error(place: InfluenceWorkplace) -> None:
    place.save(x=np.full((ROWS, 4), np.nan, np.float32))
    place.influence().refused(
        3, "the loss or the gradient of every one of the 24 training examples is not finite", "psgrad analyze"
    )
    assert place.manifest()["state"] == "failed"


# -- Refusals ------------------------------------------------------------------------------------------------


def test_queries_without_any_score_are_reported(place: InfluenceWorkplace) -> None:
    place.use_loss("def loss(output, target):\n    return (output.square().sum() * (target >= 0))\n")
    place.save_queries(y=np.array([0, -1, 1, -1, 2]))
    outcome = place.influence()
    assert "2 of 5 queries have no score but zeros and NaN, and no ranking: query-1, query-3" in outcome.err
    assert (outcome.code, set(place.samples_of_queries())) == (0, {0, 2, 4, -1})


@pytest.mark.parametrize(
    ("section", "queries", "code", "words"),
    [
        ({}, {"x": np.zeros((QUERIES, 3), np.float32)}, 3, "the queries: the model or the loss raised"),
        ({}, {"y": np.array([0, 1, 7, 0, 1])}, 3, "the queries: row 2 has the label 7"),
        ({"queries": {"rows": [0, 24]}}, {}, 2, "influence.queries.rows names row 24"),
        ({"parameters": ["head.*"]}, {}, 2, "influence.parameters: no parameter matches 'head.*'"),
        ({"groups": "dok"}, {}, 2, "dok"),
        ({"contrast": [["query-3", "query-9"]]}, {}, 2, "influence.contrast names 'query-9'"),
        ({"contrast": [["query-3", "query-9"]]}, {}, 2, "did you mean query-"),
        ({"contrast": [["query-3", "query-3"]]}, {}, 2, "compares the query 'query-3' with itself"),
        ({"contrast": []}, {}, 2, "contrast is an empty list"),
    ],
    ids=["model fails", "label", "row", "parameters", *(f"question {number}" for number in range(5))],
)
def test_influence_refused(
    place: InfluenceWorkplace, section: dict[str, Any], queries: dict[str, Any], code: int, words: str
) -> None:
    place.save_queries(**queries)
    place.section.update(section)
    place.influence().refused(code, words)


def test_a_checkpoint_of_another_architecture_is_refused(place: InfluenceWorkplace) -> None:
    place.save_checkpoint("a.safetensors", 3)
    place.save_checkpoint("wide.safetensors", 3, hidden=7)
    place.section["checkpoints"] = ["a.safetensors", "wide.safetensors"]
    place.influence().refused(3, "wide.safetensors", "0.weight")
    assert not (place.folder / "out").exists()


def test_a_run_is_not_replaced_unasked(place: InfluenceWorkplace) -> None:
    place.ranked()
    place.influence().refused(2, "the output folder out holds an earlier run", "--overwrite")


# -- Amounts -------------------------------------------------------------------------------------------------


def convex(place: InfluenceWorkplace, weight_decay: float = 0.05) -> np.ndarray:
    """A workplace of softmax regression at its minimum, and the rises of the queries' losses without each
    row, [n, m], by retraining.
    """
    random = np.random.default_rng(2)
    place.save(
        x=random.normal(size=(150, FEATURES)).astype(np.float32),
        y=random.integers(0, CLASSES, 150),
        uid=np.arange(150).astype(str),
    )
    (place.folder / "linear.py").write_text(
        f"from torch import nn\n\ndef build():\n    return nn.Linear({FEATURES}, {CLASSES}).double()\n"
    )
    inputs, labels = torch.tensor(place.arrays["x"]).double(), torch.tensor(place.arrays["y"])
    problem = SoftmaxRegression.of(inputs, labels, weight_decay)
    weights = problem.solve()
    save_file(
        {
            "weight": torch.tensor(weights[:, :-1]).contiguous(),
            "bias": torch.tensor(weights[:, -1]).contiguous(),
        },
        place.folder / "linear.safetensors",
    )
    place.config["model"] = {"factory": "linear.py:build", "checkpoint": "linear.safetensors"}
    place.config["engine"] = {"dtype": "float64"}
    place.section["method"] = {"name": "influence", "weight_decay": weight_decay}
    asked, wanted = torch.tensor(place.queries["x"]).double(), torch.tensor(place.queries["y"])
    before = problem.losses(weights, asked, wanted)
    return np.stack(
        [
            problem.losses(problem.without(row).solve(weights), asked, wanted) - before
            for row in range(len(labels))
        ]
    )


@pytest.mark.long
def test_amounts_of_a_convex_model_are_retraining_and_checked(place: InfluenceWorkplace) -> None:
    truth = convex(place)
    found = place.matrix()["scores"]
    slope = np.polyfit(found.ravel(), truth.ravel(), 1)[0]
    assert abs(slope - 1) < 0.02
    said = place.manifest()["influence"]
    assert said["unit"] == "predicted rise of the query's loss, in nats, if the training example were removed"
    assert said["fit"][0]["calibrated"] is True
    check = said["check"]
    assert check["converged"] is True
    pairs = [each for each in check["removals"] if each["query_index"] is not None]
    assert len(pairs) == 3
    for each in pairs:
        assert each["found"] == pytest.approx(truth[each["train_index"], each["query_index"]], rel=1e-3)
        assert each["predicted"] == pytest.approx(found[each["train_index"], each["query_index"]])
    (own,) = [each for each in check["removals"] if each["query_index"] is None]
    assert own["found"] == pytest.approx(own["predicted"], rel=0.2)


@pytest.mark.long
def test_weight_decay_that_the_config_leaves_out_is_estimated_and_used(place: InfluenceWorkplace) -> None:
    """Predicted, found and retrained agree; with the one that the config names nothing is replaced."""
    truth = convex(place)
    place.section["method"] = "influence"
    outcome = place.influence().succeeded()
    assert "weights are at a minimum with weight_decay 0.0500" in outcome.err
    assert "cosine 1.000): used" in outcome.err
    said = place.manifest()["influence"]
    assert said["fit"][0]["weight_decay"] == pytest.approx(0.05, rel=1e-6)
    assert said["unit"] == "predicted rise of the query's loss, in nats, if the training example were removed"
    for each in said["check"]["removals"]:
        assert each["found"] == pytest.approx(each["predicted"], rel=0.2)
        if each["query_index"] is not None:
            expected = truth[each["train_index"], each["query_index"]]
            assert each["found"] == pytest.approx(expected, rel=1e-3)
            assert each["predicted"] == pytest.approx(expected, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("named", [0.0, 0.2, 0.0501])
def test_weight_decay_that_the_config_names_stays(place: InfluenceWorkplace, named: float) -> None:
    convex(place)
    place.section["method"] = {"name": "influence", "weight_decay": named}
    outcome = place.influence().succeeded()
    other = f"and the config names {named:g}, which is used" in outcome.err
    assert other == (named != 0.0501)
    said = place.manifest()["influence"]
    assert said["fit"][0]["weight_decay"] == named
    if named:  # without any the weights, which are small, are nearer to a minimum than a removal moves them
        assert all((each["found"] is None) == other for each in said["check"]["removals"])


@pytest.mark.long
def test_scores_are_written_before_the_check_and_stay_when_it_is_interrupted(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    place.section["method"] = "influence"
    expected = place.ranked()
    monkeypatch.setattr("psgrad.commands.influence.check_removals", interrupted)
    outcome = place.influence("--overwrite")
    assert outcome.code == 130
    assert "all scores are written to out; the check of the largest ones was interrupted" in outcome.err
    pd.testing.assert_frame_equal(place.table("scores"), expected)
    manifest = place.manifest()
    assert manifest["state"] == "interrupted"
    assert manifest["influence"]["fit"][0]["solver"] == "exact"
    assert manifest["counts"]["training_examples"] == ROWS
    assert {"queries.parquet", "scores.csv", "harmful.csv"} <= {
        path.name for path in (place.folder / "out").iterdir()
    }


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize(
    "method",
    [
        "ekfac",
        "trak",
        "projected_influence",
        {"name": "ekfac", "fisher": "empirical"},
        {"name": "influence", "curvature": "fisher"},
        {"name": "influence", "curvature": "sampled"},
    ],
)
def test_scores_that_are_no_amounts_say_so_everywhere(place: InfluenceWorkplace, method: Any) -> None:
    place.section["method"] = method
    outcome = place.influence().succeeded()
    assert "unit: relative, no unit" in outcome.out
    assert "nats" not in outcome.out
    folder = place.folder / "out"
    assert place.manifest()["influence"]["unit"] == "relative, no unit"
    assert set(pd.read_csv(folder / "scores.csv")["unit"]) == {"relative, no unit"}
    for name in ("scores.parquet", "self_influence.parquet"):
        assert pd.read_parquet(folder / name).attrs["unit"] == "relative, no unit"
    assert json.loads(place.influence("--json", "--overwrite").out)["unit"] == "relative, no unit"
    assert "beyond_loss" not in pd.read_parquet(folder / "scores.parquet")


@pytest.mark.long
def test_amounts_of_a_network_at_no_minimum_are_marked(place: InfluenceWorkplace) -> None:
    for method in ("influence", {"name": "influence", "solver": "conjugate_gradient"}):
        place.section["method"] = method
        outcome = place.influence("--overwrite").succeeded()
        assert "in nats (uncalibrated), if the training example were removed" in outcome.out
        assert "Largest changes, predicted\n" in outcome.out
        assert "predicted, at no minimum" in outcome.out
        assert "weights are at a minimum" not in outcome.err
        removals = place.manifest()["influence"]["check"]["removals"]
        assert len(removals) >= 3
        assert all(each["found"] is None for each in removals)
    place.section["check"] = "never"
    assert "Largest changes" not in place.influence("--overwrite").out


@pytest.mark.sweep
def test_scores_beyond_the_loss_of_a_query_are_marked(place: InfluenceWorkplace) -> None:
    """A loss of zero or more falls by no more than it is."""
    place.section["method"] = {"name": "influence", "damping": 1e-9}
    outcome = place.influence("--top", "4")
    ranked = place.table("scores")
    losses = place.table("queries").set_index("index")["measurement"]
    limit = ranked["query_index"].map({**losses.to_dict(), -1: losses.mean()})
    assert ranked["beyond_loss"].tolist() == (ranked["score"] < -limit).tolist()
    assert ranked["beyond_loss"].any()
    assert not ranked["beyond_loss"].all()
    assert (
        f"{int(ranked['beyond_loss'].sum())} of {len(ranked)} ranked scores predict that a query's loss falls"
        " by more than it is" in outcome.err
    )
    assert "and is no amount" in outcome.out
    place.section["measurement"] = "margin"
    assert "beyond_loss" not in place.ranked("--overwrite")


def test_self_influence_by_a_solve_an_example_is_computed_where_the_config_asks(
    place: InfluenceWorkplace,
) -> None:
    place.section["check"] = "never"

    def run(wanted: str, solver: str) -> tuple[str, pd.DataFrame]:
        changes: dict[str, Any] = {
            "self_influence": wanted,
            "method": {"name": "influence", "solver": solver, "relative_damping": 1.0},
        }
        place.section.update(changes)
        outcome = place.influence("--overwrite").succeeded()
        return outcome.err, place.table("self_influence")

    heard, table = run("auto", "conjugate_gradient")
    assert "self-influence is left out, as it takes a solve for each of 24 training examples" in heard
    assert "self_influence" not in table
    own = run("always", "conjugate_gradient")[1]["self_influence"]
    np.testing.assert_allclose(run("auto", "exact")[1]["self_influence"], own, rtol=1e-4)
