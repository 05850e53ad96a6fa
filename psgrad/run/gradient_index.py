"""The index of an influence run: rows of training gradients, in shards that are complete or absent."""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np

from psgrad import __version__
from psgrad.errors import OutputError, OutputExistsError
from psgrad.run import durable_files, index_files
from psgrad.run.folder_lock import FolderLock
from psgrad.run.index_files import (
    Arrays,
    IndexLayout,
    as_stored,
    differences_of,
    differs_in_data_alone,
    shortened,
)

DESCRIPTION = "index.json"
_LAYOUT = "layout"  # of index.json, after updates
_NEXT = "index.next.json"  # what index.json will be when an update has written all of its files
FORMAT = 2
_MARK = "psgrad influence index"
_RESUME = "psgrad influence index CONFIG --resume"
_UPDATE = "psgrad influence index CONFIG --update"
_OVERWRITE = "build the index again: psgrad influence index CONFIG --overwrite"
_SHOWN = 6
_SECONDS_TO_MAKE_FOLDER = 60.0  # a part that begins does so within this time, and others wait for it


class GradientIndex:
    """A folder: `index.json`, which says what is in it, and for each checkpoint shards of rows and one file
    of sums over them.

        index.json
        checkpoint-000/gradients-00000.safetensors    rows 0, ..., rows_per_shard - 1
        checkpoint-000/gradients-00001.safetensors    the next ones
        checkpoint-000/sums.safetensors               written last
        checkpoint-000/lists.safetensors              of an approximate search, see RowLists

    A shard is there under its name when all of it is written and synced, and not before; that is its
    `written` state. Each file carries the SHA-256 of the description, so that a shard of another index is
    never taken for one of this.

    An update writes shards and sums of its own beside those that are there, which go on answering, and then
    replaces `index.json` by a description that says which of all stored rows are the index's.

        index.next.json                               while an update goes on
        checkpoint-000/sums-001.safetensors           of the first update

    Attributes:
        path: the folder.
        description: plain values; `rows`, `rows_per_shard` and `checkpoints` are read here, all else is the
            engine's.
        layout: which stored rows the rows are.
    """

    def __init__(self, path: Path, description: Mapping[str, Any], layout: IndexLayout | None = None) -> None:
        self.path, self.description = path, dict(description)
        self.layout = IndexLayout.of_new(int(description["rows"])) if layout is None else layout
        said = self.description | ({_LAYOUT: self.layout.content()} if self.layout.updates else {})
        self._id = sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        self._lock: FolderLock | None = None  # of one that is written

    # -- folders ---------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, description: Mapping[str, Any], overwrite: bool = False) -> Self:
        """A new index in a new or empty folder. `overwrite` also takes a folder with an earlier index, and
        removes that.

        Raises:
            OutputExistsError: there is an index already, or something that is not an index.
            OutputError: the folder can't be written.
        """
        cls.require_free(path, overwrite)
        try:
            durable_files.make_folder(path, 0o700)  # gradients tell about single training examples
            index = cls(path, as_stored(description))
            index._lock = FolderLock(path, alone=True)
            # First: an earlier index with only a part of its files is unfinished, and refused as such.
            (path / _NEXT).unlink(missing_ok=True)
            index._remove_files()
            durable_files.write_atomically(path / DESCRIPTION, index._content())
            index._lock.share()
        except OSError as error:
            raise _not_writable(path, error) from error
        return index

    @staticmethod
    def require_free(path: Path, overwrite: bool = False) -> None:
        """Raises OutputExistsError if `create` would, and changes nothing."""
        try:
            if path.is_dir() and not _only_leftovers(path):
                if not _is_index(path / DESCRIPTION):
                    raise OutputExistsError(
                        f"the index folder {path} is not empty and does not hold an index",
                        expected="a new or empty folder, or the folder of an earlier index",
                        next_step="choose another influence.index.path",
                    )
                if not overwrite:
                    raise OutputExistsError(
                        f"the index folder {path} holds an index",
                        expected="a new or empty folder",
                        next_step=f"go on with it: {_RESUME}; or replace it with --overwrite",
                    )
            elif path.exists() and not path.is_dir():
                raise OutputExistsError(
                    f"the index {path} is a file",
                    expected="a folder",
                    next_step="choose another influence.index.path",
                )
        except OSError as error:
            raise _not_writable(path, error) from error

    @classmethod
    def resume(cls, path: Path, description: Mapping[str, Any]) -> Self:
        """The index that was begun in this folder, to go on with; a new one if none was begun.

        Raises OutputError, naming the differences, if that is another index.
        """
        if not (path / DESCRIPTION).exists():
            return cls.create(path, description)
        index = cls._read(path)
        index.require(description)
        if index.layout.updates:
            index._require_whole()
        index._lock = FolderLock(path)
        return index

    @classmethod
    def update(cls, current: GradientIndex, description: Mapping[str, Any], places: np.ndarray) -> Self:
        """What a finished index will be after an update, which is begun, or gone on with. `finish_update`
        puts it in the place of the other.

        places: [n], for each row of the new description the stored row of `current` that it is, or -1 for one
        that is to be written: these are `new_rows`, in order.
        """
        index = cls(current.path, as_stored(description), current.layout.updated(places, current._id))
        target = index.path / _NEXT
        try:
            if not target.exists() or cls._read(index.path, _NEXT)._id != index._id:
                target.unlink(missing_ok=True)
                current._remove_files(but={current.file(*each) for each in current._files()})
                durable_files.write_atomically(target, index._content())
        except OSError as error:
            raise _not_writable(index.path, error) from error
        return index

    def finish_update(self) -> None:
        """Put an update whose files are all written in the place of the index that it updates."""
        try:
            durable_files.write_atomically(self.path / DESCRIPTION, self._content())
            (self.path / _NEXT).unlink(missing_ok=True)
            self._remove_leftovers()
        except OSError as error:
            raise _not_writable(self.path, error) from error

    def _content(self) -> bytes:
        head = {"tool": _MARK, "format": FORMAT, "version": __version__}
        layout = {_LAYOUT: self.layout.content()} if self.layout.updates else {}
        return json.dumps(head | self.description | layout, indent=2, ensure_ascii=False).encode()

    @classmethod
    def join(cls, path: Path, description: Mapping[str, Any]) -> Self:
        """The index that several parts of a job array build, of which none knows when the others run: the
        first one makes the folder. Raises as `create` and `require` do.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(0o700)
        except FileExistsError:
            end = time.monotonic() + _SECONDS_TO_MAKE_FOLDER
            while not (path / DESCRIPTION).exists():
                if time.monotonic() > end or not path.is_dir() or not _only_leftovers(path):
                    return cls.create(path, description)
                time.sleep(0.1)
            return cls.resume(path, description)
        except OSError as error:
            raise _not_writable(path, error) from error
        return cls.create(path, description)

    @classmethod
    def begun(cls, path: Path, update: bool = False) -> Self | None:
        """The index in a folder, finished or not, or its update; None where there is none."""
        name = _NEXT if update else DESCRIPTION
        return cls._read(path, name) if _is_index(path / name) else None

    @classmethod
    def open(cls, path: Path) -> Self:
        """A finished index. Raises OutputError if there is none, or an unfinished one."""
        if not (path / DESCRIPTION).exists():
            raise OutputError(
                f"there is no index in {path}", next_step="build it: psgrad influence index CONFIG"
            )
        index = cls._read(path)
        index._require_whole()
        return index

    def _require_whole(self) -> None:
        missing, updated = self.unwritten(), self.layout.updates > 0
        if missing:
            raise OutputError(
                f"the index {self.path} is half built: {self.file_count - len(missing)} of"
                f" {self.file_count} files are written",
                cause="a file was deleted" if updated else "its building was interrupted, or goes on",
                next_step=_OVERWRITE if updated else _RESUME,
            )

    @classmethod
    def _read(cls, path: Path, name: str = DESCRIPTION) -> Self:
        try:
            content = json.loads((path / name).read_bytes())
            if not isinstance(content, dict) or content.pop("tool", None) != _MARK:
                raise ValueError("it is no index's")
        except (OSError, ValueError) as error:
            raise OutputError(
                f"{path / name} can't be read: {getattr(error, 'strerror', None) or error}",
                expected="the description that psgrad wrote when the index was begun",
                next_step="build the index again in another folder",
            ) from error
        if content.pop("format", None) != FORMAT:
            raise OutputError(
                f"the index {path} is of another format than {FORMAT}",
                cause=(
                    "another version of psgrad built it; format 1 has no hash of the weights, of all rows and"
                    " of imported code"
                ),
                next_step="build it again with this one",
            )
        content.pop("version", None)  # for people
        layout = content.pop(_LAYOUT, None)
        return cls(path, content, None if layout is None else IndexLayout.read(layout))

    def differences(self, expected: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """(name, expected, found) of each value of a description that differs here."""
        return list(differences_of(as_stored(expected), self.description, ""))

    def require(self, expected: Mapping[str, Any]) -> None:
        """Raises OutputError, naming what differs, unless the description has all these values."""
        different = self.differences(expected)
        if different:
            more = f", and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            names = ", ".join(name for name, _, _ in different[:_SHOWN])
            first, wanted, actual = different[0]
            follow = f"let it follow its data: {_UPDATE}; or " if differs_in_data_alone(different) else ""
            raise OutputError(
                f"the index {self.path} is of something else: {names}{more}"
                f" differ{'s' if len(different) == 1 else ''}",
                expected=f"{first}: {shortened(wanted)}; the index has {shortened(actual)}",
                cause="model, data or settings were changed since it was built",
                next_step=(
                    f"{follow}put them back, or build an index of its own in another folder"
                    " (influence.index.path), or with --overwrite"
                ),
            )

    # -- shards ----------------------------------------------------------------------------------------------

    @cached_property
    def shards(self) -> list[range]:
        """The stored rows of each shard, the same for every checkpoint."""
        return self.layout.shards(int(self.description["rows_per_shard"]))

    @property
    def new_rows(self) -> range:
        """The stored rows that this building, or update, writes."""
        return self.layout.new_rows

    @property
    def file_count(self) -> int:
        """How many files a finished index has beside its description."""
        return int(self.description["checkpoints"]) * (len(self.shards) + 1)

    def unwritten(self) -> list[tuple[int, int | None]]:
        """(checkpoint, shard) of what is not written yet, in order; shard None for a checkpoint's sums.

        Raises OutputError for a file that is damaged or another index's.
        """
        return [(number, shard) for number, shard in self._files() if not self._is_written(number, shard)]

    def _files(self) -> list[tuple[int, int | None]]:
        shards = [*range(len(self.shards)), None]
        return [(number, shard) for number in range(self.description["checkpoints"]) for shard in shards]

    def file(self, checkpoint: int, shard: int | None) -> Path:
        sums = f"sums-{self.layout.updates:03d}" if self.layout.updates else "sums"
        name = sums if shard is None else f"gradients-{shard:05d}"
        return self.path / f"checkpoint-{checkpoint:03d}" / f"{name}.safetensors"

    def write(self, checkpoint: int, shard: int | None, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a shard, or the sums, all at once. Raises OutputError, and leaves no part of it."""
        target, seal = self.file(checkpoint, shard), self._seal(shard)
        index_files.write(target, arrays, seal, next_step=f"free some space, then {self._again}")

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
        """The shards of a checkpoint, `most` rows at a time: (first row, arrays), parts of a memory map, not
        copies; of some names only. first, step: which of these blocks are read.
        """
        place = 0
        for row, shard, rows in self.layout.pieces(self.shards):
            starts = range(0, len(rows), most)
            own = [start for number, start in enumerate(starts, place) if number % step == first]
            place += len(starts)
            if not own:
                continue
            with self._opened(checkpoint, shard) as file:
                stored = file.keys()  # a file can't be iterated over itself
            wanted = [name for name in stored if names is None or name in names]
            mapped = index_files.mapped(self.file(checkpoint, shard), wanted)
            for start in own:
                some = index_files.as_slice(rows[start : start + most])
                yield row + start, {name: array[some] for name, array in mapped.items()}

    def chosen(self, checkpoint: int, rows: np.ndarray, most: int) -> Iterator[tuple[int, Arrays]]:
        """Some rows of a checkpoint, at most `most` at a time: (how many came before, arrays).

        rows: [c], rising. Of the files only the parts with these rows are read.
        """
        for row, shard, stored in self.layout.pieces(self.shards):
            first, last = np.searchsorted(rows, (row, row + len(stored))).tolist()
            if first == last:
                continue
            with self._opened(checkpoint, shard) as file:
                mapped = index_files.mapped(self.file(checkpoint, shard), list(file.keys()))
            for start in range(first, last, most):
                some = stored[rows[start : min(start + most, last)] - row]
                yield start, {name: array[some] for name, array in mapped.items()}

    def identity_of_rows(self, checkpoint: int) -> str:
        """A hash of what the rows of a checkpoint are of, and of their numbers, by the hashes in their
        files.
        """
        digest = sha256(self._id.encode())
        for shard in range(len(self.shards)):
            with self._opened(checkpoint, shard) as file:
                digest.update(file.metadata()[index_files.SEAL].encode())
        return digest.hexdigest()

    def _is_written(self, checkpoint: int, shard: int | None) -> bool:
        """Raises OutputError for a file with other numbers than were written."""
        path = self.file(checkpoint, shard)
        if not path.exists():
            return False
        with self._opened(checkpoint, shard) as file:
            index_files.require_as_written(path, file, next_step=self._remedy)
        return True

    def _seal(self, shard: int | None) -> str:
        """The hash that a file carries: of what the index was when its segment was begun."""
        seals = [*self.layout.seals, self._id]
        return seals[-1 if shard is None else self.layout.segment_of(self.shards[shard].start)]

    def _opened(self, checkpoint: int, shard: int | None) -> Any:
        return index_files.opened(self.file(checkpoint, shard), self._seal(shard), next_step=self._remedy)

    @property
    def _again(self) -> str:
        return _UPDATE if self.layout.updates else _RESUME

    @property
    def _remedy(self) -> str:
        """What to do about a file that can't be used. Rows of which some were deleted can't be computed."""
        return _OVERWRITE if self.layout.updates else f"delete it, then {_RESUME}"

    def _remove_files(self, but: Container[Path] = ()) -> None:
        """Remove the files of an earlier index, and those of a killed process."""
        for folder in self.path.glob("checkpoint-*"):
            for path in [*folder.glob("*.safetensors"), *folder.glob(".*.safetensors.*.tmp")]:
                if path not in but:
                    path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove the descriptions that a killed process did not finish."""
        for name in (DESCRIPTION, _NEXT):
            for leftover in durable_files.leftovers_of(self.path / name):
                leftover.unlink()


def _only_leftovers(path: Path) -> bool:
    """Whether a folder holds nothing but files of a process that was killed, or is making the index."""
    return set(path.iterdir()) <= set(durable_files.leftovers_of(path / DESCRIPTION))


def _not_writable(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"the index {path} can't be written: {error.strerror or error}",
        expected="a place where folders and files can be written",
        next_step="choose another influence.index.path",
    )


def _is_index(description: Path) -> bool:
    try:
        content = json.loads(description.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("tool") == _MARK
