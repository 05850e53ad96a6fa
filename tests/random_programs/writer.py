"""Writes random programs: picks statements, runs each on the first sample, and keeps those that PyTorch
takes.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.random_programs.modes import MODES, WEIGHTS
from tests.random_programs.programs import Argument, Program, Statement, compiled

PER_SAMPLE = "per sample"
LARGEST = 240  # entries of a tensor of one sample
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


class Skipped(Exception):
    """No tensor of the program suits the operator that was picked."""


class Line(NamedTuple):
    """What an operator of the catalogue writes: an expression for a new tensor, or, with a target, a
    statement that writes to it.
    """

    text: str
    plain: str | None = None
    target: str | None = None


Operator = Callable[["Writer"], Line]


class Writer:
    """A program in the making. Operators of the catalogue ask it for tensors, numbers and axes."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        chance = self.random
        self.dtype = chance.choices(DTYPES, (4, 3, 2))[0]
        self.samples = chance.choice((1, 2, 2, 3, 3, 4))
        self.extreme = chance.random() < 0.2
        self.mode = chance.choices(list(MODES), [WEIGHTS.get(mode, 1) for mode in MODES])[0]
        self.arguments: list[Argument] = []
        self.statements: list[Statement] = []
        self.tensors: dict[str, Tensor] = {}
        self.outside: set[int] = set()  # the memory of arguments, which no statement writes to

    # -- what operators ask for ------------------------------------------------------------------------------

    def tensor(self, wanted: Callable[[Tensor], bool] = lambda x: True) -> str:
        """The name of a floating tensor, later ones more often."""
        names = [name for name, x in self.tensors.items() if x.is_floating_point() and wanted(x)]
        if not names:
            raise Skipped
        return names[-1 - min(int(self.random.expovariate(0.6)), len(names) - 1)]

    def target(self, wanted: Callable[[Tensor], bool] = lambda x: True) -> str:
        """The name of a tensor that a statement may write to, a view where there is one, mostly."""
        mine = lambda x: wanted(x) and x.untyped_storage().data_ptr() not in self.outside
        if self.random.random() < 0.8:
            try:
                return self.tensor(lambda x: mine(x) and x._is_view())
            except Skipped:
                pass
        return self.tensor(mine)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def other(self, shape: Sequence[int], fresh: float = 0.4) -> str:
        """A floating tensor of this shape: one that is there, or a new argument."""
        known = [
            name for name, x in self.tensors.items() if x.is_floating_point() and x.shape == tuple(shape)
        ]
        if known and self.random.random() > fresh:
            return self.random.choice(known)
        return self.argument(shape)

    def apart(self, source: str, target: str) -> str:
        """The source of a write by places, a clone where it shares memory with the target: what PyTorch's
        kernel reads of what it has written already goes by its order.
        """
        memories = [self.tensors[name].untyped_storage().data_ptr() for name in (source, target)]
        return f"{source}.clone()" if memories[0] == memories[1] else source

    def broadcasting(self, name: str) -> str:
        """A tensor that broadcasts to the shape of the one named."""
        shape = self.shape(name)

        def fits(x: Tensor) -> bool:
            try:
                return torch.broadcast_shapes(x.shape, shape) == shape
            except RuntimeError:
                return False

        if self.random.random() < 0.65:
            try:
                return self.tensor(fits)
            except Skipped:
                pass
        start = self.random.randint(0, len(shape))
        return self.argument([1 if self.random.random() < 0.2 else s for s in shape[start:]])

    def argument(
        self,
        shape: Sequence[int],
        spread: str = "torch.randn({shape}, dtype=torch.float64)",
        *,
        keep: bool = False,
    ) -> str:
        """A new floating argument. keep: its values are as `spread` makes them, also in an extreme
        program.
        """
        chance = self.random
        name, edits = f"a{len(self.arguments)}", []
        batched = chance.random() < 0.5
        if chance.random() < 0.06 and not keep:
            spread = chance.choice(
                ("torch.zeros({shape})", "torch.ones({shape})", "torch.randint(-2, 3, {shape}).double()")
            )
        elif self.extreme and chance.random() < 0.5 and not keep:
            if chance.random() < 0.4:
                spread += f" * {chance.choice(('1e30', '1e-30', '1e15', '1e-15'))}"
            count = math.prod(shape) * (self.samples if batched else 1)
            for _ in range(chance.choice((0, 1, 1, 2)) if count else 0):
                value = chance.choice(
                    ("float('inf')", "-float('inf')", "float('nan')", "1e30", "-1e30", "1e-30", "0.0")
                )
                edits.append(f"{{name}}.view(-1)[{chance.randrange(count)}] = {value}")
        wanted = chance.random() < 0.7 and not (batched and self.mode == PER_SAMPLE)
        return self._add(name, shape, spread, tuple(edits), batched, wanted, True)

    def integers(self, shape: Sequence[int], high: int, low: int = 0) -> str:
        """A new argument of whole numbers below `high`."""
        make = f"torch.randint({low}, {high}, {{shape}})"
        return self._add(f"a{len(self.arguments)}", shape, make, (), self.random.random() < 0.5, False, False)

    def mask(self, shape: Sequence[int]) -> str:
        return self._add(
            f"a{len(self.arguments)}",
            shape,
            "torch.rand({shape}) > 0.4",
            (),
            self.random.random() < 0.5,
            False,
            False,
        )

    def number(self) -> float:
        return self.random.choice((0.5, -0.7, 1.3, 2.0, -1.0, 0.3))

    def axis(self, name: str) -> int:
        rank = self.tensors[name].dim()
        if not rank:
            raise Skipped
        return self.random.randrange(-rank, rank)

    def pick(self, *choices: object) -> object:
        return self.random.choice(choices)

    # -- the program -----------------------------------------------------------------------------------------

    def _add(
        self,
        name: str,
        shape: Sequence[int],
        make: str,
        edits: tuple[str, ...],
        batched: bool,
        differentiated: bool,
        floating: bool,
    ) -> str:
        rank = len(shape)
        dim = self.random.randint(0, rank) if batched and self.random.random() < 0.3 else 0
        seed = self.random.randrange(10**6)
        argument = Argument(name, tuple(shape), make, edits, seed, batched, differentiated, floating, dim)
        self.arguments.append(argument)
        value = self.program(()).value(argument)
        self.tensors[name] = value[0] if batched else value
        self.outside.add(value.untyped_storage().data_ptr())
        return name

    def program(self, outputs: Sequence[str]) -> Program:
        return Program(
            tuple(self.arguments),
            tuple(self.statements),
            tuple(outputs),
            self.samples,
            self.dtype,
            self.mode,
            self.extreme,
            self.seed,
        )

    def attempt(self, operator: Operator) -> bool:
        """Add a line by this operator, if PyTorch takes it for the first sample."""
        arguments = len(self.arguments)
        try:
            line = operator(self)
        except (Skipped, ValueError, IndexError, RuntimeError):  # the others: of an empty tensor
            self._forget(arguments)
            return False
        name = line.target or f"t{sum(not s.writes for s in self.statements)}"
        prefix = "" if line.target is not None else f"{name} = "
        statement = Statement(
            prefix + line.text,
            name,
            None if line.plain is None else prefix + line.plain,
            writes=line.target is not None,
        )
        before = {id(x): x.clone() for x in self.tensors.values()} if statement.writes else {}
        names = {"torch": torch, "F": F} | self.tensors
        try:
            exec(compiled(statement.plain or statement.text), names)
            kept = self._is_fine(names[name])
        except Exception:  # whatever PyTorch says to a line that does not fit
            kept = self.random.random() < 0.01
            if kept:  # ours must refuse it, too
                self.statements.append(statement)
                return True
        if not kept:
            if statement.writes:
                for x in self.tensors.values():
                    if not _overlaps(x):
                        x.copy_(before[id(x)])
            self._forget(arguments)
            return False
        self.statements.append(statement)
        self.tensors[name] = names[name]
        return True

    def _is_fine(self, result: object) -> bool:
        if (
            not isinstance(result, Tensor)
            or result.is_complex()
            or result.numel() > LARGEST
            or not result.numel()
        ):
            return False
        if self.extreme or not result.is_floating_point():
            return True
        return bool(result.isfinite().all()) and float(result.abs().max()) < 1e4

    def _forget(self, arguments: int) -> None:
        for argument in self.arguments[arguments:]:
            self.tensors.pop(argument.name, None)
        del self.arguments[arguments:]


