"""Shapes that an operator refuses for one sample are refused by the transforms, too, with an error that is
meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import interpreter, shape_checks, vjp, vmap
from psgrad.errors import PsgradError
from tests.engine.transforms.misshapen import complaints
from tests.engine.transforms.operators import entries, programs
from tests.engine.transforms.refused import UNJUDGED

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore")
DATABASE = entries()

# PyTorch's own kernel writes beyond its arguments for these shape_checks, and the process ends.
ENDS_THE_PROCESS = "lu_unpack _batch_norm_with_update"
# Refused for their values, not for their shapes: lengths and offsets say where the last segment ends. Their
# shapes are tested below.
BY_VALUE = "_segment_reduce.offsets _segment_reduce.lengths"
# Sample calls with a mask are left out: how many values it takes depends on its values. Masks are tested
# below.
WITH_MASKS = "index_put"
# Their kernels read beyond their arguments for some wrong shape_checks. They are compared with `batch_norm`
# below, which checks them.
INNER = "native_batch_norm _native_batch_norm_legit"
LEFT_OUT = frozenset(f"{ENDS_THE_PROCESS} {BY_VALUE} {INNER}".split()) | set(UNJUDGED)

PRODUCTS = """
    mm bmm mv dot vdot inner outer addmm addmm.decomposed addmv addr addbmm baddbmm matmul linalg.vecdot
    linalg.multi_dot
    nn.functional.linear
    nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose1d nn.functional.layer_norm
    nn.functional.group_norm
    nn.functional.batch_norm nn.functional.cross_entropy nn.functional.embedding softmax index_add index_put
