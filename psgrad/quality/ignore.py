"""The ignore list: findings that somebody has looked at and accepted, each with a reason, and perhaps for a time.

- id: img-0042                     # every rule; with `rule: outlier` that one alone
  reason: a torn page, kept on purpose
- fingerprint: 0f3c...             # as every format prints it
  reason: labelled again next month
  expires: 2026-12-31              # the last day on which it is ignored
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import BeforeValidator, PrivateAttr, ValidationError, model_validator

from psgrad.config.reading import explain
from psgrad.config.values import Section, described, nearest
from psgrad.errors import ConfigError
from psgrad.quality.findings import IGNORED
from psgrad.results import RULES
from psgrad.wording import told
from psgrad.yaml12 import parse


def _id(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"got {described(value)}, expected a text or a whole number")
    return value


def _date(value: object) -> object:
    try:
        if isinstance(value, str):
            return datetime.date.fromisoformat(value)
    except ValueError:
        pass
    raise ValueError(f"got {described(value)}, expected a date such as 2026-12-31")


def _rule(value: object) -> object:
    if value in RULES:
        return value
    close = nearest(str(value), list(RULES))
    raise ValueError(f"got {described(value)}, expected one of {', '.join(RULES)}" + (f"; did you mean {close}?" if close else ""))


class IgnoreEntry(Section):
    """One entry: a sample by its id, or one finding by its fingerprint."""

    id: Annotated[str | int | None, BeforeValidator(_id)] = None
    fingerprint: str | None = None
    rule: Annotated[str | None, BeforeValidator(_rule)] = None
    reason: str
    expires: Annotated[datetime.date | None, BeforeValidator(_date)] = None
    _place: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _one_name(self) -> IgnoreEntry:
        if (self.id is None) == (self.fingerprint is None):
            raise ValueError("give exactly one of id (of a sample) and fingerprint (of a finding)")
        if not self.reason.strip():
            raise ValueError("the reason is blank; say why this may pass")
        return self

    @property
    def words(self) -> str:
        """Whom it names, and where it stands."""
        return f"{self._place}: {f'id {told(self.id)}' if self.id is not None else f'fingerprint {self.fingerprint}'}"


def read_ignore_list(path: Path) -> tuple[IgnoreEntry, ...]:
    """The entries of a file. Raises ConfigError with every mistake in it and its line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no ignore list {path}",
            next_step="check gate.ignore; it is relative to the config file's folder",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the ignore list {path} can't be read: {error}", expected="a YAML file in UTF-8") from error
    parsed = parse(text, str(path))
    if parsed.content is None:
        return ()
    if not isinstance(parsed.content, list):
        raise ConfigError(
            f"the ignore list {path} holds {described(parsed.content)}",
            expected="a list of entries, each with id or fingerprint, and reason",
        )
    entries, problems = [], []
    for number, content in enumerate(parsed.content):
        place = parsed.places.get((number,), str(path))
        try:
            entry = IgnoreEntry.model_validate(content)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                where = parsed.places.get((number, *details["loc"]), place)
                problems.append(f"  {where}: {_problem(details)}")
            continue
        entry._place = place
        entries.append(entry)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n".join([f"the ignore list {path} has {count}:", *problems]))
    return tuple(entries)


def settle(named: pd.DataFrame, entries: Sequence[IgnoreEntry], today: datetime.date) -> tuple[pd.DataFrame, list[str]]:
    """The named samples with those that an entry names marked as ignored, and what is to be told: entries that expired, and idle ones."""
    warnings, state, because = [], named["state"].to_numpy(object).copy(), named["ignored_because"].to_numpy(object).copy()
    ids = named["id"].map(str) if any(entry.id is not None for entry in entries) else None
    for entry in entries:
        # Fingerprints differ between rules; the ids of numbers are written as numbers or as text.
        hit = named["fingerprint"] == entry.fingerprint if ids is None or entry.id is None else ids == str(entry.id)
        if entry.rule is not None:
            hit &= named["rule"] == entry.rule
        rows = hit.to_numpy(bool)
        if entry.expires is not None and entry.expires < today:
            counts = f"{int(rows.sum())} of its findings count again" if rows.any() else "nothing that it names is found any more"
            warnings.append(f"{entry.words} expired on {entry.expires}: {counts}")
        elif not rows.any():
            warnings.append(f"{entry.words} names nothing that was found; it can go")
        else:
            state[rows], because[rows] = IGNORED, entry.reason
    # Of objects: pandas would make a column of texts of it, and NaN of each None.
    return named.assign(state=state, ignored_because=pd.Series(because, index=named.index, dtype=object)), warnings


def _problem(details: Any) -> str:
    key = str(details["loc"][-1]) if details["loc"] else ""
    if details["type"] == "extra_forbidden":
        close = nearest(key, list(IgnoreEntry.model_fields))
        return f"{key}: unknown key; {f'did you mean {close}? ' if close else ''}known here: {', '.join(IgnoreEntry.model_fields)}"
    if details["type"] == "missing":
        return f"{key}: missing; every entry needs a reason" if key == "reason" else f"{key}: missing"
    return f"{key + ': ' if key else ''}{explain(details)}"
