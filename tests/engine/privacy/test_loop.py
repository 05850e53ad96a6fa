"""make_private: the loop of a user, against Opacus, one-sample autograd and closed forms."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psgrad.engine.privacy import make_generator
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.loop import PrivateParts, make_private
from psgrad.errors import ConfigError, DataError, LossError, ModelError, PsgradError
from tests.engine.privacy.accountants import gaussian_delta
from tests.engine.privacy.clipped_loop import clipped_loop
from tests.oracles import one_sample_gradients

ROWS, RATE = 24, 0.5


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (ROWS,), generator=generator))


def parts_of(
    model: nn.Module, batch_size: int = ROWS, rows: Any = None, loader: Any = None, **options: Any
) -> PrivateParts:
    """loader: further options of the loader."""
    settings: dict[str, Any] = {
        "criterion": nn.CrossEntropyLoss(),
        "noise_multiplier": 0.0,
        "max_grad_norm": 0.3,
        "generator": make_generator(seed=5),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = dataset() if rows is None else rows
    batches = DataLoader(rows, batch_size=batch_size, shuffle=True, **(loader or {}))
    return make_private(model, optimizer, batches, **{**settings, **options})


def trained(parts: PrivateParts, epochs: int = 1) -> list[int]:
    """Train; the size of each batch."""
    model, optimizer, criterion, loader = parts
    sizes = []
    for _ in range(epochs):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), target)
            loss.backward()
            optimizer.step()
            sizes.append(len(target))
    return sizes


def test_step_without_noise_is_the_clipped_sum_by_autograd() -> None:
    model, (inputs, target) = network(), dataset().tensors
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = one_sample_gradients(model, nn.functional.cross_entropy, (inputs,), target)
    expected = clipped_loop(gradients, Clipping.flat(before, 0.3))
    assert trained(parts_of(model)) == [ROWS]
    for name, new in model.named_parameters():
        torch.testing.assert_close(before[name] - new, expected[name] / ROWS, rtol=1e-6, atol=1e-12)


def test_steps_without_noise_are_those_of_opacus() -> None:
    opacus = pytest.importorskip("opacus")
    theirs, ours = network(), network()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
    model, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=theirs,
        optimizer=optimizer,
        data_loader=DataLoader(dataset(), batch_size=ROWS),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
    )
    for _ in range(3):
        for inputs, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    trained(parts_of(ours), epochs=3)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)  # it divides by norm + 1e-6


def test_epsilon_of_whole_batches_is_that_of_the_gaussian_mechanism() -> None:
    parts = parts_of(network(), noise_multiplier=4.0)
    trained(parts, epochs=4)  # as one release with noise 4 / sqrt(4)
    epsilon = parts.optimizer.epsilon(1e-5)
    assert gaussian_delta(epsilon, 0.5) <= 1.02e-5
    assert gaussian_delta(0.99 * epsilon, 0.5) > 1e-5


@pytest.mark.parametrize(("poisson", "sensitivity"), [(True, 0.3), (False, 0.6)])
def test_noise_has_the_stated_deviation(poisson: bool, sensitivity: float) -> None:
    model = nn.Linear(4, 5000).double()
    before = model.weight.detach().clone()
    parts = parts_of(
        model,
        criterion=lambda output, target: (0 * output).sum(),
        noise_multiplier=2.0,
        poisson_sampling=poisson,
    )
    trained(parts)
    noise = (model.weight.detach() - before) * ROWS
    assert float(noise.std()) == pytest.approx(2.0 * sensitivity, rel=0.03)


@pytest.mark.long
def test_fixed_batches_have_one_size_and_are_accounted_without_amplification() -> None:
    parts = parts_of(network(), batch_size=8, noise_multiplier=2.0, poisson_sampling=False)
    assert trained(parts) == [8, 8, 8]
    event = parts.optimizer.events[0]
    assert (event.sampling.scheme, event.relation) == ("fixed", "replace_one")
    poisson = parts_of(network(), batch_size=8, noise_multiplier=2.0)
    trained(poisson)
    assert parts.optimizer.epsilon(1e-5) > 1.5 * poisson.optimizer.epsilon(1e-5)


def test_empty_batches_are_steps_of_noise_alone() -> None:
    model, two = network(), TensorDataset(*(each[:2] for each in dataset().tensors))
    parts = parts_of(model, 1, two, noise_multiplier=1.0, max_grad_norm=1.0)
    before = copy.deepcopy(model.state_dict())
    sizes = trained(parts, epochs=10)
    assert 0 in sizes
    assert len(parts.optimizer.events) == 20
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])


def test_loop_keeps_what_loops_use() -> None:
    parts = parts_of(network(), batch_size=12, noise_multiplier=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(parts.optimizer, step_size=1, gamma=0.5)
    trained(parts)
    scheduler.step()
    assert parts.optimizer.param_groups[0]["lr"] == 0.5
    parts.module.eval()
    assert parts.module(dataset().tensors[0]).requires_grad, "outside of training the model is itself"
    parts.module.train()
    inputs, target = next(iter(parts.data_loader))
    loss = parts.criterion(parts.module(inputs), target)
    assert "NOT PRIVATE" in repr(loss)
    assert loss.item() == pytest.approx(
        float(nn.functional.cross_entropy(parts.module.module(inputs), target))
    )


def misused(kind: str) -> None:
    model, optimizer, criterion, loader = parts_of(network(), batch_size=12)
    inputs, target = next(iter(loader))
    if kind == "changed output":
        criterion(model(inputs) * 2, target)
    loss = criterion(model(inputs), target)
    if kind == "no batch":
        optimizer.step()
    if kind == "other rows":
        criterion(model(torch.cat([inputs, inputs])), torch.cat([target, target])).backward()
    loss.backward()
    if kind == "accumulated":
        criterion(model(inputs), target).backward()
    optimizer.step()
    if kind == "used twice":
        criterion(model(inputs), target).backward()
    if kind == "closure":
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("changed output", LossError, "the loss was given another output than the model's last one"),
        ("no batch", ConfigError, "optimizer.step\\(\\) was called without a batch"),
        ("other rows", ConfigError, "the model was called with .* rows, and the loader drew"),
        ("accumulated", ConfigError, "a batch that was not drawn for it"),
        ("used twice", ConfigError, "a batch that was not drawn for it"),
        ("closure", ConfigError, "step was given a closure"),
    ],
)
def test_loop_that_would_void_the_guarantee_is_refused(
    kind: str, error: type[PsgradError], words: str
) -> None:
    with pytest.raises(error, match=words):
        misused(kind)


def test_model_that_mixes_records_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    with pytest.raises(ModelError, match="BatchNorm1d"):
        trained(parts_of(model))


# -- what is kept from record to record ----------------------------------------------------------------------


def with_a_large_number() -> TensorDataset:
    """Rows of which the last one's first number is larger than all others."""
    inputs, target = dataset().tensors
    inputs = inputs.clamp(-0.9, 0.9)
    inputs[-1, 0] = 6.0
    return TensorDataset(inputs, target)


