"""Random programs of operators under every nest of transforms, beside a loop of torch.autograd
(tests/random_programs).
"""

from __future__ import annotations

import datetime
import math
import os
import sys
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import grad, jvp, vjp, vmap
from psgrad.errors import TransformError
from tests.engine.transforms.loops import gradients_by_loop
from tests.random_programs.checking import check
from tests.random_programs.noticed import NOTICED
from tests.random_programs.planting import exactly, operator, planted
from tests.random_programs.programs import Program
from tests.random_programs.shrinking import shrunk
from tests.random_programs.writer import write

BLOCKS = 8
SEEDS = sorted({*range(100), *NOTICED.values()})
SECONDS = 60


def failure(seed: int, program: Program | None = None) -> str:
    """What is wrong with the program of a seed, and the program, made small; empty where nothing is."""
    program = write(seed) if program is None else program
    outcome = check(program)
    return f"seed {seed}: {outcome.kind}: {outcome.words}\n{shrunk(program)}" if outcome.failed else ""


@pytest.mark.every(2)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_operator_programs_fixed_seeds(block: int) -> None:
    found = [failure(seed) or failure(seed, exactly(seed)) for seed in SEEDS[block::BLOCKS]]
    assert not any(found), "\n\n".join(filter(None, found))


@pytest.mark.every(8)
@pytest.mark.parametrize("op", NOTICED)
def test_random_operator_programs_fixed_seeds_notice_error_in_rule(op: str) -> None:
    """Derivatives off by 0.1 %. Where this fails after a change of the catalogue, other programs have the
    seeds: noticed.py says how it is made.
    """
    with planted(operator(op)):
        assert check(exactly(NOTICED[op])).failed


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_random_operator_programs_seed_of_the_day(capsys: pytest.CaptureFixture[str]) -> None:
    """One minute of new programs; PSGRAD_PROGRAMS_SEED repeats those of another day.

    Each that fails is printed, made small, and turns this test red.
    """
    day = int(
        os.environ.get("PSGRAD_PROGRAMS_SEED") or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
    )
    end, counts, found = time.monotonic() + SECONDS, Counter[str](), list[str]()
    seed = day * 1_000_000
    while time.monotonic() < end:
        words = failure(seed)
        counts["failed" if words else "held"] += 1
        found += [words] if words else []
        seed += 1
    with capsys.disabled():  # the error stream, as pytest's own processes drop what they print
        print(f"\nrandom programs, PSGRAD_PROGRAMS_SEED={day}: {dict(counts)}", file=sys.stderr)
    words = f"PSGRAD_PROGRAMS_SEED={day}: {len(found)} of {counts.total()} programs fail"
    assert not found, "\n\n".join([words, *found])


# -- one test for each class of fault that was found ---------------------------------------------------------

V = torch.linspace(-1.2, 1.4, 48, dtype=torch.float64).reshape(3, 4, 4)
P = torch.tensor([0.3, -0.8, 0.5, 1.1], dtype=torch.float64)


def by_outer_autograd(write_into: Any, mapped: bool) -> Tensor:
    """The gradient in p that the caller's autograd finds, of a loss in which p is used beside the
    write, too.
    """
    p = P.clone().requires_grad_()

    def f(v: Tensor) -> Tensor:
        w = v.clone()
        write_into(w, p)
        return (w * w).sum() + (p * p).sum()

    out = vmap(f)(V) if mapped else torch.stack([f(v) for v in V])
    return torch.autograd.grad(out.sum(), p)[0]


WRITES_THROUGH_VIEWS = {
    "w[2] = p": lambda w, p: w.__setitem__(2, p),
    "w[1:3].lerp_": lambda w, p: w[1:3].lerp_(p, 0.3),
    "w.t().copy_": lambda w, p: w.t().copy_(p),
    "w.view().select().mul_": lambda w, p: w.view(2, 2, 4)[0].select(0, 1).mul_(p),
    "w.unfold()[1].copy_": lambda w, p: w.unfold(0, 2, 2)[1].copy_(p[:2]),
    "w.diagonal().add_": lambda w, p: w.diagonal().add_(p),
    "w.narrow().clamp_(p)": lambda w, p: w.narrow(0, 1, 2).clamp_(p, p + 1),
    "w[1:].copysign_": lambda w, p: w[1:].copysign_(p),
    "w[..., 0].fill_": lambda w, p: w[..., 0].fill_(p[1]),
    "w[1].scatter_reduce_": lambda w, p: w[1].scatter_reduce_(0, torch.tensor([0, 0, 2, 1]), p, "amax"),
}


