"""make_private: what its numbers say of the number of records, its account from process to process, which
rows are drawn, and that a drawn batch is stepped.
"""

from __future__ import annotations

import copy
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from psgrad.engine.privacy import StepEvent, epsilon_pld, make_generator
from psgrad.engine.privacy.loop import PrivateParts, make_private
from psgrad.engine.privacy.rounding import grid_of
from psgrad.errors import ConfigError, LedgerError
from psgrad.run.ledger import Ledger
from tests.engine.privacy.test_loop import dataset, network, trained

PUBLIC: dict[str, Any] = {"sample_rate": 0.5, "expected_batch_size": 11.0}


def parts_of(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Any = None,
    **options: Any,
) -> PrivateParts:
    model = network() if model is None else model
    settings: dict[str, Any] = {
        "criterion": nn.CrossEntropyLoss(),
        "noise_multiplier": 2.0,
        "max_grad_norm": 0.3,
        "generator": make_generator(seed=5),
    }
    return make_private(
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        DataLoader(dataset(), batch_size=12) if loader is None else loader,
        **{**settings, **options},
    )


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a file has it, read without code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


# -- the number of records -----------------------------------------------------------------------------------


def released(count: int, **options: Any) -> tuple[PrivateParts, torch.Tensor]:
    """A step on so many records without gradients, and what it does to the weights: noise alone."""
    model = nn.Linear(4, 3).double()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    rows = TensorDataset(torch.zeros(count, 4, dtype=torch.float64), torch.zeros(count, dtype=torch.int64))
    parts = parts_of(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        DataLoader(rows, batch_size=12),
        criterion=lambda output, target: (0 * output).sum(),
        **options,
    )
    inputs, target = next(iter(parts.data_loader))
    parts.criterion(parts.module(inputs), target).backward()
    parts.optimizer.step()
    return parts, before - nn.utils.parameters_to_vector(model.parameters()).detach()


def named(update: torch.Tensor, rate: float, candidates: range) -> list[int]:
    """The numbers of records for which the update times the divisor lies on the public grid of its noise."""
    grid = grid_of(2.0 * 0.3)
    steps = [update * (rate * count) / grid for count in candidates]
    return [
        count
        for count, each in zip(candidates, steps, strict=True)
        if float((each - each.round()).abs().max()) < 0.01
    ]


def test_loop_statement_says_that_the_number_of_records_is_public_where_it_can_be_named() -> None:
    for count in (23, 24):
        parts, update = released(count)
        assert named(update, 0.5, range(20, 30)) == [count]
        said = parts.optimizer.statement(1e-5)
        assert "The number of records is public: the sample rate and the divisor of each step" in said
        assert "have the same number of records" in said
        assert parts.optimizer.events[0].relation == "zero_out"


def test_loop_with_public_numbers_names_no_number_of_records() -> None:
    said = set()
    for count in (23, 24, 150):
        parts, update = released(count, **PUBLIC)
        assert named(update, 0.5, range(20, 30)) == [22], "the divisor is 11, whatever there is"
        said.add((parts.optimizer.statement(1e-5), len(parts.data_loader), tuple(parts.optimizer.events)))
    ((statement, steps, (event,)),) = said
    assert steps == 2
    assert (event.relation, event.sampling.sample_rate) == ("add_or_remove_one", 0.5)
    assert "public" not in statement
    assert "differ by one record that is added or removed" in statement


@pytest.mark.parametrize(
    ("options", "told_by"), [({"sample_rate": 0.5}, "divisor"), ({"expected_batch_size": 9.0}, "sample rate")]
)
def test_loop_with_one_public_number_says_what_the_other_tells(options: dict[str, Any], told_by: str) -> None:
    parts = parts_of(**options)
    trained(parts)
    assert f"is public: the {told_by} of each step follows" in parts.optimizer.statement(1e-5)
    assert parts.optimizer.events[0].relation == "zero_out"


def test_loop_statement_has_the_epsilon_of_the_steps() -> None:
    parts = parts_of(**PUBLIC)
    trained(parts)
    event = StepEvent(2.0, parts.optimizer.events[0].sampling, "add_or_remove_one")
    epsilon = epsilon_pld([(event, 2)], 1e-5).value
    assert epsilon is not None
    said = re.match(
        r"the result of 2 steps is \((.*), 1e-05\)-differentially private", parts.optimizer.statement(1e-5)
    )
    assert said is not None
    assert epsilon <= float(said[1]) <= 1.001 * epsilon, "rounded, and never down"
    silent = parts_of(noise_multiplier=0.0, **PUBLIC)
    trained(silent)
    assert "there is no guarantee" in silent.optimizer.statement(1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sample_rate": 1.5}, "sample_rate is 1.5"),
        ({"sample_rate": 0.0}, "sample_rate is 0.0"),
        ({"expected_batch_size": 0.0}, "expected_batch_size is 0.0"),
        ({"expected_batch_size": math.nan}, "expected_batch_size is nan"),
        (
            {"sample_rate": 0.5, "poisson_sampling": False},
            "sample_rate was given with poisson_sampling=False",
        ),
    ],
)
def test_loop_numbers_that_can_not_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parts_of(**options)


