"""Rows of unequal length: which are computed together, and that their numbers are those of each row alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psgrad.engine.execution.bucket_plan import plan_buckets, positions_of
from psgrad.engine.execution.buckets import ModelSize
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.streaming import LARGEST_AUTO_CHUNK, Stream
from psgrad.engine.gradients import PerSampleGradients, Sparse, TwoSided
from psgrad.engine.gradients.flat import as_gradients
from psgrad.errors import ModelError
from psgrad.ragged import RaggedAxes
from tests.engine.execution.ragged_models import Case, case, flat

LINE = RaggedAxes((((0, 0),), ()), (0, 0), masked=True)
APART = RaggedAxes((((0, 0),), ()), (0, 0), masked=False)
TWO = RaggedAxes((((0, 0),), ((0, 1),), ()), (0, 0, 0), masked=True)
MASKED = ("mean", "bert", "gpt2", "llama", "t5")
UNMASKED = ("lstm", "packed", "conv")
LENGTHS = (3, 9, 1, 3, 7, 9, 3)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# A model of this size costs so much a position that a pass costs nothing beside.
LARGE = ModelSize(1, 10**12)


@pytest.fixture(params=MASKED + UNMASKED, scope="module")
def ragged(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Up to a share of the largest number; numbers may be zero but for rounding, as of a key's bias."""
    assert found.shape == expected.shape
    if expected.numel():
        most = TOLERANCE[dtype] * float(expected.abs().max()) + 1e-25
        assert float((found.double() - expected.double()).abs().max()) <= most


# -- which rows are computed together ------------------------------------------------------------------------


def cost(lengths: np.ndarray, buckets: Sequence[Sequence[int]], ragged: RaggedAxes, once: float) -> float:
    sizes = [len(b) * positions_of(lengths[list(b)].max(0, keepdims=True), ragged)[0] for b in buckets]
    return float(sum(sizes) + once * len(buckets))


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=9),
    st.floats(0, 50),
    st.one_of(st.none(), st.integers(1, 60)),
    st.booleans(),
)
@example([7, 7, 7, 7, 7], 0.0, 13, True)
@example([7, 7, 7, 7, 6], 100.0, 13, True)
def test_buckets_have_each_row_once_and_keep_to_the_bound(
    lengths: list[int], once: float, most: int | None, masked: bool
) -> None:
    ragged = LINE if masked else APART
    column = torch.tensor(lengths).unsqueeze(1)
    buckets = [b.tolist() for b in plan_buckets(column, ragged, once=once, most=most)]
    assert sorted(itertools.chain(*buckets)) == list(range(len(lengths)))
    assert all(bucket == sorted(bucket) for bucket in buckets)
    for bucket in buckets:
        longest = max(lengths[place] for place in bucket)
        assert most is None or len(bucket) == 1 or len(bucket) * longest <= most
        assert masked or len({lengths[place] for place in bucket}) == 1


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=7), st.floats(0, 30))
def test_buckets_cost_least_of_all_cuts_of_the_sorted_rows(
    lengths: list[tuple[int, int]], once: float
) -> None:
    rows = np.array(lengths)
    found = plan_buckets(torch.from_numpy(rows), TWO, once=once)
    sizes = positions_of(rows, TWO)
    order = sorted(range(len(rows)), key=lambda row: (sizes[row], *rows[row]))
    cuts = itertools.chain(*(itertools.combinations(range(1, len(rows)), k) for k in range(len(rows))))
    least = min(
        cost(rows, [order[i:j] for i, j in itertools.pairwise([0, *cut, len(rows)])], TWO, once)
        for cut in cuts
    )
    assert cost(rows, [b.tolist() for b in found], TWO, once) == pytest.approx(least)


def test_positions_of_axes_that_share_a_column_count_once() -> None:
    image = RaggedAxes((((0, 0), (1, 1)), ((0, 0), (1, 0)), ((0, 0),), ()), (0, 0, 0, 0), masked=True)
    assert positions_of(np.array([[3, 5]]), image).tolist() == [15 + 3]


def test_model_size_counts_a_table_only_where_a_layer_shares_it() -> None:
    table, head = torch.nn.Embedding(50, 4), torch.nn.Linear(4, 50, bias=False)
    assert ModelSize.of(torch.nn.Sequential(table, torch.nn.Linear(4, 2))) == ModelSize(3, 10)
    head.weight = table.weight
    assert ModelSize.of(torch.nn.Sequential(table, head)) == ModelSize(1, 200)


# -- the numbers are those of each row alone -----------------------------------------------------------------


def gradients_in_buckets(ragged: Case, lengths: Sequence[int] = LENGTHS) -> tuple[PerSampleGradients, Any]:
    """Of rows of these lengths, and the rows."""
    rows = ragged.rows(lengths)
    found = ragged.stream(rows, chunk_size=len(rows), model_size=LARGE).gradients(range(len(rows)))
    return found, rows