@pytest.mark.parametrize("name", WRITES_THROUGH_VIEWS)
def test_vmap_outer_autograd_write_through_view(name: str) -> None:
    write_into = WRITES_THROUGH_VIEWS[name]
    torch.testing.assert_close(by_outer_autograd(write_into, True), by_outer_autograd(write_into, False))


@pytest.mark.parametrize("name", ["unsqueeze", "unsqueeze_", "two views"])
def test_vmap_outer_autograd_write_into_whole_view_after_write_through_another(name: str) -> None:
    """PyTorch takes a view for a leaf until its history is read, though its base was
    written to.
    """
    p, v = P.clone().requires_grad_(), V[:, 0]

    def f(v: Tensor) -> Tensor:
        w = v.clone()
        if name == "unsqueeze_":
            w.unsqueeze_(0)
        else:
            w = w.unsqueeze(0) if name == "unsqueeze" else w.view(1, 4)
        w[:1] *= p
        return (w * w).sum()

    found = torch.autograd.grad(vmap(f)(v).sum(), p)[0]
    torch.testing.assert_close(found, (2 * p * v * v).sum(0).detach())


SEVERAL_VIEWS = {
    "unbind": lambda w: w.unbind(0)[1],
    "split": lambda w: w.split(2)[0],
    "chunk": lambda w: w.chunk(2)[0],
}


@pytest.mark.parametrize("name", SEVERAL_VIEWS)
def test_vmap_outer_autograd_write_into_one_of_several_views_refused(name: str) -> None:
    write_into = lambda w, p: SEVERAL_VIEWS[name](w).mul_(p)
    with pytest.raises(
        TransformError, match=r"writes in place into one of several views.*test_operator_programs.py"
    ):
        by_outer_autograd(write_into, True)
    found = vmap(grad(lambda p, v: (SEVERAL_VIEWS[name](w := v.clone()).mul_(p), w.sum())[1]), (None, 0))(
        P, V
    )
    part = {"unbind": V[:, 1], "split": V[:, :2].sum(1), "chunk": V[:, :2].sum(1)}[name]
    torch.testing.assert_close(found, part)


@pytest.mark.parametrize("mapped", [True, False])
def test_vmap_outer_autograd_ldexp_then_write(mapped: bool) -> None:
    """PyTorch's ldexp keeps its result, not its argument."""
    p = P.clone().requires_grad_()

    def f(v: Tensor) -> Tensor:
        w = v.clone()
        out = torch.ldexp(w, p)
        w += 1
        return out.sum()

    out = vmap(f)(V).sum() if mapped else sum(f(v) for v in V)
    torch.testing.assert_close(torch.autograd.grad(out, p)[0], (V * 2**P * math.log(2)).sum((0, 1)))


WRITES_INTO_OTHER_DTYPE = {
    "select_scatter": lambda v, p: v.select_scatter(p, 0, 1),
    "slice_scatter": lambda v, p: v.slice_scatter(p[None], 0, 1, 2),
    "diagonal_scatter": lambda v, p: v.diagonal_scatter(p),
}


@pytest.mark.parametrize("name", WRITES_INTO_OTHER_DTYPE)
def test_scatter_of_wider_dtype_derivatives(name: str) -> None:
    """The tangent has the result's dtype, the cotangent that of what is written."""
    f, half = WRITES_INTO_OTHER_DTYPE[name], V.float()
    ps = P.expand(3, 4)
    tangents = vmap(lambda v, p: jvp(lambda p: f(v, p), (p,), (p,))[1])(half, ps)
    assert tangents.dtype == torch.float32
    cotangents = vmap(grad(lambda p, v: f(v, p).sum().double()))(ps, half)
    assert cotangents.dtype == torch.float64
    assert torch.equal(cotangents, torch.ones_like(ps))


