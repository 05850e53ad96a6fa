"""Names of classes become numbers: by the config, by the model, by a stored run, or by the names of the data,
which then must be as many as the model's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

import psgrad
from psgrad.commands.class_names import label_facts_of
from psgrad.data.loss import Criterion
from psgrad.errors import ConfigError, DataError, OutputError, PsgradError
from psgrad.reports.analyze_terminal import summary
from psgrad.reports.labels import label_warning, label_words

NAMES = ("stay", "upgrade", "churn")
"""In the order of the model's outputs, which is not the sorted one."""


class Model(nn.Linear):
    """Says the class of the largest of its three inputs."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__(3, outputs)
        with torch.no_grad():
            self.weight.copy_(6 * torch.eye(outputs, 3))
            self.bias.copy_(torch.arange(outputs) / 10)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(count: int = 60, seed: int = 0, without: str = "") -> pd.DataFrame:
    """Rows that the model is right about, with the names of their classes; `without` one of these."""
    random = np.random.default_rng(seed)
    labels = np.array([place for place, name in enumerate(NAMES) if name != without] * count)[:count]
    inputs = np.eye(3)[labels] + random.normal(0, 0.2, (count, 3))
    frame = pd.DataFrame({f"x{place}": inputs[:, place].astype(np.float32) for place in range(3)})
    return frame.assign(y=np.array(NAMES)[labels])


def config(path: str, output: str = "out", **sections: Any) -> dict[str, Any]:
    data = {"path": path, "inputs": ["x0", "x1", "x2"], "target": "y", **sections.pop("data", {})}
    return {"loss": "cross_entropy", "data": data, "output": output, **sections}


def losses(frame: pd.DataFrame, names: Sequence[str] = NAMES) -> np.ndarray:
    """By plain PyTorch."""
    inputs = torch.tensor(frame[["x0", "x1", "x2"]].to_numpy(np.float32))
    target = torch.tensor([names.index(name) for name in frame["y"]])
    return F.cross_entropy(Model().double()(inputs.double()), target, reduction="none").detach().numpy()


def analyze(section: dict[str, Any], **options: Any) -> Any:
    model = options.pop("model", None) or Model()
    return psgrad.analyze(section, model=model, report=False, **options)


def refused(kind: type[PsgradError], section: dict[str, Any], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        analyze(section, **options)
    return str(caught.value)


def test_names_fewer_than_the_outputs_are_refused_with_their_counts() -> None:
    rows(59, without="churn").to_csv("batch.csv", index=False)
    said = refused(DataError, config("batch.csv"))
    assert "upgrade (29 rows), stay (30 rows)" in said
    assert "the model has 3 outputs" in said
    assert "data.class_names" in said


def test_names_more_than_the_outputs_are_refused_with_the_place_of_a_rare_one() -> None:
    frame = rows()
    frame.loc[7, "y"] = "chrun"
    frame.to_csv("batch.csv", index=False)
    said = refused(DataError, config("batch.csv"))
    assert "chrun (1 row: row 7)" in said
    assert "churn (20 rows)" in said


def test_class_names_of_the_config_number_a_file_without_one_of_them() -> None:
    frame = rows(without="stay")
    frame.to_csv("batch.csv", index=False)
    found = analyze(config("batch.csv", data={"class_names": list(NAMES)}))
    np.testing.assert_allclose(found.samples["loss"], losses(frame), rtol=1e-3)


def test_class_names_that_are_not_as_many_as_the_outputs_are_refused() -> None:
    rows().to_csv("batch.csv", index=False)
    said = refused(ConfigError, config("batch.csv", data={"class_names": [*NAMES, "new"]}))
    assert "data.class_names has 4 names" in said
    assert "the model has 3 outputs" in said


def test_an_unknown_label_is_named_with_its_row_its_count_and_the_nearest_class() -> None:
    frame = rows()
    frame.loc[7, "y"] = frame.loc[9, "y"] = "chrun"
    frame.to_csv("batch.csv", index=False)
    said = refused(DataError, config("batch.csv", data={"class_names": list(NAMES)}))
    assert "'chrun' in row 7" in said
    assert "2 of 60 rows" in said
    assert "did you mean churn?" in said
    assert "stay, upgrade, churn" in said


@pytest.mark.parametrize("kind", ["run", "baseline"])
def test_a_stored_reference_numbers_a_file_without_one_of_its_classes(kind: str) -> None:
    rows(90, seed=1).to_csv("trusted.csv", index=False)
    batch = rows(without="stay")
    batch.to_csv("batch.csv", index=False)
    analyze(config("trusted.csv", "known", data={"class_names": list(NAMES)}))
    psgrad.save_baseline("known", "known.json")
    reference = {"run": "known", "baseline": "known.json"}[kind]
    outliers = {"reference": reference, "fdr": 0.2}
    found = analyze(config("batch.csv", analyze={"outliers": outliers}))
    np.testing.assert_allclose(found.samples["loss"], losses(batch), rtol=1e-3)
    assert not found.samples["is_outlier_issue"].any()
    assert found.class_names == list(NAMES)


def test_a_stored_reference_with_the_classes_in_another_order_is_refused() -> None:
    rows().to_csv("trusted.csv", index=False)
    analyze(config("trusted.csv", "known"))
    outliers = {"reference": "known"}
    section = config("trusted.csv", data={"class_names": list(NAMES)}, analyze={"outliers": outliers})
    said = refused(ConfigError, section)
    assert 'classes was ["churn", "stay", "upgrade"] and is' in said


def test_queries_of_another_file_are_numbered_as_the_training_data_are() -> None:
    rows().to_csv("train.csv", index=False)
    queries = rows(8, seed=3, without="churn")
    queries.to_csv("queries.csv", index=False)
    names = sorted(NAMES)
    influence = {"queries": {"path": "queries.csv"}, "method": "gradient_dot", "check": "never"}
    section = config("train.csv", influence=influence)
    found = psgrad.influence(section, model=Model(), report=False)
    np.testing.assert_allclose(found.queries["measurement"], losses(queries, names), rtol=1e-3)


def test_queries_with_names_beside_training_data_with_numbers_are_refused() -> None:
    rows().replace({name: place for place, name in enumerate(NAMES)}).to_csv("train.csv", index=False)
    rows(8).to_csv("queries.csv", index=False)
    section = config("train.csv", influence={"queries": {"path": "queries.csv"}, "method": "gradient_dot"})
    with pytest.raises(ConfigError, match=r"the labels of queries\.csv are names"):
        psgrad.influence(section, model=Model(), report=False)


def _index(path: str, **data: Any) -> dict[str, Any]:
    index = {"path": "index", "projection": "none"}
    queries = {"path": "queries.csv"}
    influence = {"index": index, "queries": queries, "method": "gradient_dot", "check": "never"}
    return config(path, influence=influence, data=data)


def test_an_index_that_follows_its_data_numbers_them_as_it_was_built() -> None:
    frame = rows()
    frame.to_csv("train.csv", index=False)
    rows(6, seed=3).to_csv("queries.csv", index=False)
    names = list(NAMES)
    psgrad.influence_index(_index("train.csv", class_names=names), model=Model())
    fewer = frame[frame["y"] != "churn"]
    fewer.to_csv("train.csv", index=False)
    psgrad.influence_index(_index("train.csv"), model=Model(), update=True)
    found = psgrad.influence(_index("train.csv"), model=Model(), report=False)
    np.testing.assert_allclose(found.training["loss"], losses(fewer), rtol=1e-3)
    with pytest.raises(OutputError, match="classes"):
        psgrad.influence(_index("train.csv", class_names=names[::-1]), model=Model(), overwrite=True)


@pytest.mark.parametrize("outputs", ["a vector of classes", "another shape"])
def test_names_of_a_file_for_a_loss_of_ones_own(outputs: str) -> None:
    rows(without="stay").to_csv("batch.csv", index=False)
    rows().to_csv("whole.csv", index=False)
    own = Model() if outputs == "a vector of classes" else nn.Sequential(Model(), nn.Unflatten(-1, (3, 1)))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.reshape(1, 3), target[None])

    section = {**config("batch.csv"), "loss": None}
    assert "data.class_names" in refused(DataError, section, model=own, loss=loss)
    section = {**config("whole.csv"), "loss": None}
    if outputs == "a vector of classes":
        assert analyze(section, model=own, loss=loss).class_names == sorted(NAMES)
    else:
        assert "does not tell how many classes" in refused(DataError, section, model=own, loss=loss)


def test_a_folder_of_images_without_a_class_is_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "images" / name / "0.png")
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    section = {"loss": "cross_entropy", "data": {"images": "images"}, "output": "out"}
    said = refused(DataError, section, model=model)
    assert "cat (1 row: row 0), dog (1 row: row 1)" in said
    section["data"] = {"images": "images", "class_names": ["cat", "cow", "dog"]}
    assert analyze(section, model=model).samples["target"].tolist() == [0, 2]


def test_dataset_with_names_in_another_order_than_the_classes_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    frame = rows()
    columns = {f"x{place}": frame[f"x{place}"].tolist() for place in range(3)}
    section = config("unused.csv", data={"class_names": list(NAMES)})
    del section["data"]["path"]
    made = {}
    for order in (list(NAMES), ["churn", "stay", "upgrade"]):
        kinds = dict.fromkeys(columns, datasets.Value("float32")) | {"y": datasets.ClassLabel(names=order)}
        numbers = list(map(order.index, frame["y"]))
        made[order[0]] = datasets.Dataset.from_dict({**columns, "y": numbers}, datasets.Features(kinds))
    found = analyze(section, data=made[NAMES[0]])
    np.testing.assert_allclose(found.samples["loss"], losses(frame), rtol=1e-3)
    assert "have 'churn' as class 0, which is class 2 of the model" in refused(
        DataError, section, data=made["churn"], overwrite=True
    )


def test_analyze_says_what_labels_mean_and_how_many_the_model_agrees_with() -> None:
    rows().to_csv("batch.csv", index=False)
    result = analyze(config("batch.csv", data={"class_names": list(NAMES)}))
    said = summary(result)
    assert "labels: 0 stay, 1 upgrade, 2 churn; the model agrees with 100% of 60 labels" in said
    assert "warning" not in said
    found = analyze(config("batch.csv"), overwrite=True)
    assert "were its outputs in another order: 0 stay, 1 upgrade, 2 churn" in summary(found)
    facts = found.manifest.labels
    assert facts is not None
    words = label_words(facts, found.class_names)
    assert words.startswith("0 churn, 1 stay, 2 upgrade; the model agrees with 0% of 60")
    assert "another order" in label_warning(facts, found.class_names)


def test_analyze_of_numbers_has_the_agreement_alone_and_a_regression_none() -> None:
    frame = rows().replace({name: place for place, name in enumerate(NAMES)})
    frame.to_csv("batch.csv", index=False)
    result = analyze(config("batch.csv"))
    assert "labels: the model agrees with 100% of 60 labels" in summary(result)
    section = {**config("batch.csv"), "loss": "mse"}
    model = nn.Sequential(Model(), nn.Linear(3, 1), nn.Flatten(0))
    assert "labels" not in summary(analyze(section, model=model, overwrite=True))


def test_validate_says_the_agreement_and_another_order(tmp_path: Path) -> None:
    rows().to_csv("batch.csv", index=False)
    (tmp_path / "model.py").write_text(
        "import torch\n\n\ndef build():\n    model = torch.nn.Linear(3, 3)\n"
        "    model.weight.data = 6 * torch.eye(3)\n    return model\n"
    )
    section = {"version": 1, **config("batch.csv"), "model": {"factory": "model.py:build"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(section))
    found = psgrad.validate("config.yaml")
    assert found.problems == []
    assert found.facts["labels"] == "0 churn, 1 stay, 2 upgrade; the model agrees with 0% of 60 labels"
    assert any("in another order: 0 stay, 1 upgrade, 2 churn" in note for note in found.notes)
    rows(59, without="churn").to_csv("batch.csv", index=False)
    (problem,) = psgrad.validate("config.yaml").problems
    assert "upgrade (29 rows), stay (30 rows)" in str(problem)


def test_resume_with_the_classes_in_another_order_is_refused(tmp_path: Path) -> None:
    rows().to_csv("batch.csv", index=False)
    (tmp_path / "model.py").write_text("import torch\n\n\ndef build():\n    return torch.nn.Linear(3, 3)\n")
    torch.save(Model().state_dict(), "model.pt")
    model = {"factory": "model.py:build", "checkpoint": "model.pt"}
    section = {**config("batch.csv", data={"class_names": list(NAMES)}), "model": model}
    psgrad.analyze(section, report=False)
    section["data"]["class_names"] = list(NAMES[::-1])
    with pytest.raises(ConfigError, match=r'data\.class_names was \["stay", "upgrade", "churn"\]'):
        psgrad.analyze(section, resume=True, report=False)


def test_agreement_of_tokens_is_weighted_by_their_number_and_language_models_have_none() -> None:
    columns = pd.DataFrame(
        {"loss": [1.0, 1.0, np.nan], "token_accuracy": [0.5, 1.0, 1.0], "length": [4, 6, 9]}
    )
    tokens = Criterion("token_cross_entropy", F.cross_entropy, "token")
    facts = label_facts_of(tokens, columns, ["a", "b"])
    assert facts is not None
    assert (facts.agree, facts.rows, facts.of) == (8, 10, "tokens")
    assert label_facts_of(tokens, columns, None) is None


def test_agreement_of_probabilities_is_that_of_the_likelier_class() -> None:
    columns = pd.DataFrame(
        {"loss": [1.0] * 4, "target": [0.0, 1.0, 1.0, 0.0], "prediction": [0.1, 0.9, 0.4, 0.2]}
    )
    binary = Criterion("bce_with_logits", F.cross_entropy, "binary")
    facts = label_facts_of(binary, columns, ["no", "yes"])
    assert facts is not None
    assert (facts.agree, facts.rows) == (3, 4)
    assert label_facts_of(binary, columns.assign(target=[0.0, 1.0, 0.5, 0.0]), None) is None
