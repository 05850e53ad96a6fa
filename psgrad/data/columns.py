"""Which columns a config names, what they are read as, and errors where a dataset lacks them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from psgrad.config import DataConfig, did_you_mean
from psgrad.errors import ConfigError, DataError
from psgrad.wording import first_of


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
class ColumnRoles:
    """The columns that a config names, by what they are read as; each in one of the lists.

    Attributes:
        numbers: inputs and weights: numbers, or lists of them.
        labels: targets: numbers, or lists of them, or the names of classes.
        texts: texts, chats and images: kept as they are.
        ids: ids and users: text where numbers would lose their spelling (007).
    """

    numbers: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: DataConfig, unit: str | None = None) -> ColumnRoles:
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
            ids=new([config.id, unit]),
        )

    @property
    def columns(self) -> list[str]:
        """All of them."""
        return [*self.numbers, *self.labels, *self.texts, *self.ids]


def not_numbers(name: str, kind: object, example: str | None = None) -> DataError:
    """The error for a column of text, dates, objects or anything else that is no number."""
    words = f"{name!r} is of type {kind}" + (f"; {example}" if example else "")
    hint = "encode classes as 0, 1, 2, ...; write lists of numbers as jsonl, parquet or arrow"
    return DataError(f"{words}; expected numbers", hint=hint)


def require_rows(count: int, source: str) -> None:
    """Raises DataError for an empty dataset."""
    if count == 0:
        raise DataError(f"{source} has no rows; expected at least one sample")


def require_columns(wanted: Iterable[str], known: Sequence[str], source: object) -> None:
    """Raises ConfigError for the first column that is not there, DataError for one that is there twice."""
    for name in wanted:
        if name not in known:
            mark = next((each for each in ";\t|" if len(known) == 1 and each in known[0]), None)
            meant = did_you_mean(name, known) if mark is None else ""
            listed = f"; expected one of its columns: {first_of(known, 20)}" if known else ""
            hint = f"separate columns by commas (.csv) or by tabs (.tsv), and not by {mark!r}"
            raise ConfigError(
                f"{source} has no column {name!r}{meant}{listed}", hint=None if mark is None else hint
            )
        if known.count(name) > 1:
            raise DataError(
                f"{source} has {known.count(name)} columns named {name!r}", hint="give each its own name"
            )