"""


def accepted(name: str) -> list[str]:
    """What is wrong with the first sample calls of an entry of PyTorch's operator database, in other
    shape_checks.
    """
    plain = [
        program
        for program in programs(DATABASE[name])
        if not program.name.endswith(("in place", "written through"))
    ]
    if name in WITH_MASKS.split():
        plain = [program for program in plain if all(x.dtype != torch.bool for x in program.tensors)]
    return [complaint for program in plain[:2] for complaint in complaints(program)]


@pytest.mark.parametrize(
    "name", ["mm", "mv", "dot", "addmm", "addr", "outer", "nn.functional.conv1d", "softmax"]
)
def test_shapes_refused_for_one_sample(name: str) -> None:
    assert accepted(name) == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", PRODUCTS.split())
def test_shapes_refused_for_one_sample_in_all_products_and_layers(name: str) -> None:
    assert accepted(name) == []


@pytest.mark.sweep
def test_shapes_refused_for_one_sample_in_all_operators() -> None:
    assert {name: result for name in sorted(set(DATABASE) - LEFT_OUT) if (result := accepted(name))} == {}


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
def test_shapes_refused_message(name: str) -> None:
    function, sizes, words = REFUSED[name]
    values = [torch.randn(size) for size in sizes]
    with pytest.raises((RuntimeError, IndexError), match=words):
        function(*values)
    with pytest.raises((RuntimeError, IndexError), match=words):
        vmap(function)(*[torch.stack([x] * 2) for x in values])
    with pytest.raises((RuntimeError, IndexError), match=words):
        vjp(function, *values)


def told(check: Callable[[], Any]) -> str:
    """The error of a call, in words; empty without one."""
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def draw_tensor(random: Random, dims: Sequence[int]) -> Tensor:
    dtype = torch.float64 if random.random() < 0.05 else torch.float32
    return torch.zeros([random.choice((0, 1, 2, 2, 2, 3)) for _ in range(random.choice(dims))], dtype=dtype)


LAYERS: dict[Any, Callable[[Random], tuple[Any, ...]]] = {
    aten.linear.default: lambda random: (
        draw_tensor(random, (0, 1, 2, 2, 3)),
        draw_tensor(random, (1, 2, 2, 2, 3)),
        *((draw_tensor(random, (0, 1, 1, 2)),) if random.random() < 0.7 else ()),
    ),
    aten.addmm.default: lambda random: tuple(
        draw_tensor(random, dims) for dims in ((0, 1, 1, 2), (1, 2, 2, 2, 3), (1, 2, 2, 2, 3))
    ),
}


@pytest.mark.parametrize("op", LAYERS, ids=str)
def test_shapes_of_a_layer_by_formula_are_those_that_pytorch_takes(op: Any) -> None:
    random, right = Random(0), 0
    for _ in range(3000):
        args = LAYERS[op](random)
        kernel = told(lambda args=args: op(*args))
        if shape_checks._FORMULAS[op](*args):
            right += len(args) == 3
            assert kernel == told(lambda args=args: op(*[x.to("meta") for x in args])) == "", args
        assert told(lambda args=args: shape_checks._check_shapes(op, args, {})) == kernel
    assert right, "a layer with a bias is among those that are right"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(), (2,), (5, 2)])
def test_shapes_of_a_usual_layer_are_recognised_by_formula(rows: tuple[int, ...], bias: bool) -> None:
    x, weight, more = torch.zeros(*rows, 3), torch.zeros(4, 3), (torch.zeros(4),) * bias
    assert shape_checks._FORMULAS[aten.linear.default](x, weight, *more)
    if bias and len(rows) == 1:
        assert shape_checks._FORMULAS[aten.addmm.default](*more, x, weight.mT, beta=1, alpha=2)


def test_shapes_by_formula_see_arguments_given_by_name() -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(RuntimeError):
        shape_checks._check_shapes(aten.linear.default, (x, weight), {"bias": torch.zeros(3)})


# Operators of which only the kernel runs where there are few elements: (arguments, by name).
KERNELS: dict[Any, tuple[tuple[Any, ...], ...]] = {
    aten.cat.default: (([torch.zeros(2, 3), torch.zeros(2, 4)], 0), ([torch.zeros(2), torch.zeros(3)], 0)),
    aten.layer_norm.default: ((torch.zeros(2, 3), [2]), (torch.zeros(2, 3), [3])),
    aten.mean.dim: ((torch.zeros(2), [1]), (torch.zeros(2), [0])),
    aten.cross_entropy_loss.default: (
        (torch.zeros(3), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(3), torch.zeros((), dtype=torch.int64)),
    ),
    aten.batch_norm.default: (
        (torch.zeros(2, 3), torch.zeros(2), None, None, None, True, 0.1, 1e-5, False),
        (torch.zeros(2, 3), torch.zeros(3), None, None, None, True, 0.1, 1e-5, False),
    ),
}


@pytest.mark.parametrize("op", KERNELS, ids=str)
def test_shapes_of_few_elements_are_those_of_the_kernel_and_of_many_those_of_pytorch(
    op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, right = KERNELS[op]
    expected = told(lambda: op(*wrong))
    assert expected
    for few in (shape_checks._FEW, -1):
        monkeypatch.setattr(shape_checks, "_FEW", few)
        assert told(lambda: shape_checks._check_shapes(op, wrong, {})) == expected
        assert told(lambda: shape_checks._check_shapes(op, right, {})) == ""


def test_shapes_same_signature_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    right = shape_checks._check_shapes
    monkeypatch.setattr(
        shape_checks, "_check_shapes", lambda op, *rest: (checked.append(op), right(op, *rest))
    )
    monkeypatch.setattr(shape_checks, "_accepted", set())
    for _ in range(3):
        vmap(torch.mm)(torch.randn(3, 2, 2), torch.randn(3, 2, 2))
    assert checked == [torch.ops.aten.mm.default]


def test_shapes_check_draws_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_checks, "_accepted", set())
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        vmap(torch.mm)(torch.randn(3, 2, 2, generator=torch.Generator()), torch.zeros(3))
    assert torch.equal(before, torch.get_rng_state())


def test_shapes_checker_notices_unchecked_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "refuse_shapes", lambda *call: None)
    assert any(complaint.endswith("accepted") for complaint in accepted("mm"))


def outcome(function: Callable[..., Any], *tensors: torch.Tensor | None) -> str:
    """Whether the function takes tensors of these shapes: "taken", "refused", or the name of an internal
    error.
    """
    try:
        function(*tensors)
    except (RuntimeError, IndexError, PsgradError):
        return "refused"
    except Exception as error:
        return type(error).__name__
    return "taken"


def mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under vmap, of two samples that are the same."""
    return lambda *tensors: vmap(function)(*[torch.stack([x, x]) for x in tensors])


