# ruff: noqa: E501 -- tables, a row as wide as it is
"""Elementwise operators, reductions, joins, products of matrices."""

from __future__ import annotations

from tests.random_programs.writer import Line, Operator, Skipped, Writer

UNARY = """
{x}.sin() | {x}.cos() | {x}.tanh() | {x}.sigmoid() | {x}.exp() | {x}.square() | {x}.abs() | -{x} | {x}.relu() | F.gelu({x}) | F.silu({x})
F.softplus({x}) | F.elu({x} + 0.01) | F.leaky_relu({x}, 0.1) | F.hardtanh({x}) | F.mish({x}) | F.selu({x} + 0.01) | F.celu({x} + 0.01, 0.5) | F.hardswish({x})
F.logsigmoid({x}) | F.softsign({x}) | F.tanhshrink({x}) | F.softshrink({x}, 0.2) | F.hardshrink({x}, 0.3) | F.relu6({x}) | F.hardsigmoid({x})
F.gelu({x}, approximate='tanh') | F.threshold({x}, 0.1, -0.5)
({x}.abs() + 0.5).log() | ({x}.abs() + 0.1).sqrt() | ({x}.square() + 0.3).rsqrt() | 1 / ({x}.square() + 0.5) | {x}.atan() | {x}.erf() | {x}.expm1()
{x}.sinh() | {x}.asinh() | {x}.erfc() | ({x}.abs() + 0.2).log1p() | ({x}.abs() + 0.5).lgamma() | ({x}.abs() + 0.5).digamma() | {x}.log() | {x}.sqrt()
{x}.reciprocal() | {x}.clamp(-0.5, 0.8) | {x}.clamp_min(0.1) | {x}.round() | {x}.floor() | {x}.frac() | {x}.sign() | {x} * {n} | {x} + {n} | {x} / {n}
{x} ** 2 | {x} ** 3 | {x}.abs() ** 1.5 | {n} ** {x} | {x}.nan_to_num() | {x}.clone() | {x}.exp2() | torch.sinc({x}) | torch.special.i0e({x}) | {x}.logit(1e-2)
{x}.tanh().atanh() | torch.special.entr({x}.sigmoid()) | torch.special.ndtri({x}.sigmoid()) | {x}.double() | {x}.float() | {x}.to(torch.bfloat16)
torch.zeros_like({x}) | {x}.new_zeros({x}.shape) | torch.zeros({x}.shape) | torch.ones({x}.shape, dtype={x}.dtype) | torch.empty_like({x}).fill_({n})
{x}.sin() if {x}.sum() > 0 else {x}.cos() | torch.full({x}.shape, {n}, dtype={x}.dtype)
"""
BINARY = """
{x} + {y} | {x} * {y} | {x} - {y} | {x} / ({y}.square() + 0.5) | {x} / {y} | torch.maximum({x}, {y}) | torch.minimum({x}, {y}) | torch.fmax({x}, {y})
torch.fmin({x}, {y}) | torch.atan2({x}, {y}) | torch.hypot({x}, {y}) | torch.where({x} > 0.1, {x}, {y}) | torch.lerp({x}, {y}, 0.3) | {y} * {x}
torch.lerp({x}, {y}, {z}) | torch.addcmul({x}, {y}, {z}, value=0.5) | torch.addcdiv({x}, {y}, {z}.square() + 1) | torch.logaddexp({x}, {y})
torch.logaddexp2({x}, {y}) | ({x}.abs() + 0.5) ** {y} | torch.copysign({x}, {y}) | torch.xlogy({x}, {y}.abs() + 0.5) | torch.clamp({x}, {y}, {y} + 1)
torch.clamp({x}, min={y}) | torch.where({y} > 0, {x}, {x} * 2) | torch.fmod({x}, {y}.abs() + 1) | torch.remainder({x}, {y}.abs() + 1)
torch.heaviside({x}, {y}) | torch.special.xlog1py({x}, {y}.abs()) | torch.ldexp({x}, {y}.round()) | torch.add({x}, {y}, alpha=0.7) | torch.rsub({x}, {y})
torch.where({x}.isfinite(), {x}, {y}) | torch.where({x} > {y}, {x}.sin(), {y}.exp()) | torch.float_power({x}.abs() + 0.5, {y})
"""
REDUCTION = """
{x}.sum({d}) | {x}.mean({d}) | {x}.prod({d}) | {x}.logsumexp({d}) | {x}.amax({d}) | {x}.amin({d}) | {x}.max({d}).values | {x}.min({d}).values
{x}.var({d}) | {x}.std({d}, correction=0) | torch.var_mean({x}, {d})[0] | torch.std_mean({x}, {d}, correction=0)[1] | {x}.norm(2, {d}) | {x}.norm(1, {d})
torch.linalg.vector_norm({x}, 3, {d}) | torch.linalg.vector_norm({x}, float('inf'), {d}) | {x}.softmax({d}) | {x}.log_softmax({d}) | F.softmin({x}, {d})
{x}.cumsum({d}) | {x}.cumprod({d}) | {x}.tanh().logcumsumexp({d}) | {x}.cummax({d}).values | {x}.sort({d}).values | {x}.topk(1, {d}).values | {x}.median({d}).values
{x}.kthvalue(1, {d}).values | {x}.sum({d}, keepdim=True) | {x}.amax({d}, keepdim=True) | {x}.nansum({d}) | {x}.flip({d}) | {x}.roll(1, {d}) | {x}.cummin({d})[0]
F.normalize({x}, dim={d}) | F.glu(torch.cat([{x}, {x}], {d}), {d}) | {x}.diff(dim={d}) | {x}.repeat_interleave(2, {d}) | {x}.renorm(2, {d}, 1.0)
torch.trapezoid({x}, dim={d}) | {x}.aminmax(dim={d})[0] | {x}.nanmean({d}) | {x}.quantile(0.4, {d}) | {x}.argsort({d}) * {x} | torch.cumulative_trapezoid({x}, dim={d})
"""
WHOLE = """
{x}.sum() | {x}.mean() | {x}.prod() | {x}.max() | {x}.min() | {x}.var() | {x}.std(correction=0) | {x}.norm() | {x}.median() | {x}.logsumexp(0)
{x}.square().sum().sqrt() | {x}.amax() | {x}.flatten().sort().values | {x}.flatten().cumsum(0) | torch.var_mean({x})[1] | {x}.norm(1) | {x}.nansum()
"""


