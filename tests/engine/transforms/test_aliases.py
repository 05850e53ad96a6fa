"""Whether a result shares memory with the operator's argument: as in PyTorch, under every transform.

Many operators return their argument, a view of it or a copy, depending on shapes and numbers. A write into
the result, or into the argument, shows the difference. The oracle runs the same program on one sample after
the other, on plain tensors, and takes gradients with torch.autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import grad, jvp, vmap
from psgrad.errors import TransformError
from tests.seeds import set_seed

SAMPLES = 2

# By the shape of one sample's `x`: expressions that return one or several tensors, which may share memory
# with `x`.
EXPRESSIONS = {
    (): """
x.reshape(()) | x.reshape(1) | x.view(1) | x.flatten() | x.ravel() | x.squeeze() | x.squeeze(0)
x.squeeze(-1) | x.contiguous()
x.clone() | x.expand(()) | x.expand(1) | x.permute([]) | x.transpose(0, 0) | x.t() | x[...] | x[()] | x[None]
x.unsqueeze(0) | x.tile(1)
x.repeat(()) | x.index_select(0, torch.tensor([0])) | x.gather(0, torch.tensor(0)) | x.take(torch.tensor(0))
x.sum() | x.sum(0)
x.mean(0) | x.prod(0) | x.amax(0) | x.max(0) | x.median(0) | x.mode(0) | x.kthvalue(1) | x.topk(1) | x.sort(0)
x.logsumexp(0)
x.cumsum(0) | x.cumprod(0) | x.cummax(0) | x.logcumsumexp(0) | x.flip([]) | x.flip(0) | x.roll(0)
x.clamp(-9, 9) | torch.atleast_1d(x)
torch.atleast_2d(x) | torch.atleast_3d(x) | torch.broadcast_tensors(x) | torch.broadcast_to(x, (1,))
x.unfold(0, 1, 1)
x.softmax(0) * 0 + x | torch.meshgrid(x, indexing='ij') | torch.cartesian_prod(x[None]) | torch.block_diag(x)
torch.einsum('->', x)
x.as_strided((1,), (1,)) | x.norm() | x.std(0, correction=0) + x | torch.where(torch.tensor(True), x, x)
x.masked_fill(torch.tensor(False), 1.0) | x.abs() | x.positive() | F.dropout(x, 0.5, False)
x.to(torch.float64) | x.type_as(x)
x.sum_to_size(()) | x.expand_as(x) | x.view_as(x) | torch.nan_to_num(x)
x.index_fill(0, torch.tensor([0], dtype=torch.long), 2.0)
x.index_add(0, torch.tensor([0]), x) | x.index_copy(0, torch.tensor([0]), x)
""",
    (3,): """
