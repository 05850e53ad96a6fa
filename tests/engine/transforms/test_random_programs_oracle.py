"""What the oracle of random programs (tests/random_programs) takes for rounding, or for a convention, and
what it notices beside that.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from psgrad.engine.transforms.rules import registry
from tests.engine.transforms.other_rules import with_rules
from tests.random_programs import __main__ as running
from tests.random_programs import checking
from tests.random_programs.checking import (
    AUTOGRADS_OWN,
    BOTH_RAISED,
    BY_PLACE,
    EQUAL,
    INFINITE,
    NOT_NOTICED,
    ROUNDED,
    TOO_LARGE,
    UNDERFLOW,
    Outcome,
    check,
)
from tests.random_programs.programs import Argument, Program, Statement
from tests.random_programs.writer import write

aten = torch.ops.aten
NORMAL = "torch.randn({shape}, dtype=torch.float64)"


def program(
    lines: tuple[str, ...],
    mode: str,
    extreme: bool = False,
    edit: str = "",
    dtype: torch.dtype = torch.float64,
) -> Program:
    """The last line's value, of a0 [3, 2, 3] and a1 [3], which are differentiated; a0 has a sample axis."""
    arguments = (
        Argument(
            "a0",
            (2, 3),
            NORMAL,
            (edit,) if edit else (),
            batched=True,
            differentiated=mode != "per sample",
            seed=1,
        ),
        Argument("a1", (3,), NORMAL, differentiated=True, seed=2),
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
    "the Jacobian of a slope of NaN, beside a loss without forward mode": program(
        ("a0.rsqrt()", "torch.cat([t0.flatten(), F.multi_margin_loss(a0 * a1, torch.tensor([0, 2]))[None]])"),
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
    "the Jacobian of a wider type, without forward mode": program(
        ("a0[0].float()", "F.multilabel_margin_loss(t0, torch.tensor([0, 2, -1]))"),
        "vmap(jacfwd)",
        dtype=torch.bfloat16,
    ),
    "the second derivative of a norm of equal numbers": program(
        (
            "F.avg_pool2d((a1[:1] * 2.3).expand(1, 1, 2, 2), 2, 1, 1, count_include_pad=False)",
            "F.layer_norm(torch.cat([t0, t0], -1), (1, 1, 3, 6))",
        ),
        "autograd of vmap(grad)",
    ),
    "the Jacobian of nothing": program(("a0[2:] * a1",), "jacrev(vmap)"),
    "a third derivative of conv3d in halves": program(
        ("a0.repeat(1, 1, 1, 2, 1)", "F.conv3d(t0, a1.repeat(3, 1, 1, 2, 1), None, stride=2, padding=1)"),
        "vmap(grad(jvp))",
        dtype=torch.bfloat16,
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


BETWEEN = {
    "a NaN by whose place a kernel returns this or that": (
        program(
            ("F.hardtanh(a0 + a1).sin()",), "vmap(grad)", extreme=True, edit="{name}[0, 1, 2] = float('nan')"
        ),
        BY_PLACE,
    ),
    "infinite weights beside padding": (
        program(
            (
                "(a0[0, :2] * a1[:2]).repeat(1, 3, 2, 2, 1)",
                "torch.full((1, 3, 2, 2, 2), 1e-9).index_fill(-1, torch.tensor([0]), torch.inf)",
                "F.conv3d(t0, t1, padding=1, dilation=2)",
            ),
            "vmap",
            extreme=True,
            dtype=torch.float32,
        ),
        EQUAL,
    ),
    "an infinite value that samples share, times the sum of their cotangents": (
        program(
            ("torch.full((2, 3), -torch.inf) * a1", "F.linear(a0, t0)"), "autograd of vmap", extreme=True
        ),
        INFINITE,
    ),
    "numbers on the way that are below the normal ones of float32": (
        replace(
            program(("a1 / (a1.square() + 0.5)",), "autograd of vmap", extreme=True, dtype=torch.float32),
            arguments=(
                Argument("a0", (2, 3), NORMAL, batched=True, seed=8551),
                Argument(
                    "a1",
                    (3, 4),
                    f"{NORMAL} * 1e15",
                    differentiated=True,
                    seed=406392,
                ),
            ),
        ),
        UNDERFLOW,
    ),
    "a sum of infinities of both signs, too large for bfloat16": (
        replace(
            program(
                ("F.linear(a0[..., ::2].relu(), a1 * 0.5)", "t0 @ a2"),
                "per sample",
                extreme=True,
                dtype=torch.bfloat16,
            ),
            samples=1,
            arguments=(
                Argument("a0", (2, 2, 4), f"{NORMAL} * 1e30", batched=True, seed=686281),
                Argument("a1", (2, 2), f"{NORMAL} * 1e-15", differentiated=True, seed=711383),
                Argument("a2", (2, 2, 2), f"{NORMAL} * 1e15", seed=763398),
            ),
        ),
        TOO_LARGE,
    ),
    "a write that autograd does not notice, where no sample has a value of its own": (
        replace(
            program(("a1",), "autograd of vmap"),
            statements=(
                Statement("t0 = a1.clone()", "t0"),
                Statement("t1 = torch.kron(t0, t0)", "t1"),
                Statement("t0[t0 > 0] = -0.7", "t0", writes=True),
            ),
            outputs=("t1",),
        ),
        AUTOGRADS_OWN,
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_oracle_says_what_a_difference_is(name: str) -> None:
    one, kind = BETWEEN[name]
    assert check(one).kind == kind


@pytest.mark.long
def test_oracle_knows_sign_of_one_number_that_rounding_makes_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is normalised along an axis of length one; without that the difference is wrong."""
    one = write(771000000049)
    assert check(one).kind == ROUNDED
    monkeypatch.setattr(checking, "_normalises_a_rounded_zero", lambda program: False)
    assert check(one).failed


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("line", ["torch.sinc(t0)", "torch.kron(t0, a0)"])
def test_oracle_write_that_autograd_notices_in_one_of_two_ways(line: str, dtype: torch.dtype) -> None:
    """Autograd refuses a write into what the operator keeps, in the loop too, or does not notice it there.
    What the oracle runs in the operator's place keeps other values.
    """
    lines = (
        Statement("t0 = a0.clone()", "t0"),
        Statement(f"t1 = {line}", "t1"),
        Statement("t0.sub_(a1 * 0.1)", "t0", writes=True),
    )
    one = replace(program(("a0",), "autograd of vmap", dtype=dtype), statements=lines, outputs=("t1",))
    assert check(one).kind in (BOTH_RAISED, NOT_NOTICED)


def test_oracle_knows_cotangent_rounded_by_cast_inside_write() -> None:
    """The parts of the cotangent cancel: a cross-entropy of equal numbers does not depend on their size."""
    lines = (
        Statement("t0 = a0.clone()", "t0"),
        Statement("t0.copy_(a1[:1].float())", "t0", writes=True),
        Statement("t1 = F.cross_entropy(t0, torch.tensor([0, 1]))", "t1"),
    )
    one = replace(program(("a0",), "jacrev(vmap)"), statements=lines, outputs=("t1",))
    assert check(one) == Outcome("equal")


def test_run_counts_program_that_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(seed: int) -> Outcome:
        if seed in (3, 8, 9):
            os._exit(1)
        return Outcome("equal")

    monkeypatch.setattr(running, "write", lambda seed: seed)
    monkeypatch.setattr(running, "check", checked)
    counts, failures = running.run(0, 10, 2)
    assert counts == {"equal": 7, "CRASH": 3}
    assert sorted(seed for seed, outcome in failures if outcome.failed) == [3, 8, 9]


def plant(monkeypatch: pytest.MonkeyPatch, op: object, factor: float) -> None:
    """The derivatives of an operator, off by a factor."""
    kept = registry.rules_of(op).derivative  # type: ignore[arg-type]
    assert kept is not None

    def off(make: object) -> object:
        def maker(out: object, *args: object, **kwargs: object) -> object:
            closure = make(out, *args, **kwargs)  # type: ignore[operator]
            return lambda g: result * factor if (result := closure(g)) is not None else None

        return maker

    vjp = {position: off(make) for position, make in kept.vjp.items()}
    with_rules(monkeypatch, op, derivative=registry.DerivativeRule(vjp, kept.instead))  # type: ignore[arg-type]


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
    zero = registry.DerivativeRule({0: lambda out, x, dim: lambda g: g * 0})
    with_rules(monkeypatch, aten.cumprod.default, derivative=zero)
    assert check(other).failed


def test_oracle_notices_one_digit_in_a_billion_beside_large_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    one = program(("a0 * a1", "t0.tanh()"), "vmap(grad)", extreme=True, edit="{name}[0, 0, 0] = 1e30")
    assert not check(one).failed
    plant(monkeypatch, aten.tanh.default, 1 + 1e-9)
    assert check(one).failed