class Keeping(nn.Module):
    """A model that keeps whether it has seen a large number, in a buffer and as a factor."""

    limit = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(4, 3).double()
        self.factor = 1.0
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.factor
        if (x > self.limit).any():
            self.factor, self.largest = 3.0, torch.full((), 2.0)
        return self.last(x) * factor  # type: ignore[no-any-return]


class Criterion:
    """A loss that keeps whether it has seen a large output."""

    seen = False

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        factor = 3.0 if self.seen else 1.0
        if (output.abs() > 0.5).any():
            self.seen = True
        return nn.functional.cross_entropy(factor * output, target)


def test_loop_model_that_keeps_what_it_saw_ends_before_it_pays() -> None:
    model = Keeping()
    model.limit = 5.0
    parts = parts_of(model, rows=with_a_large_number())
    with pytest.raises(ModelError, match=r"wrote into (factor|largest) while records were computed"):
        trained(parts)
    assert not parts.optimizer.events


def test_loop_state_that_the_user_changes_between_calls_stays() -> None:
    model = Keeping()
    model.limit = 100.0
    parts = parts_of(model, batch_size=12)
    for factor, (inputs, target) in zip((2.0, 4.0), parts.data_loader, strict=True):
        model.factor = factor
        loss = parts.criterion(parts.module(inputs), target)
        loss.backward()
        parts.optimizer.step()
        assert model.factor == factor


