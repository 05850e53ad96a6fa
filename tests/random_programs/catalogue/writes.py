# ruff: noqa: E501 -- tables, a row as wide as it is
"""In-place operators, which write through views where there are any."""

from __future__ import annotations

from tests.random_programs.catalogue.elementwise import entries
from tests.random_programs.writer import Line, Operator, Writer

ALONE = """
{x}.sin_() | {x}.tanh_() | {x}.mul_({n}) | {x}.add_({n}) | {x}.zero_() | {x}.fill_({n}) | {x}.relu_() | {x}.neg_() | {x}.abs_() | {x}.sigmoid_()
{x}.clamp_(-0.4, 0.6) | {x}.square_() | {x}.exp_() | {x}.div_({n}) | {x}.pow_(2) | {x} *= {n} | {x} += {n} | {x} /= 2 | {x} -= 0.3 | {x}[...] = {n}
F.relu({x}, inplace=True) | F.leaky_relu({x}, 0.2, inplace=True) | F.elu({x}.add_(0.01), inplace=True) | F.hardtanh({x}, inplace=True) | {x}.atan_() | {x}.erf_()
F.silu({x}, inplace=True) | F.threshold({x}, 0.1, 0.2, inplace=True) | {x}.cos_() | {x}.expm1_() | {x}.frac_() | {x}.round_() | {x}.sign_() | {x}.nan_to_num_()
{x}.clamp_min_(0.1) | {x}.rsqrt_() | {x}.sqrt_() | {x}.reciprocal_() | {x}.log1p_() | {x}.sinh_() | F.mish({x}, inplace=True)
"""
OF_ANOTHER = """
{x}.copy_({y}) | {x}.add_({y}) | {x}.mul_({y}) | {x}.sub_({y}) | {x}.div_({y}.square() + 0.5) | {x} += {y} | {x} *= {y} | {x}.lerp_({y}, 0.3)
{x}.lerp_({y}, {z}) | {x}.addcmul_({y}, {z}, value=0.5) | {x}.addcdiv_({y}, {z}.square() + 1) | {x}.masked_fill_({y} > 0, {n}) | {x}.fill_({s})
{x}.masked_fill_({y} > 0, {s}) | {x}.copysign_({y}) | {x}.atan2_({y}) | {x}.hypot_({y}) | {x}[...] = {y} | {x}[{x} > 0] = {n} | {x}.add_({y}, alpha=-0.7)
{x}.clamp_({y}, {y} + 1) | {x}.xlogy_({y}.abs() + 0.5) | {x}.fmod_({y}.abs() + 1) | {x}.copy_({y}.sin()) | {x}.mul_({x}) | {x}.add_({x}.clone())
{x}.sub_({y}, alpha=2) | {x}[...] = {y} * {x} | {x}.copy_({y}.float()) | {x}.pow_({y}.abs().clamp(0, 2)) | {x}.clamp_(min={y}) | {x} -= {y}
"""
ALONG = """
{x}.cumsum_({d}) | {x}.cumprod_({d}) | {x}.index_fill_({d}, torch.tensor([0]), {n}) | {x}.index_fill_({d}, torch.tensor([-1]), {n})
{x}.index_add_({d}, {i}, {v}) | {x}.index_copy_({d}, {p}, {v}) | {x}.scatter_({d}, {k}, {n}) | {x}.scatter_add_({d}, {k}, {y}) | {x}.scatter_({d}, {q}, {y})
{x}.scatter_reduce_({d}, {k}, {y}, 'sum') | {x}.scatter_reduce_({d}, {k}, {y}, 'amax') | {x}.scatter_reduce_({d}, {k}, {y}, 'mean', include_self=False)
{x}.select({d}, 0).copy_({x}.select({d}, -1).clone()) | {x}.narrow({d}, 0, 1).mul_({x}.narrow({d}, 0, 1)) | {x}.index_add_({d}, {i}, {v}, alpha=0.5)
{x}.index_reduce_({d}, {i}, {v}, 'prod') | {x}.select({d}, 0).add_({s})
"""


def _alone(w: Writer) -> Line:
    x = w.target()
    return Line(w.random.choice(entries(ALONE)).format(x=x, n=w.number()), target=x)


def _of_another(w: Writer) -> Line:
    x = w.target()
    text = w.random.choice(entries(OF_ANOTHER))
    used = {"x": x, "n": w.number()}
    for letter in "yz":
        used[letter] = w.broadcasting(x) if f"{{{letter}}}" in text else ""
    used["s"] = w.other(()) if "{s}" in text else ""
    return Line(text.format(**used), target=x)


