"""Sources of clipped sums: empty batches, records that are no numbers, memory that runs out, parameters that
change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.data.rows import Block
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy import clipped_sums
from psgrad.engine.privacy.batches import ClippedSum, GradientSource, batch_source, stream_source
from psgrad.engine.privacy.clipping import MARGIN, Clipping
from psgrad.engine.transforms import functional_call
from psgrad.errors import ModelError
from tests.engine.privacy.clipped_loop import clipped_loop, distance, group_norms
from tests.oracles import one_sample_gradients

RECORDS = 11


@pytest.fixture
def model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(device)


@pytest.fixture
def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(RECORDS, 6, dtype=torch.float64).to(device), torch.randint(3, (RECORDS,)).to(device)


def stream_of(model: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> Stream:
    inputs, target = (value.cpu() for value in batch)
    objective = Objective(model, F.cross_entropy)
    return Stream(objective.loss, objective.params, Block((inputs,), target), **options)


def in_memory(model: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> GradientSource:
    objective = Objective(model, F.cross_entropy)
    return batch_source(objective.loss, objective.params, batch[:1], batch[1], has_aux=True, **options)


def expected_of(model: nn.Module, batch: tuple[Tensor, Tensor], clipping: Clipping) -> dict[str, Tensor]:
    return clipped_loop(one_sample_gradients(model, F.cross_entropy, batch[:1], batch[1]), clipping)


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def assert_same(found: ClippedSum, expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert list(found.sums) == list(expected)
    assert distance(found.sums, expected) <= tolerance * max(distance(expected), 1e-300)


# -- batches -------------------------------------------------------------------------------------------------


def test_clipped_source_empty_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    nothing = (batch[0][:0], batch[1][:0])
    clipping = Clipping.per_layer(names_of(model), 1.0)
    for source in (in_memory(model, nothing), stream_source(stream_of(model, nothing), 0)):
        result = source(clipping)
        assert {name: value.shape for name, value in result.sums.items()} == {
            n: p.shape for n, p in model.named_parameters()
        }
        assert {value.dtype for value in result.sums.values()} == {torch.float64}
        assert not any(value.any() for value in result.sums.values())
        assert result.records.factors.shape == (0, 2)
        assert result.records.norms.shape == result.records.losses.shape == result.records.below.shape == (0,)


@pytest.mark.parametrize("chunk_size", [1, 4, "auto"])
def test_clipped_source_columns(model: nn.Module, batch: tuple[Tensor, Tensor], chunk_size: Any) -> None:
    clipping = Clipping.per_layer(names_of(model), 2.2)
    result = stream_source(stream_of(model, batch, chunk_size=chunk_size), RECORDS)(clipping)
    gradients = one_sample_gradients(model, F.cross_entropy, batch[:1], batch[1])
    norms = torch.stack(
        [
            torch.cat([gradients[name].flatten(1) for name in group.parameters], 1).norm(dim=1)
            for group in clipping.groups
        ],
        1,
    ).cpu()
    bound = clipping.groups[0].bound
    torch.testing.assert_close(result.records.norms, norms.norm(dim=1), rtol=1e-10, atol=0)
    torch.testing.assert_close(
        result.records.factors, (bound * (1 - MARGIN) / norms).clamp(max=1), rtol=1e-10, atol=0
    )
    torch.testing.assert_close(
        result.records.losses, F.cross_entropy(model(batch[0]), batch[1], reduction="none").detach().cpu()
    )
    assert result.records.below.tolist() == (norms <= bound).all(1).tolist()
    assert 0 < result.records.below.sum() < RECORDS


@pytest.mark.parametrize("chunk_size", [3, "auto"])
def test_clipped_source_updated_parameters(
    model: nn.Module, batch: tuple[Tensor, Tensor], chunk_size: Any
) -> None:
    stream, clipping = stream_of(model, batch, chunk_size=chunk_size), Clipping.flat(names_of(model), 0.5)
    for _ in range(3):
        assert_same(stream_source(stream, RECORDS)(clipping), expected_of(model, batch, clipping))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)


def test_clipped_source_chunk_size_chosen_once(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """For all batches, however many records the first one has."""
    stream, clipping = stream_of(model, batch, memory=2000), Clipping.flat(names_of(model), 0.5)
    sizes = []
    for count in (2, RECORDS, RECORDS):
        result = stream_source(stream, count)(clipping)
        assert_same(result, expected_of(model, tuple(x[:count] for x in batch), clipping))
        sizes.append(stream.chunk_size)
    assert 1 <= sizes[0] < RECORDS
    assert sizes == sizes[:1] * 3


@pytest.mark.long
def test_clipped_source_out_of_memory(
    model: nn.Module, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = clipped_sums.per_sample_weighted_sum

    def limited(loss: Any, params: Any, inputs: Any, target: Tensor, **options: Any) -> Any:
        result = real(loss, params, inputs, target, **options)
        if len(target) > 3:
            raise MemoryError
        return result

    monkeypatch.setattr(clipped_sums, "per_sample_weighted_sum", limited)
    clipping = Clipping.flat(names_of(model), 0.5)
    stream = stream_of(model, batch, chunk_size=8)
    inputs, target = stream.load(range(RECORDS))
    in_memory = batch_source(stream.loss, stream.params, inputs, target, has_aux=True, samples=8)
    for result in (stream_source(stream, RECORDS)(clipping), in_memory(clipping)):
        assert_same(result, expected_of(model, batch, clipping))
        assert len(result.records.norms) == RECORDS
    assert stream.retries > 0


def test_clipped_source_failing_record(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    if batch[1].is_cuda:
        pytest.skip("a label that is no class stops the GPU for the whole process")
    batch[1][7] = 99
    with pytest.raises(ModelError, match="row 7"):
        stream_source(stream_of(model, batch, chunk_size=4), RECORDS)(Clipping.flat(names_of(model), 1.0))


def test_clipped_source_half_precision() -> None:
    params = {"w": torch.randn(4, 3).bfloat16(), "unused": torch.zeros(2).bfloat16()}
    source = batch_source(lambda p, x: (p["w"] @ x).square().sum(), params, torch.randn(5, 3).bfloat16())
    result = source(Clipping.flat(params, 1e-3))
    assert {value.dtype for value in result.sums.values()} == {torch.float64}
    assert group_norms(result.sums, Clipping.flat(params, 5e-3))[0] <= 5e-3
    assert not result.sums["unused"].any()


# -- records that are no numbers -----------------------------------------------------------------------------

WIDE = {"w": torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) / 100, "b": torch.zeros(300)}
POSITIONS, PLACE = 4, 2


def bilinear(params: dict[str, Tensor], x: Tensor, k: Tensor) -> Tensor:
    """The gradient of w is k^T x, a product over positions; that of b is the sum of k."""
    return ((x @ params["w"].t() + params["b"]) * k).sum()


def planted(left: list[float], right: list[float]) -> tuple[Tensor, Tensor]:
    """Five ordinary records, and one whose factors have this value at each position."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, POSITIONS, 200, generator=generator)
    k = torch.randn(5, POSITIONS, 300, generator=generator)
    left_rows = torch.tensor(left).repeat(POSITIONS // len(left))[:, None].expand(POSITIONS, 200)
    right_rows = torch.tensor(right).repeat(POSITIONS // len(right))[:, None].expand(POSITIONS, 300)
    return torch.cat([x[:PLACE], left_rows[None], x[PLACE:]]), torch.cat(
        [k[:PLACE], right_rows[None], k[PLACE:]]
    )


MONSTERS: dict[str, tuple[list[float], list[float], bool]] = {
    "a product that overflows": ([1e30], [1e30], True),
    "infinity": ([math.inf], [1.0], False),
    "not a number": ([math.nan], [1.0], False),
    "infinity times zero": ([math.inf], [0.0], False),
    "zero times infinity": ([0.0], [math.inf], False),
    "huge contributions that cancel to nothing": ([1e38, 1e38], [1e30, -1e30], False),
    "huge contributions that cancel in part": ([1e38, 3e38], [3.0, -1.25], True),
    "huge times tiny": ([1e38], [1e-38], True),
    "tiny times huge": ([1e-30], [1e36], True),
    "infinite in one position": ([1.0, math.inf], [1.0, 0.0], False),
}


@pytest.mark.parametrize("clip", [Clipping.flat, Clipping.per_parameter], ids=["flat", "per parameter"])
@pytest.mark.parametrize("monster", list(MONSTERS))
def test_clipped_source_bound_for_any_record(monster: str, clip: Callable[..., Clipping]) -> None:
    left, right, adds = MONSTERS[monster]
    x, k = planted(left, right)
    clipping = clip(WIDE, 0.5)
    others = [i for i in range(6) if i != PLACE]
    result = batch_source(bilinear, WIDE, x, k)(clipping)
    rest = batch_source(bilinear, WIDE, x[others], k[others])(clipping)
    alone = batch_source(bilinear, WIDE, x[[PLACE]], k[[PLACE]])(clipping)
    assert all(value.isfinite().all() for value in result.sums.values())
    assert all(
        norm <= group.bound
        for norm, group in zip(group_norms(alone.sums, clipping), clipping.groups, strict=True)
    )
    rounding = 1e-6 * distance(rest.sums)
    assert distance(result.sums, {name: rest.sums[name] + alone.sums[name] for name in rest.sums}) <= rounding
    assert (distance(alone.sums) > 0.1) == adds
    torch.testing.assert_close(result.records.norms[others], rest.records.norms)
    if not adds and monster != "huge contributions that cancel to nothing":
        assert not result.records.factors[PLACE].any()
        assert not result.records.below[PLACE]
        assert not math.isfinite(result.records.norms[PLACE])


def test_clipped_source_all_records_nonfinite(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    spoilt = (batch[0] * math.nan, batch[1])
    clipping = Clipping.per_layer(names_of(model), 1.0)
    for source in (
        in_memory(model, spoilt),
        stream_source(stream_of(model, spoilt, chunk_size=4), RECORDS),
    ):
        result = source(clipping)
        assert not any(value.any() for value in result.sums.values())
        assert not result.records.below.any()


def test_clipped_source_branching_model() -> None:
    weight, rows = {"w": torch.randn(3, dtype=torch.float64)}, torch.randn(6, 3, dtype=torch.float64)

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        value = params["w"] @ row
        return value.square() if bool(value > 0) else -3 * value

    value = rows @ weight["w"]
    assert 0 < (value > 0).sum() < 6
    gradients = torch.where(value > 0, 2 * value, torch.full_like(value, -3)).unsqueeze(1) * rows
    clipping = Clipping.flat(weight, 0.7)
    assert_same(batch_source(loss, weight, rows)(clipping), clipped_loop({"w": gradients}, clipping))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_clipped_source_products_in_full_precision(precision: str) -> None:
    """A norm and a sum of factors that a GPU rounds to TF32, as it does in convolutions unless told
    otherwise, differ by a thousandth.
    """
    ops = [
        torch.backends.cuda.matmul,
        torch.backends.mkldnn.matmul,
        torch.backends.cudnn.conv,
        torch.backends.cudnn.rnn,
    ]
    during: list[tuple[str, bool, list[str]]] = []

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        during.append(
            (
                torch.get_float32_matmul_precision(),
                torch.backends.cudnn.allow_tf32,
                [op.fp32_precision for op in ops],
            )
        )
        return params["weight"] @ x

    params = {"weight": torch.ones(3)}
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        before = [op.fp32_precision for op in ops]
        batch_source(loss, params, torch.ones(2, 3))(Clipping.flat(params, 1.0))
        assert [op.fp32_precision for op in ops] == before
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(was)
    assert during
    assert all(seen == ("highest", False, ["ieee"] * len(ops)) for seen in during)


def test_clipped_source_frozen_backend_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.backends.disable_global_flags()` was called, as importing PyTorch's own test tools does."""
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    before = torch.backends.cudnn.allow_tf32
    params = {"weight": torch.ones(3)}
    result = batch_source(lambda params, x: params["weight"] @ x, params, torch.ones(2, 3))(
        Clipping.flat(params, 1.0)
    )
    assert result.sums["weight"].norm() == pytest.approx(2.0)
    assert torch.backends.cudnn.allow_tf32 is before


@pytest.mark.parametrize("shape", [(6,), (7, 6)], ids=["vectors", "sequences"])
def test_clipped_source_autocast(shape: tuple[int, ...]) -> None:
    """Sums in bfloat16 were longer than the bound by a thousandth."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16))
    params = {name: value.detach() for name, value in net.named_parameters()}
    rows, clipping, seen = torch.randn(RECORDS, *shape), Clipping.flat(params, 0.1), set()

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        out = functional_call(net, params, (row,))
        seen.add(out.dtype)
        return out.float().square().sum()

    with torch.autocast("cpu", torch.bfloat16):
        for row in rows.split(1):
            result = batch_source(loss, params, row)(clipping)
            assert not result.records.below.any()
            assert 0.1 * (1 - 2.0**-20) <= distance(result.sums) <= 0.1
    assert seen == {torch.bfloat16}
