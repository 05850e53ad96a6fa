"""No record moves a clipped sum by more than its bound: searches for one that does, with no tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import SquareNorms, per_sample_weighted_sum
from psgrad.engine.privacy import clipped_sums
from psgrad.engine.privacy.batches import batch_source
from psgrad.engine.privacy.clipping import Clipping
from tests.engine.privacy.clipped_loop import distance

# -- records that are made to add more than their bound, for every kind of term, and what they add -----------

Params = dict[str, Tensor]
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of term, and the loss whose gradient has it.

    Attributes:
        params: name -> shape. inputs: the shapes of one record's inputs, positions first; the gradient is
        linear in the last one. loss: (params, *inputs) to a number, and nothing but products and sums of
        them, so that no rounding depends on other records. rows: of the table that the first input is an
        index into; 0 where it is no index.
    """

    params: dict[str, tuple[int, ...]]
    inputs: tuple[tuple[int, ...], ...]
    loss: Callable[..., Tensor]
    rows: int = 0

    def make_params(self, dtype: torch.dtype, random: torch.Generator) -> Params:
        return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in self.params.items()}

    def record(self, dtype: torch.dtype, random: torch.Generator) -> Inputs:
        drawn = [torch.randn(shape, generator=random).to(dtype) for shape in self.inputs]
        if self.rows:
            drawn[0] = torch.randint(self.rows, self.inputs[0], generator=random)
        return tuple(drawn)


def product(p: Params, x: Tensor, k: Tensor) -> Tensor:
    return ((x @ p["w"].t()) * k).sum()


def conv(**options: int) -> Callable[..., Tensor]:
    return lambda p, x, k: (F.conv2d(x, p["w"], **options) * k).sum()  # type: ignore[arg-type]


KINDS: dict[str, Kind] = {
    "product, few positions": Kind({"w": (7, 5)}, ((4, 5), (4, 7)), product),
    "product, many positions": Kind({"w": (7, 5)}, ((64, 5), (64, 7)), product),
    "product and bias": Kind(
        {"w": (5, 7), "b": (5,)}, ((6, 7), (6, 5)), lambda p, x, k: (F.linear(x, p["w"], p["b"]) * k).sum()
    ),
    "product, one position": Kind(
        {"w": (7, 5)}, ((2, 5), (2, 7)), lambda p, x, k: (p["w"] @ x.sum(0)) @ k.sum(0)
    ),
    "grouped product": Kind(
        {"w": (3, 4, 5)},
        ((6, 3, 5), (6, 3, 4)),
        lambda p, x, k: (torch.einsum("tgb,gab->tga", x, p["w"]) * k).sum(),
    ),
    "convolution, kernel 1": Kind({"w": (6, 4, 1, 1)}, ((2, 4, 3, 3), (2, 6, 3, 3)), conv()),
    "convolution, kernel 1 over positions": Kind(
        {"w": (6, 4, 1)}, ((16, 4), (16, 6)), lambda p, x, k: (F.conv1d(x.t()[None], p["w"])[0].t() * k).sum()
    ),
    "convolution, kernel 3": Kind({"w": (6, 4, 3, 3)}, ((2, 4, 6, 6), (2, 6, 4, 4)), conv()),
    "convolution, few channels": Kind({"w": (6, 1, 3, 3)}, ((2, 1, 6, 6), (2, 6, 4, 4)), conv()),
    "convolution, large matrices": Kind({"w": (136, 128, 2, 1)}, ((2, 128, 3, 2), (2, 136, 2, 2)), conv()),
    "convolution, groups and strides": Kind(
        {"w": (6, 2, 3, 3)}, ((2, 4, 7, 7), (2, 6, 3, 3)), conv(groups=2, stride=2)
    ),
    "embedding": Kind(
        {"w": (5, 6)}, ((8,), (8, 6)), lambda p, i, k: (F.embedding(i, p["w"]) * k).sum(), rows=5
    ),
    "large embedding": Kind(
        {"w": (50, 6)}, ((8,), (8, 6)), lambda p, i, k: (F.embedding(i, p["w"]) * k).sum(), rows=50
    ),
    "dense": Kind({"w": (6,)}, ((4, 6), (4, 6)), lambda p, x, k: (x * p["w"] * k).sum()),
    "hadamard, one position": Kind(
        {"w": (7, 5)}, ((2, 5), (2, 7)), lambda p, x, k: ((p["w"] * MASK.to(p["w"])) @ x.sum(0)) @ k.sum(0)
    ),
    "hadamard, positions": Kind(
        {"w": (7, 5)}, ((4, 5), (4, 7)), lambda p, x, k: ((x @ (p["w"] * MASK.to(p["w"])).t()) * k).sum()
    ),
    "multiples": Kind(
        {"w": (7, 5)},
        ((4, 5), (4, 7)),
        lambda p, x, k: ((x @ p["w"].t()) * k).sum() + p["w"].square().sum() * k.sum(),
    ),
    "a weight and its transpose": Kind(
        {"w": (6, 6)},
        ((4, 6), (4, 6)),
        lambda p, x, k: ((x[:2] @ p["w"].t()) * k[:2]).sum() + ((k[2:] @ p["w"]) * x[2:]).sum(),
    ),
    "a weight in parts": Kind(
        {"w": (6, 5)},
        ((4, 5), (4, 6)),
        lambda p, x, k: product(p, x[:2], k[:2]) + (x[2:] @ p["w"][:4].t() * k[2:, :4]).sum(),
    ),
    "a tied table": Kind(
        {"w": (6, 5)},
        ((4,), (4, 5), (4, 6)),
        lambda p, i, x, k: (
            (F.embedding(i[:2], p["w"]) * x[:2] * k[:2, :5]).sum() + ((x[2:] @ p["w"].t()) * k[2:]).sum()
        ),
        rows=6,
    ),
}
MASK = torch.tensor([[1.5, 0.25, 3.0, 0.0, 1.0]] * 7)


