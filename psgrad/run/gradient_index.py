"""The index of an influence run: a folder of shards, each with rows of training gradients, and complete or
absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from psgrad import __version__
from psgrad.errors import OutputError
from psgrad.run import durable_files, index_files
from psgrad.run.identity import differences, digest, require_same
from psgrad.run.index_files import Arrays
from psgrad.run.marked_folders import MarkedFolder

DESCRIPTION = "index.json"
_SHARDS = "shards"  # of index.json
FORMAT = 3
_RESUME = "psgrad influence index CONFIG --resume"
_OVERWRITE = "build the index again: psgrad influence index CONFIG --overwrite"
# The files of an index, and those of a process that was killed while it wrote one.
_OWN = ("*.safetensors", ".*.safetensors.*.tmp")


@dataclass(frozen=True)
class Shard:
    """rows: how many its files hold. seal: which they carry, so that a shard of another index is never taken
    for this one. deleted: the places of those rows that are left out.
    """

    rows: int
    seal: str
    deleted: tuple[int, ...] = ()

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        return cls(int(content["rows"]), str(content["seal"]), tuple(content["deleted"]))

    def kept(self) -> np.ndarray:
        """The places of the rows that count, rising."""
        return np.setdiff1d(np.arange(self.rows), np.array(self.deleted, np.int64))


class GradientIndex(MarkedFolder):
    """A folder: `index.json`, which says what is in it, and for each checkpoint shards of rows and one file
    of sums over them.

        index.json
        checkpoint-000/gradients-00000.safetensors    the first rows
        checkpoint-000/gradients-00001.safetensors    the next ones
        checkpoint-000/sums.safetensors               written last

    A shard is there under its name when all of it is written and synced, and not before; that is its
    `written` state. To add rows is to add shards. To delete rows is to list them in `index.json`: they stay
    in their files, and are read no more.

    Attributes:
        path: the folder.
        description: plain values; `rows`, `rows_per_shard` and `checkpoints` are read here, all else is the
            engine's.
        shards: the index's rows in each shard, the same for every checkpoint.
    """

    top, mark = DESCRIPTION, "psgrad influence index"
    noun, holds, option = "index", "index", "influence.index.path"
    if_taken = f"go on with it: {_RESUME}; or replace it with --overwrite"
    after_more_space = f"free some space, then {_RESUME}"

    def __init__(
        self, path: Path, description: Mapping[str, Any], stored: Sequence[Shard] | None = None
    ) -> None:
        super().__init__(path)
        self.description = index_files.as_stored(description)
        self._stored = _new_shards(self.description, 0) if stored is None else list(stored)
        self._places = [shard.kept() for shard in self._stored]
        ends = np.cumsum([0, *map(len, self._places)]).tolist()
        self.shards = [range(start, stop) for start, stop in pairwise(ends)]
        self._id = digest(self._content())

    # -- folders ---------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, description: Mapping[str, Any], overwrite: bool = False) -> Self:
        """A new index; see `take`."""
        index = cls(path, description)
        return index.take(index._about(), overwrite)

    @classmethod
    def resume(cls, path: Path, description: Mapping[str, Any]) -> Self:
        """The index that was begun in this folder, to go on with; a new one if none was begun.

        Raises OutputError, naming the differences, if that is another index.
        """
        if not (path / DESCRIPTION).exists():
            return cls.create(path, description)
        index = cls._read(path)
        index.require(description)
        index.hold()
        return index

    def updated(self, description: Mapping[str, Any], kept: np.ndarray) -> Self:
        """This index with other data: of its rows those of the numbers `kept`, rising, are the first of the
        new description's rows, and new shards take the others. It answers when these are written.
        """
        gone = np.setdiff1d(np.arange(int(self.description["rows"])), kept)
        stored = []
        for shard, rows, places in zip(self._stored, self.shards, self._places, strict=True):
            out = places[gone[(gone >= rows.start) & (gone < rows.stop)] - rows.start]
            stored.append(replace(shard, deleted=tuple(sorted({*shard.deleted, *out.tolist()}))))
        index = type(self)(
            self.path, description, [*stored, *_new_shards(index_files.as_stored(description), len(kept))]
        )
        index.hold()
        index.write_manifest(index._about())
        try:
            for number in range(int(index.description["checkpoints"])):
                index.file(number, None).unlink(missing_ok=True)  # sums over other rows
        except OSError as error:
            raise self._unusable(self.path, error) from error
        return index

    @classmethod
    def joined(cls, path: Path, description: Mapping[str, Any]) -> Self:
        """The index that several parts of a job array build: see `join`. Raises as `create` and `require`
        do.
        """
        return cls.join(
            path,
            lambda: cls.resume(path, description) if (path / DESCRIPTION).exists() else None,
            lambda: cls.create(path, description),
        )

    @classmethod
    def begun(cls, path: Path) -> Self | None:
        """The index in a folder, finished or not; None where there is none."""
        return cls._read(path) if cls.manifest_of(path) is not None else None

    @classmethod
    def open(cls, path: Path) -> Self:
        """A finished index. Raises OutputError if there is none, or an unfinished one."""
        if not (path / DESCRIPTION).exists():
            raise OutputError(
                f"there is no index in {path}",
                hint="build it: psgrad influence index CONFIG",
            )
        index = cls._read(path)
        if missing := index.unwritten():
            files = len(index._files())
            raise OutputError(
                f"the index {path} is half built: {files - len(missing)} of {files} files are written",
                hint=_RESUME,
            )
        return index

    @classmethod
    def _read(cls, path: Path) -> Self:
        try:
            content = json.loads((path / DESCRIPTION).read_bytes())
            if not isinstance(content, dict) or content.pop("tool", None) != cls.mark:
                raise ValueError("it is no index's")
            if content.pop("format", None) != FORMAT:
                raise OutputError(
                    f"the index {path} was built by another version of psgrad",
                    hint=_OVERWRITE,
                )
            content.pop("version", None)  # for people
            return cls(path, content, [Shard.read(each) for each in content.pop(_SHARDS)])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutputError(
                f"{path / DESCRIPTION} can't be read: {getattr(error, 'strerror', None) or error}",
                hint="build the index again in another folder",
            ) from error

    def _about(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": __version__, **self._content()}

    def _content(self) -> dict[str, Any]:
        return {**self.description, _SHARDS: [asdict(each) for each in self._stored]}

    def require(self, expected: Mapping[str, Any]) -> None:
        """Raises OutputError, naming what differs, unless the description has all these values."""
        there = {key: self.description.get(key) for key in expected}
        now = index_files.as_stored(expected)
        of_data = {name for name, _, _ in differences(there, now)} <= {"rows", "fingerprint.data"}
        follow = "let it follow its data: psgrad influence index CONFIG --update; or " * of_data
        require_same(
            there,
            now,
            f"the index {self.path} is of something else",
            hint=(
                f"{follow}put them back, or build an index of its own in another folder"
                " (influence.index.path), or with --overwrite"
            ),
            raises=OutputError,
        )

    # -- shards ----------------------------------------------------------------------------------------------

    def unwritten(self) -> list[tuple[int, int | None]]:
        """(checkpoint, shard) of what is not written yet, in order; shard None for a checkpoint's sums.

        Raises OutputError for a file that is damaged or another index's, and where one is gone that has rows
        which the data have no more.
        """
        missing = [(number, shard) for number, shard in self._files() if not self._is_written(number, shard)]
        lost = [each for each in missing if each[1] is not None and self._stored[each[1]].deleted]
        if lost:
            raise OutputError(
                f"{self.file(*lost[0])} is gone, and some of its rows are no more in the data",
                hint=_OVERWRITE,
            )
        return missing

    def _files(self) -> list[tuple[int, int | None]]:
        shards = [*range(len(self.shards)), None]
        return [(number, shard) for number in range(int(self.description["checkpoints"])) for shard in shards]

    def file(self, checkpoint: int, shard: int | None) -> Path:
        name = "sums" if shard is None else f"gradients-{shard:05d}"
        return self.path / f"checkpoint-{checkpoint:03d}" / f"{name}.safetensors"

    def write(self, checkpoint: int, shard: int | None, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a shard, or the sums, all at once. Raises OutputError, and leaves no part of it."""
        target = self.file(checkpoint, shard)
        self.write_bytes(str(target.relative_to(self.path)), index_files.sealed(arrays, self._seal(shard)))
        with suppress(OSError):
            for leftover in durable_files.leftovers_of(target):  # of a process that was killed
                leftover.unlink()

    def read(self, checkpoint: int, shard: int | None) -> Arrays:
        """All arrays of a file."""
        with self._opened(checkpoint, shard) as file:
            return index_files.arrays_of(file)

    def blocks(
        self,
        checkpoint: int,
        most: int,
        names: Sequence[str] | None = None,
        first: int = 0,
        step: int = 1,
    ) -> Iterator[tuple[int, Arrays]]:
        """The rows of a checkpoint, `most` of a shard at a time: (first row, arrays), parts of a memory map,
        not copies; of some names only. first, step: which of these blocks are read.
        """
        place = 0
        for shard, rows in enumerate(self.shards):
            starts = range(0, len(rows), most)
            own = [start for number, start in enumerate(starts, place) if number % step == first]
            place += len(starts)
            mapped = self._mapped(checkpoint, shard, names) if own else {}
            for start in own:
                some = index_files.as_slice(self._places[shard][start : start + most])
                yield rows.start + start, {name: array[some] for name, array in mapped.items()}

    def _mapped(self, checkpoint: int, shard: int, names: Sequence[str] | None) -> Arrays:
        """The arrays of a shard's file, of some names only, without copies."""
        with self._opened(checkpoint, shard) as file:
            stored = list(file.keys())
        wanted = [name for name in stored if names is None or name in names]
        return index_files.mapped(self.file(checkpoint, shard), wanted)

    def _is_written(self, checkpoint: int, shard: int | None) -> bool:
        """Raises OutputError for a file with other numbers than were written."""
        path = self.file(checkpoint, shard)
        if not path.exists():
            return False
        with self._opened(checkpoint, shard) as file:
            index_files.require_as_written(path, file, hint=f"delete it, then {_RESUME}")
        return True

    def _seal(self, shard: int | None) -> str:
        return self._id if shard is None else self._stored[shard].seal

    def _opened(self, checkpoint: int, shard: int | None) -> Any:
        path = self.file(checkpoint, shard)
        return index_files.opened(path, self._seal(shard), hint=f"delete it, then {_RESUME}")

    def _clear(self) -> None:
        for folder in self.path.glob("checkpoint-*"):
            for path in [each for kind in _OWN for each in folder.glob(kind)]:
                path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()


def _new_shards(description: Mapping[str, Any], first: int) -> list[Shard]:
    """The shards of the rows from `first` on."""
    rows, most = int(description["rows"]), int(description["rows_per_shard"])
    seal = digest(description)
    return [Shard(min(most, rows - start), seal) for start in range(first, rows, most)]
