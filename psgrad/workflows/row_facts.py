"""What is known of rows without any measure: who they are, and how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from psgrad.workflows.setup import Setup, digest_of


def about_rows(run: Setup) -> Callable[[int, int], dict[str, Any]]:
    """(start, stop) -> id, index, fingerprint, target where there is one, and length, the positions that count, where the loss has some.

    A sample without an id of its own is known by its content.
    """
    ids, reader = run.samples.ids, run.reader
    own_ids = run.config.data.id is not None
    if not own_ids:
        reader.contents = np.full(len(ids), "", dtype="U32")
    if run.criterion.kind == "token":
        reader.lengths = np.zeros(len(ids), np.int64)

    def about(start: int, stop: int) -> dict[str, Any]:
        rows = slice(start, stop)
        prints = [digest_of(each) for each in ids[rows].tolist()] if own_ids or reader.contents is None else reader.contents[rows]
        target = {} if reader.targets is None else {"target": reader.targets[rows]}
        length = {} if reader.lengths is None else {"length": reader.lengths[rows]}
        return {"id": ids[rows], "index": np.arange(start, stop), "fingerprint": prints, **target, **length}

    return about
