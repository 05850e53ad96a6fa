"""What is differentiated of a program, each by an oracle and by the transforms under test. The oracle is
torch.autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from psgrad.engine.transforms import grad_and_value, jvp, vjp
from tests.engine.transforms.operators import Program
from tests.seeds import set_seed

Tensors = Sequence[Tensor]


class Answer(NamedTuple):
    """The results of a program, and derivatives in given directions."""

    values: tuple[Tensor, ...]
    derivatives: tuple[Tensor, ...]


class Derivative(NamedTuple):
    """One kind of derivative: the directions it needs, the oracle and the transforms, each `(program,
    tensors, directions)`.
    """

    directions: Callable[[Program], Tensors]
    oracle: Callable[[Program, Tensors, Tensors], Answer]
    ours: Callable[[Program, Tensors, Tensors], Answer]


def _like(tensors: Tensors, seed: int) -> list[Tensor]:
    set_seed(seed)
    return [torch.randn_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def _seeds(program: Program) -> list[Tensor]:
    """Cotangents of the differentiable results."""
    return _like([program.results[i] for i in program.tracked], 1)


def _tangents(program: Program) -> list[Tensor]:
    """Directions for the differentiable tensors."""
    return _like(program.leaves(program.tensors), 2)


def _fresh(program: Program, tensors: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Copies, and those of them that autograd follows."""
    given = [tensor.detach().clone() for tensor in tensors]
    return given, [leaf.requires_grad_() for leaf in program.leaves(given)]


