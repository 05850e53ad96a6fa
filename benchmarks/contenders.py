"""Who else computes per-sample gradients, each in the ways its own documentation recommends.

A contender's ways all take the same batch and return the same thing, whatever they do inside:

    norms          [n] clipped        a list in the order of the model's parameters: the sum over samples of
    the gradients, each times min(1, bound / norm) materialised   a list in that order: [n, *shape]

A call is what a training loop would do for one batch: forward, backward, and what follows; nothing is kept
from one call to the next. Opacus and BackPACK are imported where they take part, and are not needed
otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import (
    SquareNorms,
    per_sample_gradients,
    per_sample_square_norms,
    per_sample_weighted_sum,
)

TASKS = ("norms", "clipped", "materialised")
Way = Callable[[], Any]
# Samples at a time of torch.func's chunked ways; on a CPU the whole batch at once may not fit the caches.
CHUNK = 16


@dataclass(frozen=True)
class Problem:
    """A network and its batch, and the norm that gradients are clipped to."""

    model: nn.Module
    inputs: Tensor
    target: Tensor
    bound: float

    def copied(self) -> nn.Module:
        """The network for a contender that puts hooks on it."""
        return copy.deepcopy(self.model).train()


def sample_losses(output: Tensor, target: Tensor) -> Tensor:
    """[n]: the mean over a sample's positions of the cross-entropy; output [n, classes] or [n, t,
    classes].
    """
    losses = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")
    return losses.reshape(len(output), -1).mean(1)


def plain(problem: Problem) -> Way:
    """Forward and backward of the batch's mean loss: what everything is held against."""
    model = problem.model

    def run() -> list[Tensor | None]:
        model.zero_grad()
        sample_losses(model(problem.inputs), problem.target).mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    return run


def psgrad(problem: Problem) -> dict[str, Way]:
    objective = Objective(problem.model, F.cross_entropy)

    def norms() -> Tensor:
        found = per_sample_square_norms(
            objective.loss, objective.params, (problem.inputs,), problem.target, has_aux=True
        )
        return found.square_norms().sqrt()

    def clip(norms: SquareNorms) -> Tensor:
        return (problem.bound / norms.square_norms().sqrt()).clamp(max=1)

    def clipped() -> list[Tensor]:
        arguments = (objective.loss, objective.params, (problem.inputs,), problem.target)
        return list(per_sample_weighted_sum(*arguments, weights=clip, has_aux=True).sums.values())

    def materialised() -> list[Tensor]:
        found = per_sample_gradients(
            objective.loss, objective.params, (problem.inputs,), problem.target, has_aux=True
        )
        return list(found.materialise().values())

    return {"norms": norms, "clipped": clipped, "materialised": materialised}


# -- what is common to those that materialise ----------------------------------------------------------------


def norms_of(gradients: list[Tensor]) -> Tensor:
    """[n]"""
    return torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)


def clipped_sum(gradients: list[Tensor], bound: float) -> list[Tensor]:
    weights = (bound / norms_of(gradients)).clamp(max=1)
    return [torch.tensordot(weights, gradient, 1) for gradient in gradients]


# -- torch.func ----------------------------------------------------------------------------------------------


def torch_func(problem: Problem) -> dict[str, Way]:
    """vmap(grad) over the whole batch."""
    parameters, gradient = _functional(problem)

    def materialised() -> list[Tensor]:
        return list(
            torch.func.vmap(gradient, in_dims=(None, 0, 0))(
                parameters, problem.inputs, problem.target
            ).values()
        )

    return {
        "norms": lambda: norms_of(materialised()),
        "clipped": lambda: clipped_sum(materialised(), problem.bound),
        "materialised": materialised,
    }


def torch_func_in_chunks(problem: Problem) -> dict[str, Way]:
    """vmap(grad) over a few samples at a time, which are reduced before the next ones come."""
    parameters, gradient = _functional(problem)
    n = len(problem.inputs)

    def chunks() -> Iterator[list[Tensor]]:
        for start in range(0, n, CHUNK):
            part = slice(start, start + CHUNK)
            yield list(
                torch.func.vmap(gradient, in_dims=(None, 0, 0))(
                    parameters, problem.inputs[part], problem.target[part]
                ).values()
            )

    def clipped() -> list[Tensor]:
        sums: list[Tensor] = []
        for gradients in chunks():
            part = clipped_sum(gradients, problem.bound)
            sums = [total.add_(more) for total, more in zip(sums, part, strict=True)] if sums else part
        return sums

    return {"norms": lambda: torch.cat([norms_of(gradients) for gradients in chunks()]), "clipped": clipped}


def _functional(problem: Problem) -> tuple[dict[str, Tensor], Callable[..., dict[str, Tensor]]]:
    parameters = {name: parameter.detach() for name, parameter in problem.model.named_parameters()}

    def loss_of_one(parameters: dict[str, Tensor], inputs: Tensor, target: Tensor) -> Tensor:
        output = torch.func.functional_call(problem.model, parameters, (inputs[None],))
        return F.cross_entropy(output[0], target)

    return parameters, torch.func.grad(loss_of_one)


