"""Clipped sums of chunks by programs (chunk_replay.py).

A chunk that is not replayed is computed as it always was, also the recorded one, and a program must give its
bits: it draws what the computation draws, from the same seeds. So no record's numbers depend on whether its
chunk is replayed. Samples that need another computation (they cancel, or their numbers leave a type's range)
set a flag, and so does a sample that is left out; then the chunk is computed itself. A loss that draws from
NumPy's or Python's generators is not replayed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from psgrad import random_state
from psgrad.engine.execution.chunk_replay import ReplayCounts, ReplayedChunks
from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.engine.transforms.capture import MOST_PROGRAMS, Call, Captured


class SumPrograms(ReplayedChunks):
    """The programs of the chunks of one loss, by their shapes and by what else they were made for.

    The loss must not depend on Python values that change from call to call.

    Args:
        counts: of the run.
    """

    def __init__(self, counts: ReplayCounts | None = None) -> None:
        super().__init__(counts)
        self._captured: OrderedDict[Any, _CapturedSum] = OrderedDict()

    def __call__(
        self, made_for: Any, shared: Callable[[], bool], compute: Callable[..., Any], *arguments: Any
    ) -> Any:
        """`compute(*arguments)`, by a program where there is one.

        made_for: what `compute` depends on beside its arguments; anything that can be a key. shared: whether
        `compute` has drawn from generators that no program draws from.
        """
        captured = self._captured.get(made_for)
        if captured is None:
            captured = self._captured[made_for] = _CapturedSum(compute, self.counts.add_reason)
            if len(self._captured) > MOST_PROGRAMS:
                self._captured.popitem(last=False)
        captured.function, captured.shared = compute, shared
        try:
            return self.found(captured, arguments, pays=bool)
        finally:
            captured.function = captured.shared = _nothing  # what is computed holds the chunk


class _CapturedSum(Captured):
    """A function that is recorded after it was computed, and computed where a program runs out of memory."""

    shared: Callable[[], bool]

    def record(self, call: Call) -> Any:
        found = call.of(self.function)
        if self.shared():
            self.end(call.entry, "the model or the loss draws from NumPy's or Python's random generators")
            return found
        try:
            with random_state.restored():
                super().record(call)
        except Exception as error:  # the call itself went well
            self.end(call.entry, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        return found

    def replay(self, call: Call) -> tuple[bool, Any]:
        before = random_state.states() if call.entry.program and call.entry.program.draws else []
        try:
            return super().replay(call)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self.end(call.entry, "memory ran out")
        random_state.restore(before)
        return False, None


def _nothing(*_: Any) -> Any:
    raise AssertionError("a program's function is given with each call")
