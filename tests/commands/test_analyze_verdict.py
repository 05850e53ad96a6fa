"""`psgrad analyze` with trusted samples: another run, or a baseline."""

from __future__ import annotations

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.oracles import one_sample_gradients
from tests.workplace import CLASSES, FEATURES, Workplace

TRUSTED = 60
TABLE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, x):
        return self.table(x)
"""


@pytest.fixture
def judged(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A workplace with a run on trusted samples in trusted/, which draws no plots."""
    monkeypatch.setattr("psgrad.reports.analyze_page.write_report", lambda result, write: None)
    random = np.random.default_rng(7)
    np.savez(
        workplace.folder / "trusted.npz",
        x=random.normal(size=(TRUSTED, FEATURES)).astype(np.float32),
        y=random.integers(0, CLASSES, TRUSTED),
        uid=np.array([f"known-{row:02d}" for row in range(TRUSTED)]),
    )
    workplace.measured_apart("trusted.npz")
    use_reference(workplace, "trusted")
    return workplace


def trusted_norms(place: Workplace) -> np.ndarray:
    with np.load(place.folder / "trusted.npz") as file:
        inputs, target = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    gradients = one_sample_gradients(place.model, F.cross_entropy, (inputs,), target)
    return np.asarray(torch.cat([each.flatten(1).double() for each in gradients.values()], 1).norm(dim=1))


def use_reference(place: Workplace, reference: object, **outliers: object) -> None:
    place.config["analyze"] = {"outliers": {"reference": reference, "fdr": 0.5, **outliers}}


def test_a_reference_gives_each_sample_its_p_value(judged: Workplace) -> None:
    x = judged.arrays["x"].copy()
    x[3] *= 100
    judged.save(x=x)
    judged.succeeded()
    frame, facts = judged.samples(), judged.manifest()["outliers"]
    known = trusted_norms(judged)
    expected = [(1 + (known >= norm).sum()) / (TRUSTED + 1) for norm in frame["grad_norm"]]
    np.testing.assert_allclose(frame["p_value"], expected)
    assert frame["is_outlier_issue"][3]
    assert facts["reference"] == {
        "kind": "run",
        "source": "trusted",
        "size": TRUSTED,
        "nonfinite": 0,
        "in_both": 0,
    }
    assert not (judged.folder / "out" / "parts").exists()


def test_a_baseline_judges_as_its_run_does(judged: Workplace) -> None:
    judged.succeeded()
    assert judged.command("baseline", "save", "trusted", "--output", "known.json").code == 0
    use_reference(judged, "known.json")
    judged.succeeded("--output", "other")
    for column in ("p_value", "reasons"):
        assert judged.samples()[column].tolist() == judged.samples("other")[column].tolist()


def test_the_judged_run_itself_is_no_reference(judged: Workplace) -> None:
    judged.config["analyze"] = {}
    judged.succeeded("--output", "first")
    use_reference(judged, "first")
    judged.succeeded()
    facts = judged.manifest()["outliers"]
    assert not facts["evaluable"]
    assert "all of them are in the reference" in facts["why_not"]
    assert judged.samples()["q_value"].isna().all()


@pytest.mark.parametrize(
    ("reference", "outliers", "words"),
    [
        ("nowhere", {}, "holds no run of psgrad"),
        ("nowhere.json", {}, "there is no baseline"),
        ("trusted", {"score": "grad_nrom"}, "did you mean grad_norm?"),
        ("trusted", {"group_by": "length"}, "length counts positions"),
        ("trusted", {"group_by": "source"}, "has no column 'source'"),
        ("trusted", {"detectors": ["isolation_forest"]}, "neighbour_distance in analyze.measures"),
        ({"data": {"path": "trusted.npz"}}, {}, "a run of their own"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    judged: Workplace, reference: object, outliers: dict[str, object], words: str
) -> None:
    use_reference(judged, reference, **outliers)
    outcome = judged.analyze()
    assert outcome.code in (2, 3)
    outcome.refused(outcome.code, words)
    assert not (judged.folder / "out").exists()


def test_groups_may_be_a_column_of_the_dataset(judged: Workplace) -> None:
    random = np.random.default_rng(3)
    for name, rows in (("data", 24), ("trusted", TRUSTED)):
        with np.load(judged.folder / f"{name}.npz") as file:
            table = pd.DataFrame(file["x"], columns=list("abcd")).assign(y=file["y"], uid=file["uid"])
        table.assign(source=np.where(random.random(rows) < 0.5, "web", "book")).to_csv(
            judged.folder / f"{name}.csv", index=False
        )
    judged.config["data"] = {"path": "data.csv", "inputs": list("abcd"), "target": "y", "id": "uid"}
    use_reference(judged, "trusted", group_by="source", min_group=5)
    judged.succeeded(
        "--set=data.path=trusted.csv",
        "--set=analyze.outliers.reference=null",
        "--overwrite",
        "--output",
        "trusted",
    )
    judged.succeeded()
    frame, known = judged.samples(), pd.read_csv(judged.folder / "trusted.csv")
    assert (
        frame["group"].tolist()
        == pd.read_csv(judged.folder / "data.csv")["source"].tolist()
        == frame["source"].tolist()
    )
    norms = trusted_norms(judged)
    expected = [
        (1 + (norms[known["source"] == group] >= norm).sum()) / (1 + (known["source"] == group).sum())
        for group, norm in zip(frame["group"], frame["grad_norm"], strict=True)
    ]
    np.testing.assert_allclose(frame["p_value"], expected)


def test_lengths_count_the_positions_that_count(judged: Workplace) -> None:
    judged.use_model(TABLE)
    judged.config["loss"] = "token_cross_entropy"
    random = np.random.default_rng(0)
    y = random.integers(0, 5, (24, 8))
    for row in range(24):
        y[row, 1 + row % 8 :] = -100
    judged.save(x=random.integers(0, 5, (24, 8)), y=y)
    judged.config["analyze"] = {"outliers": {"group_by": "length", "min_group": 3}}
    judged.succeeded()
    frame = judged.samples()
    assert frame["length"].tolist() == (y != -100).sum(1).tolist()
    assert frame["group"].value_counts().to_dict() == {"0 to 1": 3, "2 to 3": 6, "4 to 7": 12, "8 to 15": 3}


def test_a_loss_of_tokens_on_one_class_per_row_is_refused(judged: Workplace) -> None:
    judged.config["analyze"] = {}
    judged.config["loss"] = "token_cross_entropy"
    judged.refused(3, "the target [] of one sample don't go together in token_cross_entropy")


@pytest.mark.long
@pytest.mark.parametrize(("score", "said"), [("vog", False), ("vog_z", True), ("cosine_to_mean", True)])
def test_a_score_that_depends_on_the_other_samples_is_said_to(
    judged: Workplace, score: str, said: bool
) -> None:
    checkpoints = [f"step{step}.safetensors" for step in range(3)]
    for step, name in enumerate(checkpoints):
        save_file(
            {key: value * (1 + step) for key, value in judged.model.state_dict().items()},
            judged.folder / name,
        )
    judged.config["analyze"]["outliers"]["score"] = score
    judged.config["analyze"] |= {"measures": ["vog", "cosine_to_mean"], "checkpoints": checkpoints}
    shutil.rmtree("trusted")
    judged.measured_apart("trusted.npz")
    judged.succeeded()
    caveats = judged.manifest()["outliers"]["caveats"]
    assert (
        any(each.startswith(f"{score} of a sample depends on the other samples") for each in caveats) == said
    )
