"""Groups of rows as samples: their gradients are the sums of single rows' gradients by autograd."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from torch import nn

from tests.influence_workplace import InfluenceWorkplace, loop_of_gradients
from tests.workplace import CLASSES, FEATURES, ROWS, Workplace, run_command

SIZES = (1, 4, 2, 1, 5, 3, 2, 1, 4, 1)  # 24 rows
GROUPS = np.random.default_rng(3).permutation(np.repeat([f"doc-{g}" for g in range(len(SIZES))], SIZES))
NAMES = list(dict.fromkeys(GROUPS.tolist()))


def summed(rows: torch.Tensor, groups: np.ndarray = GROUPS) -> torch.Tensor:
    """[groups, ...]: the sums of rows [n, ...], groups in the order of their first rows."""
    return torch.stack([rows[torch.from_numpy(groups == name)].sum(0) for name in dict.fromkeys(groups)])


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    workplace.save(doc=GROUPS, w=np.linspace(0.5, 2, ROWS).astype(np.float32))
    workplace.config["data"] = {"path": "data.npz", "inputs": "x", "target": "y", "group": "doc"}
    workplace.config["engine"] = {"dtype": "float64", "verify": 10}
    return workplace


def gradients(place: Workplace) -> torch.Tensor:
    return loop_of_gradients(place.model, place.arrays["x"], place.arrays["y"])


def losses(place: Workplace) -> torch.Tensor:
    x, y = torch.tensor(place.arrays["x"]).double(), torch.tensor(place.arrays["y"])
    return nn.functional.cross_entropy(place.model.double()(x), y, reduction="none").detach()


@pytest.mark.parametrize("engine", [{}, {"chunk_size": 3}], ids=str)
def test_norm_and_loss_of_a_group_are_those_of_the_sum(place: Workplace, engine: dict[str, int]) -> None:
    place.config["engine"] |= engine
    place.succeeded("--no-report")
    table = place.samples()
    assert table["id"].tolist() == NAMES
    assert table["rows"].tolist() == [int((name == GROUPS).sum()) for name in NAMES]
    np.testing.assert_allclose(table["grad_norm"], summed(gradients(place)).norm(dim=1), rtol=1e-9)
    np.testing.assert_allclose(table["loss"], summed(losses(place)), rtol=1e-9)
    for name, target in zip(NAMES, table["target"], strict=True):
        own = set(place.arrays["y"][name == GROUPS].tolist())
        assert np.isnan(target) if len(own) > 1 else {target} == own
    assert "its loss and its gradient are the sums of its rows'" in json.dumps(place.manifest())
    assert place.manifest()["self_check"]["worst_relative_error"] < 1e-9


@pytest.mark.long
def test_weights_are_those_of_the_rows_and_the_report_is_written(place: Workplace) -> None:
    place.config["data"]["weight"] = "w"
    place.succeeded()
    weighted = gradients(place) * torch.from_numpy(place.arrays["w"]).double()[:, None]
    np.testing.assert_allclose(place.samples()["grad_norm"], summed(weighted).norm(dim=1), rtol=1e-9)


@pytest.mark.long
def test_measures_take_the_gradients_of_groups(place: Workplace) -> None:
    place.config["analyze"] = {
        "measures": ["cosine_to_mean", "layer_norms", "relative_norm", "neighbour_distance", "noise_scale"]
    }
    place.succeeded("--no-report")
    rows = summed(gradients(place))
    cosines = nn.functional.cosine_similarity(rows, rows.mean(0, keepdim=True))
    np.testing.assert_allclose(place.samples()["cosine_to_mean"], cosines, rtol=1e-9)


@pytest.mark.parametrize("measure", ["el2n", "token_loss", "vog"])
def test_measures_of_single_rows_are_refused(place: Workplace, measure: str) -> None:
    place.config["analyze"] = {"measures": [measure]}
    place.refused(2, measure, "not computed for groups", "leave out data.group")


@pytest.mark.long
def test_limit_and_sample_count_groups_and_a_run_resumes(place: Workplace) -> None:
    expected = summed(gradients(place)).norm(dim=1).numpy()
    place.succeeded("--no-report", "--limit", "4")
    np.testing.assert_allclose(place.samples()["grad_norm"], expected[:4], rtol=1e-9)
    place.succeeded("--no-report", "--limit", "0.5", "--sample", "--overwrite")
    table = place.samples()
    assert len(table) == 5
    np.testing.assert_allclose(table["grad_norm"], expected[table["dataset_row"]], rtol=1e-9)
    assert table["id"].tolist() == [NAMES[row] for row in table["dataset_row"]]
    assert table["rows"].tolist() == [int((name == GROUPS).sum()) for name in table["id"]]
    place.succeeded("--no-report", "--limit", "0.5", "--sample", "--resume")


def test_select_writes_all_rows_of_the_groups_that_are_kept(place: Workplace) -> None:
    frame = pd.DataFrame(place.arrays["x"], columns=list("abcd"))
    frame.assign(y=place.arrays["y"], doc=GROUPS).to_csv("data.csv", index=False)
    place.config["data"] = {"path": "data.csv", "inputs": list("abcd"), "target": "y", "group": "doc"}
    place.succeeded("--no-report")
    outcome = place.command("select", "out", "--where", "rows >= 4", "--output", "kept.csv")
    assert outcome.code == 0, outcome.err
    kept = pd.read_csv("kept.csv")
    many = [name for name in NAMES if (name == GROUPS).sum() >= 4]
    assert kept["doc"].tolist() == [name for name in GROUPS if name in many]


def test_a_private_run_names_its_unit_instead(place: Workplace) -> None:
    place.config["privacy"] = {
        "steps": 1,
        "delta": 1e-5,
        "expected_batch_size": 4,
        "sampling": {"scheme": "poisson", "sample_rate": 0.5},
        "clipping": {"norm": 1.0},
        "noise": {"multiplier": 1.0, "seed": 1},
        "optimizer": {"name": "SGD", "kwargs": {"lr": 0.1}},
    }
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    place.command("dp-step", "config.yaml").refused(2, "data.group", "privacy.unit: {column: doc")


def test_samples_are_compared_within_a_column_in_which_groups_agree(place: Workplace) -> None:
    kind = np.array([f"kind-{int(name[4:]) % 2}" for name in GROUPS])
    place.save(kind=kind)
    place.config["analyze"] = {"outliers": {"group_by": "kind"}}
    place.succeeded("--no-report", "--limit", "6", "--sample")
    table = place.samples()
    assert table["kind"].tolist() == [f"kind-{int(name[4:]) % 2}" for name in table["id"]]
    place.save(kind=np.array([f"kind-{row % 2}" for row in range(ROWS)]))
    place.refused(3, "several values", "rows of each group agree", options=("--overwrite",))


# -- Rows of unequal length ----------------------------------------------------------------------------------


@pytest.mark.long
def test_groups_of_texts_are_the_sums_of_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    import transformers

    from tests.text_tasks import LONGER, TextCase

    groups = np.array([7, 3, 7, 5, 3, 7, 9, 5, 9, 11][: len(LONGER)])
    rows = [{"text": text, "doc": int(g)} for text, g in zip(LONGER, groups, strict=True)]
    case = TextCase(
        "causal-lm",
        rows,
        "text: text, group: doc",
        lambda tokenizer, row: {},
        tokenizer="llama",
    )
    config = case.write(tmp_path / "place", dtype="float64")
    monkeypatch.chdir(tmp_path / "place")
    outcome = run_command(
        monkeypatch, capfd, "analyze", "config.yaml", "--no-report", "--set", "engine.verify=4"
    )
    assert outcome.code == 0, outcome.err
    table = pd.read_parquet(tmp_path / "place" / "run" / "samples.parquet")
    folder = config.parent / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()  # type: ignore[no-untyped-call]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for text in LONGER:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        loss = nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])
        each = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([g.flatten() for g in each]))
    expected = summed(torch.stack(found), groups)
    assert table["id"].tolist() == [7, 3, 5, 9, 11][: len(expected)]
    np.testing.assert_allclose(table["grad_norm"], expected.norm(dim=1), rtol=1e-9)


# -- Influence -----------------------------------------------------------------------------------------------


@pytest.fixture
def asking(influence_place: InfluenceWorkplace) -> InfluenceWorkplace:
    found = influence_place
    found.save(doc=GROUPS)
    found.save_queries(doc=np.array(["p", "q", "p", "r", "q"]))
    found.config["data"] = {"path": "data.npz", "inputs": "x", "target": "y", "group": "doc"}
    found.config["engine"] = {"dtype": "float64", "verify": 4}
    found.config["influence"]["queries"] = {"path": "queries.npz"}
    return found


def scores(place: InfluenceWorkplace) -> np.ndarray:
    table = place.ranked("--top", "10", "--no-report")
    table = table[table["query_index"] >= 0]  # without their mean
    found = np.zeros((len(NAMES), 3))
    found[table["train_index"], table["query_index"]] = table["score"]
    return found


def of_queries(place: InfluenceWorkplace) -> torch.Tensor:
    rows = loop_of_gradients(place.model, place.queries["x"], place.queries["y"])
    return summed(rows, place.queries["doc"])


def test_influence_is_between_groups(asking: InfluenceWorkplace) -> None:
    products = (summed(gradients(asking)) @ of_queries(asking).T).numpy()
    np.testing.assert_allclose(scores(asking), products, rtol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("curvature", "solver"),
    [("hessian", "exact"), pytest.param("gauss_newton", "conjugate_gradient", marks=pytest.mark.sweep)],
    ids=str,
)
def test_influence_is_that_of_the_closed_form(
    asking: InfluenceWorkplace, curvature: str, solver: str
) -> None:
    asking.use_model("def Model():\n    torch.manual_seed(0)\n    return nn.Linear(4, 3)\n")
    asking.config["influence"]["method"] = {
        "name": "influence",
        "solver": solver,
        "curvature": curvature,
        "damping": 0.1,
        "leverage": False,
        "change": "gradient",
    }
    if solver == "conjugate_gradient":
        asking.config["influence"]["method"]["tolerance"] = 1e-10
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES).double()
    asking.model = nn.Sequential(model)
    x, y = torch.tensor(asking.arrays["x"]).double(), torch.tensor(asking.arrays["y"])
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def mean_loss(flat: torch.Tensor) -> torch.Tensor:
        weight, bias = flat[:12].view(3, 4), flat[12:]
        return nn.functional.cross_entropy(x @ weight.T + bias, y, reduction="sum") / len(NAMES)

    hessian = torch.func.hessian(mean_loss)(values) + 0.1 * torch.eye(15).double()
    expected = summed(gradients(asking)) @ torch.linalg.solve(hessian, of_queries(asking).T) / len(NAMES)
    np.testing.assert_allclose(scores(asking), expected.numpy(), rtol=1e-7)


@pytest.mark.long
def test_an_index_has_a_row_a_group(asking: InfluenceWorkplace) -> None:
    asking.config["influence"]["index"] = {"path": "index", "projection": "none", "dtype": "float64"}
    assert asking.index().code == 0
    products = (summed(gradients(asking)) @ of_queries(asking).T).numpy()
    np.testing.assert_allclose(scores(asking), products, rtol=1e-9)


@pytest.mark.parametrize(
    "changed", [{"method": "ekfac"}, {"method": "influence"}, {"measurement": "margin"}], ids=str
)
def test_methods_that_read_outputs_of_rows_are_refused(
    asking: InfluenceWorkplace, changed: dict[str, str]
) -> None:
    asking.config["influence"] |= changed
    asking.influence().refused(2, *changed.values(), "not computed for groups", "choose gradient_dot")


def test_queries_without_groups_beside_training_groups_are_refused(asking: InfluenceWorkplace) -> None:
    asking.config["influence"]["queries"]["group"] = None
    asking.influence().refused(2, "only one of data.npz and queries.npz has groups", "say group there")