def test_loop_model_that_is_called_twice_keeps_nothing_of_the_first_call() -> None:
    model = Keeping()
    model.limit = 5.0
    module, _, _, loader = parts_of(model, rows=with_a_large_number())
    inputs, _ = next(iter(loader))
    module(inputs)
    with pytest.raises(ModelError, match=r"wrote into (factor|largest) while records were computed"):
        module(inputs)


def test_loop_criterion_that_keeps_what_it_saw_ends_before_it_pays() -> None:
    parts = parts_of(network(), criterion=Criterion())
    with pytest.raises(ModelError, match=r"wrote into Criterion\.seen"):
        trained(parts)
    assert not parts.optimizer.events


class Augmented(torch.utils.data.Dataset[Any]):
    """Rows with noise, from a generator of this kind."""

    def __init__(self, rows: TensorDataset, kind: str) -> None:
        self.rows, self.kind, self.own = rows, kind, np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        inputs, target = self.rows[row]
        noise = {
            "torch": lambda: torch.randn(4),
            "numpy": lambda: torch.from_numpy(np.random.randn(4)),
            "own": lambda: torch.from_numpy(self.own.normal(size=4)),
        }[self.kind]()
        return inputs + 3 * noise, target


@pytest.mark.parametrize(
    ("kind", "workers"), [("torch", 0), ("numpy", 0), ("own", 0), ("torch", 1), ("own", 1)]
)
def test_loop_draws_of_a_dataset_follow_from_the_secret_stream(kind: str, workers: int) -> None:
    """Not from seeds that the user's program has set, which are known."""
    rows = Augmented(dataset(), kind)
    found = []
    for secret in (5, 5, 6):
        model = network()
        torch.manual_seed(0)
        np.random.seed(0)
        trained(parts_of(model, ROWS, rows, {"num_workers": workers}, generator=make_generator(seed=secret)))
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        assert rows.own.integers(1 << 40) == np.random.default_rng(0).integers(1 << 40)
        rows.own = np.random.default_rng(0)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("stops", [False, True])
def test_loop_draws_of_a_dataset_differ_by_step_and_row(stops: bool) -> None:
    """Also where a loop stops before the end of an epoch."""

    class Numbers(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, row: int) -> Any:
            return torch.rand(4, dtype=torch.float64), torch.tensor(0)

    parts = parts_of(network(), 8, Numbers(), max_grad_norm=1.0)
    read = []
    for _ in range(3):
        for inputs, target in parts.data_loader:
            read.append(inputs)
            parts.criterion(parts.module(inputs), target).backward()
            parts.optimizer.step()
            if stops:
                break
    assert len(torch.cat(read).unique(dim=0)) == 24


def mixup(items: list[Any]) -> Any:
    inputs, target = torch.utils.data.default_collate(items)
    return torch.rand(()) * inputs + inputs[torch.randperm(len(inputs))], target


def masked(items: list[Any]) -> Any:
    inputs, target = torch.utils.data.default_collate(items)
    torch.rand(len(inputs))
    return inputs, target


def centred(items: list[Any]) -> Any:
    inputs, target = torch.utils.data.default_collate(items)
    return inputs - inputs.mean(0), target


@pytest.mark.parametrize("collate", [mixup, masked, centred])
def test_loop_collate_function_that_mixes_records_refused(collate: Any) -> None:
    with pytest.raises(DataError, match="collate_fn makes batches whose"):
        trained(parts_of(network(), loader={"collate_fn": collate}))


def test_loop_epsilon_of_noise_whose_tail_is_too_short_refused() -> None:
    parts = parts_of(network(), noise_multiplier=0.005)
    trained(parts)
    with pytest.raises(ConfigError, match=r"the noise multiplier is 0\.005"):
        parts.optimizer.epsilon(1e-12)
