"""Lists of neighbouring rows, by which faiss finds the rows with the largest inner products without reading
all of them; kept beside an index.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np

from psgrad.errors import ConfigError
from psgrad.run import durable_files

Array = np.ndarray[Any, Any]

NAME = "lists.faiss"  # in the folder of a checkpoint
_ROUNDS = 10  # of k-means


def require_faiss() -> Any:
    """The library faiss. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("faiss")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"influence.index_search: approximate needs faiss, and there is no module {error.name}",
            hint="pip install 'psgrad[faiss]'; or set influence.index_search: exact, which reads all rows",
        ) from error


class RowLists:
    """Rows of k numbers, of 16 bits each, in lists of rows that are near to each other: an index of faiss.

    A row is in the list whose mean is nearest to it, so that short rows, which never rank, are together. A
    query searches the lists whose means have the largest inner products with it.
    """

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def built(cls, lists: int, sample: Array, blocks: Iterable[tuple[Array, Array]]) -> Self:
        """New lists, by k-means.

        sample: [s, k] float32, the rows that the means of the lists are found from. blocks: (numbers [b],
        rows [b, k] float32) of all rows.
        """
        faiss, k = require_faiss(), sample.shape[1]
        found = faiss.Kmeans(k, lists, niter=_ROUNDS, min_points_per_centroid=1)
        found.train(np.ascontiguousarray(sample))
        nearest, largest = faiss.IndexFlatL2(k), faiss.IndexFlatIP(k)
        nearest.add(found.centroids)
        largest.add(found.centroids)
        of_16_bits, product = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        index = faiss.IndexIVFScalarQuantizer(largest, k, lists, of_16_bits, product, False)
        index.train(found.centroids)  # nothing is left to find, but it has to be called
        for named, block in blocks:
            rows = np.ascontiguousarray(block, np.float32)
            places = np.ascontiguousarray(nearest.search(rows, 1)[1].ravel())
            numbers = np.ascontiguousarray(named, np.int64)
            index.add_core(len(rows), *map(faiss.swig_ptr, (rows, numbers, places)))
        return cls(index)

    @classmethod
    def stored(cls, folder: Path, identity: str) -> tuple[Self | None, str]:
        """(the lists of a folder, ""); or (None, why there are none of this identity)."""
        path = folder / NAME
        if not path.exists():
            return None, "there are none yet"
        try:
            content = path.read_bytes()
        except OSError as error:
            return None, f"those that are there can't be read: {error.strerror or error}"
        whose, _, data = content.partition(b"\n")
        if not whose.startswith(f"{identity} ".encode()):
            return None, "those that are there were made of other rows, or with other settings"
        if whose != _head(identity, data):  # faiss does not look
            return None, f"{NAME} holds other numbers than were written"
        faiss = require_faiss()
        return cls(faiss.deserialize_index(np.frombuffer(data, np.uint8))), ""

    def store(self, folder: Path, identity: str) -> None:
        """Write the lists into a folder, in the place of earlier ones. Raises OSError."""
        data = require_faiss().serialize_index(self._index).tobytes()
        durable_files.write_atomically(folder / NAME, _head(identity, data) + b"\n" + data)

    @property
    def count(self) -> int:
        """How many lists there are."""
        return int(self._index.nlist)

    def search(self, vectors: Array, most: int, probes: int) -> Array:
        """[q, most] int64: the numbers of the rows with the largest inner products with each of q vectors, of
        those in the `probes` lists whose means have the largest; -1 where there are fewer.
        """
        self._index.nprobe = probes
        found: Array = self._index.search(np.ascontiguousarray(vectors, np.float32), most)[1]
        return found


def _head(identity: str, data: bytes) -> bytes:
    """The first line of the file: what the rows are, and the hash of what follows."""
    return f"{identity} {sha256(data).hexdigest()}".encode()
