"""Curvatures of rows of unequal length: in buckets they are those of the rows one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psgrad.engine.execution.buckets import ModelSize
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import gauss_newton_rows
from psgrad.engine.influence.curvature.curvature_products import PassProducts, RowProducts
from psgrad.engine.influence.curvature.kronecker_fitting import fit_blocks, gather
from psgrad.engine.influence.curvature.matrices import loss_hessian, sum_of_outer_products
from psgrad.engine.influence.evaluation.jobs import LoadedRows
from psgrad.errors import ModelError, PsgradError
from tests.engine.execution.ragged_models import Case, case, flat

LENGTHS = (3, 6, 1, 3, 5, 6)


def examples(ragged: Case, chunk_size: int) -> Examples:
    rows = ragged.rows(LENGTHS)
    options: dict[str, Any] = {"chunk_size": chunk_size, "model_size": ModelSize(1, 10**12)}
    return Examples(ragged.objective, ragged.block(rows), options)


@pytest.fixture(params=["mean", "conv"])
def pair(request: pytest.FixtureRequest) -> tuple[Examples, Examples]:
    """The rows in buckets, and one by one."""
    ragged = case(request.param)
    found = examples(ragged, len(LENGTHS)), examples(ragged, 1)
    assert len(found[0].stream.gradients(range(len(LENGTHS))).parts) > 2
    return found


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_ragged_fisher_is_the_sum_of_the_rows_outer_products() -> None:
    ragged = case("mean")
    each = flat(ragged.gradients(ragged.rows(LENGTHS)))
    assert_close(sum_of_outer_products(examples(ragged, 6)), each.t() @ each)


@pytest.mark.long
def test_ragged_gauss_newton_matrix_and_its_rows(pair: tuple[Examples, Examples]) -> None:
    buckets, alone = (gauss_newton_rows(each) for each in pair)
    assert_close(sum_of_outer_products(buckets), sum_of_outer_products(alone))
    some = buckets.gradients(range(1, 5))
    assert_close(some.gram(), alone.gradients(range(1, 5)).gram())
    assert_close(buckets.materialise()[2:10], buckets.flat.join(some.materialise()))


@pytest.mark.long
def test_ragged_hessian(pair: tuple[Examples, Examples]) -> None:
    assert_close(*map(loss_hessian, pair))


@pytest.mark.parametrize("curvature", ["fisher", "gauss_newton", "hessian"])
def test_ragged_curvature_products(pair: tuple[Examples, Examples], curvature: Any) -> None:
    block = torch.randn(
        pair[0].flat.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).t()
    passes = [PassProducts(each, curvature).apply(block) for each in pair]
    assert_close(*passes)
    if curvature != "hessian":
        rows = [RowProducts.of(each, curvature) for each in pair]
        assert rows[0] is not None
        assert_close(rows[0].apply(block), passes[0])


def test_ragged_kronecker_factors_and_blocks(pair: tuple[Examples, Examples]) -> None:
    sums = [gather(each) for each in pair]
    assert sums[0].ties == sums[1].ties
    assert list(sums[0].moments) == list(sums[1].moments)
    for use, moments in sums[0].moments.items():
        assert_close(moments, sums[1].moments[use])
    blocks = [fit_blocks(each, len(LENGTHS)) for each in pair]
    gradients = [each.stream.gradients(range(len(LENGTHS))) for each in pair]
    for block, other in zip(*blocks, strict=True):
        assert_close(block.values.sum(), other.values.sum())
        factor = torch.ones_like(block.values)
        vectors = block.precondition(gradients[0], factor)
        for name, value in vectors.items():
            assert_close(value, gradients[1].select(name).materialise()[name])
        (squares,) = block.weighted_squares(gradients[0], [factor])
        norms = gradients[1].square_norms(per="parameter")
        assert_close(squares, torch.stack([norms[name] for name in vectors]).sum(0))


def test_ragged_outputs_of_several_sizes_have_no_jacobian_rows() -> None:
    with pytest.raises(PsgradError, match="has more numbers for long samples than for short ones"):
        gauss_newton_rows(examples(case("gpt2"), 6)).materialise()


def test_ragged_rows_that_are_trained_on_need_a_mask() -> None:
    assert len(LoadedRows.of(examples(case("mean"), 6))) == len(LENGTHS)
    with pytest.raises(ModelError, match=r"rows of 1 to 6 positions can't be trained on together"):
        LoadedRows.of(examples(case("lstm"), 6))
