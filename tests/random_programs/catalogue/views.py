"""Views. Where PyTorch's autograd takes no writes through a view (`unbind`, `split`), the oracle takes
another that is the same.
"""

from __future__ import annotations

import math

from tests.random_programs.writer import Line, Operator, Skipped, Writer


def _with_axis(write: object, rank: int = 1) -> Operator:
    """A view along one axis: `write(writer, name, axis, size of the axis)` gives the text, or a Line."""

    def view(w: Writer) -> Line:
        x = w.tensor(lambda t: t.dim() >= rank)
        axis = w.axis(x)
        found = write(w, x, axis, w.shape(x)[axis])  # type: ignore[operator]
        return found if isinstance(found, Line) else Line(found)

    return view


def _narrow(w: Writer, x: str, axis: int, size: int) -> str:
    start = w.random.randrange(size)
    return f"{x}.narrow({axis}, {start}, {w.random.randint(1, size - start)})"


def _slice(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() >= 1)
    size = w.shape(x)[0]
    last = w.shape(x)[-1]
    return Line(
        w.random.choice(
            (
                f"{x}[1:]",
                f"{x}[:{max(1, size - 1)}]",
                f"{x}[..., ::2]",
                f"{x}[..., {w.random.randrange(last)}]",
                f"{x}[{w.random.randrange(-size, size)}]",
                f"{x}[None]",
                f"{x}[...]",
                f"{x}[..., {last // 2}:]",
            )
        )
    )


def _unbind(w: Writer, x: str, axis: int, size: int) -> Line:
    place = w.random.randrange(size)
    return Line(f"{x}.unbind({axis})[{place}]", f"{x}.select({axis}, {place})")


def _split(w: Writer, x: str, axis: int, size: int) -> Line:
    length = w.random.randint(1, size)
    place = w.random.randrange(-(-size // length))
    start = place * length
    taken = min(length, size - start)
    way = (
        w.pick(f"split({length}, {axis})", f"chunk({-(-size // length)}, {axis})")
        if size % length == 0
        else f"split({length}, {axis})"
    )
    return Line(f"{x}.{way}[{place}]", f"{x}.narrow({axis}, {start}, {taken})")


def _unfold(w: Writer, x: str, axis: int, size: int) -> str:
    length = w.random.randint(1, size)
    return f"{x}.unfold({axis}, {length}, {w.pick(1, 1, 2)})"


def _transpose(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() >= 2)
    rank = len(w.shape(x))
    order = w.random.sample(range(rank), rank)
    ways = [
        f"{x}.transpose({w.axis(x)}, {w.axis(x)})",
        f"{x}.permute({order})",
        f"{x}.movedim({w.axis(x)}, {w.axis(x)})",
        f"{x}.mT",
    ]
    return Line(w.random.choice(ways if rank > 2 else [*ways, f"{x}.t()"]))


def _diagonal(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() >= 2)
    return Line(
        w.random.choice((f"{x}.diagonal(0, -2, -1)", f"{x}.diagonal(1, 0, -1)", f"{x}.diagonal(0, 1, 0)"))
    )


def _expand(w: Writer) -> Line:
    x = w.tensor()
    return Line(
        w.random.choice(
            (f"{x}.expand(2, *{x}.shape)", f"{x}.unsqueeze(-1).expand(*{x}.shape, 3)", f"{x}.expand_as({x})")
        )
    )


def _view(w: Writer) -> Line:
    x = w.tensor()
    shape = w.shape(x)
    count = math.prod(shape)
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    first = w.random.choice(divisors)
    return Line(
        w.random.choice(
            (
                f"{x}.view(-1)",
                f"{x}.reshape({first}, {count // first})",
                f"{x}.view({first}, -1)",
                f"{x}.flatten()",
                f"{x}.reshape(-1)",
                f"{x}.unsqueeze(0)",
                f"{x}.unsqueeze(-1)",
                f"{x}.squeeze()",
                f"{x}.squeeze(0)" if shape else f"{x}.squeeze()",
                f"{x}.view_as({x})",
                f"{x}.contiguous()",
                f"{x}.ravel()",
            )
        )
    )


def _unflatten(w: Writer, x: str, axis: int, size: int) -> str:
    inner = w.random.choice([d for d in range(1, size + 1) if size % d == 0])
    return f"{x}.unflatten({axis}, ({inner}, {size // inner}))"


def _as_strided(w: Writer) -> Line:
    x = w.tensor(lambda t: t.is_contiguous() and t.dim() >= 1 and not t.storage_offset())
    count = math.prod(w.shape(x))
    if count < 2:
        raise Skipped
    return Line(f"{x}.as_strided(({count // 2}, 2), (2, 1))")


def _detached(w: Writer) -> Line:
    return Line(f"{w.tensor()}.detach()")


VIEWS: tuple[Operator, ...] = (
    _slice,
    _slice,
    _slice,
    _with_axis(lambda w, x, axis, size: f"{x}.select({axis}, {w.random.randrange(-size, size)})"),
    _with_axis(_narrow),
    _with_axis(_unbind),
    _with_axis(_split),
    _with_axis(_unfold),
    _with_axis(_unflatten),
    _transpose,
    _transpose,
    _diagonal,
    _expand,
    _view,
    _view,
    _as_strided,
    _detached,
)
