"""Chunks run as programs: the second chunk of a shape is recorded, the program is compared with the model
itself on the third, and later ones are replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from psgrad import random_state
from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.engine.gradients.queries import PerSampleGradients, SquareNorms
from psgrad.engine.gradients.terms import Term
from psgrad.engine.gradients.terms.numerics import flagging
from psgrad.engine.transforms.capture import COMPILED, Captured, Entry, agree
from psgrad.engine.transforms.private_torch import register_pytree_node
from psgrad.engine.transforms.program import Compiler

# A program pays if so many chunks of its shape are to come: a recording takes about three times a chunk, a
# comparison one program more.
PAYS_FROM = 4
# Chunks of a shape before it is replayed: an ordinary one, the recorded one, and the compared one.
NOT_REPLAYED = 3


def _register(kind: type, *tensors: str) -> None:
    """Make a dataclass a pytree: of these fields; the others stay what they were in the recorded chunk."""
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
        alone: held while a chunk is recorded or compared, since random numbers that another thread draws
            meanwhile would be taken for the function's.

    Attributes:
        chunks: how many were replayed.
        flags: how many were computed again, since a program does not compute inaccurate samples again.
        how: by which kind of program.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        params: dict[str, torch.Tensor],
        compile: Compiler,
        say: Callable[[str], None],
        alone: threading.Lock | None = None,
    ) -> None:
        self.function, self.params = function, params
        self.alone = alone or threading.Lock()
        self.chunks = self.flags = 0
        self.how = "not replayed"
        # Norms are float64, but no more exact than what they are made of.
        eps = max(torch.finfo(x.dtype).eps for x in params.values())
        self.rounding = 4 * eps if compile == "none" else COMPILED
        # The parameters are tensors from outside for a program, which makes their views once.
        self._captured = Captured(
            self._flagged, compile, lambda why: say(f"chunks are not replayed: {why}"), hoists=True
        )

    def _flagged(self, inputs: Any, target: Any) -> tuple[Any, Any]:
        with flagging() as flags:
            found = self.function(self.params, inputs, target)
        return found, flags.any()

    def _unflagged(self, inputs: Any, target: Any) -> Any:
        return self.function(self.params, inputs, target)

    @torch.no_grad()
    def __call__(self, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None, to_come: int) -> Any:
        """What is found of a chunk. to_come: chunks of this size, this one included."""
        call = self._captured.call(inputs, target)
        if call is None or call.entry.ended:
            return self._unflagged(inputs, target)
        entry = call.entry
        draws = entry.program is None or entry.program.draws
        before = random_state.states() if draws else []
        if entry.program is not None:
            done, values = self._captured.replay(call)
            found = self._unless_flagged(entry, values, before) if done else None
            if found is not None:
                self.chunks += 1
                assert entry.program is not None
                self.how = entry.program.how
                return found
        elif entry.recording is not None:
            with self.alone:
                return self._captured.compare(call, self._unflagged, self._same)
        elif not entry.met:
            entry.met = True
        elif to_come >= PAYS_FROM:
            with self.alone:
                values = self._captured.record(call)
            found = self._unless_flagged(entry, values, before)
            if found is not None:
                return found
        return self._unflagged(inputs, target)

    def _unless_flagged(self, entry: Entry, values: Any, before: random_state.States) -> Any:
        """What was found, or None where samples must be computed again; then as if nothing had been drawn."""
        found, flag = values
        if flag is None or not bool(flag):
            return found
        self.flags += 1
        entry.count_failure()
        random_state.restore(before)
        return None

    def _same(self, found: Any, again: tuple[Any, torch.Tensor | None]) -> bool | None:
        """Whether a program found the same as the model itself; None where it was flagged."""
        values, flag = again
        if flag is not None and bool(flag):
            self.flags += 1
            return None
        return agree(found, values, self.rounding)

    def drop_program(self) -> None:
        """Give back what programs hold: memory ran out."""
        self._captured.entries.clear()
