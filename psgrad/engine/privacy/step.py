"""A private step: draw records, sum their clipped gradients, write the cost into the ledger, add noise,
update. And the optimiser of a config, by its name in torch.optim: it gets noisy sums only, so every optimiser
is post-processing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from psgrad.engine.privacy.accounting import StepEvent
from psgrad.engine.privacy.batches import ClippedSum, GradientSource, RecordColumns
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.sampling import Sampling
from psgrad.errors import ConfigError


@dataclass(frozen=True)
class NoisySum:
    """The released and the private results of one batch.

    Attributes:
        sums: name -> [*shape], the noisy sum of clipped gradients. Public, once it is paid for.
        sensitivity: how far one record can move the sum without noise, in L2.
        noise_std: the noise's standard deviation in every coordinate of the sum.
        records: norms, losses and clipping factors of the batch. NOT PRIVATE.
    """

    sums: dict[str, Tensor]
    sensitivity: float
    noise_std: float
    records: RecordColumns


def private_sum(
    source: GradientSource,
    clipping: Clipping,
    noise: Noise,
    relation: Relation,
    generator: Generator,
) -> NoisySum:
    """The clipped sum of the source's batch plus noise of standard deviation `noise.multiplier *
    clipping.sensitivity(relation)`.

    Nothing is paid for here: `PrivateTraining` has its ledger's line before the noise.
    """
    clipped = source(clipping)
    clipped = replace(clipped, sums=dict(clipped.sums))  # the source may keep its own
    return _noised(clipped, clipping, noise, relation, generator)


def _noised(
    clipped: ClippedSum, clipping: Clipping, noise: Noise, relation: Relation, generator: Generator
) -> NoisySum:
    """What is released of a clipped sum. Its tensors leave it one by one, so that each is freed when its
    noisy one is computed.
    """
    sensitivity = clipping.sensitivity(relation)
    sums: dict[str, Tensor] = {}
    for names in _pieces(clipped.sums):
        piece = {name: clipped.sums.pop(name) for name in names}
        sums |= noise.add(piece, clipping, relation, generator)
    return NoisySum(sums, sensitivity, noise.standard_deviation(sensitivity), clipped.records)


# Numbers that get their noise at a time: few enough that their noise and the sums without it, which are in
# memory together, add little to the peak; enough that the time of calls is negligible. A larger tensor is one
# piece.
_PIECE = 1 << 17


def _pieces(sums: Mapping[str, Tensor]) -> list[list[str]]:
    """The names in their order, in runs whose tensors have no more than `_PIECE` numbers together, or of a
    single larger tensor.
    """
    pieces: list[list[str]] = []
    numbers = 0
    for name, value in sums.items():
        numbers += value.numel()
        if not pieces or numbers > _PIECE:
            pieces.append([])
            numbers = value.numel()
        pieces[-1].append(name)
    return pieces


class PrivateTraining:
    """Steps of differentially private training: from a batch's gradients to the next weights.

    The noisy sum is divided by `expected_batch_size`, a public number, stored as the parameters' gradients,
    and the optimiser takes its step: what it computes from a private number (momentum, Adam's moments, weight
    decay) costs no privacy.

    Args:
        parameters: name -> the parameters to train, under the names that the sources' sums have. Nothing else
            changes.
        source: record numbers of a batch, sorted, to its gradients.
        records: how many records there are.
        optimizer: over these parameters and no others, from torch.optim.
        taken: steps that were taken before.

    Raises ConfigError if the optimiser has others, whose gradients would get no noise.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        source: Callable[[np.ndarray], GradientSource],
        records: int,
        *,
        clipping: Clipping,
        noise: Noise,
        sampling: Sampling,
        relation: Relation,
        expected_batch_size: float,
        optimizer: torch.optim.Optimizer,
        generator: Generator,
        taken: int = 0,
    ) -> None:
        _require_no_others(optimizer, parameters)
        self.parameters, self.source, self.records = dict(parameters), source, records
        self.clipping, self.noise, self.sampling, self.relation = clipping, noise, sampling, relation
        self.expected_batch_size, self.optimizer, self.generator = expected_batch_size, optimizer, generator
        self.taken = taken

    def event(self) -> StepEvent:
        """The cost of a step."""
        return StepEvent(self.noise.multiplier, self.sampling, self.relation)

    def draw(self) -> np.ndarray:
        """The numbers of the next step's records, sorted; possibly none."""
        return self.sampling.draw(self.records, self.generator)

    def clipped(self, records: np.ndarray) -> ClippedSum:
        """The sum of these records' clipped gradients. It is to be paid for before it gets noise."""
        return self.source(records)(self.clipping)

    def noised(self, clipped: ClippedSum) -> NoisySum:
        """The clipped sum with the step's noise. Its tensors are gone from `clipped` then."""
        return _noised(clipped, self.clipping, self.noise, self.relation, self.generator)

    def update(self, noisy: NoisySum) -> None:
        """The optimiser's step on the noisy sums, divided by the expected batch size. They are gone from
        `noisy` then, as they take as much memory as the parameters.
        """
        self.optimizer.zero_grad(set_to_none=True)  # a frozen parameter may have one from before
        for name, parameter in self.parameters.items():
            parameter.grad = noisy.sums.pop(name).div_(self.expected_batch_size).to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.taken += 1

    def step(
        self, pay: Callable[[StepEvent], None] = lambda _: None, records: np.ndarray | None = None
    ) -> NoisySum:
        """A whole step: draw, sum, pay, noise, update. An empty batch is a step like any other: noise alone.

        pay: called before anything is released: the place to write the ledger. records: that were drawn;
        None to draw them here.
        """
        clipped = self.clipped(self.draw() if records is None else records)
        pay(self.event())
        noisy = self.noised(clipped)
        self.update(noisy)
        return noisy


def _require_no_others(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ConfigError if the optimiser would change parameters without noise."""
    ours = {id(parameter) for parameter in parameters.values()}
    others = [
        value
        for group in optimizer.param_groups
        for value in group["params"]
        if value.requires_grad and id(value) not in ours
    ]
    if others:
        raise ConfigError(
            f"the optimiser has {len(others)} trainable parameters that are not among those of the private"
            " training: it would change them by gradients without noise",
            hint="make the optimiser of parameters.values(), after the others were frozen",
        )


def make_optimizer(
    name: str, kwargs: Mapping[str, Any], parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimiser over these parameters. Raises ConfigError for a name that torch.optim has not, and for
    arguments it does not take.
    """
    base = torch.optim.Optimizer
    kinds = {key: kind for key, kind in vars(torch.optim).items() if isinstance(kind, type)}
    names = sorted(key for key, kind in kinds.items() if issubclass(kind, base) and kind is not base)
    if name not in names:
        close = [other for other in names if other.lower() == name.lower()] or difflib.get_close_matches(
            name, names, n=1
        )
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"privacy.optimizer: torch.optim has no optimiser {name!r}{meant}; expected one of"
            f" {', '.join(names)}"
        )
    trained = list(parameters)
    try:
        if not _all_finite(kwargs):
            raise ValueError("a number is NaN or infinite")
        _rehearse(getattr(torch.optim, name), kwargs, trained)
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(trained, **kwargs)
    except Exception as error:  # arguments are checked in as many ways as there are optimisers
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"privacy.optimizer: {name} does not take {dict(kwargs)}: {first_line}",
            hint=f"correct privacy.optimizer.kwargs: the arguments of torch.optim.{name}, such as lr",
        ) from error
    return optimizer


def _all_finite(value: object) -> bool:
    """Whether no number in a value of a config is NaN or infinite: a ledger, which is JSON, could not hold
    it.
    """
    if isinstance(value, Mapping):
        return all(map(_all_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_all_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _rehearse(
    optimizer: type[torch.optim.Optimizer], kwargs: Mapping[str, Any], parameters: Iterable[nn.Parameter]
) -> None:
    """Take two steps on a zero for each kind of parameter: some arguments are checked only when a step is
    taken, which would be paid for then.
    """
    kinds = {(parameter.ndim, parameter.dtype, parameter.device) for parameter in parameters}
    zeros = [
        nn.Parameter(torch.zeros([1] * ndim, dtype=dtype, device=device)) for ndim, dtype, device in kinds
    ]
    tried = optimizer(zeros, **kwargs)
    for _ in range(2):
        for zero in zeros:
            zero.grad = torch.zeros_like(zero)
        tried.step()
