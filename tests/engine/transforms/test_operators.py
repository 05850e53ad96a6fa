"""Every operator of PyTorch's database, in each row of the sweep: right, or refused by name. Never a wrong
number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from psgrad.engine.transforms import derivatives as recording
from psgrad.engine.transforms import jvp
from psgrad.engine.transforms.rules import registry
from tests.device.checked import CHECKED
from tests.engine.transforms import derivatives
from tests.engine.transforms.operators import MOST_SAMPLES, entries, few_or_all_samples
from tests.engine.transforms.other_rules import with_rules
from tests.engine.transforms.refused import (
    AGREEING,
    NEW_IN_2_15,
    REFUSED,
    UNJUDGED,
    UNJUDGED_MAPPED,
    UNJUDGED_PULLED,
    UNJUDGED_TWICE,
)
from tests.engine.transforms.sweep import ROWS, judge
from tools import operators_page
from tools.operators_page import judged_rows, refused_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated operators, which are in the database too
DATABASE = entries()

# The rows of the table that are judged where one sample of each operator is; the sweep has all.
OF_EVERY_RUN = ("vmap(vjp)", "vmap(jvp)", "jvp of vjp", "vjp of vmap")

# Operators that the device of tests/device does not have as a GPU has them.
NOT_ON_CHECKED = {
    **dict.fromkeys(["sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"], "it has no sparse tensors"),
    "nn.functional.rrelu": "it draws in the order of the CPU's kernel",
}

# Operators without a kernel for a GPU.
NOT_ON_CUDA = {"sparse.mm.reduce", "histogramdd"}

# Of these the database has so many and large samples that they take half a minute.
LONG = {"grid_sampler_3d"}


@pytest.mark.every(1)  # else a mistake in a rule would show in the sweep alone
@few_or_all_samples
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sweep) if name in LONG else name
        for name in DATABASE
        if name not in UNJUDGED
    ],
)
def test_operators_right_or_refused_as_listed(name: str, most: int, device: torch.device) -> None:
    if device.type == CHECKED and name in NOT_ON_CHECKED:
        pytest.skip(NOT_ON_CHECKED[name])
    if device.type == "cuda" and name in NOT_ON_CUDA:
        pytest.skip("PyTorch has no kernel for a GPU")
    entry = DATABASE[name]
    rows = [row for row in judged_rows(name, entry) if most == MOST_SAMPLES or row in OF_EVERY_RUN]
    verdicts = judge(
        entry,
        rows,
        equal_samples=name in AGREEING.split(),
        most=most,
        device=str(device),
    )
    assert [what for verdict in verdicts.values() for what in verdict.wrong] == []
    refusals = [refusal for verdict in verdicts.values() for refusal in verdict.refusals]
    words = REFUSED[name].words.split() if name in REFUSED else []
    assert [refusal for refusal in refusals if not any(word in refusal for word in words)] == []
    refused = {row for row, verdict in verdicts.items() if verdict.refusals}
    assert refused <= refused_rows(name, entry), "refused.py says otherwise"
    if most < MOST_SAMPLES:
        return
    assert refused == refused_rows(name, entry), "refused.py says otherwise"
    if entry.supports_autograd:
        assert [
            row for row, verdict in verdicts.items() if not verdict.right and not verdict.refusals
        ] == [], "nothing was compared"


@pytest.mark.parametrize("row", [row for row in ROWS if ROWS[row].bar is not None])
def test_operators_page_bar_of_row(row: str) -> None:
    bar = ROWS[row].bar
    assert bar is not None
    assert operators_page.counts()[row].percent >= bar


of_one_version = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="page and tables speak of PyTorch 2.13's database"
)


@of_one_version
def test_operators_page_up_to_date() -> None:
    assert operators_page.PAGE.read_text(encoding="utf-8") == operators_page.page(""), (
        "run python -m tools.pages"
    )


@of_one_version
def test_operators_tables_name_known_entries() -> None:
    assert {
        *REFUSED,
        *UNJUDGED,
        *UNJUDGED_MAPPED,
        *UNJUDGED_PULLED,
        *UNJUDGED_TWICE,
    } - set(DATABASE) <= NEW_IN_2_15


# -- the checker itself --------------------------------------------------------------------------------------

SLIGHTLY = 1.001


def rows_that_notice(name: str) -> set[str]:
    return {
        row
        for row, verdict in judge(DATABASE[name], judged_rows(name, DATABASE[name])).items()
        if verdict.wrong
    }


def test_operators_checker_notices_wrong_vjp(monkeypatch: pytest.MonkeyPatch) -> None:
    off = registry.DerivativeRule({0: lambda out, x: lambda g: g * torch.cos(x) * SLIGHTLY})
    with_rules(monkeypatch, torch.ops.aten.sin.default, derivative=off)
    assert rows_that_notice("sin") == set(ROWS)


def test_operators_checker_notices_wrong_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.tanh_backward.default
    right = registry.rules_of(op).derivative.vjp
    off = registry.DerivativeRule(
        {0: right[0], 1: lambda out, g, y: lambda h: right[1](out, g, y)(h) * SLIGHTLY}
    )
    with_rules(monkeypatch, op, derivative=off)
    assert rows_that_notice("tanh") == operators_page.TWICE


@pytest.mark.parametrize("factors", [(1, SLIGHTLY), (SLIGHTLY, 1)], ids=["tangents", "values"])
def test_operators_checker_notices_wrong_jvp(
    monkeypatch: pytest.MonkeyPatch, factors: tuple[float, float]
) -> None:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        out, tangents, *aux = jvp(*args, **kwargs)
        pairs = zip((out, tangents), factors, strict=True)
        return (*(tuple(x * factor for x in some) for some, factor in pairs), *aux)

    monkeypatch.setattr(derivatives, "jvp", spoiled)
    assert rows_that_notice("sin") == {"jvp", "vmap(jvp)", "jvp of vjp"}


def fails(batch: Any, op: Any, x: Any) -> None:
    raise IndexError("list index out of range")


BATCHING: dict[str, Callable[..., Any]] = {
    "wrong": lambda batch, op, x: op(batch.physical(x)) * SLIGHTLY,
    "permuted samples": lambda batch, op, x: op(batch.physical(x)).flip(0),
    "unnamed error": fails,
}


@pytest.mark.parametrize("name", BATCHING)
def test_operators_checker_notices_batching(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with_rules(monkeypatch, torch.ops.aten.sin.default, batching=BATCHING[name])
    assert rows_that_notice("sin") == operators_page.MAPPED


def test_operators_checker_notices_lost_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "write_through", lambda op, base, new, *rest: base)
    assert "vjp" in rows_that_notice("select")