INDICES = {
    "index": torch.tensor([0, 2]),
    "matrix": torch.tensor([[0, 1], [1, 0]]),
    "mask": torch.tensor([True, False, True]),
    "long_mask": torch.tensor([True, False, True, True]),
    "no_place": torch.tensor([False, False, False]),
    "mask_of_two_axes": torch.tensor([[True, False, False], [False, False, True], [False, False, False]]),
}
INDEXED = [
    *[(name,) for name in INDICES],
    ("mask", "index"),
    ("index", "mask"),
    ("mask", "matrix"),
    ("mask", "mask"),
    ("index", "mask_of_two_axes"),
]


@pytest.mark.parametrize("names", INDEXED, ids="-".join)
@pytest.mark.parametrize("in_place", [False, True])
def test_shapes_index_put_as_pytorch(names: tuple[str, ...], in_place: bool) -> None:
    indices = [INDICES[name] for name in names]

    def put(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return x.clone().index_put_(indices, values) if in_place else x.index_put(indices, values)

    sizes = [
        (),
        (1,),
        (2,),
        (3,),
        (5,),
        (2, 3),
        (2, 2),
        (2, 1),
        (3, 3),
        (3, 3, 3),
        (2, 3, 3),
        (2, 2, 3),
        (1, 1, 3),
        (0,),
        (0, 3),
    ]
    pairs = [(torch.randn(shape), torch.randn(size)) for shape in ((3, 3, 3), (3, 3), (3,)) for size in sizes]
    wanted = {(x.shape, v.shape): outcome(put, x, v) for x, v in pairs}
    assert {(x.shape, v.shape): outcome(mapped(put), x, v) for x, v in pairs} == wanted
    assert {
        (x.shape, v.shape): outcome(lambda v, x=x: vjp(lambda v: put(x, v), v), v) for x, v in pairs
    } == wanted
    assert "taken" in wanted.values() or "long_mask" in names


@pytest.mark.parametrize("names", INDEXED, ids="-".join)
def test_shapes_index_as_pytorch(names: tuple[str, ...]) -> None:
    values = [torch.randn(size) for size in ((3, 3, 3), (3, 3), (3,), (3, 4), ())]
    for x in values:
        wanted = outcome(lambda x: x[tuple(INDICES[name] for name in names)], x)
        assert outcome(mapped(lambda x: x[tuple(INDICES[name] for name in names)]), x) == wanted, x.shape


# Calls of the operators below `batch_norm`, with its arguments.
BATCH_NORMS: dict[str, Callable[..., Any]] = {
    "native": lambda x, w, b, m, v, training: torch.native_batch_norm(x, w, b, m, v, training, 0.1, 1e-5),
    "legit": lambda x, w, b, m, v, training: torch.ops.aten._native_batch_norm_legit(
        x, w, b, m, v, training, 0.1, 1e-5
    ),
    "with_update": lambda x, w, b, m, v, _: torch.ops.aten._batch_norm_with_update(x, w, b, m, v, 0.1, 1e-5),
    "no_update": lambda x, w, b, m, v, _: torch.ops.aten._batch_norm_no_update(x, w, b, m, v, 0.1, 1e-5),
}


@pytest.mark.parametrize("name", BATCH_NORMS)
@pytest.mark.parametrize("training", [False, True])
def test_shapes_operators_below_batch_norm_refused(name: str, training: bool) -> None:
    if training is (name == "no_update") or (name == "with_update" and not training):
        pytest.skip("says by its name whether it is training")
    right = [torch.randn(2, 3, 4), *[torch.rand(3) for _ in range(4)]]
    assert outcome(mapped(lambda *all_of: BATCH_NORMS[name](*all_of, training)), *right) == "taken"
    for place in range(5):
        for size in ((), (2,), (4,), (0,), (2, 3), (1, 3), (3, 1), (3, 2), (3, 3, 3)):
            wrong = [torch.rand(size) if i == place else x for i, x in enumerate(right)]
            if (
                outcome(lambda *all_of: torch.batch_norm(*all_of, training, 0.1, 1e-5, False), *wrong)
                == "refused"
            ):
                assert (
                    outcome(mapped(lambda *all_of: BATCH_NORMS[name](*all_of, training)), *wrong) == "refused"
                ), (place, size)


def test_shapes_native_batch_norm_without_statistics_refused() -> None:
    for op in (
        torch.native_batch_norm,
        lambda x, w, b, m, v, *rest: torch.ops.aten._native_batch_norm_legit.no_stats(x, w, b, *rest),
    ):
        for size, wanted in (((3,), "taken"), ((), "refused"), ((2,), "refused"), ((2, 3), "refused")):
            result = outcome(
                mapped(lambda x, w, op=op: op(x, w, None, None, None, True, 0.1, 1e-5)),
                torch.randn(2, 3),
                torch.randn(size),
            )
            assert result == wanted, size


@pytest.mark.parametrize("named", ["lengths", "offsets"])
@pytest.mark.parametrize("axis", [0, 1, -1, 2])
def test_shapes_segment_reduce_refused(named: str, axis: int) -> None:
    def reduced(data: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(data, "mean", **{named: given}, axis=axis, unsafe=True)

    for shape in ((), (0,), (3,), (2, 3), (3, 2), (1, 3, 2), (2, 3, 4)):
        for size in ((), (0,), (2,), (1, 2), (2, 2), (3, 0), (1, 3, 2), (2, 3, 2)):
            lead = shape[: axis + len(shape) if axis < 0 else axis]
            fits = -len(shape) <= axis < len(shape) and size[:-1] == lead and len(size) == len(lead) + 1
            fits = fits and not (named == "offsets" and size[-1] == 0)
            data, given = torch.randn(shape), torch.zeros(size, dtype=torch.long)
            assert outcome(mapped(reduced), data, given) == ("taken" if fits else "refused"), (shape, size)
            if fits:  # PyTorch's own kernel reads beyond some of the others
                torch.testing.assert_close(
                    mapped(reduced)(data, given)[1], reduced(data, given), equal_nan=True
                )


def test_segment_reduce_without_lengths_refused() -> None:
    with pytest.raises(RuntimeError, match="Either lengths or offsets"):
        vmap(lambda x: torch.segment_reduce(x, "sum"))(torch.randn(2, 3))


def test_decomposed_operator_refuses_untraced_tensors() -> None:
    """PyTorch has no quantile of bfloat16; the pieces that stand for it would take any dtype."""
    shared = torch.ones(2, 3, dtype=torch.bfloat16)
    for f in (torch.quantile, torch.nanquantile):
        with pytest.raises(RuntimeError, match="must be either float or double dtype"):
            vmap(lambda x, f=f: x + f(shared, 0.4, 0))(torch.ones(4, 3))
        with pytest.raises(RuntimeError, match="must be either float or double dtype"):
            vmap(lambda x, f=f: f(x, 0.4, 0))(torch.ones(4, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_vmap_conv_transpose_result_without_places_refused(axes: int) -> None:
    """The kernel for several samples would return nothing."""
    f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[axes - 1]
    x, w = torch.randn(1, 1, *[3] * (axes - 1), 2), torch.randn(2, 1, 1, *[3] * (axes - 1), 1)
    for run in (lambda: f(x, w[0], padding=1), lambda: vmap(lambda w: f(x, w, padding=1))(w)):
        with pytest.raises(RuntimeError, match="too small"):
            run()
