"""Checks of every file that a config names, before its content is read.

Which columns a config names, and whether a dataset has them. No torch.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from psgrad.config import DataConfig, did_you_mean
from psgrad.config.data import COMPRESSIONS
from psgrad.errors import ConfigError, DataError
from psgrad.wording import first_of

LONGEST_LINE = 1 << 26
"""Characters of a line of text: an image of 48 MB in base64 fits."""


def open_text(path: Path) -> TextIO:
    """A file of text in UTF-8, decompressed where its suffix says that it is compressed."""
    if path.suffix.lower() not in COMPRESSIONS:
        return path.open(encoding="utf-8-sig", newline="")
    import pyarrow as pa

    return io.TextIOWrapper(pa.input_stream(str(path)), encoding="utf-8-sig", newline="")


def lines_of(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of an open file of text, with their ends. Raises DataError for one that is too long: a small
    compressed file may hold a line that no memory has room for.
    """
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise DataError(
                f"line {number} of {path} has more than {LONGEST_LINE:,} characters",
                expected="a row in each line, or in a few",
                cause="another format, or line ends that were lost",
                next_step="save larger values as parquet",
            )
        yield line


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line that is not blank. Raises DataError for bytes that are not UTF-8 and
    for a line that is too long.
    """
    with open_text(path) as file:
        try:
            for number, line in enumerate(lines_of(path, file), 1):
                if not line.isspace():
                    yield number, line.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise not_utf8(path, error) from error


def not_utf8(path: Path, error: Exception) -> DataError:
    """The error for a file of text that is not in UTF-8, with the first such line: the text is decoded in
    blocks, so that `error` may come lines before it.
    """
    import pyarrow as pa

    with pa.input_stream(str(path), compression="detect") as stream, io.BufferedReader(stream) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as found:
                return DataError(
                    f"{path}, line {number} can't be read as text: {found.reason}, byte"
                    f" 0x{line[found.start]:02x} at {found.start}",
                    expected="text in UTF-8",
                    next_step=f"convert it, such as with: iconv -f {_encoding_of(path)} -t UTF-8",
                )
    return DataError(f"{path} can't be read as text: {error}", expected="text in UTF-8")


def _encoding_of(path: Path) -> str:
    """What a file of text that is no UTF-8 may be written in, by its first bytes."""
    if path.suffix.lower() in COMPRESSIONS:
        return "ENCODING"
    with path.open("rb") as file:
        return "UTF-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "LATIN1"


def named_files(paths: Sequence[Path]) -> str:
    """Files in words: the only one, or the first and how many more."""
    return str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def input_names(config: DataConfig) -> list[str]:
    """The columns that a file's config names as inputs."""
    if isinstance(config.inputs, dict):
        return [each if isinstance(each, str) else each.length_of for each in config.inputs.values()]
    if config.inputs is None and config.image is not None:
        return [config.image]
    return [config.inputs] if isinstance(config.inputs, str) else list(config.inputs or ())


def length_inputs(config: DataConfig) -> frozenset[int]:
    """The places of the inputs that are the lengths of a column."""
    given = config.inputs.values() if isinstance(config.inputs, dict) else ()
    return frozenset(place for place, each in enumerate(given) if not isinstance(each, str))


def target_names(config: DataConfig) -> list[str]:
    """The columns that a config names as targets."""
    return [config.target] if isinstance(config.target, str) else list(config.target or ())


@dataclass(frozen=True)
class Wanted:
    """The columns that a config names, by what they are read as; each in one of the lists.

    Attributes:
        numbers: inputs and weights: numbers, or lists of them.
        labels: targets: numbers, or lists of them, or the names of classes.
        texts: texts, chats and images: kept as they are.
        ids: ids, users and groups: text where numbers would lose their spelling (007).
    """

    numbers: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: DataConfig, unit: str | None = None) -> Wanted:
        """The columns of `config`, and `unit`, the column that says whom a row belongs to."""
        text = [config.text] if isinstance(config.text, str) else list(config.text or ())
        roles = [*text, config.prompt, config.completion, config.messages, config.image]
        taken: set[str] = set()

        def new(names: Iterable[str | None]) -> tuple[str, ...]:
            found = tuple(dict.fromkeys(name for name in names if name is not None and name not in taken))
            taken.update(found)
            return found

        texts = new(roles)
        return cls(
            numbers=new([*input_names(config), config.weight]),
            labels=new(target_names(config)),
            texts=texts,
            ids=new([config.id, config.group, unit]),
        )

    @property
    def columns(self) -> list[str]:
        """All of them."""
        return [*self.numbers, *self.labels, *self.texts, *self.ids]


def not_numbers(name: str, kind: object, example: str | None = None) -> DataError:
    """The error for a column of text, dates, objects or anything else that is no number."""
    return DataError(
        f"{name!r} is of type {kind}" + (f"; {example}" if example else ""),
        expected="numbers",
        next_step="encode classes as 0, 1, 2, ... and texts as token numbers before they are saved",
    )


def require_rows(count: int, source: str) -> None:
    """Raises DataError for an empty dataset."""
    if count == 0:
        raise DataError(f"{source} has no rows", expected="at least one sample")


def require_columns(wanted: Iterable[str], known: Sequence[str], source: str) -> None:
    """Raises ConfigError for the first column that is not there, DataError for one that is there twice."""
    for name in wanted:
        if name not in known:
            mark = next((each for each in ";\t|" if len(known) == 1 and each in known[0]), None)
            meant = did_you_mean(name, known) if mark is None else ""
            raise ConfigError(
                f"{source} has no column {name!r}{meant}",
                expected=f"one of its columns: {first_of(known, 20)}" if known else None,
                cause=None if mark is None else f"a file whose columns are separated by {mark!r}",
                next_step=None if mark is None else "separate them by commas (.csv) or by tabs (.tsv)",
            )
        if known.count(name) > 1:
            raise DataError(
                f"{source} has {known.count(name)} columns named {name!r}",
                expected="a name of its own for every column",
            )
