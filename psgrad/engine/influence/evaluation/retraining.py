"""Trainers of an evaluation, and the measurements of retrained models, which are stored batch by batch so
that an interrupted evaluation goes on.

`EnsembleTrainer` trains many small models at once: weights stacked, one vmapped gradient step for all. Each
model has its own rows, initial weights and shuffles, all by its seed: apart from rounding, the result does
not depend on the others. Dropout alone draws for all at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from psgrad.engine.execution.objective import Criterion
from psgrad.engine.execution.ranks import Arrays, OneProcess, Processes, in_turn
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Members, Recipe
from psgrad.engine.influence.evaluation.newton import minimise
from psgrad.engine.transforms import capture, functional_call, grad_and_value, stack_module_state, vmap
from psgrad.engine.transforms.private_torch import BatchNormBase
from psgrad.errors import InfluenceError, ModelError

Array = np.ndarray[Any, Any]
# From this many steps on, capturing one and replaying it saves time. Measured on a small network.
_CAPTURED_FROM = 16
Fresh = Callable[[int], nn.Module]


Trainer = Callable[[Sequence[Job]], Members]


@dataclass(frozen=True)
class EnsembleTrainer:
    """The built-in trainer.

    fresh: seed to a model with new weights, on the device and in the type to train in. rows: the training
    set. criterion: the loss of one sample. recipe: how.
    """

    fresh: Fresh
    rows: LoadedRows
    criterion: Criterion
    recipe: Recipe

    def __call__(self, jobs: Sequence[Job]) -> Members:
        """The trained models, in the order of the jobs.

        Raises InfluenceError where a model diverges, or has no minimum for newton; ModelError for layers that
        see a whole batch.
        """
        size = self.recipe.together
        alike: dict[int, list[int]] = {}
        for number, job in enumerate(jobs):
            alike.setdefault(self.recipe.alike(len(job.rows)), []).append(number)
        groups = [
            numbers[start : start + size]
            for numbers in alike.values()
            for start in range(0, len(numbers), size)
        ]
        parts = [self._trained([jobs[number] for number in group]) for group in groups]
        order = torch.as_tensor(np.argsort(np.concatenate(groups)))
        state = {name: torch.cat([part.state[name] for part in parts])[order] for name in parts[0].state}
        return Members(parts[0].model, state, np.concatenate([part.loss for part in parts])[order.numpy()])

    def _trained(self, jobs: Sequence[Job]) -> Members:
        """Models that `Recipe.alike` says may be trained together."""
        models = [fresh_model(self.fresh, job.seed) for job in jobs]
        template = models[0]
        trained = {name for name, parameter in template.named_parameters() if parameter.requires_grad}
        parameters, buffers = stack_module_state(models)
        params = {name: value.detach() for name, value in parameters.items() if name in trained}
        fixed = {
            name: value.detach()
            for part in (parameters, buffers)
            for name, value in part.items()
            if name not in trained
        }
        if self.recipe.optimizer == "newton":
            template.eval()
            params, loss = minimise(template, params, fixed, self.rows, jobs, self.criterion, self.recipe)
        else:
            template.train()
            _require_independent(template)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(jobs[0].seed)
                loss = self._descend(template, params, fixed, jobs)
        template.eval()
        return Members(template, {**params, **fixed}, loss)

    def _descend(
        self,
        model: nn.Module,
        params: dict[str, torch.Tensor],
        fixed: dict[str, torch.Tensor],
        jobs: Sequence[Job],
    ) -> Array:
        """Steps on stacked parameters, in place; returns the mean loss of each model over its last epoch."""
        recipe, inputs, target = self.recipe, self.rows.inputs, self.rows.target
        device = inputs[0].device
        step = vmap(grad_and_value(self._loss(model)), in_dims=0, randomness="different")
        optimiser = recipe.optimiser(list(params.values()))
        shuffles = [np.random.default_rng([job.seed, 1]) for job in jobs]
        sizes = torch.tensor([len(job.rows) for job in jobs], device=device)
        longest = int(sizes.max())
        counts = torch.arange(longest, device=device) < sizes.unsqueeze(1)
        per_epoch = recipe.steps_per_epoch(longest)
        if recipe.epochs * per_epoch >= _CAPTURED_FROM:
            step = capture(step, say=lambda why: None)
        mean = torch.zeros(len(jobs), dtype=torch.float64)
        for epoch in range(recipe.epochs):
            shuffled = [random.permutation(job.rows) for random, job in zip(shuffles, jobs, strict=True)]
            # the last batch of a shorter job is filled up with its last row, which does not count there
            filled = [np.pad(rows, (0, longest - len(rows)), mode="edge") for rows in shuffled]
            order = torch.as_tensor(np.stack(filled)).to(device)
            total = torch.zeros(len(jobs), dtype=torch.float64, device=device)
            batches = zip(*(each.split(recipe.batch_size, dim=1) for each in (order, counts)), strict=True)
            for number, (batch, counted) in enumerate(batches):
                beside = {} if target is None else {"target": target[batch]}
                if not counted.all():
                    beside["shares"] = counted / counted.double().sum(1, keepdim=True)
                gradients, losses = step(params, fixed, tuple(x[batch] for x in inputs), beside)
                for group in optimiser.param_groups:
                    group["lr"] = recipe.rate(epoch * per_epoch + number, recipe.epochs * per_epoch)
                for name, parameter in params.items():
                    parameter.grad = gradients[name]
                optimiser.step()
                total += losses.double() * counted.sum(1)
            mean = (total / sizes).cpu()
            _require_finite(mean, params, jobs, epoch)
        for parameter in params.values():
            parameter.grad = None
        return mean.numpy()

    def _loss(self, model: nn.Module) -> Callable[..., torch.Tensor]:
        def mean_loss(
            params: Any,
            fixed: Any,
            inputs: tuple[torch.Tensor, ...],
            beside: dict[str, torch.Tensor],
        ) -> torch.Tensor:
            """beside: the target of each row, where there is one, and its share of the mean, where not all
            rows count.
            """
            target, shares = beside.get("target"), beside.get("shares")
            output = functional_call(model, {**params, **fixed}, inputs)
            losses = vmap(self.criterion, in_dims=(0, None if target is None else 0))(output, target)
            return losses.mean() if shares is None else (losses * shares.to(losses.dtype)).sum()

        return mean_loss


@dataclass(frozen=True)
class FunctionTrainer:
    """A trainer that hands each model to a function of the user's: (fresh model, inputs, target, seed) to the
    trained model.
    """

    fresh: Fresh
    rows: LoadedRows
    function: Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor | None, int], nn.Module]

    def __call__(self, jobs: Sequence[Job]) -> Members:
        """The trained models, in the order of the jobs."""
        return Members.of([self._trained(job) for job in jobs])

    def _trained(self, job: Job) -> nn.Module:
        taken = torch.as_tensor(job.rows, device=self.rows.inputs[0].device)
        target = None if self.rows.target is None else self.rows.target[taken]
        model = fresh_model(self.fresh, job.seed).train()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(job.seed)
            return self.function(model, tuple(x[taken] for x in self.rows.inputs), target, job.seed)


def fresh_model(fresh: Fresh, seed: int) -> nn.Module:
    """A model with the initial weights of this seed; the caller's random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return fresh(seed)


