"""Complex values: every operator of PyTorch's database that takes them, in complex128, against torch.autograd; and what the database
does not show, values that are conjugated or negated only by a mark (`x.conj()`, `x.conj().imag`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from psgrad.engine.transforms import grad, jvp, vjp, vmap
from psgrad.errors import TransformError
from tests.engine.transforms.operators import (
    UNINITIALISED,
    Program,
    TwoSamples,
    Verdict,
    agree,
    by_autograd,
    by_psgrad,
    twice_by_autograd,
    twice_by_psgrad,
    ways_to_map,
)
from tests.engine.transforms.refused import REFUSED, UNJUDGED

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated operators, which are in the database too
DTYPE, MOST_SAMPLES = torch.complex128, 2

DATABASE = {
    name: entry
    for entry in op_db
    for name in [f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name]
    if DTYPE in entry.supported_dtypes("cpu") and name not in UNJUDGED
}
WITHOUT_ORACLE = {"to_sparse": "PyTorch has no derivative of a complex sparse tensor"}
WITHOUT_SECOND_ORACLE = {
    "sparse.sampled_addmm": "PyTorch has no second derivative of it",
    "linalg.norm.subgradients_at_zero": "PyTorch says nan at a point where there is none; ours is zero",
    "linalg.householder_product": "PyTorch divides by what it has multiplied with: at numbers of 1e4 it keeps nine digits, not ten",
    "svd_lowrank": "a second derivative through three factorisations of nearly dependent columns keeps nine digits, not ten",
    "pca_lowrank": "as svd_lowrank",
}
# Casts, whose tangents and cotangents are rounded each in its own way.
ROUNDED = {"bfloat16", "float", "half", "cfloat", "chalf"}


def programs(entry: Any) -> Iterator[Program]:
    torch.manual_seed(0)
    for number, sample in enumerate(entry.sample_inputs("cpu", DTYPE, requires_grad=entry.supports_autograd)):
        if number == MOST_SAMPLES:
            return
        yield Program.of(entry, sample)


def as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def inner(xs: Any, ys: Any) -> Tensor:
    """The real inner product in which cotangents are dual to tangents."""
    return torch.stack([(as_real(x) * as_real(y)).sum() for x, y in zip(xs, ys, strict=True)]).sum()


def is_adjoint(program: Program, seeds: list[Tensor | None]) -> bool:
    """Whether the tangents of a program's results are dual to the cotangents of its arguments."""
    tracked = [i for i, seed in enumerate(seeds) if seed is not None]
    given = [seeds[i] for i in tracked]

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        tensors = [tensor.clone() for tensor in program.tensors]
        for i, leaf in zip(program.differentiable, leaves, strict=True):
            tensors[i] = leaf
        values = program(*tensors)
        return tuple(values[i] for i in tracked)

    primals = tuple(program.tensors[i] for i in program.differentiable)
    tangents = tuple(torch.randn_like(primal) for primal in primals)
    _, pushed = jvp(function, primals, tangents)
    pulled = vjp(function, *primals)[1](tuple(given))
    size = inner(pushed, pushed).sqrt() * inner(given, given).sqrt()
    return bool((inner(pushed, given) - inner(tangents, pulled)).abs() <= 1e-9 * size + 1e-12)


def judge(name: str, entry: Any) -> Verdict:
    verdict, defined = Verdict(), entry.name not in UNINITIALISED
    for number, program in enumerate(programs(entry)):
        expected, seeds = by_autograd(program, program.tensors, None)

        def alone(program: Program = program, expected: Any = expected, seeds: Any = seeds) -> bool:
            torch.manual_seed(0)
            found = by_psgrad(program, [tensor.clone() for tensor in program.tensors], seeds)
            return agree(found, expected, values_are_defined=defined)

        if not verdict.record(f"vjp of call {number}", alone):
            continue
        for where in ways_to_map(program):
            samples = TwoSamples.of(program, where)
            verdict.record(
                f"vmap {where} of the vjp of call {number}",
                lambda samples=samples: samples.confirms(samples.vmap_of_vjp(), values_are_defined=defined),
            )
        if any(seed is not None for seed in seeds):
            if name not in ROUNDED:
                verdict.record(f"jvp of call {number}", lambda program=program, seeds=seeds: is_adjoint(program, seeds))
            if entry.supports_gradgrad and name not in WITHOUT_SECOND_ORACLE:
                verdict.record(f"second vjp of call {number}", second(program, seeds))
    return verdict


