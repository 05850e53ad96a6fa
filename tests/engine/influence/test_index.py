"""An index answers as the gradients themselves would, but for what its projection and number type lose,
without the training data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import ChangedRows, ChosenRows
from psgrad.engine.influence.index import stored_index
from psgrad.engine.influence.index.build import build_index, from_index
from psgrad.engine.influence.index.index_rows import RowBlock
from psgrad.engine.influence.index.stored_index import IndexSpec, StoredRows, decoded, describe, encoded
from psgrad.engine.influence.method import Checkpoint, Method
from psgrad.engine.influence.methods.gradient_products import GradientCosine, GradientDot, TracIn
from psgrad.engine.influence.methods.projected import TRAK, ProjectedInfluence
from psgrad.errors import InfluenceError, OutputError
from psgrad.ragged import Block
from psgrad.run.gradient_index import GradientIndex
from tests.crashes import Tell, in_a_child
from tests.engine.influence.problems import both, mlp, parts
from tests.engine.influence.rows_of_gradients import scores_of
from tests.engine.influence.runs import matrix_of

N, M, CLASSES = 13, 4, 3
EXACT = IndexSpec(projection="none", dtype="float64", rows_per_shard=5, features="margin")


DATA = parts(N, M)


def network(seed: int = 0) -> nn.Module:
    return mlp(seed, (6, 7, CLASSES))


def built(path: Path, spec: IndexSpec, *training: Examples, **options: Any) -> GradientIndex:
    store = GradientIndex.create(path, describe(spec, training[0], {"data": "d"}, len(training)))
    build_index(store, lambda number: training[number], **options)
    return GradientIndex.open(path)


def by_index(method: Method, store: GradientIndex, queries: Examples) -> torch.Tensor:
    untouched = Examples(queries.objective, ChosenRows(None, range(N)))  # type: ignore[arg-type] # nothing is read
    return matrix_of(from_index(method, store).fit(untouched, Checkpoint(learning_rate=0.25)), queries)


# -- The answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", ["loss", "margin"])
@pytest.mark.parametrize(
    "method",
    [GradientDot(), GradientCosine(), TracIn(), ProjectedInfluence(projection="none")],
    ids=lambda m: m.name,
)
def test_index_of_materialised_gradients_equals_method(tmp_path: Path, method: Method, features: Any) -> None:
    training, queries = both(network(), DATA)
    store = built(tmp_path, replace(EXACT, features=features), training)
    expected = matrix_of(method.fit(training, Checkpoint(learning_rate=0.25)), queries)
    torch.testing.assert_close(by_index(method, store, queries), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["sparse", "two-sided"])
@pytest.mark.parametrize("method", [TRAK, ProjectedInfluence])
def test_index_of_projections_equals_method(tmp_path: Path, method: Any, kind: Any) -> None:
    # over two checkpoints, each with its projection
    spec = IndexSpec(
        projection=kind,
        dimension=9,
        seed=3,
        dtype="float64",
        rows_per_shard=4,
        features="margin" if method is TRAK else "loss",
    )
    pairs = [both(network(seed), DATA) for seed in range(2)]
    store = built(tmp_path, spec, *(training for training, _ in pairs))
    training, queries = zip(*pairs, strict=True)
    direct = scores_of(method(dimension=9, projection=kind, seed=3), training, queries)
    found = scores_of(from_index(method(), store), training, queries)
    np.testing.assert_allclose(found, direct, rtol=0, atol=1e-12 * np.abs(direct).max())


def test_index_self_influence(tmp_path: Path) -> None:
    training, _ = both(network(), DATA, chunk_size=N)
    store = built(tmp_path, IndexSpec(dimension=4, features="margin"), training)
    (block,) = from_index(GradientDot(), store).fit(training, Checkpoint()).self_influence()
    torch.testing.assert_close(
        block.self_influence, training.materialise().square().sum(1), rtol=1e-10, atol=0
    )
    (scaled,) = from_index(TracIn(), store).fit(training, Checkpoint(learning_rate=0.25)).self_influence()
    torch.testing.assert_close(scaled.self_influence, block.self_influence / 4, rtol=1e-15, atol=0)
    torch.testing.assert_close(
        scaled.preconditioned_norm, block.self_influence.sqrt() / 4, rtol=1e-15, atol=0
    )
    (_, norms), *_ = training.norms()
    for kept, expected in zip(
        StoredRows(store, 0).losses_and_square_norms(), (norms["loss"], norms["square_norm"]), strict=True
    ):
        torch.testing.assert_close(kept, expected, rtol=1e-10, atol=1e-14)
    with pytest.raises(InfluenceError, match="the cosine of every gradient with itself is 1"):
        list(from_index(GradientCosine(), store).fit(training, Checkpoint()).self_influence())


@settings(max_examples=6)
@given(st.integers(1, N + 2), st.integers(1, N + 2), st.integers(1, 60))
def test_index_independent_of_chunks_shards_and_blocks(
    tmp_path_factory: pytest.TempPathFactory, chunk_size: int, shard: int, block: int
) -> None:
    spec = IndexSpec(dimension=9, dtype="float64", rows_per_shard=shard)
    training, queries = both(network(), DATA, chunk_size=chunk_size)
    with patch.object(stored_index, "BLOCK", block):
        store = built(tmp_path_factory.mktemp("index"), spec, training)
        result = by_index(ProjectedInfluence(), store, queries)
    whole, _ = both(network(), DATA, chunk_size=N)
    expected = matrix_of(ProjectedInfluence(dimension=9).fit(whole, Checkpoint()), queries)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


# -- Numbers on the disk -------------------------------------------------------------------------------------

# Half a unit in the last place of the largest number, as a share of that.
ROUNDING = {"float64": 2**-53, "float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.501 / 127}


@settings(max_examples=20)
@given(st.sampled_from(list(ROUNDING)), st.integers(-300, 300), st.integers(1, 9))
def test_index_rounding_of_numbers(dtype: Any, exponent: int, columns: int) -> None:
    # rows of any size: what is lost is relative to the row's largest number
    values = torch.randn(5, columns, dtype=torch.float64) * 2.0**exponent
    values[1] = 0
    column = torch.arange(5.0, dtype=torch.float64)
    block = RowBlock(7, 12, values, column, column + 1, column + 2)
    spans = (slice(0, 1), slice(1, columns)) if columns > 1 else (slice(0, 1),)
    back = decoded(encoded([block], dtype, spans), 7, dtype, spans)
    for span in spans if dtype == "int8" else [slice(None)]:
        bound = ROUNDING[dtype] * values[:, span].abs().amax(1, keepdim=True)
        assert ((back.rows.double() - values)[:, span].abs() <= bound).all()
    assert (back.start, back.stop) == (7, 12)
    for name in ("loss", "square_norm", "weight"):
        assert getattr(back, name).equal(getattr(block, name))


# -- Building ------------------------------------------------------------------------------------------------


def counting(training: Examples, note: Callable[[int, int], None]) -> Examples:
    """The same examples, whose reads are noted."""

    def noted(block: Block, rows: torch.Tensor) -> Block:
        note(int(rows[0]), int(rows[-1]) + 1)
        return block

    return Examples(training.objective, ChangedRows(training.rows, noted), {"chunk_size": 2})


@pytest.mark.long
def test_index_resume_of_killed_build(tmp_path: Path) -> None:
    training, _ = both(network(), DATA)
    spec = IndexSpec(dimension=9, rows_per_shard=4, features="margin")
    description = describe(spec, training, {"data": "d"}, 2)

    def go(path: Path, tell: Tell) -> None:
        build_index(
            GradientIndex.resume(path, description),
            lambda number: counting(training, lambda *rows: tell([number, *rows])),
        )

    ended = in_a_child(lambda tell: go(tmp_path / "killed", tell), 20)
    assert ended.killed
    with pytest.raises(OutputError, match="is half built"):
        GradientIndex.open(tmp_path / "killed")
    left = [
        (number, shard)
        for number, shard in GradientIndex.resume(tmp_path / "killed", description).unwritten()
        if shard is not None
    ]
    assert 0 < len(left) < 8
    again: list[Any] = []
    go(tmp_path / "killed", again.append)
    number, shard = left[0]
    assert min(again) == [number, 4 * shard, 4 * shard + 2]  # nothing before
    go(tmp_path / "whole", lambda told: None)
    for file in (tmp_path / "whole").rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "killed" / file.relative_to(tmp_path / "whole")).read_bytes()
    nothing: list[Any] = []
    go(tmp_path / "whole", nothing.append)
    assert nothing == []


def test_index_nonfinite_rows(tmp_path: Path) -> None:
    x, *others = DATA
    x = x.clone()
    x[[2, 11]] = torch.inf
    training, queries = both(network(), (x, *others))
    messages: list[str] = []
    store = built(tmp_path, EXACT, training, say=messages.append)
    assert messages == [f"1 rows have a gradient that is not finite, and no score: {row}" for row in (2, 11)]
    for method in (GradientDot(), ProjectedInfluence(), TRAK()):
        result = by_index(method, store, queries)
        assert result.isnan().any(1).nonzero().flatten().tolist() == [2, 11]


# -- Refusals ------------------------------------------------------------------------------------------------


def test_index_of_loss_refuses_trak(tmp_path: Path) -> None:
    training, _ = both(network(), DATA)
    store = built(tmp_path, IndexSpec(dimension=9), training)
    with pytest.raises(
        InfluenceError, match="trak needs the gradients of the margin, and the index holds those of the loss"
    ):
        from_index(TRAK(), store).fit(training, Checkpoint())


def test_index_method_with_curvature_refused(tmp_path: Path) -> None:
    class Other(GradientDot.__base__):  # type: ignore[name-defined, misc]
        name = "ekfac"

        def fit(self, training: Any, checkpoint: Any) -> Any: ...

    training, _ = both(network(), DATA)
    with pytest.raises(InfluenceError, match="an index has no answer by ekfac") as caught:
        from_index(Other(), built(tmp_path, EXACT, training))
    assert "gradient_dot, gradient_cosine, tracin, projected_influence, trak" in str(caught.value)


def test_index_unknown_checkpoint_refused(tmp_path: Path) -> None:
    training, _ = both(network(), DATA)
    with pytest.raises(InfluenceError, match=r"checkpoint 1 \(from 0\) is not in the index, which has 1"):
        from_index(GradientDot(), built(tmp_path, EXACT, training)).fit(training, Checkpoint(1))


def test_index_of_another_model_refused(tmp_path: Path) -> None:
    training, _ = both(network(), DATA)
    wrong, queries = both(mlp(0, (6, 7, 4)), DATA)
    with pytest.raises(InfluenceError, match=r"2.weight is \[4, 7\]"):
        by_index(GradientDot(), built(tmp_path / "one", EXACT, training), queries)
    with pytest.raises(InfluenceError, match=r"2.weight is \[4, 7\]"):
        built(tmp_path / "two", EXACT, training, wrong)


def test_index_second_moment_limit(tmp_path: Path) -> None:
    training, queries = both(network(), DATA)
    with patch.object(stored_index, "WIDEST", 72):
        store = built(tmp_path, EXACT, training)
    assert by_index(GradientDot(), store, queries).isfinite().all()
    with pytest.raises(InfluenceError, match="keeps no second moment of so many"):
        from_index(TRAK(), store).fit(training, Checkpoint())
