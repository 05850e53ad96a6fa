"""Runs a program both ways, and says what came of it.

How far a number may be from the loop's is measured, not assumed: the loop runs again with every value that a
statement makes, and every cotangent that passes it, moved by one unit in the last place at random. A number
may be as far off as a small multiple of what that does.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

from psgrad.errors import PsgradError
from tests.random_programs import queries
from tests.random_programs.allowed import allowed
from tests.random_programs.backends import ForwardLoops, Loops, LoopsByOutput, Ours, TangentLoops
from tests.random_programs.modes import MODES, Case
from tests.random_programs.places import AtPlaces
from tests.random_programs.programs import FIRST_ORDER, Program
from tests.random_programs.rounding import EveryKernelRounds, EveryOperatorRounds, Nudge
from tests.random_programs.writer import PER_SAMPLE
from tests.random_programs.written_out import WithVariance, WrittenOut

EQUAL, BOTH_RAISED, REFUSED, ONLY_OURS = (
    "equal",
    "both raised",
    "refused by name",
    "only the loop raised, by a limit of autograd",
)
UNDERFLOW = "as exact as the type's exponents allow, and right in float64"
INFINITE = "infinite where the loop's sum over samples is NaN, and some sample's gradient infinite"
ROUNDED = "as exact as the type allows, where the loop is more so"
NO_NUMBER = "a higher derivative of PyTorch's is no number, of finite values"
BY_PLACE = "PyTorch's kernel returns one number or another, by the place in memory of a NaN"
NOT_NOTICED = "refused by autograd, which does not notice the write in the loop, and is wrong there"
TOO_LARGE = "infinite or NaN, as the loop's is the other of them, and too large for the type"
AUTOGRADS_OWN = "as autograd alone has it, which does not notice the write in the loop, and is wrong there"
WRONG, INTERNAL, ACCEPTED = "WRONG NUMBER", "INTERNAL ERROR", "ACCEPTED WHAT THE LOOP REFUSES"
UNLISTED = "REFUSED BY NAME, AND NOT IN allowed.py"
CRASHED = "CRASH"
FAILURES = (WRONG, INTERNAL, ACCEPTED, UNLISTED, CRASHED)

LOOPS = Loops()
_ADDED = ("grad(vmap)", "autograd of vmap")  # modes that add up the gradients of samples
ROUNDINGS = 4  # how often the loop runs with moved values
MULTIPLE = 40.0  # of the largest difference that this makes
OUR_MULTIPLE = 4.0  # of the largest difference in our own numbers
UNITS = 64.0  # in the last place, which any number may be off


@dataclass(frozen=True)
class Outcome:
    kind: str
    words: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES

    @property
    def label(self) -> str:
        """The kind; of a refusal also which of those that are allowed."""
        return f"{self.kind}: {allowed(self.words)}" if self.kind == REFUSED else self.kind


# What PyTorch's autograd can't do, and we may.
_LIMITS_OF_AUTOGRAD = re.compile(
    r"modified by an inplace operation|its base or another view of its base has been modified"
    r"|is a view and is being modified inplace|is being modified inplace with grad mode enabled"
    r"|derivative for .* is not implemented|not implemented for"
    r"|does not support|backward is unsupported|backward\(\) of|trying to backward|not differentiable|doesn't"
    r" support"
    r"|leaf variable|leaf Variable"
    r"|the derivative .* is not implemented|must be contiguous|single memory location"
)
# Errors that are a program's own fault, or a thing that psgrad refuses, are of these classes.
_SAID = (PsgradError, RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


def check(program: Program) -> Outcome:
    """What comes of a program under its transforms."""
    with quiet(), _kernels(program):
        ours, error = attempted(lambda: run_ours(program))
        plain, plain_error = attempted(lambda: run_loop(program))
        if error is not None:
            return _of_error(program, error, plain_error)
        if plain_error is not None:
            if _is_limit_of_autograd(program, plain_error):
                return Outcome(ONLY_OURS, first_line(plain_error))
            return Outcome(ACCEPTED, first_line(plain_error))
        return _compared(program, ours, plain)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _kernels(program: Program) -> Iterator[None]:
    """Convolutions without the libraries that PyTorch calls for some sizes, where infinite numbers may meet
    padding: oneDNN leaves padding out, and PyTorch's own kernels multiply it with zero; NNPACK, which takes
    16 images and more where oneDNN is off, mixes all numbers of a tile. In bfloat16 oneDNN ends the process
    at third derivatives of conv3d.
    """
    text = " ".join(statement.text for statement in program.statements)
    with ExitStack() as off:
        if (program.extreme and "conv" in text) or (program.dtype == torch.bfloat16 and "conv3d(" in text):
            off.enter_context(torch.backends.mkldnn.flags(enabled=False))
            off.enter_context(torch.backends.nnpack.flags(enabled=False))
        yield


def attempted(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], BaseException | None]:
    try:
        return run(), None
    except Exception as error:
        return [], error


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def run_ours(program: Program, dtype: torch.dtype | None = None) -> list[Tensor]:
    case = Case.of(program, program.function(), program.values(dtype))
    if program.mode == PER_SAMPLE:
        return queries.ours(program, case)
    return _flat(MODES[program.mode](Ours(), case))


def run_loop(
    program: Program,
    dtype: torch.dtype | None = None,
    moved: int | None = None,
    *,
    strictly: bool = False,
    loops: Loops = LOOPS,
    written_out: bool | type[WrittenOut] | None = None,
    apart: bool = False,
) -> list[Tensor]:
    """The loop's results. moved: a seed by which values are moved. strictly: as PyTorch's autograd runs it
    without our help. apart: each sample has its own copy of what is differentiated.
    """
    values = program.values(dtype)
    ways: dict[str, Any] = {"plain": not strictly, "written_out": written_out}
    if moved is not None:
        nudge = Nudge(moved)
        values = [nudge(x) for x in values]
        ways |= {"after": nudge.after, "again": nudge.again, "inside": nudge}
    f = program.function(**ways)
    case = Case.of(program, f, values)
    if apart:
        case = case.apart(program.samples)
    if strictly:
        return _flat(MODES[program.mode](loops, case))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        return _flat(MODES[program.mode](loops, case))


def _flat(tree: Any) -> list[Tensor]:
    return [x.detach() for x in tree_flatten(tree)[0]]


def _of_error(program: Program, error: BaseException, plain_error: BaseException | None) -> Outcome:
    words = first_line(error)
    said = isinstance(error, _SAID) and not _is_internal(error)
    by_name = isinstance(error, PsgradError) or "single memory location" in str(
        error
    )  # PyTorch says what to do as well as we could
    if by_name and plain_error is None:
        return Outcome(REFUSED if allowed(words) else UNLISTED, words)
    if plain_error is None and _LIMITS_OF_AUTOGRAD.search(str(error)):
        _, plain_error = attempted(lambda: run_loop(program, strictly=True))
        if plain_error is None and _misses_a_write(program):
            return Outcome(NOT_NOTICED, words)
    if plain_error is not None and said:
        return Outcome(BOTH_RAISED, words)
    return Outcome(INTERNAL, words)


def _misses_a_write(program: Program) -> bool:
    """Whether the loop is wrong without our help. In float64, as halves of wrong numbers may be as rounded
    ones; with other arguments, too, as a write may leave some numbers as they are; and with the derivatives
    of all arguments, as what is written over may be of no account to some.
    """
    other = [
        replace(a, make=f"-9 * ({a.make})") if a.floating and a.make.startswith("torch.randn") else a
        for a in program.arguments
    ]
    followed = [replace(a, differentiated=a.floating) for a in program.arguments]
    for arguments in (program.arguments, tuple(other), tuple(followed)):
        exact = replace(program, arguments=arguments, dtype=torch.float64)
        strict, error = attempted(lambda exact=exact: run_loop(exact, strictly=True))
        plain, plain_error = attempted(lambda exact=exact: run_loop(exact))
        if error is None and plain_error is None and _differences(exact, strict, *_with_no_tolerance(plain)):
            return True
    return False


def _is_limit_of_autograd(program: Program, error: BaseException) -> bool:
    """Whether autograd refuses what the operators themselves do not. Of dtypes both say the same."""
    if "Found dtype" in str(error):
        return attempted(lambda: run_loop(replace(program, mode="vmap")))[1] is None
    return bool(_LIMITS_OF_AUTOGRAD.search(str(error)))


def _with_no_tolerance(plain: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return plain, [torch.zeros_like(x, dtype=torch.float64) for x in plain]


def _is_internal(error: BaseException) -> bool:
    """Whether Python code of psgrad's raised it, rather than PyTorch or the program."""
    if isinstance(error, (RuntimeError, NotImplementedError)):
        return False
    trace, last = error.__traceback__, ""
    while trace is not None:
        last, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return "/psgrad/" in last and "/tests/" not in last


