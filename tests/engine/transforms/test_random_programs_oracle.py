"""What the oracle of random programs (tests/random_programs) notices. What it takes for rounding or for a
convention needs no tests: without it, random programs fail.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from psgrad.engine.transforms import derivatives, interpreter, operators
from psgrad.engine.transforms.rules import registry
from tests.engine.transforms.other_rules import with_rules
from tests.random_programs import __main__ as running
from tests.random_programs.checking import Outcome, check
from tests.random_programs.programs import Argument, Program, Statement

aten = torch.ops.aten
NORMAL = "torch.randn({shape}, dtype=torch.float64)"


def program(
    lines: tuple[str, ...], mode: str, extreme: bool = False, edit: str = "", in_both: bool = True
) -> Program:
    """The last line's value, of a0 [3, 2, 3] and a1 [3], which are differentiated; a0 has a sample axis. A
    line is what t0, t1, ... are, or writes into t0. in_both: a0 is differentiated where the mode can, too.
    """
    edits, followed = (edit,) if edit else (), in_both and mode != "per sample"
    arguments = (
        Argument("a0", (2, 3), NORMAL, edits, batched=True, differentiated=followed, seed=1),
        Argument("a1", (3,), NORMAL, differentiated=True, seed=2),
    )
    statements: list[Statement] = []
    for text in lines:
        target = f"t{sum(not each.writes for each in statements)}"
        writes = text.startswith("t0[")
        statements.append(
            Statement(text, "t0", writes=True) if writes else Statement(f"{target} = {text}", target)
        )
    return Program(arguments, tuple(statements), (target,), 3, torch.float64, mode, extreme)


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


def plant(monkeypatch: pytest.MonkeyPatch, op: object, factor: float, *places: int) -> None:
    """The derivatives of an operator, in all arguments or in those of some places, off by a factor."""
    kept = registry.rules_of(op).derivative  # type: ignore[arg-type]
    assert kept is not None

    def off(make: object) -> object:
        def maker(out: object, *args: object, **kwargs: object) -> object:
            closure = make(out, *args, **kwargs)  # type: ignore[operator]
            return lambda g: result * factor if (result := closure(g)) is not None else None

        return maker

    vjp = {place: off(make) if place in (places or kept.vjp) else make for place, make in kept.vjp.items()}
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


# The mode that notices it, and what stands in the place of what.
BROKEN: dict[str, tuple[str, Any, str, Any]] = {
    "views unknown to the caller's autograd": (
        "autograd of vmap",
        interpreter,
        "facts",
        lambda op: operators.facts(op)._replace(is_view=False),
    ),
    "a write through a view is dropped": (
        "grad(vmap)",
        derivatives,
        "write_through",
        lambda op, base, new, *rest: base,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_oracle_notices_broken_write_through_view(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mode, module, function, broken = BROKEN[name]
    one = program(("a0.clone()", "t0[1] = a1", "(t0 * a1).tanh()"), mode, in_both=False)
    assert check(one) == Outcome("equal")
    monkeypatch.setattr(module, function, broken)
    assert check(one).failed


@pytest.mark.long
@pytest.mark.parametrize("text", ["(t0 * a1).atan2(t0)", "t0.atan2(t0)"])
def test_oracle_notices_sign_where_uses_cancel(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The cotangents of two uses of one value cancel; how far rounding leads there is measured, and is far
    less than a wrong sign.
    """
    for mode in ("autograd of grad", "vmap(grad(jvp))", "per sample"):
        lines, large = ("a1 / 3.0 + a0 * 0", text), "{name}[0, 0, 0] = 1e15"
        one = program(lines, mode, extreme=True, edit=large, in_both=False)
        assert check(one) == Outcome("equal")
        with monkeypatch.context() as patch:
            plant(patch, aten.atan2.default, -1, 1)
            assert check(one).failed