def entries(table: str) -> list[str]:
    return [entry.strip() for line in table.strip().splitlines() for entry in line.split("|")]


def _unary(w: Writer) -> Line:
    return Line(w.random.choice(entries(UNARY)).format(x=w.tensor(), n=w.number()))


def _binary(w: Writer) -> Line:
    x = w.tensor()
    text = w.random.choice(entries(BINARY))
    return Line(text.format(x=x, y=w.broadcasting(x), z=w.broadcasting(x) if "{z}" in text else ""))


def _reduction(w: Writer) -> Line:
    if w.random.random() < 0.3:
        return Line(w.random.choice(entries(WHOLE)).format(x=w.tensor()))
    x = w.tensor(lambda t: t.dim() >= 1)
    return Line(w.random.choice(entries(REDUCTION)).format(x=x, d=w.axis(x)))


def _join(w: Writer) -> Line:
    x = w.tensor()
    y = w.other(w.shape(x))
    rank = len(w.shape(x))
    ways = [f"torch.stack([{x}, {y}], {w.random.randint(0, rank)})", f"torch.stack([{y}, {x}, {y}])"]
    if rank:
        ways += [
            f"torch.cat([{x}, {y}], {w.axis(x)})",
            f"torch.cat([{x}, {y}, {x}], {w.axis(x)})",
            f"{x}.repeat({(2, *[1] * (rank - 1))})",
        ]
    if rank >= 2:
        ways += [f"torch.hstack([{x}, {y}])", f"{x}.tril()", f"{x}.triu(1)", f"{x}.rot90()"]
    if rank == 1:
        ways += [
            f"{x}.diag()",
            f"torch.diag_embed({x})",
            f"torch.block_diag({x}, {y})",
            f"torch.outer({x}, {y})",
            f"torch.dot({x}, {y})",
        ]
    return Line(w.random.choice(ways))


def _product(w: Writer) -> Line:
    x = w.tensor(lambda t: 1 <= t.dim() <= 3)
    shape = w.shape(x)
    last, out = shape[-1], w.random.randint(1, 3)
    if len(shape) == 1:
        y, m = w.other((last,)), w.other((out, last))
        return Line(
            w.random.choice(
                (
                    f"{x} @ {y}",
                    f"{m} @ {x}",
                    f"{m}.mv({x})",
                    f"torch.einsum('i,oi->o', {x}, {m})",
                    f"torch.kron({x}, {y})",
                )
            )
        )
    m = w.other((last, out))
    if len(shape) == 2:
        b, square = w.argument((out,)), w.other(shape)
        ways = (
            f"{x} @ {m}",
            f"{x}.mm({m})",
            f"torch.addmm({b}, {x}, {m}, beta=0.5, alpha=2)",
            f"torch.einsum('ti,io->ot', {x}, {m})",
            f"{x}.mT @ {square}",
            f"torch.einsum('ti,ti->t', {x}, {square})",
            f"torch.cdist({x}, {square})",
            f"{square} @ {x}.t()",
            f"torch.linalg.multi_dot([{x}, {m}, {m}.t()])",
        )
        return Line(w.random.choice(ways))
    y = w.other((shape[0], last, out))
    return Line(
        w.random.choice(
            (f"{x} @ {m}", f"{x}.bmm({y})", f"torch.einsum('bti,bio->bot', {x}, {y})", f"{x} @ {y}")
        )
    )


def _linear_algebra(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() == 2 and t.shape[0] <= 4)
    size = w.shape(x)[0]
    spd = f"({x} @ {x}.mT + 2 * torch.eye({size}, dtype={x}.dtype))"
    y = w.other((size, 2))
    ways = (
        f"torch.linalg.inv({spd})",
        f"torch.linalg.solve({spd}, {y})",
        f"torch.linalg.cholesky({spd})",
        f"torch.linalg.det({spd})",
        f"torch.linalg.slogdet({spd})[1]",
        f"torch.linalg.solve_triangular({spd}.tril(), {y}, upper=False)",
        f"{spd}.trace()",
        f"torch.linalg.matrix_norm({x})",
        f"torch.linalg.eigvalsh({spd})",
    )
    if str(w.dtype) == "torch.bfloat16":
        raise Skipped
    return Line(w.random.choice(ways))


ELEMENTWISE: tuple[Operator, ...] = (
    _unary,
    _unary,
    _unary,
    _binary,
    _binary,
    _binary,
    _product,
    _product,
    _linear_algebra,
)
REDUCTIONS: tuple[Operator, ...] = (_reduction, _reduction, _reduction, _join)
