"""How a stream computes rows that differ in length: bucket by bucket, so many positions at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psgrad.engine.execution.buckets import joined_results, plan_buckets, positions_of
from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.ragged import Block

# What a chunk has of the positions that are computed at once, where rows are as long as the longest, and its
# least number of rows; and what it has of them where the factors of all buckets are kept, or a bucket where
# none are.
_BUCKETS_OF_A_CHUNK, _LEAST_ROWS = 16, 64
_BUCKETS_OF_FACTORS = 2
# Positions of padding behind the longest row of a bucket. Models of the transformers library take another way
# for a row without padding; with one position each, the rows of a bucket agree, and it is one pass.
_SPARE = 1


class RaggedChunks:
    """The sizes of buckets now.

    Args:
        tokens: positions of a bucket at most, padded ones included; a single row may have more. None for no
            bound, or for one that is to be found.
        once: what a pass costs beside its positions, in positions.
        cut: whether chunks are cut where their factors would have too many positions.
        say: called with a sentence where memory runs out, and where padding is not ignored.

    Attributes:
        tokens: the bound in force.
        longest: the positions of the row that it was found by; None where it was not found here.
        by_factors: whether it is for passes that keep factors.
    """

    def __init__(self, tokens: int | None, once: float, cut: bool, say: Callable[[str], None]) -> None:
        self.tokens, self.once, self._cut, self._say = tokens, once, cut, say
        self.longest: int | None = None
        self._told = self.by_factors = False

    def computed(
        self,
        block: Block,
        run: Callable[[Block], Any],
        keeps_factors: bool,
        out_of_memory: Callable[[], None],
    ) -> Any:
        """What `run` finds of each bucket, joined in the order of the rows.

        A bucket that memory runs out on is halved, and the others stay done; where what was found of those
        fills the memory, the whole chunk fails. out_of_memory: called before the halves are tried.
        """
        assert block.ragged is not None
        assert block.lengths is not None
        most = self.tokens
        if most is not None and self.by_factors and not keeps_factors:
            most *= _BUCKETS_OF_FACTORS
        waiting = plan_buckets(block.lengths, block.ragged, once=self.once, most=most)[::-1]
        parts, groups = [], []
        while waiting:
            places = waiting.pop()
            some = block if len(places) == len(block) else block.at(places, _SPARE)
            try:
                parts.append(run(some))
            except Exception as error:
                if len(places) == 1 or (parts and keeps_factors) or not is_out_of_memory(error):
                    raise
            else:
                groups.append(places)
                continue
            waiting += [*places.tensor_split(2)][::-1]
            self._halve(some)
            out_of_memory()
        return parts[0] if len(parts) == 1 else joined_results(parts, groups)

    def _halve(self, block: Block) -> None:
        """Buckets to come have no more positions than half of this one."""
        assert block.ragged is not None
        assert block.lengths is not None
        longest = block.lengths.amax(0, keepdim=True).numpy()
        self.by_factors = False
        self.tokens = max(1, len(block) * int(positions_of(longest, block.ragged)[0]) // 2)
        self._say(
            f"out of memory on {len(block)} rows of up to {longest.max()} positions; going on with"
            f" {self.tokens:,} positions at a time"
        )

    def rows_that_fit(self, block: Block) -> int:
        """How many of the first rows are a chunk whose factors are kept together."""
        if block.ragged is None or block.lengths is None or self.tokens is None or not self._cut:
            return len(block)
        positions = positions_of(block.lengths.numpy(), block.ragged).cumsum()
        return max(1, int((positions <= _BUCKETS_OF_FACTORS * self.tokens).sum()))

    def take(self, tokens: int, longest: int, by_factors: bool = False) -> int:
        """So many positions at a time from now on, or as many as were asked for. The number of rows of a
        chunk: enough to find rows of like length among them.

        by_factors: whether `tokens` is for passes that keep factors; others take half of the memory.
        """
        self.by_factors = by_factors and self.tokens is None
        self.tokens = tokens if self.tokens is None else self.tokens
        self.longest = max(1, longest)
        return max(_BUCKETS_OF_A_CHUNK * self.tokens // self.longest, _LEAST_ROWS)

    def tell_of_padding(self, block: Block) -> None:
        """Say once that rows of unequal length are computed apart."""
        if self._told or block.ragged is None or block.lengths is None or block.ragged.masked:
            return
        if bool((block.lengths != block.lengths[:1]).any()):
            self._told = True
            self._say(
                "rows are computed together with rows of their own length only: the model does not ignore"
                " padding"
            )
