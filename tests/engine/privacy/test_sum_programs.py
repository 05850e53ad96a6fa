"""Clipped sums by programs: the bits of the sums without them, whatever changes from step to step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from psgrad.data.rows import Block
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy.batches import ClippedSum, RecordStreams, batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.loop import make_private
from psgrad.engine.privacy.records import Records
from psgrad.engine.privacy.sum_programs import SumPrograms
from tests.engine.execution.test_chunk_replay import convolutional, perceptron

TOGETHER = 8
FEATURES, CLASSES = 6, 3


class Branching(nn.Module):
    """Records whose first number is negative take another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x[0, 0] < 0 else self.other(x)  # type: ignore[no-any-return]


class Cancelling(nn.Module):
    """Each row at two positions, whose parts of the gradient cancel where the first number is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        other = torch.where(x[:, :1] > 50, -x * (1 + 2**-20), x)
        return self.layer(torch.stack([x, other], 1)).sum(1)  # type: ignore[no-any-return]


class Cast(nn.Module):
    """Layers whose weights are cast in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x.double(), self.first.weight.double(), self.first.bias.double()).tanh()
        return F.linear(hidden, self.last.weight.double()).float()


class Scaled(nn.Module):
    """A layer times a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(FEATURES, CLASSES), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


class Computed(SumPrograms):
    """Takes the place of programs, and computes each chunk."""

    def __call__(self, made_for: Any, shared: Any, compute: Any, *arguments: Any) -> Any:
        return compute(*arguments)


class Twins:
    """Two equal models; the sums of one are computed with programs, those of the other without."""

    def __init__(self, build: Any) -> None:
        torch.manual_seed(0)
        self.model = build()
        self.programs = SumPrograms()
        self._objectives = [Objective(m, F.cross_entropy) for m in (self.model, copy.deepcopy(self.model))]

    def step(self, clipping: Clipping, *batch: Tensor) -> ClippedSum:
        """The sum with programs, after which both models move along it. The other's must have its bits."""
        found, expected = (
            batch_source(
                objective.loss,
                objective.params,
                batch[:1],
                batch[1],
                has_aux=True,
                samples=TOGETHER,
                programs=own,
            )(clipping)
            for objective, own in zip(self._objectives, (self.programs, Computed()), strict=True)
        )
        for name, value in expected.sums.items():
            assert torch.equal(found.sums[name], value), name
        for name in ("norms", "losses", "factors", "below"):
            mine, other = getattr(found.records, name), getattr(expected.records, name)
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
        with torch.no_grad():
            for objective in self._objectives:
                for name, parameter in objective.params.items():
                    parameter.sub_(expected.sums[name].to(parameter.dtype))
        return found


def draw(records: int = TOGETHER) -> tuple[Tensor, Tensor]:
    return torch.randn(records, FEATURES), torch.randint(CLASSES, (records,))


def flat(model: nn.Module, bound: float = 0.3, **options: Any) -> Clipping:
    return Clipping.flat(dict(model.named_parameters()), bound, **options)


@pytest.mark.parametrize("build", [perceptron, convolutional, Cast])
@pytest.mark.parametrize("clip", [Clipping.flat, Clipping.per_layer])
def test_replayed_sums_have_the_bits_of_others_while_parameters_change(build: Any, clip: Any) -> None:
    twins = Twins(build)
    clipping = clip(dict(twins.model.named_parameters()), 0.3)
    for records in (8, 7, 8, 7, 8, 15):  # the last in two chunks
        twins.step(clipping, *draw(records))
    assert twins.programs.chunks == 4


def test_replayed_sums_of_a_bound_that_changes() -> None:
    twins = Twins(perceptron)
    factors = [twins.step(flat(twins.model, bound), *draw()).records.factors for bound in (1, 0.3, 2, 0.1, 9)]
    assert twins.programs.chunks == 2
    assert float(factors[-1].min()) > float(factors[-2].max())


