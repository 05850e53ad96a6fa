"""Influence methods whose chunks are replayed: most of the chunks, and the numbers of the tracers' own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from psgrad.engine.execution.chunk_replay import NOT_REPLAYED, ReplayCounts
from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.continued import slopes_without
from psgrad.engine.influence.curvature.curvature_products import PassProducts
from psgrad.engine.influence.curvature.matrices import loss_hessian
from psgrad.engine.influence.damping_choice import RemovalTrial
from psgrad.engine.influence.method import Checkpoint, Method
from tests.engine.influence import runs, test_over_ranks

ROWS, CHUNK = 51, test_over_ranks.CHUNK


def problem(counts: ReplayCounts | None) -> tuple[Examples, Examples]:
    """counts: None for no replays."""
    options = {"capture": "off"} if counts is None else {"capture": "auto", "counts": counts}
    return test_over_ranks.problem(rows=ROWS, **options)


def scores(method: Method, counts: ReplayCounts | None) -> np.ndarray:
    training, queries = problem(counts)
    return runs.scores(method.fit(training, Checkpoint(learning_rate=0.1)), queries)


QUICK = ("fisher", "ekfac of the empirical Fisher", "gradient_dot", "projected_influence")
SLOW = ("hessian", "dual", "sampled, dual")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in QUICK else [pytest.mark.sweep if name in SLOW else pytest.mark.long]
        )
        for name in test_over_ranks.FITS
    ],
)
def test_most_chunks_of_a_method_are_replayed(name: str) -> None:
    counts = ReplayCounts()
    found, expected = scores(test_over_ranks.FITS[name], counts), scores(test_over_ranks.FITS[name], None)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11 * np.abs(expected).max())
    assert counts.replayed > 0.5 * counts.chunks
    assert not counts.reasons


def hessian_products(training: Examples) -> Tensor:
    products = PassProducts(training, "hessian", 0.1)
    vectors = torch.randn(5, training.flat.size, generator=torch.Generator().manual_seed(1)).double()
    return torch.cat([products.apply(vectors[:2]), products.apply(vectors[2:4])])


def gauss_newton_products(training: Examples) -> Tensor:
    products = PassProducts(training, "gauss_newton", 0.1)
    return products.apply(torch.eye(training.flat.size, dtype=torch.float64)[:3])


def slopes_at_other_weights(training: Examples) -> Tensor:
    weights = torch.randn(2, training.flat.size, generator=torch.Generator().manual_seed(1)).double()
    return slopes_without(training, [3, 17], 0.1, weights)


def losses_of_steps(training: Examples) -> Tensor:
    trial = RemovalTrial(training, 0.1)
    models = [{name: value + by for name, value in training.params.items()} for by in (0.0, 0.1, 0.3)]
    return trial._losses(models)


def outputs(training: Examples) -> Tensor:
    return torch.cat([found["output"] for _, found in training.outputs()])


def losses(training: Examples) -> Tensor:
    return torch.cat([found["loss"] for _, found in training.losses()])


# What makes passes of one kind, and how many of them are sums: their last chunk, a short one, is not filled.
PASSES: dict[str, tuple[Callable[[Examples], Tensor], int]] = {
    "outputs": (outputs, 0),
    "losses": (losses, 0),
    "the matrix of second derivatives": (loss_hessian, 1),
    "Hessian times vectors": (hessian_products, 2),
    "Gauss-Newton times vectors": (gauss_newton_products, 1),
    "gradients at other weights": (slopes_at_other_weights, 3),
}


@pytest.mark.parametrize("name", PASSES)
def test_chunks_of_a_pass_of_its_own_are_replayed(name: str) -> None:
    find, sums = PASSES[name]
    counts = ReplayCounts()
    found, expected = find(problem(counts)[0]), find(problem(None)[0])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert counts.chunks == max(sums, 1) * -(-ROWS // CHUNK)
    assert counts.replayed == counts.chunks - NOT_REPLAYED - max(sums, 1)
    assert not counts.reasons


def test_losses_of_several_models_are_replayed() -> None:
    counts = ReplayCounts()
    found, expected = losses_of_steps(problem(counts)[0]), losses_of_steps(problem(None)[0])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert counts.replayed > 0.3 * counts.chunks