def second(program: Program, seeds: list[Tensor | None]) -> Callable[[], bool]:
    expected, probes = twice_by_autograd(program, seeds, None)

    def check() -> bool:
        torch.manual_seed(0)
        return agree(twice_by_psgrad(program, program.tensors, seeds, probes), expected)

    return check


@pytest.mark.parametrize("name", [name for name in DATABASE if name not in WITHOUT_ORACLE])
def test_right_or_refused_by_name(name: str) -> None:
    verdict = judge(name, DATABASE[name])
    assert verdict.wrong == []
    words = REFUSED.get(name, "").split()
    assert [refusal for refusal in verdict.refusals if not any(word in refusal for word in words)] == []


def test_the_tables_speak_of_the_database() -> None:
    assert {*WITHOUT_ORACLE, *WITHOUT_SECOND_ORACLE, *ROUNDED} - set(DATABASE) == set()


def test_a_cotangent_that_is_not_conjugated_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from psgrad.engine.transforms.rules import registry

    op = torch.ops.aten.sin.default
    monkeypatch.setitem(registry._derivatives, op, registry.DerivativeRule({0: lambda out, x: lambda g: g * torch.cos(x)}))
    assert len(judge("sin", DATABASE["sin"]).wrong) > 0


# -- marks ------------------------------------------------------------------------------------------------------------------------


def draws(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z * 2,
        lambda z: z.conj() * 2,
        lambda z: torch.fft.fft(z.conj()),
        lambda z: torch.vdot(z[0], z[1]),
        lambda z: z.mH @ z,
        lambda z: z.conj().imag * 2,
        lambda z: z.conj().real + 1,
        lambda z: torch.view_as_real(z.conj().resolve_conj()) * 2,
        lambda z: z.conj()[0].exp(),
        lambda z: torch.linalg.pinv(z),
        lambda z: torch.cat([z.conj(), z]),
    ],
)
@pytest.mark.parametrize("given", [lambda z: z, lambda z: z.conj(), lambda z: z.mH], ids=["plain", "conjugate", "adjoint"])
def test_what_is_only_marked_is_carried_out(function: Callable[[Tensor], Tensor], given: Callable[[Tensor], Tensor]) -> None:
    samples = given(draws(3, 2, 2))
    values = torch.stack([function(sample) for sample in samples])
    torch.testing.assert_close(vmap(function)(samples), values)

    def loss(z: Tensor) -> Tensor:
        return as_real(function(z)).pow(2).sum()

    rows = []
    for sample in samples:
        leaf = sample.detach().clone().requires_grad_()
        rows.append(torch.autograd.grad(loss(leaf), leaf)[0])
    torch.testing.assert_close(vmap(grad(loss))(samples), torch.stack(rows))


def test_a_negative_that_is_only_marked_is_carried_out() -> None:
    x = draws(3, 2).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(vmap(lambda row: row * 2)(x), x * 2)
    torch.testing.assert_close(vmap(grad(lambda row: (row**3).sum()))(x), 3 * x**2)
    torch.testing.assert_close(vmap(lambda row, other: row * other)(x, x.resolve_neg()), x * x)


def test_constants_are_carried_out() -> None:
    """PyTorch runs the operators of a constant inside our interpreter, where marks would be passed over."""
    constant, x = draws(2, 2), torch.randn(2, 2, dtype=torch.float64)
    expected = torch.linalg.pinv(constant).abs().sum()
    torch.testing.assert_close(grad(lambda x: (torch.linalg.pinv(constant).abs().sum() * x).sum())(x), expected.expand(2, 2))


def test_a_write_through_a_conjugate_is_refused_or_seen() -> None:
    def through(z: Tensor) -> Tensor:
        z = z * 1
        z.conj().mul_(2j)
        return z

    z = draws(3, 2)
    torch.testing.assert_close(vmap(through)(z), torch.stack([through(row) for row in z]))
    with pytest.raises(TransformError, match="writes in place into a view"):
        grad(lambda z: through(z).abs().sum())(z)


def test_derivatives_at_the_origin_are_zero() -> None:
    zero = torch.zeros(2, dtype=DTYPE)
    for function in (torch.abs, torch.angle, lambda z: torch.sgn(z).real):
        assert torch.equal(grad(lambda z, function=function: function(z).sum())(zero), zero)