def _compared(program: Program, ours: list[Tensor], plain: list[Tensor]) -> Outcome:
    if not _differences(program, ours, *_with_no_tolerance(plain)):
        return Outcome(EQUAL)
    off = [
        far + wide
        for far, wide in zip(_measured(program, plain), _by_wider_numbers(program, plain), strict=True)
    ]
    found = _differences(program, ours, plain, off)
    if not found or _agrees_with_forward_mode(program, ours, plain, off):
        return Outcome(EQUAL)
    if program.mode not in FIRST_ORDER or (
        program.extreme and "jacrev" in program.mode
    ):  # whose rows hold cotangents of zero
        # from here on, also beside rounding
        off = [far.masked_fill(y.isnan(), math.nan) for y, far in zip(plain, off, strict=True)]
        if program.extreme and (
            "jvp" in program.mode or "jacfwd" in program.mode
        ):  # the loop's two passes back meet zeros times infinity
            off = [
                far.masked_fill(~(x.isfinite() & y.isfinite()), math.nan)
                for x, y, far in zip(ours, plain, off, strict=True)
            ]
        if not _differences(program, ours, plain, off):
            return Outcome(NO_NUMBER)
    if _agrees_the_other_way(program, ours, off):
        return Outcome(EQUAL)
    if _is_moderate(program) and _shrinks_with_the_unit(program, ours, plain, off):
        return Outcome(ROUNDED, found)
    if (program.extreme or program.dtype == torch.bfloat16) and not _differences(
        program,
        ours,
        plain,
        [far + inside for far, inside in zip(off, _by_operators(program, plain), strict=True)],
    ):
        return Outcome(ROUNDED, found)
    if _agrees_within_our_rounding(program, ours, plain, off):
        return Outcome(ROUNDED, found)
    if program.extreme and not _differences(program, ours, plain, _unless_by_place(program, off)):
        return Outcome(BY_PLACE, found)
    if program.extreme and not _differences(
        program, ours, plain, _unless_infinite(program, ours, plain, off)
    ):
        return Outcome(INFINITE, found)
    if program.extreme and not _differences(
        program, ours, plain, _unless_too_large(program, ours, plain, off)
    ):
        return Outcome(TOO_LARGE, found)
    if program.extreme and program.dtype != torch.float64 and _underflows(program, ours, plain):
        return Outcome(UNDERFLOW, found)
    if (
        program.dtype == torch.bfloat16
        and _normalises_a_rounded_zero(program)
        and _is_right_in_float64(program)
    ):
        return Outcome(ROUNDED, found)
    if program.mode == "autograd of vmap" and _misses_a_write(program):
        # of values that no sample has its own of, the operators are PyTorch's, and nothing of ours runs
        strict, error = attempted(lambda: run_loop(program, strictly=True))
        if error is None and not _differences(program, ours, strict, off):
            return Outcome(AUTOGRADS_OWN, found)
    return Outcome(WRONG, found)


