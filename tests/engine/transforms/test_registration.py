"""register_rule: rules from outside are used in every nest, and what makes no sense is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from psgrad.engine import transforms
from psgrad.engine.transforms import grad, jvp, register_rule, vmap
from psgrad.engine.transforms.rules import registry
from psgrad.engine.transforms.rules.families import elementwise_batch
from psgrad.errors import TransformError, UnsupportedOperatorError
from tests.engine.transforms.nests import NESTS, X, Y, agree, plain, slopes, weighted


@torch.library.custom_op("psgrad_registration::opaque", mutates_args=())
def opaque(x: Tensor, y: Tensor) -> Tensor:
    a, b = x.numpy(), y.numpy()
    return torch.from_numpy(np.sin(a * b) + a * a * b)


@torch.library.custom_op("psgrad_registration::told", mutates_args=())
def told(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    a, b = x.numpy(), y.numpy()
    return torch.from_numpy(np.sin(a * b) + a * a * b), torch.from_numpy(a * scale)


VJP: dict[int | str, Any] = {
    "x": lambda out, x, y: lambda g: summed(3 * g * slopes(x, y)[0], x),
    1: lambda out, x, y: lambda g: summed(3 * g * slopes(x, y)[1], y),
}


def summed(g: Tensor, like: Tensor) -> Tensor:
    """Summed over the axes along which the argument was broadcast."""
    return g.sum_to_size(like.shape)


@pytest.fixture(autouse=True)
def _rules_go_with_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "table", dict(registry.table))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize(
    "name",
    [opaque, torch.ops.psgrad_registration.opaque, "psgrad_registration::opaque"],
    ids=["op", "packet", "name"],
)
def test_registered_rule_used_in_every_nest(name: Any, nest: str) -> None:
    register_rule(name, vjp=VJP, batch=elementwise_batch)
    agree(NESTS[nest](transforms, torch.ops.psgrad_registration.opaque), NESTS[nest](torch.func, plain), 3.0)


def test_registered_rule_own_jvp() -> None:
    def push(out: Tensor, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda t: 5 * t * slopes(x, y)[0]

    register_rule(opaque, vjp=VJP, jvp={"x": push}, batch=elementwise_batch)
    agree(jvp(lambda x: opaque(x, Y), (X[0],), (X[1],))[1], 5 * slopes(X[0], Y)[0] * X[1])
    agree(jvp(lambda y: opaque(X[0], y), (Y,), (X[1],))[1], 3 * slopes(X[0], Y)[1] * X[1])


def test_registered_rule_constant() -> None:
    register_rule(opaque, constant=True, batch=elementwise_batch)
    agree(vmap(grad(lambda x: (opaque(x, Y) * x).sum()))(X), plain(X, Y))
    register_rule(opaque, vjp={"x": VJP["x"], "y": None}, replace=True)
    agree(grad(weighted(opaque), 1)(X[0], Y), torch.zeros(3))


def test_registered_rule_missing_argument_refused() -> None:
    register_rule(opaque, vjp={"x": VJP["x"]}, batch=elementwise_batch)
    agree(grad(lambda x: opaque(x, Y).sum())(X[0]), 3 * slopes(X[0], Y)[0])
    for program in (
        lambda: grad(weighted(opaque), 1)(X[0], Y),
        lambda: jvp(lambda y: opaque(X[0], y), (Y,), (Y,)),
    ):
        with pytest.raises(
            UnsupportedOperatorError,
            match="psgrad_registration::opaque has no rule for its derivative in 'y'",
        ):
            program()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown": (
        lambda: register_rule("psgrad_registration::nothing", constant=True),
        "PyTorch has no operator of this name",
    ),
    "no name": (lambda: register_rule("opaque", constant=True), "PyTorch has no operator of this name"),
    "unknown overload": (
        lambda: register_rule("aten::add.Nothing", constant=True),
        "PyTorch has no operator of this name",
    ),
    "several overloads": (lambda: register_rule(torch.ops.aten.add, constant=True), "has the overloads"),
    "a function": (lambda: register_rule(plain, constant=True), "autograd.Function"),
    "in place": (lambda: register_rule(torch.ops.aten.add_.Tensor, constant=True), "writes into an argument"),
    "ruled already": (
        lambda: register_rule(torch.ops.aten.sin.default, vjp={0: VJP["x"]}),
        "has a derivative already",
    ),
    "batched already": (
        lambda: register_rule(torch.ops.aten.sin.default, batch=elementwise_batch),
        "has a batching rule already",
    ),
    "constant already": (
        lambda: register_rule(torch.ops.aten.sign.default, constant=True),
        "has a derivative already",
    ),
    "no such argument": (lambda: register_rule(opaque, vjp={"z": VJP["x"]}), "a rule for argument 'z'"),
    "no tensor": (lambda: register_rule(told, vjp={"scale": VJP["x"]}), "a rule for argument 'scale'"),
    "out of range": (lambda: register_rule(opaque, vjp={7: VJP["x"]}), "a rule for argument 7"),
    "a jvp alone": (lambda: register_rule(opaque, jvp=VJP), "a jvp without a vjp"),
    "constant and not": (
        lambda: register_rule(opaque, vjp=VJP, constant=True),
        "constant=True together with a derivative",
    ),
    "nothing": (lambda: register_rule(opaque), "without any rule"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_registered_rule_refused(refused: str) -> None:
    program, words = REFUSED[refused]
    before = registry.operators()
    with pytest.raises(TransformError, match=words):
        program()
    assert registry.operators() == before
