"""What the oracle of random programs (tests/random_programs) takes for rounding, or for a convention, and
what it notices beside that.
"""

from __future__ import annotations

import pytest
import torch

from psgrad.engine.transforms.rules import registry
from tests.random_programs.checking import Outcome, check
from tests.random_programs.programs import Argument, Program, Statement

aten = torch.ops.aten


def program(
    lines: tuple[str, ...],
    mode: str,
    extreme: bool = False,
    edit: str = "",
    dtype: torch.dtype = torch.float64,
) -> Program:
    """The last line's value, of a0 [3, 2, 3] and a1 [3], which are differentiated; a0 has a sample axis."""
    make = "torch.randn({shape}, dtype=torch.float64)"
    arguments = (
        Argument(
            "a0",
            (2, 3),
            make,
            (edit,) if edit else (),
            batched=True,
            differentiated=mode != "per sample",
            seed=1,
        ),
        Argument("a1", (3,), make, differentiated=True, seed=2),
    )
    statements = tuple(Statement(f"t{i} = {text}", f"t{i}") for i, text in enumerate(lines))
    return Program(arguments, statements, (statements[-1].target,), 3, dtype, mode, extreme)


PADDED = "F.embedding(torch.tensor([0, 1]), a0 * a1, padding_idx=0)"
NOT_WRONG = {
    "the tangent of a padding row, beside an operator without forward mode": program(
        ("F.embedding_bag(torch.tensor([[0, 1]]), a0, mode='max')", PADDED), "vmap(jvp)"
    ),
    "the Jacobian of a slope of NaN, beside an operator without forward mode": program(
        (
            "a0.rsqrt()",
            "torch.cat([t0.flatten(), F.embedding_bag(torch.tensor([[0, 1]]), a0, mode='max')[0]])",
        ),
        "vmap(jacfwd)",
        extreme=True,
    ),
    "the Jacobian of a padding row": program(
        ("a0.index_reduce(0, torch.tensor([0, 1]), a0, 'prod')", PADDED), "vmap(jacfwd)"
    ),
    "a branch on the deviation of equal numbers": program(
        ("a0[0]", "t0.std(-1, correction=0)", "torch.where(t1 > 0, a0 * 2, a0.sin())"),
        "vmap(grad)",
        edit="{name}[...] = 0.8",
    ),
    "groups of one number, forward": program(
        ("F.group_norm(a0, 3, a1, a1)",), "vmap(jvp)", dtype=torch.float32
    ),
    "groups of one number, second derivative": program(
        ("F.group_norm(a0, 3)",),
        "vmap(grad(grad))",
        extreme=True,
        edit="{name}[0, 0, 1] = 1e30",
        dtype=torch.float32,
    ),
    "layers of one number, of halves": program(
        ("F.layer_norm(a1[:2, None], (1,), a0[0, :1])",), "grad(vmap)", dtype=torch.bfloat16
    ),
    "the sign of NaN": program(
        ("F.cross_entropy(a0, torch.tensor([0, 1]), a1.abs(), reduction='sum')", "a0.sin().copysign(t0)"),
        "vmap",
        extreme=True,
        edit="{name}[1, 0, 2] = float('nan')",
    ),
}


@pytest.mark.parametrize("name", NOT_WRONG)
def test_oracle_knows_rounding_and_conventions(name: str) -> None:
    assert check(NOT_WRONG[name]) == Outcome("equal")


def plant(monkeypatch: pytest.MonkeyPatch, op: object, factor: float) -> None:
    """The derivatives of an operator, off by a factor."""
    kept = registry._derivatives[op]  # type: ignore[index]

    def off(make: object) -> object:
        def maker(out: object, *args: object, **kwargs: object) -> object:
            closure = make(out, *args, **kwargs)  # type: ignore[operator]
            return lambda g: result * factor if (result := closure(g)) is not None else None

        return maker

    vjp = {position: off(make) for position, make in kept.vjp.items()}
    monkeypatch.setitem(registry._derivatives, op, registry.DerivativeRule(vjp, kept.instead))  # type: ignore[arg-type,index]


PLANTED = {
    "layer_norm": (("F.layer_norm(a0, (3,), a1)",), aten.native_layer_norm.default),
    "std": (("a0 * a1", "t0.std(-1)"), aten.std.correction),
    "cumprod": (("(a0 * a1).exp()", "t0.cumprod(-1)"), aten.cumprod.default),
    "embedding": (("F.embedding(torch.tensor([0, 1]), a0 * a1, padding_idx=0)",), aten.embedding.default),
}


@pytest.mark.parametrize("mode", ["vmap(grad)", "vmap(jvp)", "vmap(grad(grad))", "autograd of vmap(jvp)"])
@pytest.mark.parametrize("name", PLANTED)
def test_oracle_notices_planted_error(monkeypatch: pytest.MonkeyPatch, name: str, mode: str) -> None:
    lines, op = PLANTED[name]
    one = program(lines, mode)
    assert not check(one).failed
    plant(monkeypatch, op, 1 + 1e-9)
    assert check(one).failed


@pytest.mark.parametrize("name", ["cumprod", "logcumsumexp"])
@pytest.mark.parametrize("mode", ["vmap(grad)", "per sample"])
def test_oracle_notices_nan_in_place_of_number(monkeypatch: pytest.MonkeyPatch, name: str, mode: str) -> None:
    """And a number in place of NaN: neither is excused of cumulative operators."""
    op = getattr(aten, name).default
    one = program(("(a0 * a1).exp()", f"t0.{name}(-1)"), mode, extreme=True)
    assert not check(one).failed
    plant(monkeypatch, op, torch.nan)
    assert check(one).failed
    monkeypatch.undo()
    other = program(("a0 * a1", "t0.cumprod(-1)"), mode, extreme=True, edit="{name}[0, 0, 0] = float('inf')")
    assert not check(other).failed
    monkeypatch.setitem(
        registry._derivatives,
        aten.cumprod.default,
        registry.DerivativeRule({0: lambda out, x, dim: lambda g: g * 0}),
    )
    assert check(other).failed


def test_oracle_notices_one_digit_in_a_billion_beside_large_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    one = program(("a0 * a1", "t0.tanh()"), "vmap(grad)", extreme=True, edit="{name}[0, 0, 0] = 1e30")
    assert not check(one).failed
    plant(monkeypatch, aten.tanh.default, 1 + 1e-9)
    assert check(one).failed