def _agrees_with_forward_mode(
    program: Program, ours: list[Tensor], plain: list[Tensor], off: list[Tensor]
) -> bool:
    """Whether another way to a JVP says what we do: PyTorch's double backward passes have gaps, and its
    forward mode has others.
    """
    if "jvp" not in program.mode and "jacfwd" not in program.mode:
        return False
    for loops in (ForwardLoops(), TangentLoops()):
        forward, error = attempted(lambda loops=loops: run_loop(program, loops=loops))
        if error is None and not _differences(program, ours, forward, off):
            return True
    alone, error = attempted(lambda: run_loop(program, loops=LoopsByOutput()))
    if error is not None or len(alone) != len(ours):
        return False
    # A number that is finite where no zero of another output meets a NaN is that number.
    known = [
        torch.where(x.isfinite() & y.isnan(), one, y) for x, y, one in zip(ours, plain, alone, strict=True)
    ]
    return not _differences(program, ours, known, off)


def _agrees_the_other_way(program: Program, ours: list[Tensor], off: list[Tensor]) -> bool:
    """Whether normalisations say what we do as kernels, if the oracle has them written out, and the reverse.

    The kernels add the mean times the scale, which is NaN where the scale is infinite, and rounded where the
    sum is zero, as for one number; and so do some of our ways, but not all.
    """
    if not any("_norm(" in s.text for s in program.statements):
        return False
    for way in (program.mode in FIRST_ORDER, WithVariance):
        plain, error = attempted(lambda way=way: run_loop(program, written_out=way))
        if error is None and not _differences(program, ours, plain, off):
            return True
    return False


