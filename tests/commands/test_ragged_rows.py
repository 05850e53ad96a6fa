"""Commands on rows of unequal length, from a config to the tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.data.rows import Block, Samples
from psgrad.ragged import RaggedAxes, joined
from tests.workplace import Workplace

MODELS = """\
import torch
from torch import nn


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.head(self.lstm(x)[0][:, -1])


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x, mask):
        counted = mask.unsqueeze(-1).to(x.dtype)
        return self.head((torch.tanh(self.hidden(x)) * counted).sum(1) / counted.sum(1))


def last():
    torch.manual_seed(0)
    return Last()


def mean():
    torch.manual_seed(0)
    return Mean()
"""
LENGTHS = (4, 9, 2, 4, 7, 9, 1, 4, 3, 2, 8, 4)


class Sequences(Samples):
    """Rows of numbers [t, 2] with a mask [t]."""

    def __init__(self) -> None:
        super().__init__(np.arange(len(LENGTHS)), np.arange(len(LENGTHS)) % 3, "fingerprint")
        line = ((0, 0),)
        self.ragged = RaggedAxes((line, line, ()), (0.0, 0, 0), masked=True)

    def take(self, rows: Any) -> Block:
        return joined([self.one(int(row)) for row in rows])

    def one(self, row: int) -> Block:
        generator = torch.Generator().manual_seed(row)
        x = torch.randn(1, LENGTHS[row], 2, generator=generator)
        mask = torch.ones(1, LENGTHS[row], dtype=torch.int64)
        lengths = torch.tensor([[LENGTHS[row]]])
        return Block((x, mask), torch.tensor([row % 3]), lengths, self.ragged)


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> Sequences:
    found = Sequences()
    monkeypatch.setattr("psgrad.commands.setup.load_data", lambda *_, **__: found)
    return found


def norms_alone(model: nn.Module, samples: Sequences) -> Tensor:
    found = []
    for row in range(len(LENGTHS)):
        block = samples.one(row)
        loss = F.cross_entropy(model(*block.inputs), block.target)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([g.flatten() for g in gradients]).norm())
    return torch.stack(found)


def built(model: str) -> nn.Module:
    scope: dict[str, Any] = {}
    exec(MODELS, scope)
    made: nn.Module = scope[model]()
    return made.eval()


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    (workplace.folder / "model.py").write_text(MODELS)
    workplace.config["data"] = {"path": "data.npz", "inputs": ["x", "mask"], "target": "y"}
    return workplace


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "engine"),
    [("mean", {}), ("last", {"chunk_size": 5})],
    ids=str,
)
def test_analyze_gives_ragged_rows_their_own_norms(
    model: str, engine: dict[str, Any], samples: Sequences, place: Workplace
) -> None:
    place.config |= {"model": {"factory": f"model.py:{model}"}, "engine": {"device": "cpu", **engine}}
    outcome = place.succeeded()
    table = place.samples()
    np.testing.assert_allclose(table["grad_norm"], norms_alone(built(model), samples), rtol=1e-5)
    assert table["index"].tolist() == list(range(len(LENGTHS)))
    assert samples.ragged is not None
    assert samples.ragged.masked == (model == "mean")
    assert ("the model does not ignore padding" in outcome.err) == (model == "last")


@pytest.mark.long
def test_analyze_of_some_ragged_rows_gives_the_same_numbers(samples: Sequences, place: Workplace) -> None:
    place.config |= {"model": {"factory": "model.py:mean"}, "engine": {"device": "cpu"}}
    place.config["analyze"] = {"measures": ["cosine_to_mean", "input_gradient"]}
    place.succeeded()
    whole = place.samples()
    place.config["output"] = "again"
    place.command("analyze", "config.yaml", "--set", "output=again", "--limit", "5").succeeded()
    np.testing.assert_array_equal(place.samples("again")["grad_norm"], whole["grad_norm"][:5])
