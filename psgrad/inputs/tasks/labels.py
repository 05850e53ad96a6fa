"""Labels by name or number: what a label means to a pretrained model's head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.tasks.task import IGNORED, Array, TextRows
from psgrad.wording import first_of

_SHOWN = 20


def _require_one_order(config: Any, names: Sequence[str]) -> None:
    """Raises ConfigError where label2id of a model's config gives a name another number than id2label."""
    for name, number in (getattr(config, "label2id", None) or {}).items():
        if name in names and names.index(name) != int(number):
            raise ConfigError(
                f"the model's config has {name!r} as class {names.index(name)} in id2label, and as class"
                f" {number} in label2id",
                expected="the same number in both, as the model was trained",
                next_step="correct config.json in the model's folder",
            )


@dataclass(frozen=True)
class HeadLabels:
    """The classes of a head. names: of the classes 0, 1, ...; generic: whether they are LABEL_0, LABEL_1 and
    so on, which nobody gave.
    """

    names: tuple[str, ...]
    generic: bool

    @classmethod
    def of(cls, config: Any, data: DataConfig) -> HeadLabels:
        """Those of a model's config; data.class_names come first where the config has no names of its own.

        Raises ConfigError where class_names are not as many as the head has, where they have a name of the
        model's at another place, and where the model's config contradicts itself.
        """
        found = {int(key): str(name) for key, name in config.id2label.items()}
        names = tuple(found.get(place, f"LABEL_{place}") for place in range(config.num_labels))
        generic = names == tuple(f"LABEL_{place}" for place in range(len(names)))
        given = data.class_names
        if given is not None and len(given) != len(names):
            raise ConfigError(
                f"data.class_names has {len(given)} names, and the model's head has {len(names)} classes",
                expected=f"{len(names)} names"
                + ("" if generic else f", such as {', '.join(names[:_SHOWN])}"),
            )
        _require_one_order(config, names)
        if given is not None and not generic:
            moved = [name for place, name in enumerate(given) if name in names and names[place] != name]
            if moved:
                raise ConfigError(
                    f"data.class_names has {moved[0]!r} as class {given.index(moved[0])}, and the model's"
                    f" config (id2label) as class {names.index(moved[0])}",
                    expected=f"the model's order: {', '.join(names[:_SHOWN])}",
                    next_step="leave data.class_names out: labels by name are numbered as in the model",
                )
        return cls(names, generic) if given is None or not generic else cls(tuple(given), False)

    @property
    def given(self) -> tuple[str, ...] | None:
        """The names, unless nobody gave any."""
        return None if self.generic else self.names

    def number(self, value: Any, where: str) -> int:
        """The class of a label: its number, or its name. -100 stays, a label that does not count.

        Raises DataError, which begins with `where`, for what is no label of the head.
        """
        if isinstance(value, str):
            if value in self.names:
                return self.names.index(value)
        elif isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer()):
            number = int(value)
            if 0 <= number < len(self.names) or number == IGNORED:
                return number
        raise self._unknown(value, where)

    def _unknown(self, value: Any, where: str) -> DataError:
        if value is None or value != value:
            return DataError(f"{where} has no label", expected=f"one of {first_of(self.names, _SHOWN)}")
        arrived = f"{where} has the label {value!r}"
        if not isinstance(value, str):
            numbers = f"a number from 0 to {len(self.names) - 1}"
            return DataError(arrived, expected=f"{numbers}, or {IGNORED} for a label that does not count")
        expected = f"one of {first_of(self.names, _SHOWN)}"
        if not self.generic:
            return DataError(arrived, expected=expected)
        return DataError(
            arrived,
            expected=expected,
            cause="the model's config has no names of its classes (id2label)",
            next_step="list the names in data.class_names, in the order of the model's outputs",
        )

    def numbers(self, rows: TextRows, column: str) -> Array:
        """[n]: the class of each row's label."""
        values = enumerate(rows.values(column))
        return np.array([self.number(value, rows.where(i)) for i, value in values], np.int64)

    def of_list(self, values: Sequence[Any], where: str) -> list[int]:
        """The class of each label in a list."""
        return [self.number(value, f"{where}, position {place},") for place, value in enumerate(values)]