def _along(w: Writer) -> Line:
    x = w.target(lambda t: t.dim() >= 1)
    d, shape = w.axis(x), w.shape(x)
    size = shape[d]
    text = w.random.choice(entries(ALONG))
    makers = {
        "s": lambda: w.other(()),
        "y": lambda: w.apart(w.other(shape), x),
        "v": lambda: w.apart(w.other(shape), x),
        "i": lambda: w.integers((size,), size),
        "p": lambda: f"{w.mask((size,))}.long().argsort(stable=True)",
        "k": lambda: w.integers(shape, size),
        "q": lambda: f"{w.integers(shape, 99)}.argsort({d}, stable=True)",
    }
    used = {letter: make() if f"{{{letter}}}" in text else "" for letter, make in makers.items()}
    return Line(text.format(x=x, d=d, n=w.number(), **used), target=x)


def _into_a_place(w: Writer) -> Line:
    """A write through a view that has no name."""
    x = w.target(lambda t: t.dim() >= 1)
    size, last = w.shape(x)[0], w.shape(x)[-1]
    place = w.random.choice(
        (
            f"[{w.random.randrange(-size, size)}]",
            "[1:]",
            "[..., ::2]",
            f"[..., {w.random.randrange(last)}]",
            "[:1]",
            f"[..., {last // 2}:]",
            "[0]",
        )
    )
    view = eval(f"x{place}", {"x": w.tensors[x]})
    w.tensors["view"] = view
    try:
        y = w.broadcasting("view")
    finally:
        del w.tensors["view"]
    if y == "view":
        y = str(w.number())
    ways = [
        f"{x}{place} = {y}",
        f"{x}{place} += {y}",
        f"{x}{place} *= {y}",
        f"{x}{place} = {y} * {x}{place}",
        f"{x}{place}.copy_({y})",
    ]
    if y[0] in "at":
        ways += [
            f"{x}{place}.lerp_({y}, 0.3)",
            f"{x}{place}.addcmul_({y}, {y})",
            f"{x}{place}.masked_fill_({y} > 0, 0.5)",
        ]
    return Line(w.random.choice(ways), target=x)


def _by_index(w: Writer) -> Line:
    x = w.target(lambda t: t.dim() >= 1)
    shape = w.shape(x)
    count = w.random.randint(1, 2)
    i = w.integers((count,), shape[0], -shape[0])
    y = w.other((count, *shape[1:]))
    mask = f"{w.other(shape)} > 0"
    ways = [
        f"{x}.index_put_(({i},), {y}, accumulate=True)",
        f"{x}[{mask}] = {w.number()}",
        f"{x}.masked_scatter_({mask}, {w.other(shape)}.clone())",
    ]
    ways += [f"{x}[{i}[0]] = {y}[0]", f"{x}[[0]] = {y}[:1]"]
    if shape[0] > 1:  # else one place is written to twice, of which PyTorch's derivative knows nothing
        ways += [f"{x}[torch.tensor([0, -1])] *= 2"]
    if count == 1:
        ways += [f"{x}[{i}] = {y}", f"{x}[..., {w.integers((1,), shape[-1])}] += 0.5"]
    return Line(w.random.choice(ways), target=x)


def _matrix(w: Writer) -> Line:
    x = w.target(lambda t: t.dim() == 2)
    rows, columns = w.shape(x)
    a, b, v, u = w.other((rows, 2)), w.other((2, columns)), w.other((rows,)), w.other((columns,))
    # clones: PyTorch's product reads what it has written already where they share memory
    ways = [
        f"{x}.addmm_({a}.clone(), {b}.clone())",
        f"{x}.addr_({v}.clone(), {u}.clone())",
        f"{x}.tril_()",
        f"{x}.fill_diagonal_(0.5)",
        f"{x}.diagonal().copy_({v}[:1])",
    ]
    ways += [
        f"{x}.t().add_({u}[:, None])",
        f"{x}.mT.copy_({x}.clone().mT * 2)",
        f"{x}.view(-1).mul_(0.5)",
        f"{x}.t_()",
        f"{x}.triu_()",
    ]
    return Line(w.random.choice(ways), target=x)


def _of_shape(w: Writer) -> Line:
    x = w.target()
    ways = [f"{x}.unsqueeze_(0)", f"{x}.squeeze_()"]
    ways += [f"{x}.transpose_(0, -1)", f"{x}.swapaxes_(0, -1)"] if w.shape(x) else []
    return Line(w.random.choice(ways), target=x)


WRITES: tuple[Operator, ...] = (
    *[_alone] * 6,
    *[_of_another] * 9,
    *[_into_a_place] * 7,
    *[_along] * 5,
    *[_by_index] * 3,
    *[_matrix] * 2,
    _of_shape,
)