def test_vmap_index_of_own_places_contiguous_as_one_sample() -> None:
    """`as_strided` and `view` go by the strides, which one sample's result has."""
    places = torch.tensor([[0, 3], [1, 1], [2, 0]])

    def f(v: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        x = v[..., i]
        return x.as_strided((4, 2), (2, 1)), x.view(2, 4)

    found = vmap(f, in_dims=(None, 0))(V[0], places)
    for x, expected in zip(found, zip(*[f(V[0], i) for i in places], strict=True), strict=True):
        assert torch.equal(x, torch.stack(expected))


def test_vmap_jvp_outer_autograd_write_under_no_grad_tangent_made_inside() -> None:
    """The second derivative of x * x * x: what is clamped under no_grad stays as it is, for the caller's
    autograd too.
    """
    x = P.clone().requires_grad_()

    def f(x: Tensor) -> Tensor:
        v = x.square()
        with torch.no_grad():
            v.clamp_(min=1e-6)
        return (v * x).sum()

    out = vmap(lambda x, y: jvp(f, (x,), (torch.ones(4, dtype=torch.float64),))[1] + 0 * y, (None, 0))(
        x, P[:2]
    )
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], 12 * P)


@pytest.mark.parametrize("dim", [None, 0])
def test_std_of_equal_numbers_forward_mode_as_reverse(dim: int | None) -> None:
    x = torch.full((3,), 0.8, dtype=torch.float64)
    tangents = vmap(lambda x: jvp(lambda x: x.std(dim, correction=0), (x,), (P[:3],))[1])(x.expand(2, 3))
    assert torch.equal(tangents, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("function", [torch.fmod, torch.remainder])
def test_remainder_outer_autograd_of_gradient_divisor_nan_or_zero(function: Any) -> None:
    """What is rounded is constant, whatever the quotient."""
    x = torch.tensor([1.3, -2.2, math.nan, 0.7], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([math.nan, 0.0, 2.0, 0.5], dtype=torch.float64)
    found = vmap(grad(function, 1))(x, y)
    (second,) = torch.autograd.grad((found.nan_to_num(0, 0, 0) * x.detach()).sum() + x.sum(), x)
    assert torch.equal(second, torch.ones_like(x))


@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 4), (1, 1, 3, 4)])
def test_vmap_outer_autograd_attention_then_write(shape: tuple[int, ...]) -> None:
    """The kernel of four axes, which the samples of fewer axes share, keeps its result."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, *shape)

    def f(x: Tensor) -> Tensor:
        t = x.clone()
        out = F.scaled_dot_product_attention(t, t, t)
        out = out * 1 if out.dim() == 4 else out  # PyTorch, too, keeps the result of the kernel of four axes
        out[..., 0] = 0.5
        return (out * out).sum()

    found = []
    for run in (vmap(f), lambda x: torch.stack([f(one) for one in x])):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(run(leaf).sum(), leaf)[0])
    torch.testing.assert_close(*found)


def test_vmap_outer_autograd_composite_recorded_once() -> None:
    """An operator that PyTorch takes apart is recorded by the caller's autograd once, not once a level."""
    q, k = torch.randn(1, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    mask = torch.randn(2, 4, 1, 3, dtype=torch.float64, requires_grad=True)
    f = lambda mask: F.scaled_dot_product_attention(q, k, k, attn_mask=mask).sin().sum()
    ours, loop = vmap(vmap(f))(mask).sum(), torch.stack([f(one) for one in mask.flatten(0, 1)]).sum()
    torch.testing.assert_close(*[torch.autograd.grad(out, mask)[0] for out in (ours, loop)])


OVERWRITES = {
    "copy_": lambda t, x: t.copy_(x),
    "zero_": lambda t, x: t.zero_(),
    "fill_": lambda t, x: t.fill_(2.0),
    "fill_ of a tensor": lambda t, x: t.fill_(x.sum()),
}


@pytest.mark.parametrize("name", OVERWRITES)
def test_overwritten_value_without_finite_derivative(name: str) -> None:
    """Autograd's gradient there is zero times infinity; the sample's is NaN, and no other sample's."""

    def f(x: Tensor) -> Tensor:
        t = torch.fmax(x, x.flip(0)).log()
        OVERWRITES[name](t, x)
        return t.sum() + x.sin().sum()

    x = torch.tensor([[0.0, -1.0], [0.5, 2.0]], dtype=torch.float64)
    (loop,) = gradients_by_loop(f, x)
    assert loop[0].isnan().any()
    assert loop[1].isfinite().all()
    torch.testing.assert_close(vmap(grad(f))(x), loop, equal_nan=True)
    norms = per_sample_gradients(
        lambda params, x: f(x * params["w"]), {"w": torch.ones(2, dtype=torch.float64)}, x
    ).square_norms()
    assert norms.isfinite().tolist() == [False, True]


def test_vector_norm_in_another_dtype_gradient_dtype() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.bfloat16)
    f = lambda x: x.norm(2, 0, dtype=torch.float32)
    (loop,) = gradients_by_loop(f, x)
    torch.testing.assert_close(vmap(grad(f))(x), loop)


