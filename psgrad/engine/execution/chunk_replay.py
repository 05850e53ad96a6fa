"""Chunks of one size run one program: it is captured once, compared with the model itself on one chunk, and
replayed on the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from psgrad import random_state
from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.engine.gradients.queries import PerSampleGradients, SquareNorms
from psgrad.engine.gradients.terms import Term
from psgrad.engine.gradients.terms.numerics import flagging
from psgrad.engine.transforms.capture import Captured, capture
from psgrad.engine.transforms.private_torch import register_pytree_node, tree_flatten
from psgrad.engine.transforms.program import Compiler

# From this number of chunks on a program saves more time than its capture takes. The number is the same for
# all models: both times grow with the number of operators. Measured on CPUs, where a chunk's kernels take
# most of the time; on a GPU the Python around them does.
PAYS_FROM = {"cpu": 1000, "cuda": 200}
# If more than one chunk in this many raises a flag, and so runs twice, chunks are no longer replayed.
_RARELY = 8


def _register(kind: type, *tensors: str) -> None:
    """Make a dataclass a pytree: of these fields; the others stay what they were when the program was
    captured.
    """
    others = [field.name for field in fields(kind) if field.name not in tensors]
    register_pytree_node(
        kind,
        lambda x: ([getattr(x, name) for name in tensors], tuple(getattr(x, name) for name in others)),
        lambda values, context: kind(
            **dict(zip(tensors, values, strict=True)), **dict(zip(others, context, strict=True))
        ),
    )


_register(PerSampleGradients, "gradients", "losses", "aux")
_register(SquareNorms, "by_parameter", "losses", "aux", "computed_as")
_register(DeferredGradient, "terms")
_register(Placed, "term")
for _kind in Term.__subclasses__():
    _register(_kind, *(field.name for field in fields(_kind) if field.type in ("torch.Tensor", "Term")))  # type: ignore[arg-type]


class ChunkReplay:
    """A function of chunks, replayed as a program where that pays.

    Args:
        function: (params, inputs, target) to what is found of a chunk.
        params: the same tensors for each chunk.
        compile: as for `capture`.
        say: called with the reason why chunks are not replayed.

    Attributes:
        chunks: how many were replayed.
        how: by which kind of program.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        params: dict[str, torch.Tensor],
        compile: Compiler,
        say: Callable[[str], None],
    ) -> None:
        self.function, self.params, self.say = function, params, say
        kind = next(iter(params.values())).device.type
        self.pays_from = PAYS_FROM[kind if kind in PAYS_FROM else "cuda"] if compile == "none" else 2
        # Norms are float64, but no more exact than what they are made of.
        self.rounding = 4 * math.sqrt(max(torch.finfo(x.dtype).eps for x in params.values()))
        self.chunks = self.flags = 0
        self.how = "not replayed"
        self._captured: Captured | None = capture(
            self._program, compile=compile, say=lambda why: say(f"chunks are not replayed: {why}")
        )
        self._last_signature: Any = None  # shapes and dtypes of the last chunk
        self._replayed_signature: Any = None  # shapes and dtypes of the chunks that are replayed

    def _program(self, params: dict[str, torch.Tensor], inputs: Any, target: Any) -> tuple[Any, Any]:
        with flagging() as flags:
            found = self.function(params, inputs, target)
        return found, flags.any()

    @torch.no_grad()
    def __call__(self, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None, to_come: int) -> Any:
        """What is found of a chunk. to_come: chunks of this size, this one included."""
        signature = [None if x is None else (x.shape, x.dtype) for x in (*inputs, target)]
        before = random_state.states()
        if self._captured is not None and signature == self._replayed_signature:
            found, flag = self._captured(self.params, inputs, target)
            if flag is None or not bool(flag):
                self.chunks += 1
                return found
            self._count_flag()
            random_state.restore(before)
        found = self.function(self.params, inputs, target)
        if (
            self._captured is not None
            and signature == self._last_signature
            and signature != self._replayed_signature
            and to_come >= self.pays_from
        ):
            after = random_state.states()
            self._compare(self._captured, inputs, target, signature, found, before)
            random_state.restore(after)
        self._last_signature = signature
        return found

    def _compare(
        self,
        captured: Captured,
        inputs: Any,
        target: Any,
        signature: Any,
        found: Any,
        states: random_state.States,
    ) -> None:
        """Capture the program, and compare its replay of a chunk with `found`, the results of that chunk. If
        they agree, chunks are replayed from now on.
        """
        program = captured.program_of(self.params, inputs, target)
        if program is None:
            self._captured = None
            return
        random_state.restore(states)
        try:
            again, flag = captured(self.params, inputs, target)
        except Exception as error:  # where the model itself has just done without
            self._captured = None
            self.say(f"chunks are not replayed: {type(error).__name__} {str(error).partition(chr(10))[0]}")
            return
        if flag is not None and bool(flag):
            self._count_flag()
        elif agree(found, again, self.rounding):
            self._replayed_signature, self.how = signature, program.how
        else:
            self._captured = None
            self.say(
                "chunks are not replayed: the program gave other numbers than the model itself, which may"
                " keep a state of its own"
            )

    def _count_flag(self) -> None:
        self.flags += 1
        if self.flags > 2 + self.chunks / _RARELY:
            self._captured = None  # chunks that run twice are slower than chunks that are not replayed

    def drop_program(self) -> None:
        """Give back what programs hold: memory ran out."""
        if self._captured is not None:
            self._captured.programs.clear()
            self._replayed_signature = None


def agree(one: Any, other: Any, rounding: float) -> bool:
    """Whether all tensors of two trees are the same, but for rounding, relative to the largest number in
    each.
    """
    (ones, spec), (others, other_spec) = tree_flatten(one), tree_flatten(other)
    return spec.num_leaves == other_spec.num_leaves and all(
        _close(a, b, rounding) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ones, others, strict=True)
    )


def _close(a: torch.Tensor, b: torch.Tensor, rounding: float) -> bool:
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    largest = float(a[torch.isfinite(a)].abs().max()) if bool(torch.isfinite(a).any()) else 0.0
    return torch.allclose(a, b, rtol=rounding, atol=rounding * largest, equal_nan=True)