def _tracked(program: Program, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(values[i] for i in program.tracked)


def _detached(values: Tensors) -> tuple[Tensor, ...]:
    return tuple(value.detach() for value in values)


# -- vjp -----------------------------------------------------------------------------------------------------


def _pull_by_autograd(program: Program, tensors: Tensors, seeds: Tensors) -> Answer:
    given, leaves = _fresh(program, tensors)
    set_seed(0)
    values = program(*given)
    result: Tensors = ()
    if program.tracked:
        result = torch.autograd.grad(_tracked(program, values), leaves, seeds, materialize_grads=True)
    return Answer(_detached(values), tuple(g.to_dense() for g in result))


def _pull_by_psgrad(program: Program, tensors: Tensors, seeds: Tensors) -> Answer:
    def function(*leaves: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        values = program(*program.with_leaves(tensors, leaves))
        return _tracked(program, values), [
            value for i, value in enumerate(values) if i not in program.tracked
        ]

    results, pull, constants = vjp(function, *program.leaves(tensors), has_aux=True)
    return Answer(_merged(program, results, constants), pull(tuple(seeds)) if program.tracked else ())


def _merged(program: Program, results: Tensors, constants: Tensors) -> tuple[Tensor, ...]:
    """Differentiable and other results in their order."""
    both = iter(results), iter(constants)
    return tuple(next(both[0] if i in program.tracked else both[1]) for i in range(len(program.results)))


PULL = Derivative(_seeds, _pull_by_autograd, _pull_by_psgrad)

# -- grad of a fixed projection of the results ---------------------------------------------------------------


def _projection(program: Program) -> list[Tensor]:
    wide = [
        program.results[i].to(torch.complex128 if program.results[i].is_complex() else torch.float64)
        for i in program.tracked
    ]
    return _like(wide, 3)


def _projected(values: Tensors, projection: Tensors) -> Tensor:
    products = [(value * direction).sum() for value, direction in zip(values, projection, strict=True)]
    return torch.stack([product.real if product.is_complex() else product for product in products]).sum()


def _gradient_by_autograd(program: Program, tensors: Tensors, projection: Tensors) -> Answer:
    given, leaves = _fresh(program, tensors)
    set_seed(0)
    value = _projected(_tracked(program, program(*given)), projection)
    result = torch.autograd.grad(value, leaves, materialize_grads=True)
    return Answer((value.detach(),), tuple(g.to_dense() for g in result))


def _gradient_by_psgrad(program: Program, tensors: Tensors, projection: Tensors) -> Answer:
    def function(*leaves: Tensor) -> Tensor:
        return _projected(_tracked(program, program(*program.with_leaves(tensors, leaves))), projection)

    leaves = program.leaves(tensors)
    gradients, value = grad_and_value(function, argnums=tuple(range(len(leaves))))(*leaves)
    return Answer((value,), gradients)


GRADIENT = Derivative(_projection, _gradient_by_autograd, _gradient_by_psgrad)

# -- jvp -----------------------------------------------------------------------------------------------------


def _push_by_autograd(program: Program, tensors: Tensors, tangents: Tensors) -> Answer:
    """By dual numbers where PyTorch has them for the operator, else by its second derivative, else by the
    rows of the Jacobian.
    """
    for way in (_push_by_duals, _push_by_pulling_twice) if program.has_duals else ():
        with suppress(NotImplementedError, RuntimeError):
            return way(program, tensors, tangents)
    return _push_by_rows(program, tensors, tangents)


def _push_by_duals(program: Program, tensors: Tensors, tangents: Tensors) -> Answer:
    given = [tensor.detach().clone() for tensor in tensors]
    set_seed(0)
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(leaf, tangent)
            for leaf, tangent in zip(program.leaves(given), tangents, strict=True)
        ]
        values = [forward_ad.unpack_dual(value) for value in program(*program.with_leaves(given, duals))]
        pushed = [torch.zeros_like(dual.primal) if dual.tangent is None else dual.tangent for dual in values]
        return Answer(tuple(dual.primal for dual in values), _tracked(program, pushed))


def _push_by_pulling_twice(program: Program, tensors: Tensors, tangents: Tensors) -> Answer:
    """The vjp is linear in its seeds, and its transpose there is the jvp."""
    given, leaves = _fresh(program, tensors)
    set_seed(0)
    values = program(*given)
    seeds = [torch.zeros_like(value, requires_grad=True) for value in _tracked(program, values)]
    pulled = torch.autograd.grad(
        _tracked(program, values), leaves, seeds, create_graph=True, materialize_grads=True
    )
    moved = [(g, tangent) for g, tangent in zip(pulled, tangents, strict=True) if g.requires_grad]
    result = torch.autograd.grad(
        [g for g, _ in moved], seeds, [tangent for _, tangent in moved], materialize_grads=True
    )
    return Answer(_detached(values), result)


def _push_by_rows(program: Program, tensors: Tensors, tangents: Tensors) -> Answer:
    """Each element's tangent is the product of its gradient and the tangents of the differentiable
    tensors.
    """
    given, leaves = _fresh(program, tensors)
    set_seed(0)
    values = program(*given)

    def product(value: Tensor, place: int, unit: complex) -> Tensor:
        seed = torch.zeros_like(value, memory_format=torch.contiguous_format)
        seed.view(-1)[place] = unit
        result = torch.autograd.grad(value, leaves, seed, retain_graph=True, materialize_grads=True)
        return torch.stack(
            [(g.conj() * tangent).sum().real for g, tangent in zip(result, tangents, strict=True)]
        ).sum()

    pushed = []
    for value in _tracked(program, values):
        tangent = torch.zeros_like(value, memory_format=torch.contiguous_format).detach()
        for place in range(value.numel()):
            tangent.view(-1)[place] = product(value, place, 1) + (
                1j * product(value, place, 1j) if value.is_complex() else 0
            )
        pushed.append(tangent)
    return Answer(_detached(values), tuple(pushed))


def _push_by_psgrad(program: Program, tensors: Tensors, tangents: Tensors) -> Answer:
    def function(*leaves: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        values = program(*program.with_leaves(tensors, leaves))
        return _tracked(program, values), [
            value for i, value in enumerate(values) if i not in program.tracked
        ]

    results, pushed, constants = jvp(function, tuple(program.leaves(tensors)), tuple(tangents), has_aux=True)
    return Answer(_merged(program, results, constants), tuple(pushed))


PUSH = Derivative(_tangents, _push_by_autograd, _push_by_psgrad)

# -- vjp of vjp ----------------------------------------------------------------------------------------------


def _seeds_and_probes(program: Program) -> list[Tensor]:
    """Cotangents of the results, and of the cotangents of the differentiable tensors."""
    return [*_seeds(program), *_tangents(program)]


def _pull_twice_by_autograd(program: Program, tensors: Tensors, directions: Tensors) -> Answer:
    """The cotangents as values, and theirs in turn: in the differentiable tensors and in the seeds."""
    given, leaves = _fresh(program, tensors)
    count = len(program.tracked)
    seeds, probes = (
        [seed.detach().clone().requires_grad_() for seed in directions[:count]],
        directions[count:],
    )
    set_seed(0)
    result = torch.autograd.grad(
        _tracked(program, program(*given)), leaves, seeds, create_graph=True, materialize_grads=True
    )
    smooth = [i for i, g in enumerate(result) if g.requires_grad]
    again = torch.autograd.grad(
        [result[i] for i in smooth], [*leaves, *seeds], [probes[i] for i in smooth], materialize_grads=True
    )
    return Answer(_detached(result), again)


def _cotangents(program: Program, tensors: Tensors) -> Callable[..., tuple[Tensor, ...]]:
    """The cotangents by our vjp, as a function of the differentiable tensors and the seeds."""
    count = len(program.differentiable)
    return lambda *both: (
        _pull_by_psgrad(program, program.with_leaves(tensors, both[:count]), both[count:]).derivatives
    )


def _pull_twice_by_psgrad(program: Program, tensors: Tensors, directions: Tensors) -> Answer:
    count = len(program.tracked)
    first, pull = vjp(_cotangents(program, tensors), *program.leaves(tensors), *directions[:count])
    return Answer(first, pull(tuple(directions[count:])))


PULL_TWICE = Derivative(_seeds_and_probes, _pull_twice_by_autograd, _pull_twice_by_psgrad)

# -- jvp of vjp ----------------------------------------------------------------------------------------------


def _seeds_and_both_tangents(program: Program) -> list[Tensor]:
    """Cotangents of the results, and tangents of the differentiable tensors and of those cotangents."""
    seeds = _seeds(program)
    return [*seeds, *_tangents(program), *_like(seeds, 4)]


def _push_pulled_by_autograd(program: Program, tensors: Tensors, directions: Tensors) -> Answer:
    """Second derivatives are symmetric: pulling the tangents back a second time gives what they move the
    cotangents by.
    """
    seeds, tangents, moves = _split(program, directions)
    values, again = _pull_twice_by_autograd(program, tensors, [*seeds, *tangents])
    by_seeds = _pull_by_autograd(program, tensors, moves).derivatives
    return Answer(
        values, tuple(bend + move for bend, move in zip(again[: len(tangents)], by_seeds, strict=True))
    )


def _push_pulled_by_psgrad(program: Program, tensors: Tensors, directions: Tensors) -> Answer:
    seeds, tangents, moves = _split(program, directions)
    primals = (*program.leaves(tensors), *seeds)
    return Answer(*jvp(_cotangents(program, tensors), primals, (*tangents, *moves)))


def _split(program: Program, directions: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    seeds, tangents = len(program.tracked), len(program.differentiable)
    return directions[:seeds], directions[seeds : seeds + tangents], directions[seeds + tangents :]


PUSH_PULLED = Derivative(_seeds_and_both_tangents, _push_pulled_by_autograd, _push_pulled_by_psgrad)
