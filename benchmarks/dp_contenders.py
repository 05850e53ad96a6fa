"""Who takes differentially private steps, each as its own documentation recommends: a whole step of training,
from rows to parameters.

A contender's step is in two parts. `draw` draws the numbers of the records that take part, as that contender
does it, out of a dataset in memory; `update` takes rows and changes the parameters: forward, backward,
clipping, noise, division by the expected batch size, SGD.

    plain              a shuffled batch, PyTorch's backward pass, torch.optim.SGD psgrad             Poisson
    sampling and noise by its default generator (AES in counter mode, keyed by the operating system) Opacus
    hooks       `GradSampleModule`, a formula a layer type; Poisson sampling and noise by PyTorch's generator
    (its secure mode needs Opacus functorch   torchcsprng, which there is for no current PyTorch). functorch:
    torch.func's gradient of each layer. Opacus ghost       `GradSampleModuleFastGradientClipping`: norms
    first, then a second backward pass

Opacus is imported where it takes part, and is not needed otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from contenders import sample_losses
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.privacy.batches import GradientSource, batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.step import PrivateTraining, private_sum
from psgrad.engine.privacy.sum_programs import SumPrograms


@dataclass(frozen=True)
class Training:
    """What is trained and how: the same for everybody.

    Attributes:
        model: as it is before the first step; everybody trains a copy.
        records: how many the dataset has.
        sample_rate: the chance of each to be in a batch.
        bound: the norm that each record's gradient is clipped to.
        noise_multiplier: the noise on the sum of gradients has this many times the bound as its standard
            deviation.
        learning_rate, momentum: of torch.optim.SGD.
    """

    model: nn.Module
    records: int
    sample_rate: float
    bound: float
    noise_multiplier: float
    learning_rate: float = 1e-3
    momentum: float = 0.0

    @property
    def expected_batch_size(self) -> int:
        return round(self.records * self.sample_rate)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum)


@dataclass(frozen=True)
class Step:
    """draw() -> record numbers; update(inputs, target); parameters as they are now, in the order of the
    model's own.
    """

    draw: Callable[[], Tensor]
    update: Callable[[Tensor, Tensor], Any]
    parameters: list[Tensor]

    def forget(self) -> None:
        """What a step leaves beside the parameters is dropped, so that the next one's memory is counted from
        nothing.
        """
        for parameter in self.parameters:
            parameter.grad = None


def plain(training: Training) -> Step:
    """A step without privacy."""
    model = copy.deepcopy(training.model).train()
    optimizer = training.optimizer(model.parameters())

    def update(inputs: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        sample_losses(model(inputs), target).mean().backward()
        optimizer.step()

    def draw() -> Tensor:
        return torch.randint(training.records, (training.expected_batch_size,))

    return Step(draw, update, list(model.parameters()))


def psgrad(training: Training) -> Step:
    model = copy.deepcopy(training.model).train()
    objective = Objective(model, F.cross_entropy)
    parameters = dict(model.named_parameters())
    generator = make_generator()
    sampling = Sampling("poisson", sample_rate=training.sample_rate)
    clipping, noise = Clipping.flat(parameters, training.bound), Noise(training.noise_multiplier)
    private = PrivateTraining(
        parameters,
        _no_rows,
        training.records,
        clipping=clipping,
        noise=noise,
        sampling=sampling,
        relation="add_or_remove_one",
        expected_batch_size=training.expected_batch_size,
        optimizer=training.optimizer(parameters.values()),
        generator=generator,
    )

    loss, params = objective.loss, objective.params
    programs, coins = SumPrograms(), Coins(generator)

    def update(inputs: Tensor, target: Tensor) -> None:
        options = {"has_aux": True, "coins": coins, "programs": programs}
        source = batch_source(loss, params, (inputs,), target, **options)
        private.update(private_sum(source, clipping, noise, "add_or_remove_one", generator))

    return Step(
        lambda: torch.from_numpy(sampling.draw(training.records, generator)),
        update,
        list(parameters.values()),
    )


def _no_rows(numbers: np.ndarray) -> GradientSource:
    """Rows are taken outside, the same for everybody."""
    raise NotImplementedError


def opacus(mode: str) -> Callable[[Training], Step]:
    """`hooks` has a formula a layer type, `functorch` takes torch.func's gradient of each layer."""

    def build(training: Training) -> Step:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        module = GradSampleModule(copy.deepcopy(training.model).train(), force_functorch=mode == "functorch")
        optimizer = DPOptimizer(
            training.optimizer(module.parameters()),
            noise_multiplier=training.noise_multiplier,
            max_grad_norm=training.bound,
            expected_batch_size=training.expected_batch_size,
        )

        def update(inputs: Tensor, target: Tensor) -> None:
            optimizer.zero_grad(set_to_none=True)
            sample_losses(module(inputs), target).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return Step(_poisson(training), update, list(module.parameters()))

    return build


def opacus_ghost(training: Training) -> Step:
    """Norms from activations and cotangents where a layer type has a formula for it; the clipped sum by a
    second backward pass.
    """
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    class Criterion:
        reduction = "mean"  # DPLossFastGradientClipping sets it to "none" around the call

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            return sample_losses(output, target)

    module = GradSampleModuleFastGradientClipping(
        copy.deepcopy(training.model).train(), max_grad_norm=training.bound
    )
    optimizer = DPOptimizerFastGradientClipping(
        training.optimizer(module.parameters()),
        noise_multiplier=training.noise_multiplier,
        max_grad_norm=training.bound,
        expected_batch_size=training.expected_batch_size,
    )
    criterion = DPLossFastGradientClipping(module, optimizer, Criterion(), "mean")

    def update(inputs: Tensor, target: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(module(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Step(_poisson(training), update, list(module.parameters()))


def _poisson(training: Training) -> Callable[[], Tensor]:
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    sampler = UniformWithReplacementSampler(num_samples=training.records, sample_rate=training.sample_rate)
    return lambda: torch.tensor(next(iter(sampler)), dtype=torch.long)


RIVALS: dict[str, Callable[[Training], Step]] = {
    "Opacus hooks": opacus("hooks"),
    "Opacus functorch": opacus("functorch"),
    "Opacus ghost": opacus_ghost,
}
