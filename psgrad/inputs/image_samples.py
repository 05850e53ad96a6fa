"""A dataset of images: read when they are asked for, prepared for the model."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.errors import DataError
from psgrad.inputs.image_files import (
    BrokenImage,
    channels_of,
    content_of,
    decoded,
    notes_on,
    opened,
)
from psgrad.inputs.image_preparation import Preparation
from psgrad.inputs.sources.arrow_columns import plain
from psgrad.inputs.sources.columns import RowName
from psgrad.inputs.sources.host_files import arrays_made_once, in_pieces
from psgrad.inputs.sources.source_rows import Array, SourceRows, pieces_of
from psgrad.inputs.sources.table_samples import TableSamples
from psgrad.inputs.targets import Labels

_ROWS_PER_PART = 256
DIGEST = 16
"""Bytes of the digest of an image."""


class ImageSamples(TableSamples):
    """Rows of a table with a column of images: paths, bytes, or datasets' {bytes, path}.

    The headers of all images are read once, with their fingerprint, by all processes of a run together;
    pixels are decoded when a row is read, of an image with the same bytes.

    Args:
        folder: paths are relative to it.
        prepared: how an image becomes an input.
    """

    def __init__(
        self,
        rows: SourceRows,
        config: DataConfig,
        labels: Labels,
        unit: str | None,
        *,
        folder: Path,
        prepared: Preparation,
    ) -> None:
        assert config.image is not None
        self._image, self._folder, self._prepared = config.image, folder, prepared
        of = f"images of {rows.fingerprint} in {folder}"
        parts = pieces_of(rows, _ROWS_PER_PART)

        def look() -> Iterator[bytes]:
            return in_pieces(of, len(parts), lambda k: self._look(rows, parts[k]))

        look()  # this process's share, where work is divided
        looks = arrays_made_once(of, lambda: _joined(look()))
        modes = Counter({mode: int(count) for mode, count in looks["modes"]})
        self._digests = looks["digests"]
        digest = hashlib.sha256(self._digests.tobytes()).hexdigest()
        first = next(iter(modes), "RGB")
        self._channels = prepared.channels or channels_of(first)
        self._shape: tuple[int, ...] | None = None
        super().__init__(rows, config, unit, labels)
        self.notes += notes_on(modes, self._channels)
        said = f"{rows.fingerprint} {digest} {prepared.described} {self._channels}"
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()

    def picture(self, row: int) -> Any:
        """The image of a row as it is in the data, for people: of Pillow, as colours or grey."""
        content, named = self._content(self._rows.read(row, row + 1), 0, self._rows.row_name(row))
        return decoded(content, named, self._channels)

    def _is_number(self, name: str) -> bool:
        return name != self._image

    def _input(self, table: pa.Table, name: str, rows: Array, row_name: RowName) -> Tensor:
        if name != self._image:
            return super()._input(table, name, rows, row_name)
        found = (self._tensor(table, place, int(row), row_name(place)) for place, row in enumerate(rows))
        return torch.stack(list(found))

    def _tensor(self, table: pa.Table, place: int, row: int, where: str) -> Tensor:
        broken, differs = None, "was changed while the run read it, or is another one on this machine"
        try:
            content, named = self._content(table, place, where)
        except BrokenImage as error:
            content, named, broken = str(error).encode(), error.arrived, error
            differs = "now; it was not so when the run began"
        if _digest(content) != bytes(self._digests[row]):
            raise DataError(
                f"{named} {differs}",
                expected="the same images in all passes, and on all machines",
                cause="a file that was written or removed meanwhile, or a machine with a copy of its own",
                next_step="put the file back and go on with --resume, or begin anew with --overwrite",
            )
        if broken is not None:
            raise broken
        found = self._prepared.tensor(decoded(content, named, self._channels), named)
        shape = tuple(found.shape)
        self._shape = shape if self._shape is None else self._shape
        if shape != self._shape:
            raise DataError(
                f"{named} has the shape {list(shape)} once it is prepared, the first one {list(self._shape)}",
                expected="images of one size",
                next_step="set data.size to [height, width], or data.size and data.crop",
            )
        return found

    def _content(self, table: pa.Table, place: int, where: str) -> tuple[bytes, str]:
        return content_of(plain(table.column(self._image))[place].as_py(), self._folder, where)

    def _look(self, rows: SourceRows, part: range) -> bytes:
        """A line with the modes of these images, JSON {mode: how many} in the order of the rows, and the
        digest of each image. A broken image is an error when its row is read, and not here.
        """
        modes: Counter[str] = Counter()
        digests = bytearray()
        for start in range(part.start, part.stop, _ROWS_PER_PART):
            table = rows.read(start, min(start + _ROWS_PER_PART, part.stop)).select([self._image])
            for place in range(table.num_rows):
                try:
                    content, named = self._content(table, place, rows.row_name(start + place))
                except BrokenImage as error:
                    content = str(error).encode()
                else:
                    with suppress(BrokenImage):
                        modes[opened(content, named).mode] += 1
                digests += _digest(content)
        return json.dumps(modes).encode() + b"\n" + digests


def _joined(pieces: Iterable[bytes]) -> dict[str, Array]:
    """`modes` [k, 2] text: how many images have which; `digests` [n, 16] bytes: of each image."""
    modes: Counter[str] = Counter()
    digests = []
    for piece in pieces:
        head, _, rest = piece.partition(b"\n")
        modes.update(json.loads(head))
        digests.append(np.frombuffer(rest, np.uint8).reshape(-1, DIGEST))
    return {
        "digests": np.concatenate(digests),
        "modes": np.array(list(modes.items()), dtype="U32").reshape(-1, 2),
    }


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:DIGEST]
