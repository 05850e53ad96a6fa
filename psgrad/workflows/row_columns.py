"""The columns of a row that no measure computes: id, number, fingerprint, target and length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from psgrad.inputs.derived import DrawnSamples
from psgrad.inputs.reader import digest_of
from psgrad.inputs.rows import Samples
from psgrad.workflows.setup import Setup

ABOUT_COLUMNS = ("id", "index", "dataset_row", "fingerprint", "target")
About = Callable[[int, int], dict[str, Any]]
"""(start, stop) to what is known of these rows without the measures: some of ABOUT_COLUMNS -> values."""
Content = Callable[[Sequence[int]], str]


def content_of_made(samples: Samples) -> Content | None:
    """A hash of some rows, where code makes them; None of rows in files."""
    return samples.content_of if samples.sources else None


def about_rows(run: Setup) -> Callable[[int, int], dict[str, Any]]:
    """(start, stop) -> id, index, dataset_row of drawn rows, fingerprint, target where there is one, and
    length, the positions that count, where the loss has some.

    A sample without an id of its own is known by its content.
    """
    ids, reader = run.samples.ids, run.reader

    def about(start: int, stop: int) -> dict[str, Any]:
        rows = slice(start, stop)
        prints = (
            [digest_of(each) for each in ids[rows].tolist()]
            if reader.contents is None
            else reader.contents[rows]
        )
        targets = run.samples.agreed_targets if reader.targets is None else reader.targets
        target = {} if targets is None else {"target": targets[rows]}
        length = {} if reader.lengths is None else {"length": reader.lengths[rows]}
        place = {"index": np.arange(start, stop)}
        if run.samples.group_sizes is not None:
            place["rows"] = run.samples.group_sizes[rows]
        if isinstance(run.samples, DrawnSamples):
            place["dataset_row"] = run.samples.rows[rows]
        return {"id": ids[rows], **place, "fingerprint": prints, **target, **length}

    return about