x.reshape(3) | x.reshape(-1) | x.reshape(1, 3) | x.view(3) | x.flatten() | x.flatten(0, 0) | x.ravel()
x.squeeze() | x.squeeze(0)
x.contiguous() | x.clone() | x.expand(3) | x.expand(-1) | x.expand(1, 3) | x.expand_as(x) | x.view_as(x)
x.reshape_as(x) | x.permute(0)
x.movedim(0, 0) | x.t() | x.transpose(0, 0) | x.swapaxes(0, 0) | x[:] | x[...] | x[0:3] | x[::1] | x[None]
x[torch.tensor([0, 1, 2])]
x[torch.tensor([True] * 3)] | x[[0, 1, 2]] | x.narrow(0, 0, 3) | x.narrow_copy(0, 0, 3) | x.split(3)
x.split([3]) | x.split([1, 2])
x.chunk(1) | x.chunk(3) | x.tensor_split(1) | x.hsplit(1) | x.unbind() | x.select(0, 1) | x.unfold(0, 3, 1)
x.unfold(0, 2, 1)
x.tile(1) | x.tile((1, 1)) | x.repeat(1) | x.repeat(1, 1) | x.repeat_interleave(1) | x.roll(0) | x.roll(3)
x.flip([])
x.index_select(0, torch.arange(3)) | x.gather(0, torch.arange(3)) | x.take(torch.arange(3))
x.take_along_dim(torch.arange(3), 0)
x.to(torch.float64) | x.to(x) | x.to('cpu') | x.double() | x.cpu() | x.type(torch.float64) | x.type_as(x)
x.to(torch.float64, copy=True)
x.float().double() | x.sum_to_size(3) | x.sum_to_size(1) | x.sum(0, keepdim=True) | x.real | x.conj()
x.conj_physical()
x.resolve_conj() | x.resolve_neg() | x.positive() | x.relu() | x.clamp(-9, 9) | x.clamp_min(-9) | x.abs()
x.round(decimals=3)
x.trunc() + x.frac() | x.nan_to_num() | x.pow(1) | x * 1 | x + 0 | x / 1 | +x | x ** 1 | x.float_power(1)
torch.float_power(x, 1)
torch.atleast_1d(x) | torch.atleast_2d(x) | torch.atleast_3d(x) | torch.broadcast_tensors(x)
torch.broadcast_to(x, (3,))
torch.cat([x]) | torch.cat([x, x[:0]]) | torch.stack([x]) | torch.hstack([x]) | torch.vstack([x])
torch.column_stack([x])
torch.dstack([x]) | torch.concat([x, x]) | torch.cartesian_prod(x) | torch.combinations(x, 1)
torch.meshgrid(x, indexing='ij')
torch.block_diag(x) | torch.diag_embed(x) | torch.diag(x) | torch.einsum('i', x) | torch.einsum('i->i', x)
torch.einsum('i,->i', x, torch.tensor(1.0, dtype=x.dtype)) | x.outer(x) | x.diff(n=0) | torch.diff(x)
F.dropout(x, 0.5, False)
F.dropout(x, 0.0, True) | F.alpha_dropout(x, 0.5, False) | F.feature_alpha_dropout(x, 0.5, False)
F.pad(x, (0, 0)) | F.pad(x, ())
F.pad(x, (0, 1)) | F.pad(x, (0, -1)) | F.pad(x[None], (0, 0), mode='reflect')
F.pad(x[None], (0, 0), mode='circular')
F.pad(x[None], (0, 0), mode='replicate') | F.normalize(x, dim=0) | F.relu(x) | F.threshold(x, -99, 0)
F.leaky_relu(x, 1.0)
F.hardtanh(x, -9, 9) | F.softplus(x, threshold=-99) | F.glu(torch.cat([x, x])) | F.celu(x) | F.rrelu(x, 1, 1)
F.linear(x, torch.eye(3, dtype=x.dtype)) | F.avg_pool1d(x[None], 1) | F.max_pool1d(x[None], 1)
F.adaptive_avg_pool1d(x[None], 3)
F.adaptive_max_pool1d(x[None], 3) | F.interpolate(x[None, None], 3)
F.interpolate(x[None, None], 3, mode='linear')
F.interpolate(x[None, None], scale_factor=1.0) | F.interpolate(x[None, None], 3, mode='area')
F.layer_norm(x, (3,))
F.local_response_norm(x[None, None], 1, 0.0) | F.softmax(x, 0) | F.mse_loss(x, x * 2, reduction='none')
torch.where(torch.tensor(True), x, x) | x.where(torch.tensor([True] * 3), 0.0)
x.masked_fill(torch.tensor(False), 1.0)
x.masked_scatter(torch.tensor([False] * 3), x[:0]) | x.masked_select(torch.tensor([True] * 3))
x.index_fill(0, torch.tensor([], dtype=torch.long), 1.0)
x.index_add(0, torch.tensor([], dtype=torch.long), x[:0])
x.index_copy(0, torch.tensor([], dtype=torch.long), x[:0])
x.index_put((torch.tensor([], dtype=torch.long),), x[:0])
x.scatter(0, torch.tensor([], dtype=torch.long), 1.0)
x.scatter_add(0, torch.tensor([], dtype=torch.long), x[:0])
x.slice_scatter(x[:0], 0, 0, 0) | x.select_scatter(x[0], 0, 0)
x.put(torch.tensor([], dtype=torch.long), x[:0]) | x.sort() | x.sort()[0]
x.topk(3) | x.msort() | x.cumsum(0) | x.cummax(0) | x.kthvalue(1) | x.quantile(0.5) | x.amax(0) | x.std(0)
x.max(0)
x.addcmul(x, x, value=0) | x.add(x, alpha=0) | x.lerp(x, 0.0) | x.sub(0) | torch.add(0, x) | torch.mul(1, x)
x.maximum(x - 1)
x.copysign(x) | x.fmod(1e9) | x.remainder(1e9) | x.contiguous(memory_format=torch.contiguous_format)
x.clone(memory_format=torch.preserve_format) | x.neg().neg() | x.as_strided((3,), (1,))
x.as_strided((2,), (1,))
x.as_strided((2,), (1,), 1) | torch.empty_like(x).copy_(x) | x.squeeze(0) | x.unflatten(0, (3, 1))
x.unflatten(0, (1, 3))
x.unsqueeze(-1).mT | x.unsqueeze(0).mT | x.expand(2, 3)[0] | x.broadcast_to(3) | torch.ravel(x)
torch.squeeze(x) | torch.flatten(x)
x.detach() | torch.stack([x, x]).unbind() | torch.view_copy(x, (3,)) | torch.alias_copy(x)
torch.expand_copy(x, (3,))
torch.unsqueeze_copy(x, 0) | torch.squeeze_copy(x) | torch.unbind_copy(x)
torch.as_strided_copy(x, (3,), (1,))
torch.unfold_copy(x, 0, 3, 1) | torch.permute_copy(x, [0])
""",
    (1, 4, 2, 2): """