@pytest.mark.parametrize("x", [0.0, 1e-300, 1e-30, 1e-8, 1e-3])
def test_sinc_derivatives_around_zero(x: float) -> None:
    """sinc x = 1 - (pi x)^2 / 6 + (pi x)^4 / 120 - ..., of which the first terms suffice here."""
    square, first = -(math.pi**2) / 3, grad(torch.sinc)
    expected = [square * x + math.pi**4 / 30 * x**3, square + math.pi**4 / 10 * x**2, math.pi**4 / 5 * x]
    at = torch.tensor([x], dtype=torch.float64)
    found = [vmap(f)(at) for f in (first, grad(first), grad(grad(first)))]
    torch.testing.assert_close(
        torch.cat(found), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0
    )


BAGS_WITH_NAN = {
    "first": [torch.nan, 1.0, 2.0, torch.nan],
    "later": [1.0, torch.nan, torch.nan, 0.5],
    "behind the lowest": [-torch.inf, torch.nan, -torch.inf, torch.nan],
    "behind padding": [torch.nan, torch.nan, 3.0, 4.0],
    "all": [torch.nan] * 4,
}


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("bags", [[0], [0, 1, 1, 3]])
@pytest.mark.parametrize("name", BAGS_WITH_NAN)
def test_embedding_bag_max_with_nan(name: str, bags: list[int], padding: int | None) -> None:
    weight = torch.tensor([BAGS_WITH_NAN[name], BAGS_WITH_NAN[name][::-1]])[..., None] * torch.tensor(
        [1.0, -1.0]
    )
    index = torch.arange(4)
    f = lambda w: F.embedding_bag(index, w, torch.tensor(bags), mode="max", padding_idx=padding)
    torch.testing.assert_close(vmap(f)(weight), torch.stack([f(w) for w in weight]), equal_nan=True)
    loss = lambda w: (f(w) * torch.linspace(0.5, 1.5, f(w).numel()).reshape(f(w).shape)).sum()
    torch.testing.assert_close(vmap(grad(loss))(weight), gradients_by_loop(loss, weight)[0], equal_nan=True)


NAN, INF = torch.nan, torch.inf


def test_write_that_changes_how_a_value_lies_in_memory_then_view() -> None:
    def f(x: Tensor) -> Tensor:
        t = x.clone()
        t.mT.masked_scatter_(x > 0, x * 2)
        return t.reshape(-1)[1:].sin()

    x = torch.randn(2, 3, 3, dtype=torch.float64)
    loop = torch.stack([torch.autograd.functional.jvp(f, one, one)[1] for one in x])
    torch.testing.assert_close(vmap(lambda x: jvp(f, (x,), (x,))[1])(x), loop)


