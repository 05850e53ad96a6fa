"""`influence.level: token` from its config to tokens.parquet and the page."""

from __future__ import annotations

import numpy as np
import pytest

from psgrad.errors import ConfigError
from tests.influence_workplace import InfluenceWorkplace
from tests.workplace import CLASSES, ROWS

WORDS, LENGTH = 9, 6
MODEL = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.words, self.head = nn.Embedding(9, 5), nn.Linear(5, 9)
        self.mix = nn.Linear(5, 5)

    def forward(self, ids):
        hidden = self.words(ids)
        return self.head(hidden + torch.tanh(self.mix(hidden.cumsum(1))))
"""


@pytest.fixture
def place(place: InfluenceWorkplace) -> InfluenceWorkplace:
    random = np.random.default_rng(0)
    ids = random.integers(0, WORDS, (ROWS, LENGTH + 1))
    target = ids[:, 1:].copy()
    target[:, :2] = -100  # a prompt
    place.save(ids=ids[:, :-1], next=target)
    place.use_model(MODEL)
    place.config["loss"] = "token_cross_entropy"
    place.config["data"] = {"path": "data.npz", "inputs": "ids", "target": "next", "id": "uid"}
    place.config["engine"] = {"dtype": "float64", "verify": 0}
    place.config["influence"] = {"queries": {"rows": [0, 3]}, "level": "token", "top": 3}
    return place


@pytest.mark.long
@pytest.mark.report
def test_influence_tokens_add_up_to_the_scores_of_samples(place: InfluenceWorkplace) -> None:
    place.influence().succeeded()
    found = place.table("tokens")
    scores = place.table("scores")
    pairs = scores[scores["query_index"] >= 0].set_index(["query_index", "train_index"])["score"]
    sums = found.groupby(["query_index", "train_index"])["score"].sum()
    assert len(sums) == len(pairs)
    np.testing.assert_allclose(sums[pairs.index], pairs, rtol=1e-8)
    assert set(found["query_token"]) == set(found["train_token"]) == {3, 4, 5, 6}  # of LENGTH + 1, by name
    facts = place.manifest()["influence"]
    assert facts["method"] == "ekfac"  # the default of token losses
    assert any("influence.method: ekfac" in said for said in facts["warnings"])
    page = (place.folder / "out" / "report.html").read_text()
    assert "Token by token. Query row-00" in page
    assert "The strongest pairs of tokens" in page


@pytest.mark.long
def test_influence_tokens_a_named_method_stays(place: InfluenceWorkplace) -> None:
    place.section.update({"method": "influence", "level": "sample"})
    assert place.influence("--no-report").code == 0
    assert place.manifest()["influence"]["method"] == "influence"


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            {"measurement": {"name": "model.py:number", "larger_is": "worse"}},
            2,
            ("is not divided over tokens",),
        ),
        ({"index": "index"}, 2, ("which an index has not",)),
        (
            {"checkpoints": ["a.safetensors", "b.safetensors"]},
            2,
            ("divides the scores of one checkpoint",),
        ),
        ({"method": "gradient_cosine"}, 3, ("the scores of gradient_cosine", "choose ekfac")),
    ],
)
def test_influence_tokens_that_cannot_be(
    place: InfluenceWorkplace, change: dict[str, object], code: int, words: tuple[str, ...]
) -> None:
    with (place.folder / "model.py").open("a") as file:
        file.write("\n\ndef number(output, target):\n    return output.sum()\n")
    place.section.update(change)
    place.influence().refused(code, *words)


def test_influence_tokens_of_a_loss_of_samples(place: InfluenceWorkplace) -> None:
    place.config["loss"] = "cross_entropy"
    place.use_model(f"def Model():\n    return nn.Linear(4, {CLASSES})\n")
    place.config["data"] = {"path": "data.npz", "inputs": "x", "target": "y", "id": "uid"}
    place.influence().refused(2, "the loss cross_entropy has one value a sample", "level: sample")


def test_influence_tokens_by_several_processes_are_refused(place: InfluenceWorkplace) -> None:
    with pytest.raises(ConfigError, match=r"influence\.level: token: 2 processes share this run"):
        place.first_of_two()
    assert not (place.folder / "out").exists()
