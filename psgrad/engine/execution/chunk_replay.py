"""Chunks run as programs: the second chunk of a shape is recorded, the program is compared with the model
itself on the third, and later ones are replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from psgrad.engine.execution.buckets import SumOverSamples
from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.engine.gradients.parts import Part
from psgrad.engine.gradients.per_sample import (
    ProjectedGradients,
    per_sample_gradients,
    per_sample_square_norms,
)
from psgrad.engine.gradients.queries import PerSampleGradients, SquareNorms
from psgrad.engine.gradients.terms import Convolution, Dense, GroupedProduct, Image, Lookup, Product
from psgrad.engine.transforms.capture import Captured
from psgrad.engine.transforms.private_torch import register_pytree_node

# A program pays if so many chunks of its shape are to come: a recording takes about three times a chunk, a
# comparison one program more.
PAYS_FROM = 4
_OTHER_VALUES = "values that it reads differ from chunk to chunk"
_CANCELLING = "sums that cancel are computed again in too many chunks"
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


_register(PerSampleGradients, "parts", "losses", "aux")
_register(Part, "places", "gradients")
_register(SquareNorms, "by_parameter", "losses", "aux", "computed_as")
_register(ProjectedGradients, "rows", "norms")
_register(SumOverSamples, "value")
_register(DeferredGradient, "terms")
_register(Placed, "term")
_OF_TENSORS = ("torch.Tensor", "tuple[torch.Tensor, ...]", "tuple[Placed, ...]")
for _kind in (Convolution, Dense, GroupedProduct, Image, Product, Lookup):
    _register(_kind, *(field.name for field in fields(_kind) if field.type in _OF_TENSORS))


How = TypeVar("How", bound=Callable[..., Any])


def replayable(finds: Literal["rows", "sum"]) -> Callable[[How], How]:
    """Marks a way to compute chunks, (loss, params, inputs, target, **options) to what is found, whose result
    follows from its tensors alone: so a program may replace it.

    finds: whether that has an axis of rows in each tensor, or adds up over the rows. Arguments in front, or
    by name, are a `partial`'s: tensors, and plain values.
    """

    def mark(how: How) -> How:
        how.replayable = finds  # type: ignore[attr-defined]
        return how

    return mark


replayable("rows")(per_sample_gradients)
replayable("rows")(per_sample_square_norms)


@dataclass
class ReplayCounts:
    """How many chunks of a run were replayed, and why others were not.

    Attributes:
        chunks: that were computed, each bucket of a chunk by itself.
        replayed: of these.
        by: the kinds of programs.
        reasons: why functions are not replayed.
    """

    chunks: int = 0
    replayed: int = 0
    by: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)

    def add_reason(self, why: str) -> None:
        if why not in self.reasons:
            self.reasons.append(why)

    def facts(self) -> dict[str, Any]:
        """In the words of a manifest."""
        few = [f"fewer than {PAYS_FROM + 1} chunks of one size"] if self.chunks and not self.replayed else []
        return {
            "chunks": self.chunks,
            "chunks_replayed": self.replayed,
            "replayed_by": ", ".join(sorted(self.by)) or None,
            "not_replayed": "; ".join(self.reasons or few) or None,
        }


class ReplayedChunks:
    """Functions of chunks, each replaced by a program where that pays.

    After an ordinary chunk of a shape come a recorded one, one in which the program is compared, and replays.
    Where a program's guard does not hold, the function runs.

    Args:
        counts: of the run.
        alone: held while a chunk is recorded or compared, since random numbers that another thread draws
            meanwhile would be taken for the function's.

    Attributes:
        chunks: how many were replayed.
    """

    def __init__(self, counts: ReplayCounts | None = None, alone: threading.Lock | None = None) -> None:
        self.counts, self.alone = counts or ReplayCounts(), alone or threading.Lock()
        self.chunks = 0

    def found(self, captured: Captured, chunk: tuple[Any, ...], pays: Callable[[int], bool]) -> Any:
        """What the captured function finds of a chunk. pays: from the number of chunks of this shape that ran
        before to whether a recording pays.
        """
        call = captured.call(*chunk)
        if call is None or call.entry.ended:
            if call is not None and not captured.warned:
                captured.warned = True
                self.counts.add_reason(_CANCELLING if captured.flags else _OTHER_VALUES)
            return captured.function(*chunk)
        entry = call.entry
        if entry.program is not None:
            done, found = captured.replay(call)
            if done:
                self.chunks += 1
                self.counts.replayed += 1
                if entry.program is not None:
                    self.counts.by.add(entry.program.how)
                return found
        elif entry.recording is not None:
            with self.alone:
                return captured.compare(call)
        elif pays(entry.met):
            with self.alone:
                return captured.record(call)
        else:
            entry.met += 1  # where many came, as many are expected
        return captured.function(*chunk)


class ChunkReplay(ReplayedChunks):
    """One function of chunks, which is replayed if enough of them are to come.

    Args:
        function: (params, inputs, target, *given) to what is found of a chunk.
        params: the same tensors for each chunk.

    The others are those of ReplayedChunks.

    Attributes:
        ragged_chunks: how many chunks of rows that differ in length there were, counted by the caller.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        params: dict[str, torch.Tensor],
        counts: ReplayCounts | None = None,
        alone: threading.Lock | None = None,
    ) -> None:
        super().__init__(counts, alone)
        self.ragged_chunks = 0
        # Norms are float64, but no more exact than what they are made of.
        eps = max(torch.finfo(x.dtype).eps for x in params.values())
        # The parameters are tensors from outside for a program, which makes their views once.
        self._captured = Captured(
            partial(function, params), self.counts.add_reason, hoists=True, rounding=4 * eps
        )

    @torch.no_grad()
    def __call__(
        self,
        inputs: tuple[torch.Tensor, ...],
        target: torch.Tensor | None,
        to_come: int,
        given: tuple[Any, ...] = (),
    ) -> Any:
        """What is found of a chunk. to_come: chunks of this size, this one included, as far as is known."""
        self.counts.chunks += 1
        chunk = inputs, target, *given
        return self.found(self._captured, chunk, lambda met: met > 0 and max(met, to_come) >= PAYS_FROM)

    def drop_program(self) -> None:
        """Give back what programs hold: memory ran out."""
        self._captured.entries.clear()
