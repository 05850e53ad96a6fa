"""Influence methods whose passes several ranks share: the scores of one process, and the same bits on each
rank.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import ChangedRows
from psgrad.engine.influence.curvature.curvature_products import PassProducts, curvature_products
from psgrad.engine.influence.index.build import build_index, from_index
from psgrad.engine.influence.index.stored_index import IndexSpec, describe
from psgrad.engine.influence.method import Checkpoint, Method, row_norms
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.gradient_products import GradientCosine, GradientDot, TracIn
from psgrad.engine.influence.methods.influence import Influence
from psgrad.engine.influence.methods.projected import TRAK, ProjectedInfluence
from psgrad.errors import InfluenceError
from psgrad.plugins import METHODS, own_classes
from psgrad.ragged import Block
from psgrad.run.gradient_index import GradientIndex
from tests.engine.execution.thread_ranks import ThreadRank, by_ranks
from tests.engine.influence.problems import both, mlp, parts
from tests.engine.influence.runs import scores, self_influence

ROWS, QUERIES, CHUNK = 23, 5, 4
FITS: dict[str, Method] = {
    "exact": Influence(solver="exact", damping=0.1),
    "dual": Influence(solver="dual", damping=0.1),
    "conjugate_gradient": Influence(solver="conjugate_gradient", damping=0.1, tolerance=1e-12),
    "hessian": Influence(solver="conjugate_gradient", curvature="hessian", damping=3.0, tolerance=1e-10),
    "fisher": Influence(curvature="fisher", damping=0.1),
    "sampled": Influence(curvature="sampled", damping=0.1),
    "sampled, dual": Influence(curvature="sampled", solver="dual", damping=0.1, draws=2),
    "leverage": Influence(solver="exact", damping=0.1, leverage=True),
    "at the output": Influence(solver="conjugate_gradient", damping=0.1, change="output", tolerance=1e-12),
    "ekfac": EKFAC(damping=0.1),
    "ekfac of the empirical Fisher": EKFAC(damping=0.1, fisher="empirical"),
    "gradient_dot": GradientDot(),
    "gradient_cosine": GradientCosine(),
    "tracin": TracIn(),
    "projected_influence": ProjectedInfluence(dimension=8),
    "trak": TRAK(dimension=8, projection="sparse"),
}


def problem(processes: Any = None, rows: int = ROWS, **options: Any) -> tuple[Examples, Examples]:
    """Training examples and queries of a small network, in float64."""
    data = parts(rows, QUERIES, (4,))
    training, queries = both(mlp(0, (4, 6, 3)), data, **{"chunk_size": CHUNK, **options})
    if processes is None:
        return training, queries
    return replace(training, processes=processes), replace(queries, processes=processes)


def found_by(method: Method, processes: Any = None) -> dict[str, np.ndarray]:
    training, queries = problem(processes)
    fitted = method.fit(training, Checkpoint(learning_rate=0.1))
    found = {"scores": scores(fitted, queries)}
    if fitted.has_self_influence or fitted.solver() is not None:
        found["own"], found["norms"] = self_influence(fitted)
    return found


def test_every_method_is_tried() -> None:
    assert {method.name for method in FITS.values()} == set(own_classes(METHODS))


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] * (name == "hessian")) for name in FITS]
)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_scores_over_ranks_are_those_of_one_process(name: str, size: int) -> None:
    alone = found_by(FITS[name])
    each = by_ranks(size, lambda rank: found_by(FITS[name], rank))
    for what, wanted in alone.items():
        np.testing.assert_allclose(each[0][what], wanted, rtol=1e-7, atol=1e-10 * np.abs(wanted).max())
        for other in each[1:]:
            np.testing.assert_array_equal(other[what], each[0][what])


@pytest.mark.long
@pytest.mark.parametrize(
    ("curvature", "by"),
    [
        ("gauss_newton", "rows kept"),
        ("fisher", "rows kept"),
        ("gauss_newton", "passes over the data"),
        ("fisher", "passes over the data"),
        ("hessian", "passes over the data"),
    ],
)
def test_products_over_ranks_are_those_of_one_process(curvature: Any, by: str) -> None:
    block = torch.randn(3, problem()[0].flat.size, dtype=torch.float64)

    def found(rank: ThreadRank | None) -> torch.Tensor:
        training = problem(rank)[0]
        products = (
            curvature_products(training, curvature, weight_decay=0.1)
            if by == "rows kept"
            else PassProducts(training, curvature, 0.1)
        )
        assert products.how == by
        return products.apply(block)

    for each in by_ranks(2, found):
        torch.testing.assert_close(each, found(None), rtol=1e-10, atol=1e-12)


@pytest.mark.long
def test_more_ranks_than_rows() -> None:
    """A rank without a row adds nothing to a sum."""
    method = EKFAC(damping=0.1)

    def found(rank: ThreadRank | None) -> np.ndarray:
        training, queries = (part.at(torch.arange(2)) for part in problem(rank))
        return scores(method.fit(training, Checkpoint()), queries)

    for each in by_ranks(5, found):
        np.testing.assert_allclose(each, found(None), rtol=1e-9)


def test_ranks_take_as_many_rows_at_once_as_the_first() -> None:
    def found(rank: ThreadRank) -> int:
        training = problem(rank, chunk_size=CHUNK + rank.rank)[0]
        row_norms(training)
        return training.stream.chunk_size

    assert by_ranks(3, found) == [CHUNK] * 3


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    """The row that fails is in the share of one rank; all of them are told, and can go on together."""

    def found(rank: ThreadRank) -> str:
        training = problem(rank)[0]

        def bad(block: Block, rows: torch.Tensor) -> Block:
            if ROWS - 1 in rows:
                raise InfluenceError("the last row is bad")
            return block

        with pytest.raises(InfluenceError, match="the last row is bad"):
            row_norms(replace(training, rows=ChangedRows(training.rows, bad)))
        return str(len(row_norms(training).losses))

    assert by_ranks(3, found) == [str(ROWS)] * 3


@pytest.mark.parametrize("features", ["loss", "margin"])
def test_index_by_ranks_is_that_of_one_process(tmp_path: Path, features: Any) -> None:
    spec = IndexSpec(dimension=8, features=features, rows_per_shard=5, dtype="float64")
    description = describe(spec, problem()[0], {})

    def built(name: str, rank: ThreadRank | None) -> None:
        path = tmp_path / name
        if rank is None or rank.leads:
            GradientIndex.create(path, description)
        if rank is not None:
            rank.meet("folder")
        store = GradientIndex.begun(path)
        assert store is not None
        build_index(store, lambda number: problem()[0], processes=rank)

    built("one", None)
    by_ranks(3, lambda rank: built("three", rank))
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors"))
    assert len(files) == 6
    for file in files[:-1]:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "three" / file).read_bytes()

    def answered(name: str, rank: ThreadRank | None) -> np.ndarray:
        store = GradientIndex.open(tmp_path / name)
        training, queries = problem(rank)
        return scores(from_index(ProjectedInfluence(), store).fit(training, Checkpoint()), queries)

    wanted = answered("one", None)
    for each in by_ranks(3, lambda rank: answered("three", rank)):
        np.testing.assert_allclose(each, wanted, rtol=1e-9)
