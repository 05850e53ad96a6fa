"""Complex values: every operator of PyTorch's database that takes them, in complex128, against
torch.autograd; and what the database does not show, values that are conjugated or negated only by a mark
(`x.conj()`, `x.conj().imag`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from psgrad.engine.transforms import grad, vmap
from psgrad.engine.transforms.rules import registry
from tests.engine.transforms.loops import gradients_by_loop
from tests.engine.transforms.operators import MOST_SAMPLES, entries, few_or_all_samples
from tests.engine.transforms.other_rules import with_rules
from tests.engine.transforms.refused import AGREEING, REFUSED, UNJUDGED
from tests.engine.transforms.sweep import TWICE, Verdict, judge
from tools.operators_page import judged_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated operators, which are in the database too
DTYPE = torch.complex128
DATABASE = entries(DTYPE)

# Where conjugates go wrong, they do so here; the other rows are the same rules, put together in other ways.
WANTED = ["vjp", "vmap(vjp)", "jvp", "vjp of vjp"]

WITHOUT_ORACLE = {**UNJUDGED, "to_sparse": "PyTorch has no derivative of a complex sparse tensor"}
UNSTABLE = "where the arguments change by 1e-15, PyTorch's second derivative changes by 1e-9, ours by 1e-15"
WITHOUT_SECOND_ORACLE = dict.fromkeys(["linalg.householder_product", "svd_lowrank", "pca_lowrank"], UNSTABLE)


def verdicts(name: str, most: int = MOST_SAMPLES) -> dict[str, Verdict]:
    entry = DATABASE[name]
    rows = [
        row
        for row in judged_rows(name, entry)
        if row in WANTED and not (row in TWICE and name in WITHOUT_SECOND_ORACLE)
    ]
    return judge(entry, rows, equal_samples=name in AGREEING.split(), dtype=DTYPE, most=most)


@pytest.mark.every(6)
@few_or_all_samples
@pytest.mark.parametrize("name", [name for name in DATABASE if name not in WITHOUT_ORACLE])
def test_complex_operators_right_or_refused_as_listed(name: str, most: int) -> None:
    result = verdicts(name, most)
    assert [what for verdict in result.values() for what in verdict.wrong] == []
    words = REFUSED[name].words.split() if name in REFUSED else []
    refusals = [refusal for verdict in result.values() for refusal in verdict.refusals]
    assert [refusal for refusal in refusals if not any(word in refusal for word in words)] == []


def test_complex_checker_notices_missing_conjugate(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.sin.default
    wrong = registry.DerivativeRule({0: lambda out, x: lambda g: g * torch.cos(x)})
    with_rules(monkeypatch, op, derivative=wrong)
    assert [row for row, verdict in verdicts("sin").items() if not verdict.wrong] == []


# -- marks ---------------------------------------------------------------------------------------------------


def as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


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
@pytest.mark.parametrize(
    "given", [lambda z: z, lambda z: z.conj(), lambda z: z.mH], ids=["plain", "conjugate", "adjoint"]
)
def test_conjugate_bit_resolved(
    function: Callable[[Tensor], Tensor], given: Callable[[Tensor], Tensor]
) -> None:
    samples = given(draws(3, 2, 2))
    values = torch.stack([function(sample) for sample in samples])
    torch.testing.assert_close(vmap(function)(samples), values)

    def loss(z: Tensor) -> Tensor:
        return as_real(function(z)).pow(2).sum()

    torch.testing.assert_close(vmap(grad(loss))(samples), gradients_by_loop(loss, samples)[0])


def test_negative_bit_resolved() -> None:
    x = draws(3, 2).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(vmap(lambda row: row * 2)(x), x * 2)
    torch.testing.assert_close(vmap(grad(lambda row: (row**3).sum()))(x), 3 * x**2)
    torch.testing.assert_close(vmap(lambda row, other: row * other)(x, x.resolve_neg()), x * x)


def test_conjugate_bit_of_constants_resolved() -> None:
    """PyTorch runs the operators of a constant inside our interpreter, where marks would be passed over."""
    constant, x = draws(2, 2), torch.randn(2, 2, dtype=torch.float64)
    expected = torch.linalg.pinv(constant).abs().sum()
    torch.testing.assert_close(
        grad(lambda x: (torch.linalg.pinv(constant).abs().sum() * x).sum())(x), expected.expand(2, 2)
    )


@pytest.mark.parametrize(
    "part",
    [torch.conj, torch.real, torch.imag, torch.view_as_real, lambda z: torch.view_as_real(z).select(-1, 1)],
)
def test_complex_write_through_real_or_imaginary_part(part: Callable[[Tensor], Tensor]) -> None:
    def through(z: Tensor) -> Tensor:
        z = z * 1
        other = z[0]
        part(z).mul_(torch.arange(1.0, 3.0, dtype=torch.float64).sum())
        return torch.cat([z.reshape(-1), other.reshape(-1)])

    samples = draws(3, 2, 2)
    torch.testing.assert_close(vmap(through)(samples), torch.stack([through(row) for row in samples]))

    def loss(z: Tensor) -> Tensor:
        return as_real(through(z)).pow(3).sum()

    torch.testing.assert_close(vmap(grad(loss))(samples), gradients_by_loop(loss, samples)[0])


def test_complex_derivatives_at_origin_are_zero() -> None:
    zero = torch.zeros(2, dtype=DTYPE)
    for function in (torch.abs, torch.angle, lambda z: torch.sgn(z).real):
        assert torch.equal(grad(lambda z, function=function: function(z).sum())(zero), zero)
