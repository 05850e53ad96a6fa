"""Shapes that an operator refuses for one sample are refused by the transforms, too, with an error that is meant."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
import torch

from psgrad.engine.transforms import interpreter, shapes, vjp, vmap
from tests.engine.transforms.misshapen import complaints
from tests.engine.transforms.operators import entries, programs
from tests.engine.transforms.refused import UNJUDGED

pytestmark = pytest.mark.filterwarnings("ignore")
DATABASE = entries()

# PyTorch's own kernel writes beyond its arguments for these shapes, and the process ends.
ENDS_THE_PROCESS = "lu_unpack _batch_norm_with_update"
# Refused for their values, not for their shapes: lengths and offsets say where the last segment ends, a mask how many values it takes.
BY_VALUE = "_segment_reduce.offsets _segment_reduce.lengths index_put"
# They write running statistics, and are refused under vmap; PyTorch's check of the shapes is in `nn.functional.batch_norm`.
INNER = "native_batch_norm _native_batch_norm_legit"
LEFT_OUT = frozenset(f"{ENDS_THE_PROCESS} {BY_VALUE} {INNER}".split()) | set(UNJUDGED)

PRODUCTS = """
    mm bmm mv dot vdot inner outer addmm addmm.decomposed addmv addr addbmm baddbmm matmul linalg.vecdot linalg.multi_dot
    nn.functional.linear
    nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose1d nn.functional.layer_norm nn.functional.group_norm
    nn.functional.batch_norm nn.functional.cross_entropy nn.functional.embedding softmax index_add
"""


def accepted(name: str) -> list[str]:
    """What is wrong with the first sample calls of an entry of PyTorch's operator database, in other shapes."""
    plain = [program for program in programs(DATABASE[name]) if not program.name.endswith(("in place", "written through"))]
    return [complaint for program in plain[:2] for complaint in complaints(program)]


@pytest.mark.parametrize("name", ["mm", "mv", "dot", "addmm", "addr", "outer", "nn.functional.conv1d", "softmax"])
def test_shapes_refused_for_one_sample(name: str) -> None:
    assert accepted(name) == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", PRODUCTS.split())
def test_shapes_refused_for_one_sample_in_all_products_and_layers(name: str) -> None:
    assert accepted(name) == []


@pytest.mark.sweep
def test_shapes_refused_for_one_sample_in_a_tenth_of_all_operators() -> None:
    names = sorted(set(DATABASE) - LEFT_OUT)[date.today().toordinal() % 10 :: 10]  # another tenth each day
    assert {name: found for name in names if (found := accepted(name))} == {}


REFUSED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "a matrix times a scalar": (torch.mm, ((2, 2), ()), "must be a matrix"),
    "a matrix times a vector": (torch.mm, ((2, 2), (2,)), "must be a matrix"),
    "a scalar times a matrix": (torch.bmm, ((), (2, 2, 2)), "3D"),
    "vectors of two lengths": (torch.dot, ((2,), (3,)), "size"),
    "a product of a scalar": (torch.outer, ((), (3,)), "1-D"),
    "a layer without inputs": (torch.nn.functional.linear, ((), (2, 2)), "1D"),
    "an axis of a scalar": (lambda x: x.softmax(1), ((),), "Dimension out of range"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_shapes_are_named_as_by_the_operator(name: str) -> None:
    function, sizes, words = REFUSED[name]
    values = [torch.randn(size) for size in sizes]
    with pytest.raises((RuntimeError, IndexError), match=words):
        function(*values)
    with pytest.raises((RuntimeError, IndexError), match=words):
        vmap(function)(*[torch.stack([x] * 2) for x in values])
    with pytest.raises((RuntimeError, IndexError), match=words):
        vjp(function, *values)


def test_the_same_signature_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    right = shapes._ask
    monkeypatch.setattr(shapes, "_ask", lambda op, *rest: (asked.append(op), right(op, *rest)))
    monkeypatch.setattr(shapes, "_accepted", set())
    for _ in range(3):
        vmap(torch.mm)(torch.randn(3, 2, 2), torch.randn(3, 2, 2))
    assert asked == [torch.ops.aten.mm.default]


def test_what_is_asked_draws_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_accepted", set())
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        vmap(torch.mm)(torch.randn(3, 2, 2, generator=torch.Generator()), torch.zeros(3))
    assert torch.equal(before, torch.get_rng_state())


def test_an_operator_that_nobody_asks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "refuse_shapes", lambda *call: None)
    assert any(complaint.endswith("accepted") for complaint in accepted("mm"))


@pytest.mark.parametrize("function", [torch.var_mean, torch.std_mean, torch.var, torch.std])
@pytest.mark.parametrize("keywords", [{"dim": None}, {"dim": None, "keepdim": True, "correction": 0}, {"dim": 0, "correction": 0}])
def test_statistics_of_scalars(function: Callable[..., Any], keywords: dict[str, Any]) -> None:
    x = torch.randn(3, dtype=torch.float64)
    found, wanted = vmap(lambda x: function(x, **keywords))(x), [function(one, **keywords) for one in x]
    if isinstance(found, tuple):
        torch.testing.assert_close(found, tuple(torch.stack(column) for column in zip(*wanted, strict=True)), equal_nan=True)
    else:
        torch.testing.assert_close(found, torch.stack(wanted), equal_nan=True)
