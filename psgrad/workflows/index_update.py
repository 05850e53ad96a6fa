"""`psgrad influence index --update`: the index follows its data. New rows are computed, and rows that are
gone are left out of all answers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from psgrad.engine.influence.index.index_rows import BLOCK
from psgrad.engine.influence.index.stored_index import StoredRows
from psgrad.errors import OutputError
from psgrad.inputs.reader import CheckedReader
from psgrad.storage.gradient_index import GradientIndex
from psgrad.workflows.setup import Setup

_READ = 64  # rows at once, whose digests are taken
_COMPARED = 8  # rows whose loss is held against an index


def with_digests(run: Setup) -> Setup:
    """The same, with a reader that notes the digest of each row that it reads."""
    return replace(
        run, reader=CheckedReader(run.samples, run.criterion, run.reader.classes, with_digests=True)
    )


def digests_read(reader: CheckedReader, rows: np.ndarray | None = None) -> Callable[[int, int], np.ndarray]:
    """(start, stop) to uint8 [b, 16], the digests of rows that have been read. rows: those that are counted,
    all if None.
    """
    contents = reader.contents
    assert contents is not None, "a reader that notes digests"

    def read(start: int, stop: int) -> np.ndarray:
        found = contents[start:stop] if rows is None else contents[rows[start:stop]]
        return np.frombuffer(bytes.fromhex("".join(found)), np.uint8).reshape(-1, 16)

    return read


def begin_update(
    current: GradientIndex, description: dict[str, Any], run: Setup, say: Callable[[str], None]
) -> GradientIndex:
    """What a finished index will be when it has followed its data; itself, where nothing has changed.

    All rows are read, and recognised by their digests; of some of those that are kept the loss is computed
    again. Raises OutputError for an index of another model or of other settings, one without digests, and one
    whose losses are others.
    """
    same = {name: value for name, value in description.items() if name not in ("rows", "fingerprint")}
    same["fingerprint"] = {
        name: value for name, value in description["fingerprint"].items() if name != "data"
    }
    current.require(same)
    before = current.layout.places()
    for start in range(0, len(run.samples), _READ):
        run.reader(start, min(start + _READ, len(run.samples)))
    now = digests_read(run.reader)(0, len(run.samples))
    places = matched(_stored_digests(current), before, now)
    kept = np.flatnonzero(places >= 0)
    if len(kept):
        rows = kept[:: -(-len(kept) // _COMPARED)]
        losses = np.full(int(before.max()) + 1, np.nan)
        losses[before] = StoredRows(current, 0).losses_and_square_norms()[0].numpy()
        require_losses(current, run, rows.tolist(), torch.from_numpy(losses[places[rows]]))
    added, deleted = len(places) - len(kept), len(before) - len(kept)
    say(f"{len(kept):,} rows are kept, {added:,} are added, and {deleted:,} are deleted")
    if np.array_equal(places, before) and not current.differences(description):
        return current
    return GradientIndex.update(current, description, places)


def matched(stored: np.ndarray, places: np.ndarray, now: np.ndarray) -> np.ndarray:
    """[n]: the place of the stored row that each row is, by their digests [k, 16] and [n, 16]; -1 for a row
    that none is. Of rows that are alike each is taken once, in order.
    """
    known: defaultdict[bytes, deque[int]] = defaultdict(deque)
    for digest, place in zip(stored, places.tolist(), strict=True):
        known[digest.tobytes()].append(place)
    found = (known.get(digest.tobytes()) for digest in now)
    return np.array([each.popleft() if each else -1 for each in found], np.int64)


def require_losses(index: GradientIndex, run: Setup, rows: list[int], known: torch.Tensor) -> None:
    """Raises OutputError where the losses of some rows are not those that an index knows, float64.

    What a description can't see is what code reads from elsewhere while it runs.
    """
    found = run.stream(lambda _: None).gradients_at(rows).losses.double().cpu()
    rounding = torch.finfo(run.objective.autocast or run.dtype).eps ** 0.5
    different = known.isfinite() & ~torch.isclose(found, known, rtol=rounding, atol=rounding)
    if bool(different.any()):
        place = int(different.nonzero()[0])
        raise OutputError(
            f"the index {index.path} is of something else: it has a loss of {float(known[place]):.4g} for row"
            f" {rows[place]}",
            expected=f"{float(found[place]):.4g}, as the model has it now",
            cause="a file that the model or the loss reads while it runs was changed since it was built",
            next_step="put them back, or build the index again with --overwrite",
        )


def compared_rows(count: int) -> list[int]:
    """The rows of an index whose losses are held against it."""
    return sorted({place * count // _COMPARED for place in range(_COMPARED)})


def _stored_digests(index: GradientIndex) -> np.ndarray:
    """[n, 16] of the index's rows."""
    parts = [block for _, block in index.blocks(0, BLOCK, ("digest",))]
    if any("digest" not in part for part in parts):
        raise OutputError(
            f"the index {index.path} does not say which rows it holds",
            expected="a digest of each row, by which --update knows it again",
            cause="an earlier version of psgrad built it",
            next_step="build it again with --overwrite",
        )
    return np.concatenate([part["digest"] for part in parts])