# -- Opacus --------------------------------------------------------------------------------------------------


def opacus(mode: str) -> Callable[[Problem], dict[str, Way]]:
    """`GradSampleModule`: `hooks` has a formula a layer type, `functorch` takes torch.func's gradient of each
    layer.
    """

    def ways(problem: Problem) -> dict[str, Way]:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        module = GradSampleModule(problem.copied(), loss_reduction="sum", force_functorch=mode == "functorch")
        parameters = list(module.parameters())
        optimizer = DPOptimizer(
            torch.optim.SGD(parameters, lr=0.0),
            noise_multiplier=0.0,
            max_grad_norm=problem.bound,
            expected_batch_size=len(problem.inputs),
            loss_reduction="sum",
        )

        def backward() -> None:
            sample_losses(module(problem.inputs), problem.target).sum().backward()

        def taken(name: str) -> list[Tensor]:
            """The results, off the parameters, which keep nothing."""
            found = [getattr(parameter, name) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = parameter.grad_sample = parameter.summed_grad = None
            return found

        def materialised() -> list[Tensor]:
            backward()
            return taken("grad_sample")

        def clipped() -> list[Tensor]:
            backward()
            optimizer.clip_and_accumulate()
            return taken("summed_grad")

        return {"norms": lambda: norms_of(materialised()), "clipped": clipped, "materialised": materialised}

    return ways


def opacus_ghost(problem: Problem) -> dict[str, Way]:
    """Norms from activations and cotangents where a layer type has a formula for it; the clipped sum by a
    second backward pass.
    """
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    class Criterion:
        reduction = "sum"  # DPLossFastGradientClipping sets it to "none" around the call

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            return sample_losses(output, target)

    module = GradSampleModuleFastGradientClipping(
        problem.copied(), loss_reduction="sum", max_grad_norm=problem.bound
    )
    parameters = list(module.parameters())
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(parameters, lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=problem.bound,
        expected_batch_size=len(problem.inputs),
        loss_reduction="sum",
    )
    criterion = DPLossFastGradientClipping(module, optimizer, Criterion(), "sum")

    def forget() -> None:
        for parameter in parameters:
            parameter.grad = parameter.grad_sample = None

    def norms() -> Tensor:
        sample_losses(module(problem.inputs), problem.target).sum().backward()
        forget()
        return module.get_norm_sample()

    def clipped() -> list[Tensor]:
        criterion(module(problem.inputs), problem.target).backward()
        sums = [parameter.grad for parameter in parameters]
        forget()
        return sums

    return {"norms": norms, "clipped": clipped}


# -- BackPACK ------------------------------------------------------------------------------------------------


def backpack_gradients(problem: Problem) -> dict[str, Way]:
    """`BatchGrad`: every per-sample gradient."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    model = extend(problem.copied())
    parameters = list(model.parameters())

    def materialised() -> list[Tensor]:
        with backpack(BatchGrad()):
            sample_losses(model(problem.inputs), problem.target).sum().backward()
        found = [parameter.grad_batch for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
            del parameter.grad_batch
        return found

    return {
        "norms": lambda: norms_of(materialised()),
        "clipped": lambda: clipped_sum(materialised(), problem.bound),
        "materialised": materialised,
    }


def backpack_norms(problem: Problem) -> dict[str, Way]:
    """`BatchL2Grad`: squared norms without the gradients where its formula allows; the clipped sum by a
    second backward pass.
    """
    from backpack import backpack, extend
    from backpack.extensions import BatchL2Grad

    model = extend(problem.copied())
    parameters = list(model.parameters())

    def losses_and_norms(*, again: bool) -> tuple[Tensor, Tensor]:
        with backpack(BatchL2Grad(), retain_graph=again):
            losses = sample_losses(model(problem.inputs), problem.target)
            losses.sum().backward(retain_graph=again)
        square = torch.stack([parameter.batch_l2 for parameter in parameters]).sum(0)
        for parameter in parameters:
            parameter.grad = None
            del parameter.batch_l2
        return losses, square.sqrt()

    def clipped() -> list[Tensor]:
        losses, norms = losses_and_norms(again=True)
        ((problem.bound / norms).clamp(max=1) * losses).sum().backward()
        sums = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return sums

    return {"norms": lambda: losses_and_norms(again=False)[1], "clipped": clipped}


RIVALS: dict[str, Callable[[Problem], dict[str, Way]]] = {
    "torch.func": torch_func,
    "torch.func, chunks": torch_func_in_chunks,
    "Opacus hooks": opacus("hooks"),
    "Opacus functorch": opacus("functorch"),
    "Opacus ghost": opacus_ghost,
    "BackPACK BatchGrad": backpack_gradients,
    "BackPACK BatchL2Grad": backpack_norms,
}