def test_a_batch_of_no_records_between_replays() -> None:
    twins = Twins(perceptron)
    for _ in range(3):
        twins.step(flat(twins.model), *draw())
    twins.step(flat(twins.model), *draw(0))
    twins.step(flat(twins.model), *draw())
    assert twins.programs.chunks == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
def test_a_record_that_needs_another_computation_is_not_replayed(number: float) -> None:
    twins = Twins(perceptron)
    for _ in range(4):
        twins.step(flat(twins.model), *draw())
    inputs, target = draw()
    inputs[2, 1] = number
    found = twins.step(flat(twins.model), inputs, target)
    assert all(torch.isfinite(value).all() for value in found.sums.values())
    before = twins.programs.chunks
    twins.step(flat(twins.model), *draw())
    assert twins.programs.chunks == before + 1


def test_a_record_whose_positions_cancel_is_computed_alone() -> None:
    twins = Twins(Cancelling)
    for _ in range(4):
        twins.step(flat(twins.model, 1e-2), *draw())
    assert twins.programs.chunks == 1
    inputs, target = draw()
    inputs[3, 0] = 100.0
    twins.step(flat(twins.model, 1e-2), inputs, target)
    assert twins.programs.chunks == 1


def test_records_that_disagree_on_a_branch_are_not_replayed_by_the_wrong_program() -> None:
    twins = Twins(Branching)
    for sign in (1, 1, 1, 1, -1, 0, 1, 0):
        inputs, target = draw()
        inputs[:, 0] = inputs[:, 0].abs() * sign if sign else inputs[:, 0]
        twins.step(flat(twins.model), inputs, target)


# -- runs ----------------------------------------------------------------------------------------------------


def streams_of(model: nn.Module, rows: Block, capture: Any = "auto") -> RecordStreams:
    objective = Objective(model, F.cross_entropy)
    return RecordStreams(
        Records.of_rows(len(rows.inputs[0])),
        rows,
        objective.loss,
        objective.params,
        lambda loss, read: Stream(
            loss, objective.params, read, chunk_size=1, randomness="different", capture=capture
        ),
        randomness="different",
        coins=Coins(make_generator(seed=3)),
    )


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_steps_of_a_run_are_replayed(dropout: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), *[nn.Dropout(dropout)] * (dropout > 0))
    model.append(nn.Linear(5, CLASSES))
    inputs, target = draw(3 * TOGETHER)
    rows = Block((inputs,), target)
    streams, plain = streams_of(model, rows), streams_of(model, rows, "off")
    for step in range(8):
        found, expected = (
            some.source(
                torch.randperm(3 * TOGETHER, generator=torch.Generator().manual_seed(step))[:6], step
            )(flat(model))
            for some in (streams, plain)
        )
        for name, value in expected.sums.items():
            assert torch.equal(found.sums[name], value), (step, name)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(expected.sums[name].float())
    assert (streams.replayed, plain.replayed) == (8 * 6 - 3, 0)


def set_value(model: nn.Module) -> None:
    model.scale = 3.0  # type: ignore[assignment]


def add_hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, given, output: 3.0 * output)


def add_hook_before(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda module, given: (3.0 * given[0],))


@pytest.mark.parametrize("change", [set_value, add_hook, add_hook_before])
def test_a_value_that_a_loop_changes_between_steps_is_read_again(change: Callable[[nn.Module], None]) -> None:
    def trained(capturable: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Scaled()
        inputs, target = draw()
        parts = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            DataLoader(TensorDataset(inputs, target), batch_size=TOGETHER),
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=0.0,
            max_grad_norm=0.3,
            generator=make_generator(seed=5),
        )
        private, optimizer, criterion, loader = parts
        for step in range(10):
            if step == 6:
                change(model)
            for x, y in loader:
                if not capturable:
                    private._loop[0]._programs = SumPrograms()
                criterion(private(x), y).backward()
                optimizer.step()
            if capturable and step == 5:
                assert private._loop[0]._programs.chunks == 3
        return [parameter.detach() for parameter in model.parameters()]

    for mine, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(mine, other)
