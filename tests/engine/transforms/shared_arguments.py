"""Normalisations, losses and pools as functions of several tensors, any of which the samples may share or
have for themselves.

Their shapes are the ones in which expanded memory hides: one image, one group, one channel, no sample axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.gradients import per_sample_square_norms
from psgrad.engine.transforms import grad, jacrev, vmap

SAMPLES = 3
DTYPE = torch.float64


class Program(NamedTuple):
    """A function of tensors of the given shapes."""

    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]


def _norms() -> Iterator[tuple[str, Program]]:
    for (b, c), size in product(((1, 1), (1, 4), (2, 1)), ((3,), (2, 2))):
        shape, affine = (b, c, *size), ((c,), (c,))
        where = f"{list(shape)}"
        for groups in {1, c}:
            yield (
                f"group_norm {groups} {where}",
                Program(lambda x, w, v, g=groups: F.group_norm(x, g, w, v), (shape, *affine)),
            )
            yield (
                f"group_norm {groups} {where} bare",
                Program(lambda x, g=groups: F.group_norm(x, g), (shape,)),
            )
        yield (
            f"layer_norm {where}",
            Program(lambda x, w, v, s=shape[1:]: F.layer_norm(x, s, w, v), (shape, shape[1:], shape[1:])),
        )
        yield f"layer_norm whole {where}", Program(lambda x, s=shape: F.layer_norm(x, s), (shape,))
        yield (
            f"rms_norm {where}",
            Program(lambda x, w, s=shape[-1:]: F.rms_norm(x, s, w), (shape, shape[-1:])),
        )
        yield (
            f"batch_norm eval {where}",
            Program(
                lambda x, m, s, w, v: F.batch_norm(x, m.detach(), s.detach().square() + 0.5, w, v),
                (shape, (c,), (c,), *affine),
            ),
        )
        yield f"local_response_norm {where}", Program(lambda x: F.local_response_norm(x, 2), (shape,))
        yield (
            f"instance_norm {where}",
            Program(lambda x, w, v: F.instance_norm(x, weight=w, bias=v), (shape, *affine)),
        )
        yield f"normalize {where}", Program(lambda x: F.normalize(x), (shape,))


LABELS = torch.tensor([2, 0])


def _losses() -> Iterator[tuple[str, Program]]:
    for rows, reduction in ((1, "mean"), (1, "sum"), (1, "none"), (2, "mean")):
        shape, labels = (rows, 3), LABELS[:rows]
        named: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
            "cross_entropy": (
                lambda x, w, y=labels, r=reduction: F.cross_entropy(x, y, w.detach().exp(), reduction=r),
                (shape, (3,)),
            ),
            "cross_entropy soft": (
                lambda x, y, r=reduction: F.cross_entropy(x, y.softmax(-1), reduction=r),
                (shape, shape),
            ),
            "nll_loss": (
                lambda x, w, y=labels, r=reduction: F.nll_loss(x, y, w.detach().exp(), reduction=r),
                (shape, (3,)),
            ),
            "bce logits": (
                lambda x, y, w, p, r=reduction: F.binary_cross_entropy_with_logits(
                    x, y.sigmoid(), w.detach().exp(), pos_weight=p.detach().exp(), reduction=r
                ),
                (shape, shape, (1, 3), (3,)),
            ),
            "bce": (
                lambda x, y, r=reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=r),
                (shape, shape),
            ),
            "mse": (lambda x, y, r=reduction: F.mse_loss(x, y, reduction=r), (shape, shape)),
            "l1": (lambda x, y, r=reduction: F.l1_loss(x, y, reduction=r), (shape, shape)),
            "huber": (lambda x, y, r=reduction: F.huber_loss(x, y, reduction=r), (shape, shape)),
            "smooth_l1": (lambda x, y, r=reduction: F.smooth_l1_loss(x, y, reduction=r), (shape, shape)),
            "kl_div": (lambda x, y, r=reduction: F.kl_div(x, y.sigmoid(), reduction=r), (shape, shape)),
            "kl_div log": (
                lambda x, y, r=reduction: F.kl_div(x, y, reduction=r, log_target=True),
                (shape, shape),
            ),
            "poisson": (
                lambda x, y, r=reduction: F.poisson_nll_loss(x, y.exp(), reduction=r),
                (shape, shape),
            ),
            "poisson without log": (
                lambda x, y, r=reduction: F.poisson_nll_loss(
                    x.exp(), y.exp() + 2, log_input=False, full=True, reduction=r
                ),
                (shape, shape),
            ),
            "gaussian_nll": (
                lambda x, y, v, r=reduction: F.gaussian_nll_loss(x, y, v.exp(), reduction=r),
                (shape, shape, shape),
            ),
            "hinge_embedding": (
                lambda x, k=rows, r=reduction: F.hinge_embedding_loss(
                    x, torch.tensor([[1.0, -1.0, 1.0]] * k, dtype=DTYPE), reduction=r
                ),
                (shape,),
            ),
            "margin_ranking": (
                lambda x, y, k=rows, r=reduction: F.margin_ranking_loss(
                    x, y, torch.ones(k, 3), 0.5, reduction=r
                ),
                (shape, shape),
            ),
            "multilabel_soft_margin": (
                lambda x, y, w, r=reduction: F.multilabel_soft_margin_loss(
                    x, y.sigmoid(), w.detach().exp(), reduction=r
                ),
                (shape, shape, (3,)),
            ),
            "soft_margin": (
                lambda x, y, r=reduction: F.soft_margin_loss(x, y.detach(), reduction=r),
                (shape, shape),
            ),
            "multi_margin": (
                lambda x, w, y=labels, r=reduction: F.multi_margin_loss(
                    x, y, weight=w.detach().exp(), reduction=r
                ),
                (shape, (3,)),
            ),
            "multilabel_margin": (
                lambda x, k=rows, r=reduction: F.multilabel_margin_loss(
                    x, torch.tensor([[1, 0, -1]] * k), reduction=r
                ),
                (shape,),
            ),
            "cosine_embedding": (
                lambda x, y, k=rows, r=reduction: F.cosine_embedding_loss(x, y, torch.ones(k), reduction=r),
                (shape, shape),
            ),
            "triplet": (
                lambda x, y, z, r=reduction: F.triplet_margin_loss(x, y, z, reduction=r),
                (shape, shape, shape),
            ),
            "triplet by a distance": (
                lambda x, y, z, r=reduction: F.triplet_margin_with_distance_loss(
                    x, y, z, distance_function=lambda a, b: (a - b).abs().sum(-1), reduction=r
                ),
                (shape, shape, shape),
            ),
            "ctc": (
                lambda x, k=rows, r=reduction: F.ctc_loss(
                    x.log_softmax(-1), torch.ones(k, 2, dtype=torch.long), (4,) * k, (2,) * k, reduction=r
                ),
                ((4, rows, 3),),
            ),
        }
        for name, (function, shapes) in named.items():
            yield f"{name} {reduction} {rows}", Program(function, shapes)


def _pools() -> Iterator[tuple[str, Program]]:
    for b, c, axes in product((1, 2), (1, 2), (1, 2, 3)):
        shape = (b, c, *(4,) * axes)
        for kind in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"):
            pool = getattr(F, f"{kind}{axes}d")
            yield f"{kind}{axes}d {list(shape)}", Program(lambda x, f=pool: f(x, 2), (shape,))
        if axes > 1:
            fractional = getattr(F, f"fractional_max_pool{axes}d")
            places = torch.full((b, c, axes), 0.4, dtype=DTYPE)
            yield (
                f"fractional_max_pool{axes}d {list(shape)}",
                Program(
                    lambda x, f=fractional, p=places: f(x, 2, output_size=2, _random_samples=p), (shape,)
                ),
            )
        powers, undone = getattr(F, f"lp_pool{axes}d"), getattr(F, f"max_unpool{axes}d")
        yield (
            f"lp_pool{axes}d {list(shape)}",
            Program(lambda x, f=powers: f(x.square() + 0.1, 2, 2), (shape,)),
        )
        places = 3 * torch.arange(2**axes).expand(b, c, -1).reshape(b, c, *(2,) * axes)
        yield (
            f"max_unpool{axes}d {list(shape)}",
            Program(lambda x, f=undone, i=places: f(x, i, 2), ((b, c, *(2,) * axes),)),
        )
        mode = ("linear", "bilinear", "trilinear")[axes - 1]
        for how in (mode, "nearest"):
            yield (
                f"interpolate {how} {list(shape)}",
                Program(lambda x, m=how: F.interpolate(x, scale_factor=2, mode=m), (shape,)),
            )


def _others() -> Iterator[tuple[str, Program]]:
    def lookup(table: Tensor) -> Tensor:
        return F.embedding(torch.tensor([0, 2, 0]), table)

    yield "conv2d", Program(lambda x, w, v: F.conv2d(x, w, v), ((1, 1, 4, 4), (1, 1, 2, 2), (1,)))
    yield (
        "conv_transpose1d",
        Program(lambda x, w, v: F.conv_transpose1d(x, w, v), ((1, 1, 4), (1, 1, 2), (1,))),
    )
    yield "linear", Program(lambda x, w, v: F.linear(x, w, v), ((1, 3), (1, 3), (1,)))
    yield "attention", Program(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ((1, 1, 3, 4),) * 3)
    yield (
        "attention without batch",
        Program(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ((3, 4),) * 3),
    )
    yield (
        "grid_sample",
        Program(lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), ((1, 1, 3, 3), (1, 2, 2, 2))),
    )
    yield "cdist", Program(lambda x, y: torch.cdist(x, y), ((1, 3), (2, 3)))
    yield "embedding", Program(lookup, ((3, 2),))
    yield "det", Program(lambda a: torch.linalg.det(a), ((1, 2, 2),))
    yield "slogdet", Program(lambda a: torch.linalg.slogdet(a)[1], ((2, 2),))
    yield "matrix_exp", Program(torch.linalg.matrix_exp, ((1, 2, 2),))
    yield "solve", Program(lambda a, b: torch.linalg.solve(a, b), ((2, 2), (2, 1)))
    yield "fft", Program(lambda x: torch.fft.rfft(x).abs(), ((1, 4),))
    yield "softmax", Program(lambda x: x.softmax(0), ((1, 4),))
    yield "prelu", Program(F.prelu, ((1, 1, 3), (1,)))
    yield "bilinear", Program(F.bilinear, ((1, 2), (1, 2), (1, 2, 2)))
    yield "scatter_add", Program(lambda x, y: x.scatter_add(0, torch.tensor([[0, 0]]), y), ((2, 2), (1, 2)))


FAMILIES = {"norms": _norms, "losses": _losses, "pools": _pools, "others": _others}


def tensors(program: Program, mapped: tuple[bool, ...], samples: int = SAMPLES) -> list[Tensor]:
    """The program's arguments and, last, what its result is multiplied with; a mapped one has a leading axis
    of samples.
    """
    meeting = program.function(*[torch.rand(shape, dtype=DTYPE) for shape in program.shapes]).shape
    shapes = (*program.shapes, meeting)
    return [
        torch.randn(((samples,) if own else ()) + shape, dtype=DTYPE)
        for shape, own in zip(shapes, mapped, strict=True)
    ]


def subsets(count: int, everything: bool) -> Iterator[tuple[bool, ...]]:
    """Which of `count` arguments are mapped: each alone and all of them, or every subset that is not
    empty.
    """
    sizes = range(1, count + 1) if everything else sorted({1, count})
    for size in sizes:
        for chosen in combinations(range(count), size):
            yield tuple(i in chosen for i in range(count))


def loss(program: Program) -> Callable[..., Tensor]:
    """Of all arguments and a tensor that the result meets only afterwards: so the program may be computed
    once for all samples.
    """
    return lambda *args: (program.function(*args[:-1]) * args[-1]).sum()


def by_loop(function: Callable[..., Tensor], given: list[Tensor], mapped: tuple[bool, ...]) -> list[Tensor]:
    """For each argument the gradients of all samples, [n, *shape], by torch.autograd one sample after the
    other.
    """
    rows = []
    for n in range(_samples(given, mapped)):
        leaves = [
            (x[n] if own else x).detach().clone().requires_grad_()
            for x, own in zip(given, mapped, strict=True)
        ]
        rows.append(torch.autograd.grad(function(*leaves), leaves, materialize_grads=True))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _samples(given: list[Tensor], mapped: tuple[bool, ...]) -> int:
    return next(len(x) for x, own in zip(given, mapped, strict=True) if own)


def by_vmap_of_grad(
    function: Callable[..., Tensor], given: list[Tensor], mapped: tuple[bool, ...]
) -> list[Tensor]:
    return list(
        vmap(grad(function, tuple(range(len(given)))), tuple(0 if own else None for own in mapped))(*given)
    )


def by_jacobian_of_vmap(
    function: Callable[..., Tensor], given: list[Tensor], mapped: tuple[bool, ...]
) -> list[Tensor]:
    whole = vmap(function, tuple(0 if own else None for own in mapped))
    rows = jacrev(whole, tuple(range(len(given))))(*given)
    return [
        torch.stack([row[n, n] for n in range(len(row))]) if own else row
        for row, own in zip(rows, mapped, strict=True)
    ]


def norms_differ(
    function: Callable[..., Tensor], given: list[Tensor], mapped: tuple[bool, ...], wanted: list[Tensor]
) -> bool:
    """Whether the squared norms of the shared arguments' gradients, as one parameter each, are other than
    those of `wanted`.
    """
    shared = {str(i): given[i] for i, own in enumerate(mapped) if not own}
    if not shared:
        return False
    own_ones = [x for x, own in zip(given, mapped, strict=True) if own]

    def of_parameters(params: Any, *batch: Tensor) -> Tensor:
        rest = iter(batch)
        return function(*[next(rest) if own else params[str(i)] for i, own in enumerate(mapped)])

    result = per_sample_square_norms(of_parameters, shared, *own_ones).square_norms(per="parameter")
    return any(
        not torch.allclose(
            result[name], wanted[int(name)].square().reshape(len(result[name]), -1).sum(1), 1e-9, 1e-10
        )
        for name in shared
    )


def wrong_ways(program: Program, mapped: tuple[bool, ...], samples: int = SAMPLES) -> list[str]:
    """The transforms that give other numbers than the loop."""
    torch.manual_seed(0)
    function, given = loss(program), tensors(program, mapped, samples)
    wanted = by_loop(function, given, mapped)
    result = []
    for name, way in (("vmap(grad)", by_vmap_of_grad), ("jacrev(vmap)", by_jacobian_of_vmap)):
        if not all(
            torch.allclose(a, b, 1e-9, 1e-10)
            for a, b in zip(way(function, given, mapped), wanted, strict=True)
        ):
            result.append(name)
    if norms_differ(function, given, mapped, wanted):
        result.append("norms")
    return result
