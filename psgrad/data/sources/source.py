"""A source reads one format of data files, as Arrow tables; and the files of a config. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.config.data import COMPRESSIONS, data_format
from psgrad.data.columns import ColumnRoles
from psgrad.errors import ConfigError, DataError
from psgrad.plugins import SOURCES, configured
from psgrad.run.input_files import require_file


class Source(ABC):
    """A format of data files. A subclass is a class in `psgrad/data/sources/formats`.

    Attributes:
        name: the suffix of its files, without the dot.
        compressed: whether it reads compressed files, too.
        stays_open: whether its tables are mapped from the files themselves, which must not change.
        ids_are_spelled: whether all cells are text, so that ids are whole numbers where none loses its
            spelling.
        stacks: whether columns of one number a row, named in a list, are one vector where the config does not
            say.
    """

    name: ClassVar[str]
    compressed: ClassVar[bool] = False
    stays_open: ClassVar[bool] = False
    ids_are_spelled: ClassVar[bool] = False
    stacks: ClassVar[bool] = True

    @abstractmethod
    def table(self, path: Path, roles: ColumnRoles) -> pa.Table:
        """The columns of `roles`, in memory or mapped. Raises ConfigError for one that is not there,
        DataError for a file that can't be used.
        """


def source_for(path: Path) -> Source:
    """The source of a file's format. Raises ConfigError where there is none."""
    found: Source = configured(SOURCES, data_format(path), {}, path.parent)
    return found


def source_of(config: DataConfig, base: Path) -> tuple[Source, list[Path]]:
    """(the source that reads the files that a config names, the files). Raises ConfigError and DataError."""
    paths = [require_file(path, "dataset", DataError) for path in data_files(config, base)]
    source = source_for(paths[0])
    packed = [path for path in paths if path.suffix.lower() in COMPRESSIONS]
    if packed and not source.compressed:
        raise DataError(
            f"{packed[0]} is compressed, which is not read for .{source.name} files",
            hint=f"decompress it; .{source.name} has a compression of its own, if it has any",
        )
    return source, paths


_GLOB = frozenset("*?[")


def data_files(config: DataConfig, base: Path) -> list[Path]:
    """The files of data.path, those of a glob in the order of their names. Raises ConfigError without any."""
    found = []
    for path in (base / each for each in config.paths):
        matches = [path]
        if not path.exists() and _GLOB & {*str(path)}:
            matches = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            if not matches:
                raise ConfigError(
                    f"there is no dataset {path}: no file has such a name",
                    hint="check the path; it is relative to the config file's folder",
                )
        found += matches
    if len(set(found)) < len(found):
        twice = next(path for place, path in enumerate(found) if path in found[:place])
        raise ConfigError(f"data.path names {twice} twice; expected each file once")
    return found
