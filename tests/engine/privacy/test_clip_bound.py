"""No record moves a clipped sum by more than its bound: searches for one that does, with no tolerance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import SquareNorms, per_sample_weighted_sum
from psgrad.engine.privacy import clipped_sums
from psgrad.engine.privacy.batches import batch_source
from psgrad.engine.privacy.clipping import Clipping
from tests.engine.privacy.clip_attacks import (
    KINDS,
    Kind,
    ascend,
    cancelling,
    clippings,
    contribution,
    with_a_remainder,
)
from tests.engine.privacy.clipped_loop import distance

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_clip_bound_cancelling_positions(kind: Kind, dtype: torch.dtype) -> None:
    """Positions that cancel to one part in 10^2 to 10^9, or exactly but for a remainder."""
    random = torch.Generator().manual_seed(0)
    params = kind.make_params(dtype, random)
    others = [kind.record(dtype, random) for _ in range(3)]
    shares = [(0, 6), (3, 16), (10, 24)]
    attacks = [cancelling(kind.record(dtype, random), 10.0**power, 2.0**-rest) for power, rest in shares]
    attacks += [with_a_remainder(kind.record(dtype, random), 2.0**power) for power in (10, 30)]
    for number, record in enumerate(attacks):
        clipping = list(clippings(list(params)))[number % 3]
        company = others if number != 1 else []
        assert contribution(kind, params, clipping, company, record) <= 1


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_clip_bound_gradient_ascent(kind: Kind, dtype: torch.dtype) -> None:
    """Inputs are moved to where the gradient is small beside them, at many magnitudes, in every grouping."""
    random = torch.Generator().manual_seed(2)
    params = kind.make_params(dtype, random)
    others = [kind.record(dtype, random) for _ in range(5)]
    for step, result in enumerate(ascend(kind, params, kind.record(dtype, random), 8)):
        record = (*result[:-1], result[-1] * 10.0 ** (2 * step))
        for clipping in clippings(list(params)):
            assert contribution(kind, params, clipping, others, record) <= 1


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_clip_bound_hill_climbing(kind: Kind, dtype: torch.dtype) -> None:
    """What the worst record so far adds is made worse by changes at random: of magnitudes, of the share that
    stays, of entries.
    """
    random = torch.Generator().manual_seed(3)
    params = kind.make_params(dtype, random)
    others = [kind.record(dtype, random) for _ in range(2)]
    clipping = Clipping.flat(params, 1.0)
    worst, at = 0.0, (3.0, 4.0)
    base = kind.record(dtype, random)
    for _ in range(20):
        move = torch.randn(2, generator=random)
        power, rest = at[0] + 2 * float(move[0]), at[1] + 3 * float(move[1])
        changed = tuple(
            (
                x * torch.randn(x.shape, generator=random).mul(0.1).exp().to(x.dtype)
                if x.is_floating_point()
                else x
            )
            for x in base
        )
        result = contribution(kind, params, clipping, others, cancelling(changed, 10.0**power, 2.0**-rest))
        assert result <= 1
        if result > worst:
            worst, at, base = result, (power, rest), changed
    assert worst > 0.99


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "count"),
    [("product, one position", 100_000), ("product, many positions", 5_000), ("dense", 100_000)],
)
def test_clip_bound_many_aligned_records(name: str, count: int, dtype: torch.dtype) -> None:
    """Roundings of one sum that all go the same way: it moved by 1.0009 of the bound where it was one product
    in float32.
    """
    kind = KINDS[name]
    random = torch.Generator().manual_seed(1)
    params, record = kind.make_params(dtype, random), kind.record(dtype, random)
    batch = [x.expand(count, *x.shape) for x in record]
    clipping = Clipping.flat(params, 0.1)
    sums = [
        batch_source(kind.loss, params, *(x[:n] for x in batch))(clipping).sums for n in (count, count - 1)
    ]
    assert 0.99 < distance(*sums) / 0.1 <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", ["product, one position", "product, few positions", "dense", "convolution, kernel 1", "multiples"]
)
def test_clip_bound_tiny_times_huge(name: str, dtype: torch.dtype) -> None:
    """Factors whose squares leave their type's range at either end, and whose products do not."""
    kind, random = KINDS[name], torch.Generator().manual_seed(4)
    params = kind.make_params(dtype, random)
    others = [kind.record(dtype, random) for _ in range(2)]
    for tiny, huge in (
        ((1e-30, 1e36), (1e-24, 1e30))
        if dtype == torch.float32
        else ((1e-170, 1e200), (1e-150, 1e152), (1e-100, 1e160))
    ):
        x, k = kind.record(dtype, random)
        for record in ((x * tiny, k * huge), (x * huge, k * tiny)):
            assert contribution(kind, params, Clipping.flat(params, 1.0), others, record) <= 1


def test_clip_bound_autocast_cancelling_positions() -> None:
    """Factors in bfloat16 of weights in float32, through a network: the last layer's positions cancel."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
    objective = Objective(
        model, lambda output, target: (output.float() * target).sum(), autocast=torch.bfloat16
    )
    x, target = torch.randn(4, 4, 6), torch.randn(4, 4, 5)
    x[0, 2:] = x[0, :2]
    for clipping in clippings(list(objective.params)):
        for power in (0, 10, 30):
            target[0, :2] = torch.randn(2, 5) * 2.0**power
            target[0, 2:] = -target[0, :2] * (1 + 2.0**-7)
            sums = batch_source(objective.loss, objective.params, (x[:1],), target[:1], has_aux=True)(
                clipping
            ).sums
            for group in clipping.groups:
                assert distance({name: sums[name] for name in group.parameters}) <= group.bound


@pytest.mark.parametrize("positions", [1, 4])
def test_clip_bound_factors_changed_after_norms(positions: int) -> None:
    """The norm that counts is that of the numbers that are summed, whoever changes them meanwhile."""
    x, k = torch.randn(3, positions, 50), torch.randn(3, positions, 70)

    def loss(params: dict[str, Tensor], x: Tensor, k: Tensor) -> Tensor:
        return ((x @ params["w"].t() + params["b"]) * k).sum()

    def weights(norms: SquareNorms) -> Tensor:
        factors = 0.5 / norms.square_norms().sqrt()
        x.mul_(3)
        k.mul_(3)
        return factors

    params = {"w": torch.randn(70, 50), "b": torch.randn(70)}
    summed = per_sample_weighted_sum(loss, params, x, k, weights=weights, bounded=True)
    for name, value in summed.sums.items():
        assert value.norm() <= (summed.weights * summed.norms.by_parameter[name].sqrt()).sum()


def test_clip_bound_cancelling_tied_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the records that are computed alone, too: the norm of a sum of terms is that of its value where
    they cancel.
    """
    monkeypatch.setattr(clipped_sums, "MOST_ABSOLUTE", float("inf"))
    kind, random = KINDS["a weight and its transpose"], torch.Generator().manual_seed(0)
    params = kind.make_params(torch.float64, random)
    record = kind.record(torch.float64, random)
    record = tuple(
        torch.cat([x[:2], y[:2]]) for x, y in zip(record, (record[0], -record[1] * (1 + 1e-9)), strict=True)
    )
    assert contribution(kind, params, Clipping.flat(params, 1e-9), [], record) <= 1
