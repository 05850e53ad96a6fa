"""A program: arguments, and statements as text. It prints as Python that runs by itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.random_programs.written_out import Conventions, WrittenOut, WrittenOutTorch
from tests.seeds import set_seed

FIRST_ORDER = {
    "vmap",
    "vmap(vmap)",
    "grad",
    "vmap(grad)",
    "grad(vmap)",
    "vmap(vjp)",
    "vmap(jacrev)",
    "jacrev(vmap)",
    "autograd of vmap",
    "autograd of vmap(vmap)",
    "per sample",
}
"""Modes whose oracle takes no derivative of a derivative."""


@dataclass(frozen=True)
class Argument:
    """An argument of a program: how its values are made, and what the transforms do with it.

    shape: of one sample. make: an expression for a tensor of the shape `{shape}`, which has the sample axis
    in front where `batched`. edits: statements that change single values, with `{name}` for the argument.
    dim: where the sample axis is put for `vmap`.
    """

    name: str
    shape: tuple[int, ...]
    make: str
    edits: tuple[str, ...] = ()
    seed: int = 0
    batched: bool = False
    differentiated: bool = False
    floating: bool = True
    dim: int = 0


@dataclass(frozen=True)
class Statement:
    """One line. `plain`: how the oracle runs it, where PyTorch's autograd refuses the line as it is.

    target: the name that the line binds, or of the tensor that it writes to.
    """

    text: str
    target: str
    plain: str | None = None
    writes: bool = False


@dataclass(frozen=True)
class Program:
    """A function of tensors, the number of its samples, and the nest of transforms that it is put under."""

    arguments: tuple[Argument, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    samples: int
    dtype: torch.dtype
    mode: str
    extreme: bool = False
    seed: int = 0

    def values(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The arguments, the sample axis in front of those that are batched. Floating ones are rounded to the
        program's dtype.
        """
        found = [self.value(argument) for argument in self.arguments]
        return [x.to(dtype) if dtype is not None and x.is_floating_point() else x for x in found]

    def value(self, argument: Argument) -> Tensor:
        names: dict[str, Any] = {"torch": torch}
        set_seed(argument.seed)
        value = eval(argument.make.format(shape=self.full_shape(argument)), names)
        names[argument.name] = value.to(self.dtype) if argument.floating else value
        for edit in argument.edits:
            exec(edit.format(name=argument.name), names)
        return names[argument.name]

    def full_shape(self, argument: Argument) -> tuple[int, ...]:
        return (self.samples, *argument.shape) if argument.batched else argument.shape

    def function(
        self,
        plain: bool = False,
        after: Callable[[dict[str, Any], Statement], None] | None = None,
        again: Callable[[Any], Any] | None = None,
        written_out: bool | type[WrittenOut] | None = None,
        inside: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Callable[..., Any]:
        """The program as a function of its arguments. plain: as the oracle runs it. after: called when a
        statement has run.

        again: what a statement sees of a value that it names a second time. written_out: whether the
        functions of WrittenOut are programs of elementwise operators; by default where the oracle takes
        second derivatives. inside: what these see of their values.
        """
        written_out = plain and self.mode not in FIRST_ORDER if written_out is None else written_out
        texts = [s.plain if plain and s.plain is not None else s.text for s in self.statements]
        lines = [
            (compiled(text if again is None else self._again(text)), s)
            for text, s in zip(texts, self.statements, strict=True)
        ]

        def f(*args: Tensor) -> tuple[Tensor, ...]:
            writer = WrittenOut if isinstance(written_out, bool) else written_out
            functional: Any = writer(inside) if written_out else Conventions() if plain else F
            if functional is not F and "jvp" not in self.mode and "jacfwd" not in self.mode:
                # double backward passes are no tangents here, but second derivatives
                functional.embedding, functional.embedding_bag = F.embedding, F.embedding_bag
                functional.multi_margin_loss = F.multi_margin_loss
            modules = {"torch": WrittenOutTorch() if plain else torch, "F": functional}
            names: dict[str, Any] = {**modules, "again": again} | {
                a.name: x for a, x in zip(self.arguments, args, strict=True)
            }
            for code, statement in lines:
                exec(code, names)
                if after is not None:
                    after(names, statement)
            return tuple(names[name] for name in self.outputs)

        return f

    def _again(self, text: str) -> str:
        """A statement, with `again(...)` around each name of a tensor but the first time."""
        seen: set[str] = set()
        tensors = {a.name for a in self.arguments} | {s.target for s in self.statements}

        def replaced(found: re.Match[str]) -> str:
            name = found[0]
            if name not in tensors or name not in seen:
                seen.add(name)
                return name
            return f"again({name})"

        return re.sub(r"(?<![\w.])[a-z]\w*", replaced, text)

    @property
    def unit(self) -> float:
        """A unit in the last place of the narrowest type that the program computes with."""
        return unit_of(self.dtype, " ".join(statement.text for statement in self.statements))

    def places(self, which: Callable[[Argument], bool]) -> list[int]:
        return [i for i, argument in enumerate(self.arguments) if which(argument)]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        yield f"# seed {self.seed}, {self.mode}, {self.samples} sample(s), {self.dtype}"
        yield "import torch, torch.nn.functional as F"
        for a in self.arguments:
            made = a.make.format(shape=self.full_shape(a))
            made = f"({made}).to({self.dtype})" if a.floating else made
            notes = [
                f"in_dims {a.dim}, moved there from 0"
                if a.batched and a.dim
                else "in_dims 0"
                if a.batched
                else "in_dims None"
            ]
            notes += ["differentiated"] if a.differentiated else []
            yield f"torch.manual_seed({a.seed}); {a.name} = {made}  # {', '.join(notes)}"
            yield from (edit.format(name=a.name) for edit in a.edits)
        yield f"def f({', '.join(a.name for a in self.arguments)}):"
        yield from (
            f"    {s.text}" + (f"  # the loop: {s.plain}" if s.plain is not None else "")
            for s in self.statements
        )
        yield f"    return {', '.join(self.outputs)},"


def unit_of(dtype: torch.dtype, text: str) -> float:
    """A unit in the last place of the narrowest type that statements compute with: this one, or one that they
    cast to, which rounds values and their cotangents.
    """
    named = [torch.float32] * (".float()" in text) + [torch.bfloat16] * ("bfloat16" in text)
    return max(torch.finfo(kind).eps for kind in (dtype, *named))


@functools.lru_cache(maxsize=4096)
def compiled(text: str) -> CodeType:
    return compile(text, text, "exec")


@dataclass
class Names:
    """The tensors of a program that is being written, by name, as they are for its first sample."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def floating(self) -> list[str]:
        return [name for name, x in self.tensors.items() if x.is_floating_point()]

    def those(self, wanted: Callable[[Tensor], bool]) -> list[str]:
        return [name for name in self.floating() if wanted(self.tensors[name])]


def flat(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in outputs if isinstance(x, Tensor)]