def test_bucketed_gradients_answer_every_query_as_each_row_alone(ragged: Case) -> None:
    found, rows = gradients_in_buckets(ragged)
    assert len(found.parts) > 2
    alone = ragged.gradients(rows)
    expected = flat(alone)
    assert_close(flat(found.materialise()), expected)
    assert_close(found.losses, ragged.losses(rows))
    assert_close(found.square_norms(), expected.square().sum(1))
    by_name = found.square_norms(per="parameter")
    for name, value in alone.items():
        assert_close(by_name[name], value.flatten(1).square().sum(1))
    weights = torch.linspace(-1, 2, len(rows), dtype=torch.float64)
    assert_close(torch.cat([x.flatten() for x in found.weighted_sum(weights).values()]), weights @ expected)
    vector = {name: torch.full_like(value[0], 0.3) + value[1] for name, value in alone.items()}
    assert_close(found.dot(vector), expected @ torch.cat([x.flatten() for x in vector.values()]))
    assert_close(found.gram(), expected @ expected.t())
    assert_close(found.inner(found), expected @ expected.t())
    assert_close(torch.cat([x.flatten() for x in found.second_moment().values()]), expected.square().mean(0))
    largest = found.reduce(
        lambda most, name, samples, block: most.index_copy(
            0,
            torch.arange(len(most))[samples],
            torch.maximum(most[samples], block.abs().reshape(len(block), -1).amax(1)),
        ),
        torch.zeros(len(rows), dtype=torch.float64),
    )
    assert_close(largest, expected.abs().amax(1))


@pytest.mark.parametrize("kind", ["mean", "conv"])
def test_bucketed_gradients_with_those_of_other_rows(kind: str) -> None:
    ragged = case(kind)
    found, rows = gradients_in_buckets(ragged)
    others, more = gradients_in_buckets(ragged, (4, 4, 11, 1, 2))
    expected, other = flat(ragged.gradients(rows)), flat(ragged.gradients(more))
    assert_close(found.inner(others), expected @ other.t())
    plain = as_gradients(ragged.gradients(more))
    assert_close(found.inner(plain), expected @ other.t())
    assert_close(plain.inner(found), other @ expected.t())
    modules = found.inner(others, per="module")
    assert_close(torch.stack(list(modules.values())).sum(0), expected @ other.t())


@pytest.mark.parametrize("projection", [Sparse(6), TwoSided(2, 3)], ids=str)
def test_bucketed_gradients_projected_as_their_values_are(projection: Any) -> None:
    for kind in ("mean", "lstm"):
        ragged = case(kind)
        found, rows = gradients_in_buckets(ragged)
        expected = as_gradients(ragged.gradients(rows)).project(projection)
        assert_close(found.project(projection), expected)


@pytest.mark.parametrize("samples", [slice(2, 7), slice(1, 2), torch.tensor([6, 0, 4]), slice(0, 0)], ids=str)
def test_some_samples_of_bucketed_gradients(samples: Any) -> None:
    ragged = case("mean")
    found, rows = gradients_in_buckets(ragged)
    alone = ragged.gradients(rows)
    some = found.at(samples)
    count = len(torch.arange(len(rows))[samples])
    assert len(some) == len(some.losses) == count
    values, moments = some.materialise(), some.second_moment()
    for name, value in alone.items():
        assert_close(values[name], value[samples])
        assert_close(moments[name] * count, value[samples].square().sum(0))
    assert not values["unused.weight"].any()
    assert found.materialise()["unused.weight"].shape == (len(rows), 2, 2)


@pytest.mark.parametrize("kind", ["mean", "bert", "gpt2", "lstm"])
def test_bucketed_gradients_in_float32(kind: str) -> None:
    ragged = case(kind, torch.float32)
    found, rows = gradients_in_buckets(ragged)
    expected = flat(case(kind).gradients(rows))
    assert_close(flat(found.materialise()), expected, torch.float32)
    assert_close(found.square_norms(), expected.square().sum(1), torch.float32)
    assert_close(found.gram(), expected @ expected.t(), torch.float32)


# -- chunks of a stream --------------------------------------------------------------------------------------


class Watched:
    """A measure that keeps norms and losses, and the shapes of what was computed together."""

    def __init__(self, needs_factors: bool) -> None:
        self.needs_factors = needs_factors

    def columns(self, gradients: Any) -> dict[str, torch.Tensor]:
        return {"norm": gradients.square_norms(), "loss": gradients.losses}

    def keep(self) -> None:
        pass


def shapes_computed(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, room: int | None = None
) -> list[tuple[int, ...]]:
    """room: for so many numbers there is memory."""
    seen: list[tuple[int, ...]] = []
    pass_of = stream.pass_of

    def watching(how: Callable[..., Any]) -> Callable[..., Any]:
        run = pass_of(how)

        def found(params: Any, inputs: Any, target: Any) -> Any:
            seen.append(tuple(inputs[0].shape))
            if room is not None and inputs[0].numel() > room:
                raise torch.OutOfMemoryError("out of memory")
            return run(params, inputs, target)

        return found

    monkeypatch.setattr(stream, "pass_of", watching)
    return seen