def _measured(program: Program, plain: list[Tensor]) -> list[Tensor]:
    """How far moved values lead: for each number of the loop's the largest difference, times MULTIPLE.

    Of normalisations both ways are measured, as kernels and written out: what is zero of equal numbers, as a
    derivative of their deviation, is rounded by the one and not by the other.
    """
    off = _led_to(plain, lambda seed: run_loop(program, moved=seed))
    if any("_norm(" in s.text for s in program.statements):
        other_way = program.mode in FIRST_ORDER
        other, error = attempted(lambda: run_loop(program, written_out=other_way))
        if error is None:
            others = _led_to(other, lambda seed: run_loop(program, moved=seed, written_out=other_way))
            off = [torch.maximum(far, another) for far, another in zip(off, others, strict=True)]
    return off


def _by_operators(program: Program, plain: list[Tensor]) -> list[Tensor]:
    """The same where each operator rounds, also those inside a statement and on the way back."""

    def run(seed: int | None) -> list[Tensor]:
        with (
            EveryOperatorRounds(seed),
            sdpa_kernel(SDPBackend.MATH),
        ):  # attention rounds inside its kernels, too
            return run_loop(program)

    unmoved, error = attempted(lambda: run(None))
    return _led_to(plain if error is not None else unmoved, run)


def _agrees_within_our_rounding(
    program: Program, ours: list[Tensor], plain: list[Tensor], off: list[Tensor]
) -> bool:
    """Of extreme programs all numbers; of others the inner products, which have no guard as norms have."""
    if program.mode == PER_SAMPLE:
        moved = queries.of_products(plain, _by_our_rounding(program, ours))
        return not _differences(program, ours, plain, off, moved)
    if not program.extreme:
        return False
    wider = [far + own for far, own in zip(off, _by_our_rounding(program, ours), strict=True)]
    return not _differences(program, ours, plain, wider)


def _by_our_rounding(program: Program, ours: list[Tensor]) -> list[Tensor]:
    """How far our own numbers move where each kernel rounds once more: numbers from 1e-30 to 1e30 in one
    program may leave a sum with no digit, and another order of the same sum with some.
    """

    def run(seed: int) -> list[Tensor]:
        with EveryKernelRounds(seed):
            return run_ours(program)

    return [far * (OUR_MULTIPLE / MULTIPLE) for far in _led_to(ours, run)]


def _unless_by_place(program: Program, off: list[Tensor]) -> list[Tensor]:
    """How far numbers may be off; NaN, for any distance, where the loop's go by places in memory."""

    def run(alone: bool) -> list[Tensor]:
        with AtPlaces(alone):
            return run_loop(program)

    alone, error = attempted(lambda: run(True))
    together, other_error = attempted(lambda: run(False))
    if error is not None or other_error is not None:
        return off
    return [
        far.masked_fill(_is_wrong(program, x, y, far, as_gradients=True), math.nan)
        for x, y, far in zip(alone, together, off, strict=True)
    ]