F.channel_shuffle(x, 1) | F.channel_shuffle(x, 2) | F.channel_shuffle(x, 4) | F.channel_shuffle(x[:, :1], 1)
F.channel_shuffle(x[..., :0], 2) | F.channel_shuffle(x[:0], 2) | F.channel_shuffle(x.mT, 1)
F.channel_shuffle(x.movedim(1, -1).contiguous().movedim(-1, 1), 1) | F.channel_shuffle(x[:, :, :1, :1], 2)
F.channel_shuffle(x[:, :, 0], 1) | F.pixel_shuffle(x, 1) | F.pixel_shuffle(x, 2) | F.pixel_unshuffle(x, 1)
F.pixel_unshuffle(x, 2)
F.pixel_shuffle(x[:, :, :1, :1], 2) | F.pixel_unshuffle(x[:, :1], 2) | F.pixel_shuffle(x[:0], 1)
F.pixel_shuffle(x.mT, 1)
F.pixel_unshuffle(x[:, :1].mT, 1) | torch.native_channel_shuffle(x, 1) | torch.native_channel_shuffle(x, 2)
x.flatten(1) | x.flatten(2)
x.flatten(0, 1) | x.mT.flatten(2) | x.mT.flatten(1, 2) | x.reshape(4, 4) | x.mT.reshape(4, 4)
x.mT.reshape(1, 4, 4)
x.mT.reshape(1, 4, 2, 2) | x.view(4, -1) | x[..., ::2].reshape(4, 2) | x[:, ::2].reshape(2, 4)
x[:, ::2].flatten(2)
x[:, :2].contiguous() | x[:, :, :1].contiguous() | x.mT.contiguous() | x[:, :1].mT.contiguous()
x.movedim(1, -1).contiguous()
x.movedim(1, -1).reshape(-1) | x.movedim(0, 1).contiguous() | x.movedim(0, 1).reshape(-1)
x.permute(0, 1, 2, 3)
x.permute(0, 2, 3, 1).flatten(0, 2) | x.squeeze() | x.squeeze(0) | x.squeeze(1) | x.squeeze((0, 1))
x.mT.squeeze(0).reshape(16)
x.expand(1, 4, 2, 2) | x.expand(3, -1, -1, -1)[1] | x.expand(3, -1, -1, -1).reshape(3, 16)[2]
x.to(memory_format=torch.channels_last)
x.to(memory_format=torch.contiguous_format) | x.contiguous(memory_format=torch.channels_last)
x[:, :1].contiguous(memory_format=torch.channels_last)
x[:, :, :1, :1].contiguous(memory_format=torch.channels_last)
x.to(memory_format=torch.channels_last).reshape(-1) | x.to(memory_format=torch.channels_last).flatten(1)
x.to(memory_format=torch.channels_last).movedim(1, -1).reshape(-1)
x.to(memory_format=torch.channels_last).contiguous()
x.clone(memory_format=torch.channels_last).flatten(2) | F.interpolate(x, (2, 2))
F.interpolate(x, scale_factor=1.0)
F.interpolate(x, (2, 2), mode='bilinear') | F.interpolate(x, (2, 2), mode='bilinear', align_corners=True)
F.interpolate(x, (2, 2), mode='bicubic') | F.interpolate(x, (2, 2), mode='area')
F.interpolate(x, (2, 2), mode='nearest-exact')
F.interpolate(x, (2, 2), mode='bilinear', antialias=True) | F.interpolate(x, (4, 2)) | F.pad(x, (0, 0))
F.pad(x, (0, 0, 0, 0))
F.pad(x, (0, 0, 0, 0), mode='reflect') | F.pad(x, (0, 0, 0, 0), mode='replicate')
F.pad(x, (0, 0, 0, 0), mode='circular')
F.pad(x, (-1, 0)) | F.pad(x, (0, -1, 0, -1), mode='circular') | F.unfold(x, 1) | F.unfold(x, 2)
F.fold(F.unfold(x, 1), (2, 2), 1)
F.avg_pool2d(x, 1) | F.max_pool2d(x, 1) | F.lp_pool2d(x, 1, 1) | F.adaptive_avg_pool2d(x, 2)
F.adaptive_avg_pool2d(x, (None, None))
F.adaptive_max_pool2d(x, 2) | F.adaptive_avg_pool2d(x[..., :1, :1], 1) | F.adaptive_avg_pool3d(x, 2)
F.max_pool3d(x, 1)
F.avg_pool3d(x, 1) | F.group_norm(x, 1) | F.group_norm(x, 4) | F.instance_norm(x)
F.batch_norm(x, torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype), eps=0.0)
F.local_response_norm(x, 1, 0.0)
F.dropout2d(x, 0.5, False) | F.dropout3d(x, 0.5, False) | F.feature_alpha_dropout(x, 0.5, False)
F.dropout1d(x[0], 0.5, False)
F.dropout2d(x, 0.0, True) | F.prelu(x, torch.ones(4, dtype=x.dtype))
F.grid_sample(x, F.affine_grid(torch.eye(2, 3).to(x)[None], (1, 4, 2, 2), False), align_corners=False)
x.tile(1)
x.tile((1, 1, 1, 1)) | x.repeat(1, 1, 1, 1) | x.rot90(0) | x.rot90(4, (2, 3)) | x.rot90(1, (2, 3))
x.fliplr() | x.flipud()
x.roll(0, 0) | x.roll((0, 0), (0, 1)) | x.roll(2, 2) | x.diagonal(0, 2, 3) | x[0, 0].diagonal()
torch.diag(x[0, 0])
torch.diagflat(x[0, 0]) | x[0, 0].tril(5) | x[0, 0].triu(-5) | x[0, 0].matrix_power(1) | x[0, 0].t()
x[0, 0].T | x[0, 0].mH | x[0, 0].H
x[0, 0].adjoint() | torch.linalg.multi_dot([x[0, 0], torch.eye(2, dtype=x.dtype)])
torch.linalg.diagonal(x) | torch.einsum('abcd', x) | torch.einsum('abcd->abdc', x)
torch.einsum('abcd->bacd', x)
torch.einsum('abcc->abc', x) | torch.movedim(x, 0, 0) | torch.atleast_3d(x) | torch.swapdims(x, 0, 0)
torch.swapdims(x, 1, 2)
x.unflatten(1, (2, 2)) | x.vsplit(1) | x.dsplit(1) | x.tensor_split([2], 1) | x.split([1, 3], 1)
x.chunk(2, 1) | x.unbind(1)
x[:, [0, 1, 2, 3]] | x[0] | x[:, 1:, None] | x[..., 0] | x.select(1, 2) | x.unfold(2, 2, 1)
x.unfold(1, 4, 1) | x.mean((0,)) | x.sum(0)
x.sum((0,), keepdim=True) | x.mean(0, keepdim=True) | x.amax(0) | x.prod(0) | x.sum_to_size(1, 4, 2, 2)
x.sum_to_size(1, 4, 1, 2)
x.cumsum(0) | x.softmax(0) + x | torch.hstack([x]) | torch.cat([x], 1) | torch.cat([x, x[:, :0]], 1)
torch.broadcast_tensors(x, x[:, :1]) | torch.meshgrid(x[0, 0, 0], x[0, 0, 0], indexing='xy')
F.conv2d(x, torch.eye(4, dtype=x.dtype)[:, :, None, None]) | F.fold(x.flatten(2), (2, 2), 1)
x.as_strided((4, 4), (4, 1))
x.as_strided((2, 2), (8, 1), 1) | x.mT.as_strided((4,), (1,)) | x.real | x.conj() | x.nan_to_num()
F.scaled_dot_product_attention(x, x, x).reshape(-1) | F.glu(x, 1).flatten()
F.cosine_similarity(x, x + 1, 0).reshape(-1)
F.pairwise_distance(x, x * 2).view(-1)
""",
}


# Writes into these are refused by name where derivatives are followed: several elements of a view at one
# place, or no derivative.
REFUSED = {
    "x.expand(2, 3)[0]",
    "x.detach()",
    "x.expand(3, -1, -1, -1)[1]",
    "x.expand(3, -1, -1, -1).reshape(3, 16)[2]",
}

# Writes into these are refused by name everywhere: what several writes to one place leave there goes by their
# order.
OVERLAPPING = {"x.unfold(0, 2, 1)"}

Program = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def expressions() -> Iterator[Any]:
    for shape, table in EXPRESSIONS.items():
        texts = [text.strip() for line in table.strip().splitlines() for text in line.split(" | ")]
        for text in dict.fromkeys(texts):
            yield pytest.param(shape, text, id=f"{text} of {list(shape)}")


def write(x: Tensor, s: Tensor) -> None:
    x.mul_(0.5).add_(s)


def call(text: str, x: Tensor) -> list[Tensor]:
    result = eval(text, {"torch": torch, "F": F, "x": x})
    return [result] if isinstance(result, Tensor) else list(result)


def into_the_results(text: str, x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    base = x.clone()
    results = call(text, base)
    for result in results:
        if result.is_floating_point():
            write(result, s)
    return base, *results


def into_the_argument(text: str, x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    base = x.clone()
    results = call(text, base)
    write(base, s)
    return base, *results


def programs(text: str) -> Iterator[Program]:
    """Those that PyTorch takes: it refuses writes into results in which several elements lie at one place."""
    yield functools.partial(into_the_argument, text)
    yield functools.partial(into_the_results, text)


def total(results: tuple[Tensor, ...]) -> Tensor:
    """A number to which each entry of each result adds in its own way."""
    terms = [
        (x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape)).sum()
        for x in results
        if x.is_floating_point()
    ]
    return sum(terms[1:], terms[0])


def values_by_loop(program: Program, xs: Tensor, s: Tensor, axis: int = 0) -> list[Tensor] | None:
    """None where PyTorch does not take the write: several elements of the result lie at one place."""
    try:
        rows = [program(xs.select(axis, i), s[i]) for i in range(SAMPLES)]
    except RuntimeError as error:
        if "single memory location" not in str(error):
            raise
        return None
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def gradients_by_loop(program: Program, xs: Tensor, s: Tensor) -> list[Tensor] | None:
    """None where PyTorch's autograd does not take the write. It keeps copies of what it needs, so that no
    later write disturbs it.
    """
    rows = []
    for i in range(SAMPLES):
        leaves = [xs[i].clone().requires_grad_(), s[i].clone().requires_grad_()]
        try:
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
                rows.append(torch.autograd.grad(total(program(*leaves)), leaves, materialize_grads=True))
        except RuntimeError:
            return None
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def by_grad(program: Program, xs: Tensor, s: Tensor) -> list[Tensor]:
    rows = [grad(lambda x, s: total(program(x, s)), (0, 1))(xs[i], s[i]) for i in range(SAMPLES)]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def by_vmap_of_grad(program: Program, xs: Tensor, s: Tensor) -> list[Tensor]:
    return list(vmap(grad(lambda x, s: total(program(x, s)), (0, 1)))(xs, s))


def by_autograd_of_vmap(program: Program, xs: Tensor, s: Tensor) -> list[Tensor]:
    leaves = [xs.clone().requires_grad_(), s.clone().requires_grad_()]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        return list(
            torch.autograd.grad(
                vmap(lambda x, s: total(program(x, s)))(*leaves).sum(), leaves, materialize_grads=True
            )
        )


def by_jvp(program: Program, xs: Tensor, s: Tensor) -> list[Tensor]:
    """The derivatives along two directions, in x and in s."""
    f = lambda x, s: total(program(x, s))
    pairs = [
        (torch.ones_like(xs[0]).cumsum(-1) if xs.dim() > 1 else torch.ones_like(xs[0]), 0 * s[0]),
        (0 * xs[0], 0 * s[0] + 1),
    ]
    return [torch.stack([jvp(f, (xs[i], s[i]), pair)[1] for i in range(SAMPLES)]) for pair in pairs]


def same(some: list[Tensor] | tuple[Tensor, ...], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        x.shape == y.shape and torch.allclose(x, y, 1e-9, 1e-9) for x, y in zip(some, others, strict=True)
    )


@pytest.fixture
def samples(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    set_seed(0)
    return torch.randn(SAMPLES, *request.param, dtype=torch.float64), torch.tensor(
        [0.05, -0.03], dtype=torch.float64
    )


@pytest.mark.every(2)
@pytest.mark.parametrize(("samples", "text"), list(expressions()), indirect=["samples"])
def test_vmap_write_into_result_or_argument(samples: tuple[Tensor, Tensor], text: str) -> None:
    xs, s = samples
    behind = xs.movedim(0, -1).contiguous()  # the samples lie side by side in memory
    for program in programs(text):
        expected = values_by_loop(program, xs, s)
        if expected is None:
            continue
        if program.func is into_the_results and text in OVERLAPPING:
            with pytest.raises(TransformError, match="one place in memory for several elements"):
                vmap(program)(xs, s)
            continue
        assert same(vmap(program)(xs, s), expected)
        shared = xs[:1].expand_as(xs)
        assert same(vmap(program, in_dims=(None, 0))(xs[0], s), values_by_loop(program, shared, s)), (
            "one tensor for all samples"
        )
        assert same(vmap(program, in_dims=(-1, 0))(behind, s), values_by_loop(program, behind, s, -1)), (
            "the sample axis behind"
        )


@pytest.mark.every(4)
@pytest.mark.parametrize(("samples", "text"), list(expressions()), indirect=["samples"])
def test_derivatives_write_into_result_or_argument(samples: tuple[Tensor, Tensor], text: str) -> None:
    xs, s = samples
    for program in programs(text):
        expected = gradients_by_loop(program, xs, s)
        if expected is None or (program.func is into_the_results and text in OVERLAPPING):
            continue
        assert same(by_autograd_of_vmap(program, xs, s), expected)
        along = (
            (expected[0] * (torch.ones_like(xs).cumsum(-1) if xs.dim() > 1 else 1))
            .reshape(SAMPLES, -1)
            .sum(1)
        )
        try:
            assert same(by_grad(program, xs, s), expected)
            assert same(by_vmap_of_grad(program, xs, s), expected)
            assert same(by_jvp(program, xs, s), [along, expected[1]])
        except TransformError:
            if program.func is not into_the_results or text not in REFUSED:
                raise


# -- what the search beside these programs found -------------------------------------------------------------


def by_loop(function: Callable[..., Any], *samples: Tensor) -> list[Tensor]:
    rows = [function(*[x[i] for x in samples]) for i in range(SAMPLES)]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def test_vmap_histogram_edges_are_a_copy() -> None:
    xs, edges = torch.rand(SAMPLES, 7), torch.tensor([[0.0, 0.3, 1.0], [0.1, 0.5, 0.9]])

    def f(x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        own = edges.clone()
        returned = torch.histogram(x, own).bin_edges
        returned.mul_(2)
        return own, returned

    assert same(vmap(f)(xs, edges), by_loop(f, xs, edges))


@pytest.mark.parametrize("mapped", ["statistics", "values", "both"])
def test_vmap_instance_norm_running_statistics(mapped: str) -> None:
    set_seed(0)
    x, mean, var = torch.randn(SAMPLES, 2, 3, 4), torch.randn(SAMPLES, 3), torch.rand(SAMPLES, 3) + 0.5

    def f(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        mean, var = mean.clone(), var.clone()
        return F.instance_norm(x, mean, var, momentum=0.3), mean, var

    if mapped == "values":
        mean, var = mean[:1].expand(SAMPLES, 3), var[:1].expand(SAMPLES, 3)
    if mapped == "statistics":
        x = x[:1].expand(SAMPLES, 2, 3, 4)
    dims = {"statistics": (None, 0, 0), "values": (0, None, None), "both": (0, 0, 0)}[mapped]
    given = [z if d is not None else z[0] for z, d in zip((x, mean, var), dims, strict=True)]
    found, expected = vmap(f, dims)(*given), by_loop(f, x, mean, var)
    for some, others in zip(found, expected, strict=True):
        torch.testing.assert_close(some, others)


def test_vmap_native_batch_norm_shared_input() -> None:
    set_seed(0)
    x, s = torch.randn(4, 3, 2), torch.randn(SAMPLES)

    def f(s: Tensor) -> tuple[Tensor, ...]:
        own = x.clone()
        out, mean, _ = torch.native_batch_norm(
            own, torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5
        )
        return out * s, mean * s

    for some, others in zip(vmap(f)(s), by_loop(f, s), strict=True):
        torch.testing.assert_close(some, others)


def test_vmap_outer_autograd_embedding_scale_grad_by_freq_refused() -> None:
    """The caller's autograd would count the tokens of all samples together."""
    table = torch.randn(5, 2, requires_grad=True)
    with pytest.raises(TransformError, match="scale_grad_by_freq"):
        vmap(lambda tokens: F.embedding(tokens, table, scale_grad_by_freq=True))(
            torch.tensor([[1, 1], [1, 2]])
        )
    with pytest.raises(TransformError, match="scale_grad_by_freq"):
        vmap(lambda table: F.embedding(torch.tensor([1, 1]), table, scale_grad_by_freq=True))(
            table.expand(2, 5, 2)
        )
    found = vmap(lambda tokens: F.embedding(tokens, table.detach(), scale_grad_by_freq=True))(
        torch.tensor([[1, 1], [1, 2]])
    )
    assert torch.equal(found, table.detach()[torch.tensor([[1, 1], [1, 2]])])


def test_masked_scatter_empty_source_refused() -> None:
    x = torch.randn(SAMPLES, 3)
    with pytest.raises((IndexError, RuntimeError)):
        vmap(lambda x: x.masked_scatter(torch.tensor([False, True, False]), x[:0]))(x)
