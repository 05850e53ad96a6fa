"""Lists of neighbouring rows, by which faiss finds the rows with the largest inner products without reading
all of them; kept beside an index.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from psgrad.errors import ConfigError
from psgrad.run import durable_files
from psgrad.run.index_files import SEAL, arrays_of, digest_of

Array = np.ndarray[Any, Any]

NAME = "lists.safetensors"  # in the folder of a checkpoint
_ROUNDS = 10  # of k-means
_TOGETHER = 1 << 14  # rows that are given to faiss at once


def require_faiss() -> Any:
    """The library faiss. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("faiss")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"influence.index_search: approximate needs faiss, and there is no module {error.name}",
            expected="the library faiss, which finds neighbouring rows",
            cause="psgrad was installed without its extra faiss",
            next_step=(
                "pip install 'psgrad[faiss]'; or set influence.index_search: exact, which reads all rows and"
                " needs no library"
            ),
        ) from error


class RowLists:
    """Rows of k numbers, of 16 bits each, in lists of rows that are near to each other.

    A row is in the list whose mean is nearest to it, so that short rows, which never rank, are together. A
    query searches the lists whose means have the largest inner products with it.

    Args:
        means: [lists, k] float32.
        rows: [n, k] float16.
        numbers: [n] int64, by which rows are named.
        places: [n] int64, the list of each row.
    """

    def __init__(self, means: Array, rows: Array, numbers: Array, places: Array) -> None:
        self.arrays = {"means": means, "rows": rows, "numbers": numbers, "places": places}
        faiss, (count, k) = require_faiss(), means.shape
        quantizer = faiss.IndexFlatIP(k)
        quantizer.add(means)
        of_16_bits, product = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        self._index = faiss.IndexIVFScalarQuantizer(quantizer, k, count, of_16_bits, product, False)
        self._index.train(means)  # nothing is left to find, but it has to be called
        for start in range(0, len(rows), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            some = rows[part].astype(np.float32), numbers[part], places[part]
            self._index.add_core(len(some[0]), *map(faiss.swig_ptr, some))

    @classmethod
    def built(cls, lists: int, sample: Array, blocks: Iterable[tuple[Array, Array]]) -> Self:
        """New lists, by k-means.

        sample: [s, k] float32, the rows that the means of the lists are found from. blocks: (numbers [b],
        rows [b, k] float32) of all rows.
        """
        faiss = require_faiss()
        k = sample.shape[1]
        found = faiss.Kmeans(k, lists, niter=_ROUNDS, min_points_per_centroid=1)
        found.train(np.ascontiguousarray(sample))
        nearest = faiss.IndexFlatL2(k)
        nearest.add(found.centroids)
        numbers, rows, places = [], [], []
        for named, block in blocks:
            numbers.append(named.astype(np.int64))
            rows.append(block.astype(np.float16))
            places.append(nearest.search(np.ascontiguousarray(block), 1)[1].ravel())
        return cls(found.centroids, np.concatenate(rows), np.concatenate(numbers), np.concatenate(places))

    @classmethod
    def stored(cls, folder: Path, identity: str) -> tuple[Self | None, str]:
        """(the lists of a folder, ""); or (None, why there are none of this identity)."""
        path = folder / NAME
        if not path.exists():
            return None, "there are none yet"
        try:
            file: Any = safe_open(path, framework="numpy")
            with file:
                whose, _, digest = (file.metadata() or {}).get(SEAL, "").partition(" ")
                arrays = arrays_of(file)
        except (OSError, SafetensorError) as error:
            return None, f"those that are there can't be read: {getattr(error, 'strerror', None) or error}"
        if whose != identity:
            return None, "those that are there were made of other rows, or with other settings"
        if digest != digest_of(arrays) or not _fit(**arrays):
            return None, f"{NAME} holds other numbers than were written"
        return cls(**arrays), ""

    def store(self, folder: Path, identity: str) -> None:
        """Write the lists into a folder, in the place of earlier ones. Raises OSError."""
        data = save(self.arrays, metadata={SEAL: f"{identity} {digest_of(self.arrays)}"})
        durable_files.write_atomically(folder / NAME, data)

    @property
    def count(self) -> int:
        """How many lists there are."""
        return len(self.arrays["means"])

    def search(self, vectors: Array, most: int, probes: int) -> Array:
        """[q, most] int64: the numbers of the rows with the largest inner products with each of q vectors, of
        those in the `probes` lists whose means have the largest; -1 where there are fewer.
        """
        self._index.nprobe = probes
        found: Array = self._index.search(np.ascontiguousarray(vectors, np.float32), most)[1]
        return found


def _fit(means: Array, rows: Array, numbers: Array, places: Array) -> bool:
    """Whether faiss, which does not look, would find all places."""
    shapes = (len(rows), means.shape[1]) == rows.shape and numbers.shape == places.shape == rows.shape[:1]
    kinds = (means.dtype, rows.dtype, numbers.dtype, places.dtype)
    known = kinds == (np.float32, np.float16, np.int64, np.int64)
    return bool(shapes and known and len(rows) and places.min() >= 0 and places.max() < len(means))
