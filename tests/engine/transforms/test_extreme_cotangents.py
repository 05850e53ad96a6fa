"""Cotangents that are infinite or NaN, through every operator of PyTorch's database, beside torch.autograd:
a rule selects where autograd selects, and multiplies where it multiplies.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from psgrad.errors import PsgradError
from tests.engine.transforms.derivatives import PULL, Derivative, _seeds
from tests.engine.transforms.operators import Program, entries, few_or_all_samples, programs
from tests.engine.transforms.refused import AGREEING, UNJUDGED, UNJUDGED_MAPPED, UNJUDGED_PULLED
from tests.engine.transforms.sweep import TwoSamples

DATABASE = {name: entry for name, entry in entries().items() if entry.supports_autograd}
TRIANGLES = "both take products of whole triangles, of different parts of the matrices"
AUTOGRAD_DIVIDES = "autograd divides in the kernel, and as we do where it keeps a graph"
TIES = "autograd counts the target's own value in a tie, also where it is not to be counted"
OTHERS = {
    **dict.fromkeys(("lu", "linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex", "ormqr"), TRIANGLES),
    **dict.fromkeys(("cumprod", "masked.cumprod", "prod", "masked.prod", "linalg.vander"), AUTOGRAD_DIVIDES),
    **dict.fromkeys(("linalg.det", "logdet", "linalg.householder_product"), "both are right to rounding"),
    **dict.fromkeys(("svd_lowrank", "pca_lowrank"), "without a unique result for equal singular values"),
    **dict.fromkeys(
        (f"{op}_reduce.{kind}" for op in ("scatter", "index") for kind in ("amin", "amax")), TIES
    ),
    "polar": "autograd's derivative in a size of zero is zero, ours is that of the point's two coordinates",
}
NAMES = [name for name in DATABASE if name not in {*UNJUDGED, *UNJUDGED_MAPPED, *UNJUDGED_PULLED, *OTHERS}]
INF, NAN = math.inf, math.nan
# Numbers written over every fifth entry of a cotangent, from the first, second, ... on.
PATTERNS = {"mixed": (INF, None, NAN, -INF, None), "infinite": (INF,) * 5}


def _extreme_seeds(pattern: str) -> Derivative:
    def directions(program: Program) -> list[Tensor]:
        seeds = [seed.clone() for seed in _seeds(program)]
        for seed in seeds:
            for first, number in enumerate(PATTERNS[pattern]):
                if number is not None:
                    seed.view(-1)[first::5] = number
        return seeds

    return Derivative(directions, PULL.oracle, PULL.ours)


def _with_ties(program: Program) -> Program:
    """The program at whole numbers, of which many are equal and some are zero."""
    tensors = list(program.tensors)
    for place in program.differentiable:
        if tensors[place].is_floating_point():
            tensors[place] = tensors[place].round()
    return dataclasses.replace(program, tensors=tuple(tensors))


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Equal where autograd's is a number. Where it is infinite or NaN the order of its sums decides which of
    them.
    """
    finite = expected.isfinite()
    return bool((found.isfinite() == finite).all()) and torch.allclose(
        found[finite], expected[finite], 1e-7, 1e-9
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.every(2)
@few_or_all_samples
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", NAMES)
def test_operator_with_extreme_cotangents(name: str, pattern: str, most: int) -> None:
    derivative = _extreme_seeds(pattern)
    for given in programs(DATABASE[name], most=most):
        if "in place" in given.name or "written" in given.name or not given.tracked:
            continue
        for program in (given, _with_ties(given)):
            where = (0,) * len(program.tensors)
            try:
                samples = TwoSamples.of(program, derivative, where, equal=name in AGREEING.split())
            except RuntimeError:
                continue  # PyTorch refuses these numbers
            try:
                answers = samples.vmap(), samples.vjp_of_vmap()
            except PsgradError:
                continue
            for answer in answers:
                for place, expected in enumerate(samples.loop):
                    for found, theirs in zip(answer.derivatives, expected.derivatives, strict=True):
                        assert _alike(found[place], theirs), (program.name, found[place], theirs)