def _unless_infinite(
    program: Program, ours: list[Tensor], plain: list[Tensor], off: list[Tensor]
) -> list[Tensor]:
    """How far numbers may be off; NaN where ours is infinite, as some sample's own gradient is, and the
    loop's sum over samples is NaN: an infinite value that samples share is multiplied with the sum of its
    cotangents, and the loop adds the products.
    """
    if program.mode not in _ADDED:
        return off
    alone, error = attempted(lambda: run_loop(program, apart=True))
    if error is not None:
        return off
    return [
        far.masked_fill(x.isinf() & y.isnan() & each.isinf().any(0), math.nan)
        if each.shape == (program.samples, *x.shape)
        else far
        for x, y, far, each in zip(ours, plain, off, alone, strict=True)
    ]


def _unless_too_large(
    program: Program, ours: list[Tensor], plain: list[Tensor], off: list[Tensor]
) -> list[Tensor]:
    """How far numbers may be off; NaN where ours and the loop's both are none, as the number itself is too
    large for the type: a sum of infinities of both signs is NaN in one order, and infinite in another.
    """
    exact, error = attempted(lambda: run_loop(program, torch.float64))
    if error is not None or program.dtype == torch.float64:
        return off
    largest = torch.finfo(program.dtype).max
    return [
        far.masked_fill(~x.isfinite() & ~y.isfinite() & (each.abs() > largest), math.nan)
        if each.shape == y.shape
        else far
        for x, y, far, each in zip(ours, plain, off, exact, strict=False)
    ]


def _led_to(plain: list[Tensor], run: Callable[[int], list[Tensor]]) -> list[Tensor]:
    off = [torch.zeros_like(x, dtype=torch.float64) for x in plain]
    for seed in range(ROUNDINGS):
        moved, error = attempted(lambda seed=seed: run(seed))
        if error is not None:
            continue
        for far, x, y in zip(off, plain, moved, strict=True):
            difference = (x.double() - y.double()).abs()
            torch.maximum(far, torch.where(_same_kind(x, y), difference.nan_to_num(), math.inf), out=far)
    return [far * MULTIPLE for far in off]


def _by_wider_numbers(program: Program, plain: list[Tensor]) -> list[Tensor]:
    """The loop's own error, as float64 tells it, times four: kernels of one sample and of many round in
    different places.
    """
    zeros = [torch.zeros_like(x, dtype=torch.float64) for x in plain]
    if program.dtype == torch.float64:
        return zeros
    wide, error = attempted(lambda: run_loop(program, torch.float64))
    if error is not None:
        return zeros
    return [4 * (x.double() - y.double()).abs().nan_to_num(0, 0, 0) for x, y in zip(plain, wide, strict=True)]


def _differences(
    program: Program,
    ours: list[Tensor],
    plain: list[Tensor],
    off: Sequence[Tensor],
    more: Mapping[int, Tensor] | None = None,
) -> str:
    """What is different, in words; empty where nothing is. more: place of a result -> how far it may be off
    besides.
    """
    if program.mode != PER_SAMPLE:
        pairs = list(zip(plain, off, strict=True))
    else:
        names = [program.arguments[i].name for i in program.places(lambda a: a.differentiated)]
        own = [
            far + UNITS * program.unit * x.double().abs().nan_to_num(0, 0, 0)
            for x, far in zip(plain, off, strict=True)
        ]
        pairs = [*zip(plain, off, strict=True), *queries.expected(plain, own, names)]
    if len(pairs) != len(ours):
        return f"{len(ours)} results in place of {len(pairs)}"
    for number, (x, (y, far)) in enumerate(zip(ours, pairs, strict=True)):
        checks_kind = number < len(plain)
        far = far + (more or {}).get(number, 0)
        if x.shape != y.shape or (checks_kind and x.dtype != y.dtype):
            return f"result {number} is {tuple(x.shape)} {x.dtype} in place of {tuple(y.shape)} {y.dtype}"
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return f"result {number}: {x.tolist()} in place of {y.tolist()}"
            continue
        wrong = _is_wrong(program, x, y, far, as_gradients=checks_kind)
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            return (
                f"result {number} at {place}: {x[place].item()!r} in place of {y[place].item()!r}, may be"
                f" {far[place].item():.3g} off"
            )
    return ""


