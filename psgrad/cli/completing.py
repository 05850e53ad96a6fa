"""What the shell is offered where psgrad knows the words: keys of a config, measures, methods. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psgrad.config.values import Section

_MEASURES = "analyze.measures=["


def complete_setting(incomplete: str) -> list[str]:
    """Dotted keys for `--set`; behind `analyze.measures=[` the names of measures."""
    if incomplete.startswith(_MEASURES):
        from psgrad.workflows.known_names import measure_options

        begun, _, last = incomplete.removeprefix(_MEASURES).rpartition(",")
        before = f"{_MEASURES}{begun}," if begun else _MEASURES
        return [f"{before}{name}]" for name in measure_options() if name.startswith(last.strip())]
    from psgrad.config import Config

    return [f"{key}=" for key in _keys(Config, "") if key.startswith(incomplete)]


def complete_method(incomplete: str) -> list[str]:
    """Names of influence methods."""
    from psgrad.workflows.known_names import method_options

    return [name for name in method_options() if name.startswith(incomplete)]


def _keys(section: type[Section], above: str) -> Iterator[str]:
    """The keys that hold plain values, dotted. Lists of sections count as plain: they are written in one go."""
    from psgrad.config.describing import sections_in

    for key, info in section.model_fields.items():
        inside = next(sections_in(info.annotation), None)
        if inside is None or str(info.annotation).startswith("list"):
            yield f"{above}{key}"
        else:
            yield from _keys(inside, f"{above}{key}.")