def cancelling(record: Inputs, scale: float, rest: float) -> Inputs:
    """The record with positions in its second half that take back what the first half adds, but for a share
    `rest` of it.
    """
    result = []
    for place, x in enumerate(record):
        half = len(x) // 2
        last = place == len(record) - 1
        first = x[:half] * scale if last else x[:half]
        result.append(torch.cat([first, (-first * (1 + rest)).to(x.dtype) if last else first]))
    return tuple(result)


def with_a_remainder(record: Inputs, scale: float) -> Inputs:
    """The record whose positions cancel exactly in pairs, but for the last ones, which are not scaled."""
    result = list(cancelling(record, scale, 0.0))
    for place, x in enumerate(record):
        quarter = len(x) // 4
        if quarter:
            result[place] = torch.cat([result[place][: len(x) - quarter], x[-quarter:]])
            if place == len(record) - 1:  # those whose partners are gone
                result[place][len(x) // 2 - quarter : len(x) // 2] = 0
    return tuple(result)


def contribution(
    kind: Kind,
    params: Params,
    clipping: Clipping,
    others: list[Inputs],
    record: Inputs,
) -> float:
    """How far the sums with and without the record are apart, in float64: the largest share of a group's
    bound.
    """
    sums = []
    for records in ([*others, record], others):
        batch = (
            [torch.stack(column) for column in zip(*records, strict=True)]
            if records
            else [x[None][:0] for x in record]
        )
        sums.append(batch_source(kind.loss, params, *batch)(clipping).sums)
    assert all(value.isfinite().all() for value in sums[0].values())
    with_it, without = sums
    return max(
        distance(
            {name: with_it[name] for name in group.parameters},
            {name: without[name] for name in group.parameters},
        )
        / group.bound
        for group in clipping.groups
    )


def clippings(names: list[str]) -> Iterator[Clipping]:
    yield Clipping.flat(names, 1.0)
    yield Clipping.per_parameter(names, 0.3)
    yield Clipping.per_layer(names, 2.0, rule="automatic")


def ascend(kind: Kind, params: Params, record: Inputs, steps: int) -> Iterator[Inputs]:
    """Records whose gradient becomes smaller beside their inputs: gradient descent on the logarithm of the
    one over the other.
    """
    exact = {name: value.double().requires_grad_() for name, value in params.items()}
    free = [x.double().clone().requires_grad_() if x.is_floating_point() else x for x in record]
    moved = [x for x in free if x.is_floating_point()]
    optimizer = torch.optim.Adam(moved, lr=0.1)
    for _ in range(steps):
        gradients = torch.autograd.grad(kind.loss(exact, *free), list(exact.values()), create_graph=True)
        norm = sum((g.square().sum() for g in gradients), torch.zeros((), dtype=torch.float64))
        objective = (norm + 1e-300).log() - sum(
            (x.square().sum().log() for x in moved), torch.zeros((), dtype=torch.float64)
        )
        grads = torch.autograd.grad(objective, moved)
        for x, g in zip(moved, grads, strict=True):
            x.grad = g.nan_to_num()
        optimizer.step()
        yield tuple(x.detach().to(old.dtype) for x, old in zip(free, record, strict=True))


# -- the tests ----------------------------------------------------------------------------------------------

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
