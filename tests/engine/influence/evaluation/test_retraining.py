"""Controls by plain algebra, finished models that are not trained twice, and methods as matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics.pairwise import cosine_similarity, euclidean_distances
from torch import nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.influence.evaluation.controls import (
    LABEL,
    LOSS,
    NEIGHBOUR,
    NORM,
    PENULTIMATE,
    RANDOM,
    controls,
    penultimate,
)
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Members
from psgrad.engine.influence.evaluation.retraining import measured, seed_of
from psgrad.engine.influence.evaluation.statistics import (
    score_matrix,
    self_influences,
)
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.gradient_products import GradientDot
from tests.engine.influence.problems import (
    classified,
    convolution,
    cross_entropy,
    examples,
    gradient_rows,
    mlp,
    squared_error,
)

INPUTS, LABELS = classified(14)
QUERIES, ASKED = classified(5, seed=2)


# -- controls ------------------------------------------------------------------------------------------------


def test_evaluation_controls_equal_sklearn_and_the_loop() -> None:
    model = mlp()
    result, notes = controls(
        examples(model, cross_entropy, INPUTS, LABELS), examples(model, cross_entropy, QUERIES, ASKED)
    )
    assert notes == []
    assert all(matrix.shape == (14, 5) for matrix in result.values())
    with torch.no_grad():
        hidden = [model[1](model[0](x)).numpy() for x in (INPUTS, QUERIES)]  # type: ignore[index, operator]
        losses = F.cross_entropy(model(INPUTS), LABELS, reduction="none").numpy()
    np.testing.assert_array_equal(result[LABEL], LABELS.numpy()[:, None] == ASKED.numpy()[None])
    np.testing.assert_allclose(
        result[NEIGHBOUR], -euclidean_distances(INPUTS.numpy(), QUERIES.numpy()), rtol=1e-9
    )
    np.testing.assert_allclose(result[PENULTIMATE], cosine_similarity(*hidden), rtol=1e-9, atol=1e-12)
    norms = np.linalg.norm(gradient_rows(model, cross_entropy, INPUTS, LABELS), axis=1)
    for query in range(5):
        np.testing.assert_allclose(result[LOSS][:, query], losses, rtol=1e-10)
        np.testing.assert_allclose(result[NORM][:, query], norms, rtol=1e-10)
    assert abs(result[RANDOM].mean()) < 0.5


def test_evaluation_penultimate_layer() -> None:
    class Backwards(nn.Module):
        """Its layers are named in another order than they run in."""

        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(4, 3).double(), nn.Linear(6, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x).tanh())

    model = Backwards()
    result = penultimate(Objective(model, F.cross_entropy), LoadedRows((INPUTS,), LABELS))
    assert result is not None
    torch.testing.assert_close(result, model.body(INPUTS).tanh().detach())
    assert not any(module._forward_pre_hooks for module in model.modules())
    pictures, _ = classified(4, (1, 6, 6))
    deep = convolution()
    taken = penultimate(Objective(deep, F.cross_entropy), LoadedRows((pictures,), None))
    assert taken is not None
    torch.testing.assert_close(taken, deep[:-1](pictures).detach())  # type: ignore[index]


def test_evaluation_missing_controls_refused() -> None:
    tokens, values = torch.arange(6).reshape(3, 2), torch.randn(3, 1, dtype=torch.float64)
    model = nn.Sequential(nn.Embedding(6, 1), nn.Flatten(), nn.Linear(2, 1)).double()
    result, notes = controls(*[examples(model, squared_error, tokens, values)] * 2)
    assert LABEL not in result
    assert NEIGHBOUR not in result
    assert PENULTIMATE in result
    assert [note.split(":")[0] for note in notes] == [f"no control {LABEL!r}", f"no control {NEIGHBOUR!r}"]
    lookup, _ = controls(
        *[
            examples(
                nn.Sequential(nn.Embedding(6, 1), nn.Flatten()).double(),
                squared_error,
                tokens,
                tokens.double(),
            )
        ]
        * 2
    )
    assert PENULTIMATE not in lookup


# -- finished models -----------------------------------------------------------------------------------------


class Memory(dict[str, Any]):
    def load(self, name: str) -> Any:
        return self.get(name)

    def save(self, name: str, values: Any) -> None:
        self[name] = values


class Counting:
    """A trainer of nothing: a member is its number of rows and its seed."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.batches: list[list[int]] = []
        self.fail_at = fail_at

    def __call__(self, jobs: Sequence[Job]) -> Members:
        if self.fail_at is not None and len(self.batches) == self.fail_at:
            raise KeyboardInterrupt
        self.batches.append([len(job.rows) for job in jobs])
        state = {"weight": torch.tensor([[len(job.rows), job.seed, int(job.rows[0])] for job in jobs])}
        return Members(nn.Identity(), state, np.zeros(len(jobs)))