def _overlaps(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def write(seed: int) -> Program:
    """The random program of this seed."""
    from tests.random_programs.catalogue import KINDS

    writer = Writer(seed)
    chance = writer.random
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for _ in range(chance.randint(1, 3)):
            writer.argument(
                [chance.choice((1, 2, 2, 3, 3, 4)) for _ in range(chance.choice((0, 1, 1, 2, 2, 3)))]
            )
        while not (
            any(a.batched for a in writer.arguments) and any(a.differentiated for a in writer.arguments)
        ):
            writer.argument([chance.choice((1, 2, 3)) for _ in range(chance.choice((0, 1, 2)))])
        writer.attempt(lambda w: Line(f"{w.tensor()}.clone()"))
        wanted = chance.choice((2, 3, 4, 5, 6, 8, 10, 14))
        for _ in range(8 * wanted):
            if len(writer.statements) >= wanted:
                break
            kind = chance.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
            writer.attempt(chance.choice(KINDS[kind][1]))
    floating = [name for name, x in writer.tensors.items() if x.is_floating_point()]
    made = [name for name in floating if name.startswith("t")]
    outputs = list(dict.fromkeys([*made[-1:], *chance.sample(made, min(len(made), chance.randint(0, 2)))]))
    if chance.random() < 0.2:
        outputs.append(chance.choice(floating))
    return writer.program(list(dict.fromkeys(outputs)) or floating[:1])
