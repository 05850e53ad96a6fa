"""The coverage table says what the transforms do: held against the registry, and against runs of operators of
each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from psgrad.engine.transforms import jvp, vjp, vmap
from psgrad.engine.transforms.operators import facts
from psgrad.engine.transforms.rules import registry
from psgrad.engine.transforms.rules import registry as table
from psgrad.errors import UnsupportedOperatorError

ROWS = {row.operator: row for row in table.coverage()}
aten = torch.ops.aten


def test_coverage_page_lists_every_operator_with_a_rule() -> None:
    declared = {
        op.name() for op in registry.operators() if not facts(op).mutated and not facts(op).mutated_kwargs
    }
    assert declared - set(ROWS) == set()


def pulled(op: Callable[..., Any], x: Tensor) -> Any:
    out, pull = vjp(op, x)
    return pull(torch.ones_like(out))


def pushed(op: Callable[..., Any], x: Tensor) -> Any:
    return jvp(op, (x,), (torch.ones_like(x),))


def mapped(op: Callable[..., Any], x: Tensor) -> Any:
    return vmap(op)(x)


KINDS = {
    "aten::sin": (aten.sin.default, (table.OWN, table.OWN, table.OWN)),
    "aten::relu": (aten.relu.default, (table.OWN, table.OWN, table.OWN)),
    "aten::_log_softmax": (
        lambda x: aten._log_softmax.default(x, 0, False),
        (table.OWN, table.FROM_VJP, table.OWN),
    ),
    "aten::isnan": (aten.isnan.default, (table.CONSTANT, table.CONSTANT, table.OWN)),
    "aten::sign": (aten.sign.default, (table.OWN, table.OWN, table.OWN)),
    "aten::selu": (aten.selu.default, (table.DECOMPOSED, table.DECOMPOSED, table.DECOMPOSED)),
    "aten::_foreach_sin": (
        lambda x: aten._foreach_sin.default([x])[0],
        (table.REFUSED, table.REFUSED, table.REFUSED),
    ),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("column", ["vjp", "jvp", "batching"])
def test_coverage_page_kinds_of_rules(name: str, column: str) -> None:
    op, expected = KINDS[name]
    assert ROWS[name] == (name, *expected)
    run = {"vjp": pulled, "jvp": pushed, "batching": mapped}[column]
    x = torch.randn(2, 3, dtype=torch.float64)
    if getattr(ROWS[name], column) == table.REFUSED:
        with pytest.raises(UnsupportedOperatorError, match=name):
            run(op, x)
    else:
        run(op, x)