def _require_finite(
    mean: torch.Tensor, params: dict[str, torch.Tensor], jobs: Sequence[Job], epoch: int
) -> None:
    finite = mean.isfinite()
    for value in params.values():
        finite &= value.reshape(len(jobs), -1).isfinite().all(1).cpu()
    if bool(finite.all()):
        return
    lost = (~finite).nonzero().flatten().tolist()
    raise InfluenceError(
        f"the training of {jobs[lost[0]].name} diverged in epoch {epoch}: its loss or weights are not finite "
        f"({len(lost)} of the {len(jobs)} models that are trained together)",
        hint="set a smaller learning_rate in influence.evaluate.train",
    )


def _require_independent(model: nn.Module) -> None:
    mixing = next((name for name, layer in model.named_modules() if isinstance(layer, BatchNormBase)), None)
    if mixing is not None:
        raise ModelError(
            f"the built-in trainer can't train the layer {mixing or 'the model itself'}: batch normalisation"
            " makes every sample depend on its whole batch",
            hint="name a function of your own in influence.evaluate.train.function",
        )


class ResultStore(Protocol):
    """Storage of finished numbers from one run to the next."""

    def load(self, name: str) -> Array | None:
        """The array that was saved under this name; None where there is none, or it is damaged."""

    def save(self, name: str, values: Array) -> None:
        """Keep an array, durably."""


def measured(
    jobs: Sequence[Job],
    train: Trainer,
    measure: Callable[[Members], Array],
    store: ResultStore,
    fingerprint: str,
    together: int,
    tell: Callable[[int], None] = lambda _: None,
    processes: Processes | None = None,
) -> Array:
    """[jobs, m]: the result of `measure` for each trained model, [K, m] of K.

    Args:
        fingerprint: of all else that the numbers depend on: model, data, recipe, measurement. Numbers that
            were stored under another are not used.
        together: models to a batch, which is what an interruption can cost.
        tell: called with the number of models that are done, after each batch.
        processes: those that share the batches, which are smaller then where there would be too few; None for
            this one alone.
    """
    processes = OneProcess() if processes is None else processes
    parts = list[Array]()
    # Models of one size come together, whatever their order: a batch is trained at once.
    order = sorted(range(len(jobs)), key=lambda number: len(jobs[number].rows))
    together = max(1, min(together, -(-len(jobs) // processes.size)))

    def own() -> Iterator[Arrays]:
        for start in range(processes.rank * together, len(jobs), processes.size * together):
            batch = [jobs[number] for number in order[start : start + together]]
            name = _name(batch, fingerprint)
            stored = store.load(name)
            if stored is None or len(stored) != len(batch):
                stored = measure(train(batch))
                store.save(name, stored)
            yield {"measured": torch.from_numpy(stored)}

    for found in in_turn(processes, "retrained models", own()):
        parts.append(found["measured"].numpy())
        tell(sum(map(len, parts)))
    result: Array = np.concatenate(parts)[np.argsort(order)]
    return result


def _name(jobs: Sequence[Job], fingerprint: str) -> str:
    digest = hashlib.sha256(fingerprint.encode())
    for job in jobs:
        digest.update(f"{job.seed} {len(job.rows)} ".encode())
        digest.update(np.ascontiguousarray(job.rows, dtype=np.int64).tobytes())
    return digest.hexdigest()[:24]


def seed_of(base: int, *place: int) -> int:
    """A seed for each place (subset, repetition), all different ones for other bases."""
    return int(np.random.SeedSequence([base, *place]).generate_state(1)[0])
