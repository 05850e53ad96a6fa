"""Differentially private training in your own loop, with the arguments of Opacus's make_private.

    model, optimizer, criterion, loader = make_private(
        model, optimizer, loader, criterion=nn.CrossEntropyLoss(), noise_multiplier=1.1, max_grad_norm=1.0,
        sample_rate=0.01, expected_batch_size=128,
    )
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), target)
        loss.backward()
        optimizer.step()
    print(optimizer.statement(1e-5))

The loss is that of psgrad, which sums clipped gradients of single records, and not a tensor of autograd's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from psgrad.engine.execution.objective import Objective
from psgrad.engine.privacy.batches import ClippedSum, GradientSource, batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.generators import Generator, make_generator
from psgrad.engine.privacy.loop_loader import DrawnBatch, LoopSampling, PrivateLoader, RowsWithCoins
from psgrad.engine.privacy.loop_optimizer import PrivateOptimizer, StepLedger, account_of
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.preflight import stand_ins, warm_up, why_not_checked
from psgrad.engine.privacy.step import PrivateTraining
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
    sample_rate: float | None = None,
    expected_batch_size: float | None = None,
    poisson_sampling: bool = True,
    generator: Generator | None = None,
    ledger: StepLedger | None = None,
) -> PrivateParts:
    """The parts of a private training loop, in the order (module, optimizer, criterion, data_loader).

    THE NUMBER OF RECORDS IS PUBLIC without `sample_rate` and `expected_batch_size`: it follows from the sizes
    of the steps, and neighbouring datasets then have the same number of records (zero_out). With both, which
    must be chosen without looking at the data, it is protected, too (add_or_remove_one).

    Args:
        module: its parameters that require a gradient are trained, in place.
        optimizer: over these parameters. An account in its state goes on.
        data_loader: of a dataset with a length, in its own order or shuffled: all of its records are drawn
            from, by a sampler that takes the place of the loader's.
        criterion: of a batch's output and target, a mean or a sum over the batch; it is called with batches
            of one record.
        noise_multiplier: standard deviation of the noise on the sum of clipped gradients, as a multiple of
            its sensitivity: max_grad_norm, and twice that where a record may be replaced.
        max_grad_norm: what each record's gradient is clipped to.
        sample_rate: the probability with which each step draws each record; None for 1 / len(data_loader). An
            epoch is about 1 / sample_rate steps.
        expected_batch_size: what the sum is divided by; None for sample_rate times the number of records.
        poisson_sampling: if it is False, each step draws data_loader.batch_size records without replacement,
            neighbours differ by a record that is replaced, and no amplification is accounted.
        generator: of draws and noise; by default a cryptographic one.
        ledger: gets a line for each step before anything of it is released, and has those of earlier
            processes, such as psgrad.run.Ledger.

    A batch that was drawn is stepped: the loader refuses to go on after one that a loop left out.

    A model or a loss that keeps something while it runs on records (a buffer, an attribute) ends the step
    before anything is released. The model, the loss and the dataset draw from generators that are seeded
    from a secret stream.

    Raises ConfigError for a loader whose rows can't be drawn or whose sampler chooses among them, and for an
    optimiser of other parameters; ModelError for a generator in an attribute that can't be seeded.
    """
    drawn = LoopSampling.of(data_loader, poisson_sampling, sample_rate, expected_batch_size)
    if isinstance(module, PrivateModule) or isinstance(optimizer, PrivateOptimizer):
        raise ConfigError(
            "make_private was given what it made before; expected the module and the optimiser"
            " themselves: `.module` and `.original_optimizer`",
        )
    account = account_of(module, optimizer, ledger)
    objective = Objective(module, _of_one(criterion))
    generator = generator or make_generator()
    loop = _Loop(objective, Unchanged(module, criterion), generator)
    dataset = data_loader.dataset
    rows = RowsWithCoins(dataset, Coins(generator, dataset, data_loader.collate_fn))
    training = PrivateTraining(
        {name: module.get_parameter(name) for name in objective.params},
        loop.source,
        len(dataset),  # type: ignore[arg-type]
        clipping=Clipping.flat(objective.params, max_grad_norm),
        noise=Noise(noise_multiplier),
        sampling=drawn.sampling,
        relation=drawn.relation,
        expected_batch_size=drawn.expected,
        optimizer=optimizer,
        generator=generator,
    )
    return PrivateParts(
        PrivateModule(module, loop),
        PrivateOptimizer(training, module, account, drawn, loop.drawn),
        PrivateCriterion(criterion, loop),
        PrivateLoader(data_loader, rows, drawn, generator, loop.drawn),
    )


class _Loop:
    """What the parts of one loop know of the batch that is trained on."""

    def __init__(self, objective: Objective, state: Unchanged, generator: Generator) -> None:
        self.objective, self._state = objective, state
        self._coins = Coins(generator, objective.model, objective.criterion)
        self._programs, self._version = SumPrograms(), state.version
        self.drawn = DrawnBatch()
        self.called: tuple[tuple[Tensor, ...], Any] | None = None
        self._batch: tuple[tuple[Tensor, ...], Any] | None = None
        self._checked = self._warm = self._begun = False

    def begin(self, inputs: tuple[Tensor, ...]) -> None:
        """Take the state of the model and the loss for what it is to be at the end of the step: values that
        are written from here on come from records. What the model sets up on its first run comes from
        stand-ins.
        """
        if not self._warm:
            self._warm = True
            warm_up(self.objective.model, lambda: self.objective.model(*stand_ins(inputs)[0]))
        if self._begun:  # the model was called on records already
            self._state.require(by_bits=True)
        self._begun = True
        self._state.renew()

    def inputs_of(self, output: Any) -> tuple[Tensor, ...]:
        """The inputs that the model was called with for this output. Raises LossError for another object."""
        if self.called is None or self.called[1] is not output:
            raise LossError(
                "the loss was given another output than the model's last one in train mode; expected"
                " criterion(model(inputs), target): psgrad computes both again, record by record",
                hint="put what is done to the output into the criterion, or into the model",
            )
        return self.called[0]

    def take(self, inputs: tuple[Tensor, ...], target: Any) -> None:
        """Keep the batch of the step to come. Raises ConfigError where it is not a batch of the loader, or
        the second.
        """
        rows = len(inputs[0])
        if self.drawn.size is None or self._batch is not None:
            raise ConfigError(
                "a step was to have a batch that was not drawn for it; expected one batch of the private"
                " loader for each step, and one backward() for each batch",
                hint="a batch that is used twice, gradients that are accumulated, or another loader",
            )
        if rows != self.drawn.size:
            raise ConfigError(
                f"the model was called with {rows} rows, and the loader drew {self.drawn.size} records;"
                " expected one row for each record",
                hint="rows were added, left out or taken from elsewhere",
            )
        if not self._checked and rows > 1:
            self._check(inputs, target)
        self._batch = inputs, target

    def _check(self, inputs: tuple[Tensor, ...], target: Any) -> None:
        """Require a model that keeps records apart, by stand-ins of the shapes of a few rows."""
        self._checked = True
        few = [x[:_CHECKED] for x in inputs], None if target is None else target[:_CHECKED]
        why_not = why_not_checked(self.objective, self._state, *few)
        if why_not is not None:
            warnings.warn(f"whether the model keeps records apart was not checked: {why_not}", stacklevel=4)

    def source(self, _: np.ndarray) -> GradientSource:
        """The clipped sum of the batch that was kept. Raises ConfigError where there is none."""
        if self._batch is None:
            raise ConfigError(
                "optimizer.step() was called without a batch; expected loss.backward() of a private loss"
                " before each step",
            )
        inputs, target = self._batch
        self._batch = self.called = None
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
            self._begun = False
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
            raise ModelError("the model was called without tensors; expected tensors with a row a record")
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


def _of_one(criterion: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The loss of one record, by a loss of batches."""

    def loss(output: Any, target: Any) -> Tensor:
        batch = tree_map(lambda x: x.unsqueeze(0) if isinstance(x, Tensor) else x, (output, target))
        value = criterion(*batch)
        return value.squeeze(0) if isinstance(value, Tensor) and value.shape == (1,) else value

    return loss