@pytest.mark.parametrize("kind", ["mean", "lstm"])
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    chunk_size=st.one_of(st.just("auto"), st.integers(1, 13)),
    tokens=st.one_of(st.none(), st.integers(1, 30)),
    factors=st.booleans(),
)
def test_stream_of_ragged_rows_gives_each_rows_own_numbers(
    kind: str, lengths: list[int], chunk_size: Any, tokens: int | None, factors: bool
) -> None:
    ragged = case(kind)
    rows = ragged.rows(lengths)
    stream = ragged.stream(rows, chunk_size=chunk_size, tokens=tokens, model_size=LARGE)
    chunks = list(stream.run(len(rows), [Watched(factors)]))
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    expected = flat(ragged.gradients(rows))
    assert_close(torch.cat([chunk.values["norm"] for chunk in chunks]), expected.square().sum(1))
    assert_close(torch.cat([chunk.values["loss"] for chunk in chunks]), ragged.losses(rows))


def test_tokens_bound_what_is_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ragged = case("bert")
    lengths = [5, 30, 2, 2, 7, 11, 3, 40, 8, 8, 9, 1]
    rows = ragged.rows(lengths)
    for factors in (True, False):
        stream = ragged.stream(rows, chunk_size="auto", tokens=32)
        seen = shapes_computed(stream, monkeypatch)
        list(stream.run(len(rows), [Watched(factors)]))
        assert all(n * (t - 1) <= 32 or n == 1 for n, t in seen)  # one position is spare
        assert (1, 40) in seen
        assert max(n for n, _ in seen) > 3
        assert stream.ragged.tokens == 32


def test_automatic_ragged_chunk_is_measured_in_positions() -> None:
    ragged = case("bert")
    rows = ragged.rows([2] * 4 + [8] * 20)
    whole = ragged.stream(rows, memory=1 << 20)
    list(whole.run(len(rows), [Watched(False)]))
    half = ragged.stream(rows, memory=1 << 19)
    list(half.run(len(rows), [Watched(False)]))
    assert whole.ragged.tokens is not None
    assert half.ragged.tokens is not None
    assert 0.4 < half.ragged.tokens / whole.ragged.tokens < 0.6
    assert 64 <= half.chunk_size <= LARGEST_AUTO_CHUNK


@pytest.mark.parametrize("factors", [True, False])
def test_bucket_that_runs_out_of_memory_is_halved_and_others_stay_done(
    factors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the factors of the others are kept, they may be what fills the memory: the chunk is halved."""
    ragged = case("mean")
    rows = ragged.rows([2] * 8 + [9] * 8)
    said: list[str] = []
    stream = ragged.stream(rows, chunk_size=16, model_size=LARGE, say=said.append)
    seen = shapes_computed(stream, monkeypatch, room=40)
    chunks = list(stream.run(16, [Watched(factors)]))
    assert len(chunks) == 1 + factors
    assert_close(
        torch.cat([chunk.values["norm"] for chunk in chunks]), flat(ragged.gradients(rows)).square().sum(1)
    )
    halves = [(8, 9), (4, 9), (4, 9)]
    assert seen == ([(8, 2), (8, 9), (8, 2), *halves] if factors else [(8, 2), *halves])
    assert stream.retries == 1 + factors
    assert stream.ragged.tokens == 36
    assert "8 rows of up to 9 positions" in said[-1]


def test_ragged_row_that_fails_is_named() -> None:
    ragged = case("mean")
    rows = ragged.rows([3, 2, 5, 4])
    rows[2][0][0][1] = 99
    with pytest.raises(ModelError, match=r"raised IndexError on row 2") as raised:
        list(ragged.stream(rows, chunk_size=4, model_size=LARGE).run(4, [Watched(True)]))
    assert "[1, 5]" in str(raised.value)


def test_summaries_of_positions_are_padded_with_nan() -> None:
    ragged = case("gpt2")
    rows = ragged.rows([2, 5, 3])
    objective = ragged.objective.with_summary(
        lambda output, target: {"best": output.amax(-1), "target": target}
    )
    stream = Stream(objective.loss, objective.params, ragged.block(rows), chunk_size=3, model_size=LARGE)
    found = stream.gradients(range(3))
    assert found.aux["best"].shape == (3, 5)
    assert (~found.aux["best"].isnan()).sum(1).tolist() == [2, 5, 3]
    assert torch.equal(found.aux["target"][1], rows[1][1])


def test_outputs_and_norms_of_ragged_examples() -> None:
    ragged = case("bert")
    rows = ragged.rows(LENGTHS)
    options = {"chunk_size": 4, "model_size": LARGE}
    examples = Examples(ragged.objective, ragged.block(rows), options)
    outputs = torch.cat([found["output"] for _, found in examples.outputs()])
    alone = [ragged.forward(ragged.model, *(x[None] for x in inputs))[0] for inputs, _ in rows]
    assert_close(outputs, torch.stack(alone).detach())
    norms = torch.cat([found["square_norm"] for _, found in examples.norms()])
    assert_close(norms, flat(ragged.gradients(rows)).square().sum(1))
