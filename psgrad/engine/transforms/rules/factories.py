"""Fresh tensors and random draws."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten, first_result, on_physical
from psgrad.engine.transforms.rules.registry import Op, constant, define, replace

# Tensors like a mapped one, with values that don't depend on it: made for every sample, because they may be
# written to.
constant(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    batch=on_physical,
)


def _new(batch: Any, op: Op, x: torch.Tensor, size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return op(batch.physical(x), [batch.size, *size], *args, **kwargs)


constant(
    aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default, batch=_new
)
constant(
    aten.new_empty_strided.default,
    batch=lambda batch, op, x, size, stride, **kwargs: aten.new_empty.default(
        batch.physical(x), [batch.size, *size], **kwargs
    ),
)

# -- random draws: with randomness='different', one draw over all samples at once ----------------------------


def draw_like(batch: Any, op: Op, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The draw has the shape of a tensor."""
    if batch.is_mapped(x):
        return op(batch.physical(x), *args, **kwargs)
    return op(x.unsqueeze(0).expand(batch.size, *x.shape).contiguous(), *args, **kwargs)


def shared_draw_like(draw: Any, op: Op, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """One draw for all samples, of an operator that reads its tensor's shape and not its values."""
    return draw(op, torch.empty(x.shape, dtype=x.dtype, device=x.device), *args, **kwargs)


def shared_dropout(draw: Any, op: Op, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One dropout mask for all samples."""
    scale, mask = draw(op, torch.ones(x.shape, dtype=x.dtype, device=x.device), *args)
    return x * scale, mask


def draw_shape(position: int) -> Any:
    """The draw's shape is an argument."""

    def draw_shape(batch: Any, op: Op, *args: Any, **kwargs: Any) -> torch.Tensor:
        full = list(args)
        full[position] = [batch.size, *args[position]]
        return op(*full, **kwargs)

    return draw_shape


def draw_with_parameters(batch: Any, op: Op, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Each element is drawn with a parameter of its own."""
    return op(*[batch.physical(a).contiguous() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)


constant(
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.rand_like.generator,
    aten.randn_like.generator,
    aten.randint_like.generator,
    aten.randint_like.low_generator_dtype,
    batch=draw_like,
    same=shared_draw_like,
)
constant(
    aten.bernoulli_.float,
    aten.uniform_.default,
    aten.normal_.default,
    aten.exponential_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.geometric_.default,
    batch=draw_like,
)
constant(
    aten.bernoulli_.Tensor,
    batch=lambda batch, op, x, p, **kwargs: op(batch.physical(x), batch.aligned(p, x.dim()), **kwargs),
)
constant(
    aten.bernoulli.p,
    aten.uniform.default,
    aten.normal_functional.default,
    aten.exponential.default,
    aten.cauchy.default,
    aten.log_normal.default,
    aten.geometric.default,
    aten.random.default,
    aten.random.to,
    getattr(aten.random, "from"),
    batch=draw_like,
    same=shared_draw_like,
)
constant(
    aten.rand.default, aten.randn.default, aten.rand.generator, aten.randn.generator, batch=draw_shape(0)
)
constant(aten.randint.default, aten.randint.generator, batch=draw_shape(1))
constant(aten.randint.low, aten.randint.low_generator, aten.normal.float_float, batch=draw_shape(2))


def shared_normal(draw: Any, op: Op, mean: Any, std: Any = 1.0, generator: Any = None) -> torch.Tensor:
    """One standard normal draw, scaled and shifted by each sample. The draw has no derivative."""
    mean, std = (t.detach() if isinstance(t, torch.Tensor) else t for t in (mean, std))
    tensors = [t for t in (mean, std) if isinstance(t, torch.Tensor)]
    shape = torch.broadcast_shapes(*[t.shape for t in tensors])
    standard = draw(
        aten.randn.generator, shape, generator=generator, dtype=tensors[0].dtype, device=tensors[0].device
    )
    return standard * std + mean


def shared_bernoulli(draw: Any, op: Op, p: torch.Tensor, generator: Any = None) -> torch.Tensor:
    """One uniform draw, compared with each sample's probabilities."""
    return (draw(aten.rand.generator, p.shape, generator=generator, dtype=p.dtype, device=p.device) < p).to(
        p.dtype
    )


def shared_multinomial(
    draw: Any, op: Op, p: torch.Tensor, count: int, replacement: bool = False, generator: Any = None
) -> torch.Tensor:
    """One draw of the noise of PyTorch's kernel, which does not depend on the probabilities."""
    if p.dim() not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if replacement and count > 1:
        noise = draw(
            aten.rand.generator,
            [*p.shape[:-1], count],
            generator=generator,
            dtype=torch.float64,
            device=p.device,
        )
        reached = p.double().cumsum(-1)
        return torch.searchsorted(reached / reached[..., -1:], noise).clamp(max=p.shape[-1] - 1)
    noise = draw(
        aten.exponential.default,
        torch.empty(p.shape, dtype=p.dtype, device=p.device),
        1.0,
        generator=generator,
    )
    return (p / noise).topk(count)[1]


constant(
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    batch=draw_with_parameters,
    same=shared_normal,
)
constant(aten.bernoulli.default, batch=draw_with_parameters, same=shared_bernoulli)
define(  # drawn as a function of uniform numbers, through which its parameter has a derivative
    aten._standard_gamma.default,
    vjp={0: lambda out, a, generator=None: lambda g: g * aten._standard_gamma_grad.default(a, out)},
    batch=draw_with_parameters,
)
define(aten._standard_gamma_grad.default, batch=on_physical)
constant(
    aten.poisson.default, aten.binomial.default, aten._sample_dirichlet.default, batch=draw_with_parameters
)
constant(
    aten.randperm.default,
    aten.randperm.generator,
    batch=lambda batch, op, n, *args, **kwargs: torch.stack(
        [op(n, *args, **kwargs) for _ in range(batch.size)]
    ),
)


def _draw_from_rows(
    batch: Any, op: Op, p: torch.Tensor, count: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if p.dim() == 1:
        return op(batch.physical(p), count, *args, **kwargs)
    if p.dim() != 2:
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    return op(batch.physical(p).flatten(0, 1), count, *args, **kwargs).unflatten(0, (batch.size, -1))


constant(aten.multinomial.default, same=shared_multinomial, batch=_draw_from_rows)


def _dropout_back(out: Any, x: torch.Tensor, p: float, train: bool | None) -> Any:
    mask = out[1]
    scale = 1 / (1 - p) if p < 1 else 0.0
    return lambda g: g * mask * scale


define(
    aten.native_dropout.default, vjp={0: first_result(_dropout_back)}, batch=draw_like, same=shared_dropout
)


@replace(aten.dropout.default)
def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """As PyTorch's kernel: with p = 0 the argument itself, with p = 1 zeros without a draw."""
    if p == 0 or not train:
        return x
    return (
        x * torch.zeros((), dtype=x.dtype, device=x.device)
        if p == 1
        else aten.native_dropout.default(x, p, train)[0]
    )


# -- randomised relu: a slope drawn for each negative element ------------------------------------------------


def _rrelu(
    x: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> torch.Tensor:
    """Under a gradient: a leaky relu, or in training the operator that returns the slopes as well."""
    if not training:
        return aten.leaky_relu.default(x, (lower + upper) / 2)
    return aten.rrelu_with_noise_functional.default(x, torch.ones_like(x), lower, upper, True, generator)[0]


def _draw_slopes(batch: Any, op: Op, x: torch.Tensor, noise: torch.Tensor, *args: Any) -> Any:
    return op(batch.physical(x), batch.physical(noise).contiguous(), *args)


def _same_slopes(
    draw: Any, op: Op, x: torch.Tensor, noise: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drawn once at every place, because different elements are negative in different samples.

    On a CPU the kernel draws for negative elements only, one after the other: the third one gets the third
    draw, at any place.
    """
    negative = torch.full(x.shape, -1.0, dtype=x.dtype, device=x.device)
    _, slopes = draw(aten.rrelu_with_noise_functional.default, negative, torch.empty_like(negative), *args)
    if x.device.type == "cpu" and x.numel():
        number = (x <= 0).reshape(-1).cumsum(0) - 1
        slopes = aten.index.Tensor(slopes.reshape(-1), [number.clamp(min=0).reshape(x.shape)])
    slopes = torch.where(x <= 0, slopes, 1)
    return x * slopes, slopes


define(
    aten.rrelu.default,
    aten.rrelu_.default,
    batch=draw_like,
    same=lambda draw, op, x, *args: _same_slopes(draw, op, x, x, *args)[0],
)
define(aten.rrelu.default, instead=_rrelu)
define(
    aten.rrelu_with_noise_functional.default,
    vjp={0: first_result(lambda out, x, *args: lambda g: g * out[1])},
    batch=_draw_slopes,
    same=_same_slopes,
)