# -- the account ---------------------------------------------------------------------------------------------


def into_the_private_optimiser(model: nn.Module, state: dict[str, Any]) -> PrivateParts:
    parts = parts_of(model)
    parts.optimizer.load_state_dict(state)
    return parts


def into_the_optimiser_before(model: nn.Module, state: dict[str, Any]) -> PrivateParts:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    optimizer.load_state_dict(state)
    return parts_of(model, optimizer)


@pytest.mark.parametrize("load", [into_the_private_optimiser, into_the_optimiser_before])
def test_loop_account_goes_on_at_a_restart(load: Callable[..., PrivateParts]) -> None:
    whole, first = parts_of(), parts_of()
    trained(whole, epochs=4)
    trained(first, epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = load(copy.deepcopy(first.module.module), saved(first.optimizer.state_dict()))
    assert second.optimizer.events == first.optimizer.events
    trained(second, epochs=2)
    assert second.optimizer.events == whole.optimizer.events
    assert second.optimizer.epsilon(1e-5) == whole.optimizer.epsilon(1e-5)
    third = load(copy.deepcopy(second.module.module), saved(second.optimizer.state_dict()))
    assert third.optimizer.events == whole.optimizer.events


def test_loop_account_keeps_steps_that_a_loaded_state_does_not_have() -> None:
    parts = parts_of()
    trained(parts)
    early = saved(parts.optimizer.state_dict())
    trained(parts)
    parts.optimizer.load_state_dict(early)  # steps that were taken back were seen
    assert len(parts.optimizer.events) == 4
    parts.optimizer.load_state_dict(parts.optimizer.state_dict())  # and none counts twice
    assert len(parts.optimizer.events) == 4


def test_loop_account_adds_two_processes_that_went_on_from_one_state() -> None:
    parts = parts_of()
    trained(parts)
    state = saved(parts.optimizer.state_dict())
    others = [into_the_private_optimiser(network(), copy.deepcopy(state)) for _ in range(2)]
    for other in others:
        trained(other)
    others[0].optimizer.load_state_dict(saved(others[1].optimizer.state_dict()))
    assert len(others[0].optimizer.events) == 6


def test_loop_fresh_account_over_trained_parts_warns() -> None:
    public = torch.optim.Adam((model := network()).parameters())
    model(dataset().tensors[0]).sum().backward()
    public.step()
    with pytest.warns(UserWarning, match="steps of which no account is here"):
        parts_of(model, public)
    fresh = parts_of()
    with pytest.warns(UserWarning, match="the loaded state come from steps of which no account"):
        fresh.optimizer.load_state_dict(torch.optim.SGD(network().parameters(), lr=1.0).state_dict())
    trained(fresh)
    with pytest.warns(UserWarning, match="steps of which no account is here"):
        parts_of(fresh.module.module)


@pytest.mark.parametrize("account", [[1], {"a": 3}, {"a": [[{}, 1]]}, {"a": [["x", 1]]}])
def test_loop_state_whose_account_is_damaged_is_refused(account: Any) -> None:
    parts = parts_of()
    state = parts.optimizer.state_dict()
    state["param_groups"][0]["privacy"] = account
    with pytest.raises(ConfigError):
        parts.optimizer.load_state_dict(state)


def test_loop_parts_that_are_private_already_are_refused() -> None:
    parts = parts_of()
    for model, optimizer in ((parts.module, None), (parts.module.module, parts.optimizer)):
        with pytest.raises(ConfigError, match="what it made before"):
            parts_of(model, optimizer)


def test_loop_ledger_has_each_step_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, {"delta": 1e-5}) as ledger:
        first = parts_of(ledger=ledger)
        trained(first)
    with Ledger.resume(path, {}) as ledger:
        second = parts_of(first.module.module, ledger=ledger)
        assert second.optimizer.events == first.optimizer.events
        second.optimizer.load_state_dict(saved(first.optimizer.state_dict()))
        assert len(second.optimizer.events) == 2, "the state's steps are the ledger's"
        trained(second)
    assert len(Ledger.read(path).steps) == 4
    assert second.optimizer.events == [first.optimizer.events[0]] * 4


