"""A loss of one's own that takes columns of the data besides output and target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from torch import nn

from tests.private_workplace import EXACT, PrivateWorkplace
from tests.workplace import CLASSES, ROWS, Workplace

LOSS = """\
def loss(output, target, w, prior):
    return w * torch.nn.functional.cross_entropy(output + prior, target)
"""
ROWS_OF_A_FACTORY = """\
import numpy as np

class Rows:
    def __init__(self):
        self.all = dict(np.load('data.npz'))

    def __len__(self):
        return 24

    def __getitem__(self, row):
        return {name: each[row] for name, each in self.all.items()}
"""


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    random = np.random.default_rng(7)
    workplace.save(
        w=random.uniform(0.5, 2.0, ROWS).astype(np.float32),
        prior=random.normal(size=(ROWS, CLASSES)).astype(np.float32),
    )
    workplace.use_loss(LOSS)
    workplace.config["loss"] = {"name": "loss.py:loss", "columns": ["w", "prior"]}
    return workplace


def expected(place: Workplace, **changed: Any) -> tuple[list[float], list[float]]:
    """(losses, norms) by autograd, one row at a time."""
    arrays = {name: torch.from_numpy(each) for name, each in place.arrays.items() if name != "uid"} | changed
    losses, norms = [], []
    for row in range(len(arrays["x"])):
        output = place.model(arrays["x"][row : row + 1])[0] + arrays["prior"][row]
        loss = arrays["w"][row] * nn.functional.cross_entropy(output, arrays["y"][row])
        gradients = torch.autograd.grad(loss, list(place.model.parameters()))
        losses.append(float(loss))
        norms.append(float(torch.cat([each.flatten() for each in gradients]).norm()))
    return losses, norms


def check(place: Workplace, *options: str) -> None:
    place.succeeded("--overwrite", *options)
    losses, norms = expected(place)
    assert place.samples()["loss"].to_numpy() == pytest.approx(losses, rel=1e-5)
    assert place.samples()["grad_norm"].to_numpy() == pytest.approx(norms, rel=1e-4)


@pytest.mark.long
def test_loss_gets_columns_of_arrays_and_the_report_shows_them(place: Workplace) -> None:
    check(place)
    assert place.manifest()["self_check"]["worst_relative_error"] < 1e-4


def test_loss_gets_columns_of_a_table_whose_inputs_are_one_vector(place: Workplace) -> None:
    frame = pd.DataFrame(place.arrays["x"], columns=list("abcd"))
    frame = frame.assign(y=place.arrays["y"], w=place.arrays["w"], prior=place.arrays["prior"].tolist())
    frame.to_parquet("data.parquet")
    place.config["data"] = {"path": "data.parquet", "inputs": list("abcd"), "target": "y"}
    check(place, "--no-report")


def test_loss_gets_columns_of_a_factorys_items_and_the_model_its_keywords(place: Workplace) -> None:
    (place.folder / "rows.py").write_text(ROWS_OF_A_FACTORY)
    place.config["data"] = {"factory": "rows.py:Rows", "inputs": {"input": "x"}, "target": "y"}
    check(place, "--no-report")


def test_change_of_a_loss_column_is_another_run(place: Workplace) -> None:
    place.succeeded("--no-report", "--limit", "9")
    place.save(w=place.arrays["w"] * 2)
    place.analyze("--no-report", "--limit", "9", "--resume").refused(2, "data (its content)")


@pytest.mark.long
def test_loss_columns_in_influence_and_its_queries(place: Workplace) -> None:
    place.config["influence"] = {"method": "gradient_dot", "queries": {"worst": 3}, "check": "never"}
    place.analyze()  # writes the config
    outcome = place.command("influence", "config.yaml", "--overwrite", "--no-report")
    assert outcome.code == 0, outcome.err
    scores = pd.read_parquet("out/scores.parquet")
    losses, norms = expected(place)
    asked = [row for row in dict.fromkeys(scores["query_index"]) if row >= 0]
    assert asked == np.argsort(-np.array(losses))[:3].tolist()
    own = scores[(scores["query_index"] == asked[0]) & (scores["train_index"] == asked[0])]["score"]
    assert own.iloc[0] == pytest.approx(norms[asked[0]] ** 2, rel=1e-4)


@pytest.mark.long
def test_loss_columns_in_a_private_step(place: Workplace) -> None:
    private = PrivateWorkplace(place)
    private.privacy.update({**EXACT, "clipping": {"norm": 1e3}})
    private.succeeded()
    place.model.double()
    arrays = {name: torch.from_numpy(each) for name, each in place.arrays.items() if name != "uid"}
    output = place.model(arrays["x"].double()) + arrays["prior"]
    losses = nn.functional.cross_entropy(output, arrays["y"], reduction="none")
    gradients = torch.autograd.grad((losses * arrays["w"]).mean(), list(place.model.parameters()))
    names = [name for name, _ in place.model.named_parameters()]
    for name, gradient, before in zip(names, gradients, place.model.parameters(), strict=True):
        found = private.weights()[name]
        torch.testing.assert_close(found.double(), before.detach() - gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "code", "words"),
    [
        ({"name": "cross_entropy", "columns": ["w"]}, 2, "the loss 'cross_entropy' does not take columns"),
        ({"name": "loss.py:loss", "columns": ["weights"]}, 2, "weights"),
        ({"name": "loss.py:loss", "columns": ["w"]}, 3, "missing 1 required positional argument"),
    ],
)
def test_loss_columns_that_do_not_fit_are_reported(
    place: Workplace, loss: dict[str, Any], code: int, words: str
) -> None:
    place.config["loss"] = loss
    place.refused(code, words)


@pytest.mark.long
def test_methods_that_differentiate_in_the_output_refuse_loss_columns(place: Workplace) -> None:
    place.config["influence"] = {"method": {"name": "influence", "damping": 0.1}, "queries": {"rows": [0]}}
    place.analyze()
    outcome = place.command("influence", "config.yaml", "--overwrite", "--no-report")
    outcome.refused(3, "takes the columns w, prior, and was to be taken without them")


@pytest.mark.parametrize(
    ("columns", "words"),
    [(["w", "nothing"], "nothing"), (["w", "uid"], "uid")],
)
def test_validate_looks_at_the_columns_of_a_loss(place: Workplace, columns: list[str], words: str) -> None:
    place.succeeded("--no-report")
    assert place.command("validate", "config.yaml").code == 0
    place.config["loss"]["columns"] = columns
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    outcome = place.command("validate", "config.yaml")
    assert outcome.code in (2, 3)
    assert words in outcome.err + outcome.out
