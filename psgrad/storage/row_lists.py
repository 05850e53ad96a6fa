"""Lists of neighbouring rows, by which faiss finds the rows with the largest inner products without reading
all of them; kept beside an index.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np

from psgrad.errors import ConfigError
from psgrad.storage import files

Array = np.ndarray[Any, Any]

NAME = "lists"  # of its files in the folder of a checkpoint
_MARK = "psgrad lists of neighbouring rows"
_READ = 1 << 24
_ROUNDS = 10  # of k-means


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
    """Rows of k numbers, of 16 bits each, in lists of rows that are near to each other: an IndexIVF of faiss.

    A row is in the list whose mean is nearest to it, so that short rows, which never rank, are together. A
    query searches the lists whose means have the largest inner products with it.

        lists.faiss    the rows, list by list, in faiss's own format
        lists.json     which rows they were made of, and the hash of lists.faiss; written last

    faiss's file is read only where it has the hash that was noted when it was written: faiss is written in
    C++, and must not read a damaged file. Nothing in it is code.

    Attributes:
        index: the IndexIVF.
    """

    def __init__(self, index: Any) -> None:
        self.index = index

    @classmethod
    def built(cls, lists: int, sample: Array, blocks: Iterable[tuple[Array, Array]]) -> Self:
        """New lists, by k-means.

        sample: [s, k] float32, the rows that the means of the lists are found from. blocks: (numbers [b],
        rows [b, k] float32) of all rows.
        """
        faiss = require_faiss()
        k = sample.shape[1]
        means = faiss.Kmeans(k, lists, niter=_ROUNDS, min_points_per_centroid=1)
        means.train(np.ascontiguousarray(sample))
        nearest, quantizer = faiss.IndexFlatL2(k), faiss.IndexFlatIP(k)
        nearest.add(means.centroids)
        quantizer.add(means.centroids)
        of_16_bits, product = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        index = faiss.IndexIVFScalarQuantizer(quantizer, k, lists, of_16_bits, product, False)
        index.train(np.ascontiguousarray(sample))  # nothing is left to find, but it has to be called
        for numbers, rows in blocks:
            whole, named = np.ascontiguousarray(rows), numbers.astype(np.int64)
            places = np.ascontiguousarray(nearest.search(whole, 1)[1].ravel())
            index.add_core(len(whole), *map(faiss.swig_ptr, (whole, named, places)))
        return cls(index)

    @classmethod
    def stored(cls, folder: Path, identity: str) -> tuple[Self | None, str]:
        """(the lists of a folder, ""); or (None, why there are none of this identity)."""
        about, path = folder / f"{NAME}.json", folder / f"{NAME}.faiss"
        if not about.exists():
            return None, "there are none yet"
        try:
            content = json.loads(about.read_bytes())
            if content.get("tool") != _MARK or content.get("identity") != identity:
                return None, "those that are there were made of other rows, or with other settings"
            if content.get("sha256") != _hash_of(path):
                return None, f"{path.name} is not the file that was written"
        except (OSError, ValueError, AttributeError) as error:
            return None, f"those that are there can't be read: {getattr(error, 'strerror', None) or error}"
        return cls(require_faiss().read_index(os.fspath(path))), ""

    def store(self, folder: Path, identity: str) -> None:
        """Write the lists into a folder, in the place of earlier ones. Raises OSError."""
        faiss, digest = require_faiss(), sha256()

        def write(data: bytes) -> int:
            digest.update(data)
            return file.write(data)

        with files.written_atomically(folder / f"{NAME}.faiss") as file:
            writer = faiss.PyCallbackIOWriter(write)
            faiss.write_index(self.index, writer)
            del writer  # which writes what it still holds
        about = {
            "tool": _MARK,
            "faiss": faiss.__version__,
            "identity": identity,
            "sha256": digest.hexdigest(),
        }
        files.write_atomically(folder / f"{NAME}.json", json.dumps(about, indent=2).encode())

    @property
    def count(self) -> int:
        """How many lists there are."""
        return int(self.index.nlist)

    def search(self, vectors: Array, most: int, probes: int) -> Array:
        """[q, most] int64: the rows with the largest inner products with each of q vectors, of those in the
        `probes` lists whose means have the largest; -1 where there are fewer.
        """
        self.index.nprobe = probes
        found: Array = self.index.search(np.ascontiguousarray(vectors, np.float32), most)[1]
        return found


def _hash_of(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while part := file.read(_READ):
            digest.update(part)
    return digest.hexdigest()