def test_loop_ledger_that_can_not_be_written_releases_nothing(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", {})
    parts = parts_of(ledger=ledger)
    before = copy.deepcopy(parts.module.module.state_dict())
    ledger.close()
    with pytest.raises(LedgerError):
        trained(parts)
    assert parts.optimizer.events == []
    assert all(torch.equal(value, before[name]) for name, value in parts.module.module.state_dict().items())


# -- which rows are drawn ------------------------------------------------------------------------------------


def test_loop_samplers_that_choose_rows_are_refused() -> None:
    rows = dataset()
    for sampler in (
        SubsetRandomSampler(range(20)),  # four people withdrew
        WeightedRandomSampler([1.0] * 24, 24),
        RandomSampler(rows, replacement=True),
        RandomSampler(rows, num_samples=12),
        SequentialSampler(Subset(rows, range(20))),
        list(range(20)),
    ):
        with pytest.raises(ConfigError, match=f"a sampler of its own, a {type(sampler).__name__}"):
            parts_of(loader=DataLoader(rows, batch_size=12, sampler=sampler))
    with pytest.raises(ConfigError, match="a sampler of its own, a list"):
        parts_of(loader=DataLoader(rows, batch_sampler=[[0, 1], [2, 3]]))


def test_loop_default_and_shuffled_loaders_are_taken() -> None:
    rows = dataset()
    for loader in (
        DataLoader(rows, batch_size=12),
        DataLoader(rows, batch_size=12, shuffle=True),
        DataLoader(rows, batch_size=12, sampler=RandomSampler(rows)),
        DataLoader(rows, batch_sampler=BatchSampler(SequentialSampler(rows), 12, False)),
        DataLoader(Subset(rows, range(20)), batch_size=12, shuffle=True),
    ):
        assert len(parts_of(loader=loader).data_loader) == 2


def test_loop_loader_without_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="the loader has no batches"):
        parts_of(loader=DataLoader(dataset(), batch_size=30, drop_last=True))


# -- a drawn batch is stepped --------------------------------------------------------------------------------


def skip_infinite(parts: PrivateParts) -> None:
    model, optimizer, criterion, loader = parts
    for inputs, target in loader:
        loss = criterion(model(inputs), target)
        if not math.isfinite(loss.item()):
            continue
        loss.backward()
        optimizer.step()


def skip_the_last(parts: PrivateParts) -> None:
    batches: Iterator[Any] = iter(parts.data_loader)
    for _ in range(2):
        inputs, target = next(batches)
        parts.criterion(parts.module(inputs), target).backward()
        if len(parts.optimizer.events) == 0:
            parts.optimizer.step()
    next(batches, None)


def stop_and_begin_again(parts: PrivateParts) -> None:
    for _ in range(2):
        for inputs, target in parts.data_loader:
            if parts.criterion(parts.module(inputs), target).item() > 0:
                break


def of_batches(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if len(output) == 1:
        raise ZeroDivisionError("a record that can't be computed")
    return nn.functional.cross_entropy(output, target)


def skip_failed(parts: PrivateParts) -> None:
    model, optimizer, criterion, loader = parts
    for inputs, target in loader:
        criterion(model(inputs), target).backward()
        with suppress(ZeroDivisionError):
            optimizer.step()


@pytest.mark.parametrize("loop", [skip_infinite, skip_the_last, skip_failed, stop_and_begin_again])
def test_loop_that_leaves_a_drawn_batch_out_is_refused(loop: Callable[[PrivateParts], None]) -> None:
    inputs, target = dataset().tensors
    if loop is skip_infinite:
        inputs = inputs.clone()
        inputs[:] = math.inf
    options = {"criterion": of_batches} if loop is skip_failed else {}
    parts = parts_of(loader=DataLoader(TensorDataset(inputs, target), batch_size=12), **options)
    with pytest.raises(ConfigError, match="no step was taken on the one before") as refused:
        loop(parts)
    assert "a drawn batch is stepped" in str(refused.value)


def test_loop_of_infinite_records_takes_its_steps() -> None:
    """What a loop would skip adds nothing, and the noise goes on."""
    inputs, target = dataset().tensors
    parts = parts_of(loader=DataLoader(TensorDataset(inputs * math.inf, target), batch_size=12))
    trained(parts)
    assert len(parts.optimizer.events) == 2
    assert all(value.isfinite().all() for value in parts.module.module.state_dict().values())


def test_loop_epsilon_at_a_delta_that_can_not_be_told_is_refused() -> None:
    parts = parts_of(noise_multiplier=40.0)
    trained(parts)
    with pytest.raises(ConfigError, match="there is no epsilon for these steps: delta is 1e-16"):
        parts.optimizer.epsilon(1e-16)