def test_vmap_returns_view_of_fresh_tensor_written_to_since() -> None:
    """The view had no sample axis when it was taken, and nothing looks at it before it is returned."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        t = torch.zeros(2, 2, dtype=torch.float64)
        views = t[0], t.mT, t.expand(3, 2, 2), t.view(4)
        t.copy_(x)
        return views

    x = torch.arange(8, dtype=torch.float64).reshape(2, 2, 2)
    torch.testing.assert_close(vmap(f)(x), tuple(torch.stack(some) for some in zip(*map(f, x), strict=True)))
    tangents = jvp(vmap(f), (x,), (x,))[1], vmap(lambda x: jvp(f, (x,), (x,))[1])(x)
    assert all(torch.equal(a, b) for a, b in zip(*tangents, strict=True))
    torch.testing.assert_close(tangents[0], vmap(f)(x))


@pytest.mark.parametrize("initial", [None, -1.0, 2.0, 3.0, INF, NAN])
@pytest.mark.parametrize("kind", ["max", "min", "mean", "sum", "prod"])
def test_segment_reduce_ties_with_initial_value_and_values_not_finite(
    kind: str, initial: float | None
) -> None:
    rows = [[1, 2, 2, -1], [1, NAN, 2, 0.5], [0, 3, 0, 2], [INF, INF, 2, -INF], [NAN, NAN, NAN, 0]]
    cotangents = [[1, 1, 1], [INF, INF, INF], [NAN, NAN, 1], [-INF, 0, NAN]]
    x = torch.tensor(rows, dtype=torch.float64).repeat_interleave(len(cotangents), 0)
    g = torch.tensor(cotangents, dtype=torch.float64).repeat(len(rows), 1)
    f = lambda x: torch.segment_reduce(x, kind, lengths=torch.tensor([2, 0, 2]), initial=initial, unsafe=True)
    torch.testing.assert_close(vmap(f)(x), torch.stack([f(one) for one in x]), equal_nan=True)
    leaf = x.clone().requires_grad_()
    (loop,) = torch.autograd.grad([f(one) for one in leaf], leaf, list(g))
    (outside,) = torch.autograd.grad(vmap(f)(leaf), leaf, g)
    for found in (vmap(lambda x, g: vjp(f, x)[1](g)[0])(x, g), vjp(vmap(f), x)[1](g)[0], outside):
        torch.testing.assert_close(found, loop, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["max", "min", "prod"])
@pytest.mark.parametrize("offsets", [[0], [0, 2], [0, 1, 3]])
def test_segment_reduce_elements_behind_last_segment(kind: str, offsets: list[int]) -> None:
    f = lambda x: torch.segment_reduce(x, kind, offsets=torch.tensor(offsets), unsafe=True)
    loss = lambda x: (f(x) * torch.tensor([0.5, 2.0])[: f(x).numel()]).sum()
    x = torch.tensor([[1.0, 3.0, 3.0, NAN], [2.0, 2.0, 5.0, 7.0]], dtype=torch.float64)
    torch.testing.assert_close(vmap(grad(loss))(x), gradients_by_loop(loss, x)[0])


OF_TWO_DTYPES = {
    "solve_triangular": lambda x, y: torch.linalg.solve_triangular(
        x.reshape(2, 2), y.reshape(2, 2), upper=True
    ),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y),
    "as_strided_scatter": lambda x, y: x.detach().clone().as_strided_scatter(y[:3], (3,), (1,), 1) + 0 * x,
    "atan2": torch.atan2,
}


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")])
@pytest.mark.parametrize("name", OF_TWO_DTYPES)
def test_derivatives_of_operator_of_two_dtypes_have_those_of_arguments_and_result(
    name: str, dtypes: tuple[str, str]
) -> None:
    x, y = (torch.rand(3, 4).add(0.5).to(getattr(torch, dtype)) for dtype in dtypes)
    loss = lambda x, y: OF_TWO_DTYPES[name](x, y).sum()
    torch.testing.assert_close(
        vmap(grad(loss, (0, 1)))(x, y), gradients_by_loop(loss, x, y, argnums=(0, 1)), rtol=1e-5, atol=1e-6
    )
    for tangents in ((x[0], torch.zeros_like(y[0])), (torch.zeros_like(x[0]), y[0])):
        out, tangent = jvp(OF_TWO_DTYPES[name], (x[0], y[0]), tangents)
        assert tangent.dtype == out.dtype


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")])
def test_huber_loss_of_two_dtypes_which_autograd_refuses(dtypes: tuple[str, str]) -> None:
    x, y = (torch.rand(3, 4).to(getattr(torch, dtype)) for dtype in dtypes)
    found = vmap(grad(lambda x, y: F.huber_loss(x, y, delta=0.5, reduction="sum"), (0, 1)))(x, y)
    slope = (x.double() - y).clamp(-0.5, 0.5)
    torch.testing.assert_close(found, (slope.to(x.dtype), -slope.to(y.dtype)))


@pytest.mark.parametrize("mapped", [True, False])
def test_vmap_outer_autograd_eigvalsh(mapped: bool) -> None:
    x = (V[:, :3, :3] + torch.diag(P[:3])).requires_grad_()
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    values = lambda x: torch.linalg.eigvalsh(x @ x.mT)
    out = vmap(values)(x) if mapped else vmap(lambda v: values(x) * v)(weight)
    loop = values(x) if mapped else torch.stack([values(x) * v for v in weight])
    found, expected = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (out, loop))
    torch.testing.assert_close(found, expected)