def as_is(members: Members) -> np.ndarray:
    return members.state["weight"].numpy()


JOBS = [Job(f"{k}", np.arange(k % 3, 10 + k % 3 + k % 2), k) for k in range(10)]
SAID = [[len(job.rows), job.seed, int(job.rows[0])] for job in JOBS]


@pytest.mark.parametrize("together", [1, 3, 4, 100])
def test_evaluation_order_of_jobs(together: int) -> None:
    train, told = Counting(), list[int]()
    result = measured(JOBS, train, as_is, Memory(), "", together, told.append)
    assert result.tolist() == SAID
    assert told[-1] == 10
    assert sum(len(set(batch)) > 1 for batch in train.batches) <= 1  # models of one size are trained together


def test_evaluation_resume() -> None:
    store = Memory()
    with pytest.raises(KeyboardInterrupt):
        measured(JOBS, Counting(fail_at=2), as_is, store, "", 3)
    again = Counting()
    assert measured(JOBS, again, as_is, store, "", 3).tolist() == SAID
    assert len(again.batches) == 2  # of four


@pytest.mark.parametrize("change", ["fingerprint", "rows", "seed", "damage"])
def test_evaluation_resume_after_change_trains_again(change: str) -> None:
    store, jobs, fingerprint = Memory(), list(JOBS), "one model"
    measured(jobs, Counting(), as_is, store, fingerprint, 100)
    other = {
        "fingerprint": jobs[0],
        "rows": replace(jobs[0], rows=jobs[0].rows + 1),
        "seed": replace(jobs[0], seed=99),
        "damage": jobs[0],
    }[change]
    if change == "damage":
        store.update({name: values[:-1] for name, values in store.items()})
    train = Counting()
    measured(
        [other, *jobs[1:]], train, as_is, store, "another" if change == "fingerprint" else fingerprint, 100
    )
    assert len(train.batches) == 1


def test_evaluation_seeds_differ() -> None:
    assert (
        len({seed_of(0, s, r) for s in range(100) for r in range(5)} | {seed_of(1, s, 0) for s in range(100)})
        == 600
    )


# -- methods as matrices -------------------------------------------------------------------------------------


def test_evaluation_scores_over_all_checkpoints() -> None:
    models = [mlp(seed) for seed in (0, 1)]
    training = [examples(model, cross_entropy, INPUTS, LABELS, chunk_size=4) for model in models]
    queries = [examples(model, cross_entropy, QUERIES, ASKED) for model in models]
    fitted = [GradientDot().fit(each, Checkpoint(number)) for number, each in enumerate(training)]
    rows = [gradient_rows(model, cross_entropy, INPUTS, LABELS) for model in models]
    asked = [gradient_rows(model, cross_entropy, QUERIES, ASKED) for model in models]
    products = [one @ other.T for one, other in zip(rows, asked, strict=True)]
    own = [(one**2).sum(1) for one in rows]
    divided = [one / np.sqrt(of)[:, None] for one, of in zip(products, own, strict=True)]
    alike = np.mean([each / np.sqrt(np.mean(each**2, axis=0)) for each in divided], axis=0)
    np.testing.assert_allclose(
        score_matrix(GradientDot(), fitted, queries, "self_influence"), alike, rtol=1e-9
    )
    single = self_influences(GradientDot(), fitted[:1])
    np.testing.assert_allclose(single / single.mean(), own[0] / own[0].mean(), rtol=1e-9)
