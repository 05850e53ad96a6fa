"""Random operators for samples that draw by label: see transforms/random_draws.py.

A random operator that is not here is decomposed into others, or refused by name.
"""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.operators import Op, aten
from psgrad.engine.transforms.random_draws import Drawer, Program, programs
from psgrad.engine.transforms.rules.attention import by_matrix_products
from psgrad.engine.transforms.rules.registry import shared_draw

Arguments = dict[str, Any]


def _shape_dtype_device(arguments: Arguments) -> tuple[Any, torch.dtype, Any]:
    """(shape, dtype, device) of the draw, from the arguments or from the tensor `self`."""
    like = arguments.get("self")
    if like is None:
        return (
            arguments["size"],
            arguments["dtype"] or torch.get_default_dtype(),
            arguments["device"] or "cpu",
        )
    return like.shape, arguments.get("dtype") or like.dtype, arguments.get("device") or like.device


def _declare(program: Program, *ops: Op) -> None:
    programs.update(dict.fromkeys(ops, program))


# -- numbers with one distribution for all samples -----------------------------------------------------------


def _normal(draw: Drawer, arguments: Arguments) -> torch.Tensor:
    return draw.normal(*_shape_dtype_device(arguments)) * arguments.get("std", 1.0) + arguments.get(
        "mean", 0.0
    )


def _uniform(draw: Drawer, arguments: Arguments) -> torch.Tensor:
    return (
        draw.rand(*_shape_dtype_device(arguments)) * (arguments["to"] - arguments["from"]) + arguments["from"]
    )


def _from_inside(function: Any) -> Program:
    """The program of a function of (uniform on (0, 1), the operator's arguments), computed in float64."""

    def program(draw: Drawer, arguments: Arguments) -> torch.Tensor:
        dtype = _shape_dtype_device(arguments)[1]
        return function(draw.inside(*_shape_dtype_device(arguments)), arguments).to(dtype)  # type: ignore[no-any-return]

    return program


def _log_normal(draw: Drawer, arguments: Arguments) -> torch.Tensor:
    return _normal(draw, arguments).exp()


def _bernoulli(draw: Drawer, arguments: Arguments) -> torch.Tensor:
    shape, dtype, device = _shape_dtype_device(arguments)
    return draw.below(arguments["p"], shape, device).to(dtype)


def _integers(draw: Drawer, arguments: Arguments) -> torch.Tensor:
    like = arguments.get("self")
    if like is None:
        shape, dtype, device = (
            arguments["size"],
            arguments["dtype"] or torch.int64,
            arguments["device"] or "cpu",
        )
    else:
        shape, dtype, device = _shape_dtype_device(arguments)
    low, high = arguments.get("low", arguments.get("from")), arguments.get("high", arguments.get("to"))
    # up to the largest number of the type, or the largest whole number that it represents exactly
    if high is None:
        high = 2 ** _BITS[dtype] if dtype in _BITS else torch.iinfo(dtype).max + 1
    return draw.integers(low or 0, high, shape, dtype, device)


# For each type the power of two up to which it represents all whole numbers.
_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53, torch.bool: 1}

_declare(
    lambda draw, arguments: draw.rand(*_shape_dtype_device(arguments)),
    aten.rand.default,
    aten.rand.generator,
    aten.rand_like.default,
    aten.rand_like.generator,
)
_declare(
    _normal,
    aten.randn.default,
    aten.randn.generator,
    aten.randn_like.default,
    aten.randn_like.generator,
    aten.normal_.default,
    aten.normal_functional.default,
    aten.normal.float_float,
)
_declare(_uniform, aten.uniform_.default, aten.uniform.default)
_declare(
    _from_inside(lambda u, arguments: -u.log() / arguments["lambd"]),
    aten.exponential_.default,
    aten.exponential.default,
)
_declare(
    _from_inside(
        lambda u, arguments: torch.tan(torch.pi * (u - 0.5)) * arguments["sigma"] + arguments["median"]
    ),
    aten.cauchy_.default,
    aten.cauchy.default,
)
_declare(
    _from_inside(
        lambda u, arguments: (u.log() / torch.log1p(torch.full_like(u, -arguments["p"]))).ceil().clamp(min=1)
    ),
    aten.geometric_.default,
    aten.geometric.default,
)
_declare(_log_normal, aten.log_normal_.default, aten.log_normal.default)
_declare(_bernoulli, aten.bernoulli_.float, aten.bernoulli.p)
for _packet in (aten.random_, aten.random):
    _declare(_integers, _packet.default, _packet.to, getattr(_packet, "from"))
for _overload in ("default", "generator", "low", "low_generator"):
    _declare(_integers, getattr(aten.randint, _overload))
for _overload in ("default", "generator", "low_dtype", "low_generator_dtype"):
    _declare(_integers, getattr(aten.randint_like, _overload))
_declare(
    lambda draw, arguments: draw.permutation(
        arguments["n"], arguments["dtype"] or torch.int64, arguments["device"] or "cpu"
    ),
    aten.randperm.default,
    aten.randperm.generator,
)

# -- numbers with parameters of each sample: standard draws, transformed by each sample ----------------------


def _by_standard_draws(op: Op) -> Program:
    """The program for a shared draw, on the standard draws of each sample."""

    def program(draw: Drawer, arguments: Arguments) -> torch.Tensor:
        shared = shared_draw(op)
        assert shared is not None
        return shared(lambda op, *args, **kwargs: draw.run(op, args, kwargs), op, *arguments.values())  # type: ignore[no-any-return]

    return program


for _op in (
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.bernoulli.default,
    aten.multinomial.default,
):
    programs[_op] = _by_standard_draws(_op)


def _bernoulli_of(draw: Drawer, arguments: Arguments) -> torch.Tensor:
    target, p = arguments["self"], arguments["p"]
    return draw.inside(target.shape, torch.float64, target.device) < p


programs[aten.bernoulli_.Tensor] = _bernoulli_of

# -- layers --------------------------------------------------------------------------------------------------


def _dropout(draw: Drawer, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    x, p = arguments["input"], arguments["p"]
    if arguments["train"] is False:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = draw.below(1 - p, x.shape, x.device)
    return x * (mask.to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0)), mask


def _slopes(draw: Drawer, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    x = arguments["self"]
    drawn = (
        draw.rand(x.shape, x.dtype, x.device) * (arguments["upper"] - arguments["lower"]) + arguments["lower"]
    )
    slopes = torch.where(x <= 0, drawn, 1)
    return x * slopes, slopes


def _attention(draw: Drawer, arguments: Arguments) -> torch.Tensor:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return by_matrix_products(
        *[arguments[name] for name in names], scale=arguments["scale"], enable_gqa=arguments["enable_gqa"]
    )


programs[aten.native_dropout.default] = _dropout
programs[aten.rrelu_with_noise_functional.default] = _slopes
_declare(lambda draw, arguments: _slopes(draw, arguments)[0], aten.rrelu.default, aten.rrelu_.default)
programs[aten.scaled_dot_product_attention.default] = _attention