def _is_wrong(program: Program, x: Tensor, y: Tensor, far: Tensor, *, as_gradients: bool) -> Tensor:
    finite = x.isfinite() & y.isfinite()
    unit = max(torch.finfo(x.dtype).eps, program.unit)
    tiny = 1e-300 if program.dtype == torch.float64 else 1e-36
    allowed = far.nan_to_num(math.inf) + UNITS * unit * y.double().abs() + tiny
    difference = (x.double() - y.double()).abs()
    kinds = _same_kind(x, y) if as_gradients else x.isfinite() == y.isfinite()
    return torch.where(finite, difference > allowed, ~kinds & ~(far == math.inf) & ~(far.isnan()))


def _is_moderate(program: Program) -> bool:
    """Whether no finite number that goes in is so large or small that an absolute tolerance would mean
    nothing.
    """
    sizes = torch.cat([x.double().abs().flatten() for x in program.values() if x.is_floating_point()])
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    return not program.extreme or bool(((sizes > 1e-5) & (sizes < 1e5)).all())


def _shrinks_with_the_unit(
    program: Program, ours: list[Tensor], plain: list[Tensor], measured: list[Tensor]
) -> bool:
    """Whether the difference is rounding: each number as far off as moved values lead, or by units in the
    last place of the largest number, and less far in float64, as its unit is smaller.
    """
    sizes = [
        float(x.abs().nan_to_num(0, 0, 0).max())
        for x in (*plain, *program.values())
        if x.is_floating_point() and x.numel()
    ]
    unit, wide_unit = torch.finfo(program.dtype).eps, torch.finfo(torch.float64).eps
    off = [far.clamp(min=1e3 * unit * max(1.0, *sizes)) for far in measured]
    if _differences(program, ours, plain, off):
        return False
    wide, error = attempted(lambda: run_ours(program, torch.float64))
    loop, loop_error = attempted(lambda: run_loop(program, torch.float64))
    if error is not None or loop_error is not None:
        return False
    exact = replace(program, dtype=torch.float64)
    return not _differences(exact, wide, loop, [far * (wide_unit / unit) for far in off])


def _same_kind(x: Tensor, y: Tensor) -> Tensor:
    """Where both are finite, or both NaN, or the same infinity."""
    return (x.isfinite() & y.isfinite()) | (x.isnan() & y.isnan()) | (x == y)


def _underflows(program: Program, ours: list[Tensor], plain: list[Tensor]) -> bool:
    """Whether what is wrong in a narrow type is right in float64, whose exponents hold what lost its digits
    there. Finite numbers alone are excused: none is infinite or NaN where the loop's is not, nor the reverse.
    """
    if not all(bool(_same_kind(x, y).all()) for x, y in zip(ours, plain, strict=False)):
        return False
    wide, error = attempted(lambda: run_ours(program, torch.float64))
    if error is not None:
        return False
    queries_of_both = zip(ours[len(plain) :], wide[len(plain) :], strict=True)
    if any(bool((x.isfinite() != y.isfinite()).any()) for x, y in queries_of_both):
        return False
    return _is_right_in_float64(program)


def _is_right_in_float64(program: Program) -> bool:
    wide, error = attempted(lambda: run_ours(program, torch.float64))
    loop, loop_error = attempted(lambda: run_loop(program, torch.float64))
    if error is not None or loop_error is not None:
        return False
    off = [torch.zeros_like(x) + 1e-9 * x.double().abs().nan_to_num(0, 0, 0) for x in loop]
    return not _differences(replace(program, dtype=torch.float64), wide, loop, off)


def _normalises_a_rounded_zero(program: Program) -> bool:
    """Whether a vector of one number is normalised that is zero by our rounding and not by the loop's, or the
    reverse. The result is the number's sign, and steep at zero alone.
    """
    for place, statement in enumerate(program.statements):
        call = re.search(r"F\.normalize\((\w+), dim=(-?\d+)\)", statement.text)
        if call is None:
            continue
        before = replace(program, statements=program.statements[:place], outputs=(call[1],), mode="vmap")
        ours, error = attempted(lambda one=before: run_ours(one))
        loop, loop_error = attempted(lambda one=before: run_loop(one))
        if error is not None or loop_error is not None:
            continue
        axis = int(call[2]) if int(call[2]) < 0 else int(call[2]) + 1
        if ours[0].shape[axis] == 1 and bool(((ours[0] == 0) != (loop[0] == 0)).any()):
            return True
    return False
