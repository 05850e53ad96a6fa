"""Differentially private training in your own loop, with the arguments of Opacus's make_private.

    model, optimizer, criterion, loader = make_private(
        model, optimizer, loader, criterion=nn.CrossEntropyLoss(), noise_multiplier=1.1, max_grad_norm=1.0
    )
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), target)
        loss.backward()
        optimizer.step()
    print(optimizer.epsilon(1e-5))

The loss is that of psgrad, which sums clipped gradients of single records, and not a tensor of autograd's.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from psgrad.engine.execution.objective import Objective
from psgrad.engine.privacy.accounting import StepEvent, epsilon_pld
from psgrad.engine.privacy.batches import ClippedSum, GradientSource, batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.drawn_rows import DrawnRow, RecordsApart, RowsWithCoins
from psgrad.engine.privacy.generators import Generator, make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.preflight import NotRun, require_separate_records, stand_ins, warm_up
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.refusals import require_tail
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.step import PrivateTraining, private_sum
from psgrad.engine.privacy.sum_programs import SumPrograms
from psgrad.engine.privacy.unchanged import Unchanged
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.errors import ConfigError, LossError, ModelError

_CHECKED = 4  # rows of the first batch that are checked for a model that mixes records


class PrivateParts(NamedTuple):
    """What takes the places of a model, an optimiser, a loss and a loader in a training loop."""

    module: PrivateModule
    optimizer: PrivateOptimizer
    criterion: PrivateCriterion
    data_loader: PrivateLoader


def make_private(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any],
    *,
    criterion: Callable[[Any, Any], Tensor],
    noise_multiplier: float,
    max_grad_norm: float,
    poisson_sampling: bool = True,
    generator: Generator | None = None,
) -> PrivateParts:
    """The parts of a private training loop, in the order (module, optimizer, criterion, data_loader).

    Args:
        module: its parameters that require a gradient are trained, in place.
        optimizer: over these parameters.
        data_loader: of a dataset with a length. Its sampler is replaced.
        criterion: of a batch's output and target, a mean or a sum over the batch; it is called with batches
            of one record.
        noise_multiplier: standard deviation of the noise on the sum of clipped gradients, as a multiple of
            its sensitivity: max_grad_norm where a record may be added or removed, twice that where it may be
            replaced.
        max_grad_norm: what each record's gradient is clipped to.
        poisson_sampling: each step draws each record with probability 1 / len(data_loader), and neighbours
            differ by one record; else each step draws data_loader.batch_size records without replacement,
            neighbours differ by a record that is replaced, and no amplification is accounted.
        generator: of draws and noise; by default a cryptographic one.

    A model or a loss that keeps something while it runs on records (a buffer, an attribute) ends the step
    before anything is released. The model, the loss and the dataset draw from generators that are seeded
    from a secret stream.

    Raises ConfigError for a loader whose rows can't be drawn, and for an optimiser of other parameters;
    ModelError for a generator in an attribute that can't be seeded.
    """
    _require_drawable(data_loader, poisson_sampling)
    records = len(data_loader.dataset)  # type: ignore[arg-type]
    rate = 1 / len(data_loader)
    relation: Relation = "add_or_remove_one" if poisson_sampling else "replace_one"
    sampling = (
        Sampling("poisson", sample_rate=rate)
        if poisson_sampling
        else Sampling("fixed", batch_size=data_loader.batch_size)
    )
    objective = Objective(module, _of_one(criterion))
    noise = Noise(noise_multiplier)
    generator = generator or make_generator("aes")
    expected = records * rate if poisson_sampling else float(data_loader.batch_size or 1)
    loop = _Loop(objective, Unchanged(module, criterion), generator)
    dataset = data_loader.dataset
    rows = RowsWithCoins(dataset, Coins(generator, dataset, data_loader.collate_fn))
    training = PrivateTraining(
        {name: module.get_parameter(name) for name in objective.params},
        loop.source,
        records,
        clipping=Clipping.flat(objective.params, max_grad_norm),
        noise=lambda _: noise,
        sampling=sampling,
        relation=relation,
        expected_batch_size=expected,
        optimizer=optimizer,
        generator=loop.generator,
    )
    return PrivateParts(
        PrivateModule(module, loop),
        PrivateOptimizer(training, loop),
        PrivateCriterion(criterion, loop),
        PrivateLoader(data_loader, rows, training, loop),
    )


class _Loop:
    """What the parts of one loop know of the batch that is trained on."""

    def __init__(self, objective: Objective, state: Unchanged, generator: Generator) -> None:
        self.objective, self.generator, self._state = objective, generator, state
        self._coins = Coins(generator, objective.model, objective.loss_of)
        self._programs, self._version = SumPrograms(), state.version
        self.drawn: int | None = None
        self.called: tuple[tuple[Tensor, ...], Any] | None = None
        self._batch: tuple[tuple[Tensor, ...], Any] | None = None
        self._checked = self._warm = False

    def begin(self, inputs: tuple[Tensor, ...]) -> None:
        """Take the state of the model and the loss for what it is to be at the end of the step: values that
        are written from here on come from records. What the model sets up on its first run comes from
        stand-ins.
        """
        if not self._warm:
            self._warm = True
            warm_up(self.objective.model, lambda: self.objective.model(*stand_ins(inputs)[0]))
        self._state.renew()

    def inputs_of(self, output: Any) -> tuple[Tensor, ...]:
        """The inputs that the model was called with for this output. Raises LossError for another object."""
        if self.called is None or self.called[1] is not output:
            raise LossError(
                "the loss was given another output than the model's last one in train mode",
                expected="criterion(model(inputs), target): psgrad computes both again, record by record",
                next_step="put what is done to the output into the criterion, or into the model",
            )
        return self.called[0]

    def take(self, inputs: tuple[Tensor, ...], target: Any) -> None:
        """Keep the batch of the step to come. Raises ConfigError where it is not a batch of the loader, or
        the second.
        """
        rows = len(inputs[0])
        if self.drawn is None or self._batch is not None:
            raise ConfigError(
                "a step was to have a batch that was not drawn for it",
                expected="one batch of the private loader for each step, and one backward() for each batch",
                cause="a batch that is used twice, gradients that are accumulated, or another loader",
            )
        if rows != self.drawn:
            raise ConfigError(
                f"the model was called with {rows} rows, and the loader drew {self.drawn} records",
                expected="one row for each record",
                cause="rows were added, left out or taken from elsewhere",
            )
        if not self._checked and rows > 1:
            self._check(inputs, target)
        self._batch = inputs, target

    def _check(self, inputs: tuple[Tensor, ...], target: Any) -> None:
        """Require a model that keeps records apart, by stand-ins of the shapes of a few rows."""
        self._checked = True
        self._state.require(by_bits=True)
        few = stand_ins([x[:_CHECKED] for x in inputs], None if target is None else target[:_CHECKED])
        try:
            require_separate_records(self.objective, *few)
        except NotRun as error:
            warnings.warn(
                f"whether the model keeps records apart was not checked: {error.arrived}", stacklevel=4
            )
        self._state.renew()

    def source(self, _: np.ndarray) -> GradientSource:
        """The clipped sum of the batch that was kept. Raises ConfigError where there is none."""
        if self._batch is None:
            raise ConfigError(
                "optimizer.step() was called without a batch",
                expected="loss.backward() of a private loss before each step",
            )
        inputs, target = self._batch
        self._batch = self.drawn = self.called = None
        params = self.objective.params
        dims = (0, None if target is None else 0)

        def source(clipping: Clipping) -> ClippedSum:
            loss = self._state.checked(self.objective.loss)
            options: dict[str, Any] = {"in_dims": dims, "has_aux": True, "randomness": "different"}
            if self._state.version != self._version:  # programs have the former state
                self._programs, self._version = SumPrograms(), self._state.version
            options |= {"coins": self._coins, "programs": self._programs}
            found = batch_source(loss, params, inputs, target, **options)(clipping)
            self._state.require(by_bits=True)
            return found

        return source


class PrivateModule(nn.Module):
    """The model: in train mode it notes what it is called with, and builds no graph. `module` is the model
    itself, whose state_dict is to be saved.
    """

    def __init__(self, module: nn.Module, loop: _Loop) -> None:
        super().__init__()
        self.module = module
        self._loop = [loop]  # in a list, as nothing of it is the module's
        self.train(module.training)

    def forward(self, *inputs: Any) -> Any:
        if not self.training or not torch.is_grad_enabled():
            return self.module(*inputs)
        if not inputs or not all(isinstance(x, Tensor) for x in inputs):
            raise ModelError("the model was called without tensors", expected="tensors with a row a record")
        with torch.no_grad():
            self._loop[0].begin(inputs)
            output = self.module(*inputs)
        self._loop[0].called = inputs, output
        return output


class PrivateCriterion:
    """The loss of a batch, with the records that it came from."""

    def __init__(self, criterion: Callable[[Any, Any], Tensor], loop: _Loop) -> None:
        self._criterion, self._loop = criterion, loop

    def __call__(self, output: Any, target: Any) -> PrivateLoss:
        inputs = self._loop.inputs_of(output)
        with torch.no_grad():
            value = self._criterion(output, target)
        return PrivateLoss(value, lambda: self._loop.take(inputs, target))


class PrivateLoss:
    """The loss of a batch. Its value is NOT PRIVATE."""

    def __init__(self, value: Tensor, take: Callable[[], None]) -> None:
        self._value, self._take = value, take

    def backward(self) -> None:
        """Have the next optimizer.step() train on this batch."""
        self._take()

    def detach(self) -> Tensor:
        return self._value

    def item(self) -> float:
        return float(self._value)

    __float__ = item

    def __repr__(self) -> str:
        return f"PrivateLoss({self.item():.6g}, NOT PRIVATE)"


class PrivateOptimizer(torch.optim.Optimizer):
    """The optimiser: a step clips each record's gradient, adds noise, and updates. `events` are the steps
    that were taken, as accountants read them.
    """

    def __init__(self, training: PrivateTraining, loop: _Loop) -> None:  # no super(): all is the inner one's
        self._training, self._loop = training, loop
        self.original_optimizer = training.optimizer
        self.events: list[StepEvent] = []

    param_groups = property(lambda self: self.original_optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.original_optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.original_optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ConfigError("step was given a closure", expected="one gradient a step: no closure")
        training = self._training
        noisy = private_sum(
            self._loop.source(np.arange(0)),
            training.clipping,
            training.noise(training.taken),
            training.relation,
            training.generator,
            pay=lambda: self.events.append(training.event()),
        )
        training.update(noisy.sums)
        training.taken += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.original_optimizer!r}, {len(self.events):,} private steps)"

    def epsilon(self, delta: float) -> float:
        """What the steps so far have spent, an upper bound by privacy loss distributions; infinite without
        noise. It holds against those who do not know the generator's seed, if it has one.

        Raises ConfigError for a noise multiplier that is too small for the generator's tail at this delta.
        """
        multipliers = [(event.noise_multiplier, 1) for event in self.events]
        require_tail(multipliers, delta, self._training.generator.reach)
        found = epsilon_pld([(event, 1) for event in self.events], delta).value
        assert found is not None  # both schemes are covered
        return found


class PrivateLoader:
    """Batches of records that are drawn for each step; an epoch is as many as the loader had. An empty batch
    is a batch.
    """

    def __init__(
        self, loader: DataLoader[Any], rows: RowsWithCoins, training: PrivateTraining, loop: _Loop
    ) -> None:
        self._loop, self._sizes, self.dataset = loop, deque[int](), loader.dataset
        self._batches, self._drawn = len(loader), 0

        def draws() -> Iterator[list[DrawnRow]]:
            for _ in range(self._batches):
                drawn = training.sampling.draw(training.records, training.generator).tolist()
                self._sizes.append(len(drawn))
                yield [DrawnRow(self._drawn, row) for row in drawn]
                self._drawn += 1

        self._inner: DataLoader[Any] = DataLoader(
            rows,
            batch_sampler=_Batches(draws, self._batches),
            collate_fn=RecordsApart(loader.collate_fn, partial(loader.dataset.__getitem__, 0)),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        self._sizes.clear()
        for batch in self._inner:
            self._loop.drawn = self._sizes.popleft()
            yield batch


class _Batches:
    """The rows of each batch, drawn anew in each epoch."""

    def __init__(self, draws: Callable[[], Iterator[list[DrawnRow]]], count: int) -> None:
        self._draws, self._count = draws, count

    def __iter__(self) -> Iterator[list[DrawnRow]]:
        return self._draws()

    def __len__(self) -> int:
        return self._count


def _of_one(criterion: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The loss of one record, by a loss of batches."""

    def loss(output: Any, target: Any) -> Tensor:
        batch = tree_map(lambda x: x.unsqueeze(0) if isinstance(x, Tensor) else x, (output, target))
        value = criterion(*batch)
        return value.squeeze(0) if isinstance(value, Tensor) and value.shape == (1,) else value

    return loss


def _require_drawable(loader: DataLoader[Any], poisson: bool) -> None:
    dataset: Sequence[Any] | Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        raise ConfigError(
            f"the loader's dataset is of type {type(dataset).__name__}",
            expected="a dataset with a length and rows by number, of which each step draws some",
        )
    if not poisson and loader.batch_size is None:
        raise ConfigError("the loader has no batch_size", expected="one, for batches of a fixed size")
