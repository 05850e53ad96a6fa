"""Two completions of each prompt as one dataset."""

from __future__ import annotations

import hashlib

import numpy as np

from psgrad.inputs.rows import Block, Samples
from psgrad.ragged import joined


class TwoCompletions(Samples):
    """The rows of a dataset, and after them the same rows with other completions.

    Args:
        first, second: alike but for their completions.
        name: of the second one, which is added to the ids of its rows.
    """

    def __init__(self, first: Samples, second: Samples, name: str) -> None:
        ids = [str(each) for each in first.ids]
        super().__init__(
            np.array([*ids, *(f"{each} ({name})" for each in ids)], dtype=object),
            None,
            hashlib.sha256(f"{first.fingerprint} {second.fingerprint}".encode()).hexdigest(),
        )
        self.first, self.second = first, second
        self.keywords, self.ragged, self.weighted = first.keywords, first.ragged, first.weighted
        self.notes, self.class_names = first.notes, first.class_names
        self.sources, self.code, self.stamps = first.sources, first.code, first.stamps

    def read(self, start: int, stop: int) -> Block:
        count, blocks = len(self.first), []
        if start < count:
            blocks.append(self.first.read(start, min(stop, count)))
        if stop > count:
            blocks.append(self.second.read(max(start, count) - count, stop - count))
        return joined(blocks)

    def describe(self, row: int) -> str | None:
        count = len(self.first)
        return self.first.describe(row) if row < count else self.second.describe(row - count)

    def input_names(self) -> list[str]:
        return self.first.input_names()

    def pieces(self, ids: list[int]) -> list[str] | None:  # type: ignore[override]
        return self.first.pieces(ids)

    def special_tokens(self) -> frozenset[int]:
        return self.first.special_tokens()
