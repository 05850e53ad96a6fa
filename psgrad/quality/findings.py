"""Findings from a judged table of samples, their fingerprints, and the ignore list of accepted findings.

A fingerprint is the digest of the rule and the sample: the same in every run, in any row and with any values.
An entry of the ignore list has a reason, and may have a last day:

- id: img-0042                     # every rule; with `rule: outlier` that one alone
  reason: a torn page, kept on purpose
- fingerprint: 0f3c...             # as every format prints it
  reason: labelled again next month
  expires: 2026-12-31              # the last day on which it is ignored
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import BeforeValidator, PrivateAttr, ValidationError, model_validator

from psgrad.config import GateConfig
from psgrad.config.reading import explain, problems_found
from psgrad.config.values import ConfigSection, described, require_regular
from psgrad.errors import ConfigError
from psgrad.run.results import RULES, Finding, Location
from psgrad.run.results.check import FINDINGS_OF_A_RULE, Level
from psgrad.run.results.manifest import RunManifest
from psgrad.wording import did_you_mean, short_repr
from psgrad.yaml12 import parse


def finding_fingerprints(rule: str, samples: pd.DataFrame, named: npt.NDArray[np.bool_]) -> list[str]:
    """32 hexadecimal digits for each named row [n bool] of a table with a column `fingerprint`, in row order.

    Samples with the same content have the same fingerprint: these are distinguished by their number among
    their equals, in row order, so that each finding is distinct, and is the same in the next run as long as
    no equal is put before it.
    """
    prints = samples["fingerprint"].astype(str)
    mine = prints[named]
    equals = prints[prints.isin(mine.unique())]
    occurrence = equals.groupby(equals).cumcount()[mine.index]
    return [
        _digest(rule, each, number) for each, number in zip(mine.tolist(), occurrence.tolist(), strict=True)
    ]


def _digest(rule: str, sample: str, occurrence: int) -> str:
    parts: tuple[Any, ...] = (rule, sample, occurrence) if occurrence else (rule, sample)
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


NEEDED = ("id", "index", "fingerprint", "status", "is_outlier_issue", "loss", "grad_norm")
LEAK_OF = "leak_of"
OPTIONAL = ("reasons", "group", "rank", "p_value", "q_value", "outlier_score", LEAK_OF)
"""Columns of samples.parquet that findings are made of, beside the score that samples are judged by."""

NEW, KNOWN, IGNORED = "new", "known", "ignored"
_STATES = (NEW, KNOWN, IGNORED)


def named_samples(samples: pd.DataFrame, run: RunManifest) -> pd.DataFrame:
    """A row for each sample and rule that names it, the most severe rule first: rule, row (its place in
    `samples`), id, fingerprint.

    State and the reason for ignoring are added by `with_states`. `run` shows whether a reference has decided
    which samples are outliers.
    """
    ok = samples["status"].to_numpy(object) == "ok"
    listed = samples["is_outlier_issue"].to_numpy(bool) & ok
    leaked = samples[LEAK_OF].to_numpy(object) != "" if LEAK_OF in samples else np.zeros(len(samples), bool)
    masks = {
        "nonfinite": samples["status"].to_numpy(object) == "nonfinite",
        "outlier" if run.judged.referenced else "review": listed,
        "leak": leaked,
        "zero-gradient": ok & (samples["grad_norm"].to_numpy("float64") == 0),
    }
    plain = samples.reset_index(drop=True)
    parts = [
        pd.DataFrame(
            {
                "rule": rule,
                "row": np.flatnonzero(masks[rule]),
                "id": plain["id"].to_numpy(object)[masks[rule]],
                "fingerprint": finding_fingerprints(rule, plain, masks[rule]),
            }
        )
        for rule in RULES
        if rule in masks
    ]
    return pd.concat(parts, ignore_index=True).assign(state=NEW, ignored_because=None)


def counts_of(named: pd.DataFrame) -> dict[str, dict[str, int]]:
    """rule -> state -> how many."""
    counted = named.groupby(["rule", "state"], observed=True).size()
    return {rule: {state: int(counted.get((rule, state), 0)) for state in _STATES} for rule in RULES}


def levels_of(gate: GateConfig) -> dict[str, Level]:
    """The level of each rule: an outlier is an error if a gate counts outliers."""
    nonfinite: dict[str, Level] = {"error": "error", "warning": "warning", "ignore": "note"}
    counted = gate.max_outliers is not None or gate.max_fraction is not None
    return {
        "nonfinite": nonfinite[gate.nonfinite],
        "outlier": "error" if counted else "warning",
        "leak": "warning" if gate.max_leaks is None else "error",
        "zero-gradient": "warning",
        "review": "note",
    }


def in_order(named: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """By severity of the rule, state, rank and row; at most FINDINGS_OF_A_RULE of each rule."""
    rank: Any = 0.0
    if "rank" in samples:
        rank = samples["rank"].to_numpy("float64", na_value=np.inf)[named["row"].to_numpy(int)]
    keys = named.assign(
        rule_place=named["rule"].map({rule: place for place, rule in enumerate(RULES)}).astype(int),
        state_place=named["state"].map({state: place for place, state in enumerate(_STATES)}).astype(int),
        rank=rank,
    )
    ordered = keys.sort_values(["rule_place", "state_place", "rank", "row"], kind="stable")
    return ordered[ordered.groupby("rule", sort=False).cumcount() < FINDINGS_OF_A_RULE]


def listed_findings(
    ordered: pd.DataFrame,
    samples: pd.DataFrame,
    gate: GateConfig,
    score: str,
    location: Location,
    lines: Mapping[int, int],
) -> Iterator[Finding]:
    """The findings of an ordered table. `lines`: row -> its line in the data file, where that has lines."""
    levels = levels_of(gate)
    rows = samples.iloc[ordered["row"].to_numpy(int)]
    wanted = dict.fromkeys((score, "grad_norm", "loss", "p_value", "q_value", "outlier_score"))
    columns = [column for column in wanted if column in rows]
    numbers = {column: rows[column].to_numpy("float64", na_value=np.nan).tolist() for column in columns}
    reasons, groups, leaks = (_texts(rows, column) for column in ("reasons", "group", LEAK_OF))
    indices = rows["index"].tolist()
    for place, row in enumerate(ordered.itertuples(index=False)):
        values = {column: numbers[column][place] for column in columns}
        index = int(indices[place])
        yield Finding(
            rule=str(row.rule),
            level=levels[str(row.rule)],
            id=row.id if isinstance(row.id, int) and not isinstance(row.id, bool) else str(row.id),
            index=index,
            fingerprint=str(row.fingerprint),
            message=_message(str(row.rule), score, values, leaks[place]),
            location=Location(location.path, lines.get(index, location.line)),
            reasons=(
                (f"evaluation row {leaks[place]}",)
                if row.rule == "leak"
                else tuple(part for part in (reasons[place] or "").split("; ") if part)
            ),
            group=groups[place],
            values={column: value if math.isfinite(value) else None for column, value in values.items()},
            state=row.state,  # type: ignore[arg-type]
            ignored_because=row.ignored_because,  # type: ignore[arg-type]
        )


def _message(rule: str, score: str, values: Mapping[str, float], leak_of: str | None) -> str:
    """The sentence of a rule, with the numbers that matter for it. The sample's id is not in it: each format
    writes ids in its own form.
    """
    if rule == "leak":
        return f"{RULES[rule]}: evaluation row {leak_of}"
    shown = [column for column in dict.fromkeys((score, "grad_norm", "loss")) if column in values]
    if rule == "outlier":
        shown += [column for column in ("p_value", "q_value") if column in values]
    return f"{RULES[rule]} ({', '.join(f'{column} {values[column]:.4g}' for column in shown)})"


def _texts(rows: pd.DataFrame, column: str) -> list[str | None]:
    if column not in rows:
        return [None] * len(rows)
    return [None if pd.isna(each) else str(each) for each in rows[column].tolist()]


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
    meant = did_you_mean(str(value), list(RULES))
    raise ValueError(f"got {described(value)}, expected one of {', '.join(RULES)}{meant}")


class IgnoreEntry(ConfigSection):
    """One entry: a sample by its id, or one finding by its fingerprint."""

    id: Annotated[str | int | None, BeforeValidator(_id)] = None
    fingerprint: str | None = None
    rule: Annotated[str | None, BeforeValidator(_rule)] = None
    reason: str
    """Why this may pass."""
    expires: Annotated[datetime.date | None, BeforeValidator(_date)] = None
    _location: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _one_name(self) -> IgnoreEntry:
        if (self.id is None) == (self.fingerprint is None):
            raise ValueError("give exactly one of id (of a sample) and fingerprint (of a finding)")
        if not self.reason.strip():
            raise ValueError("the reason is blank; say why this may pass")
        return self

    @property
    def words(self) -> str:
        """The sample or finding that it names, and its line."""
        named = f"fingerprint {self.fingerprint}" if self.id is None else f"id {short_repr(self.id)}"
        return f"{self._location}: {named}"


def read_ignore_list(path: Path) -> tuple[IgnoreEntry, ...]:
    """The entries of a file. Raises ConfigError with every mistake in it and its line."""
    require_regular(path, "ignore list")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no ignore list {path}",
            hint="check gate.ignore; it is relative to the config file's folder",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the ignore list {path} can't be read: {error}; expected a YAML file in UTF-8"
        ) from error
    parsed = parse(text, str(path))
    if parsed.content is None:
        return ()
    if not isinstance(parsed.content, list):
        raise ConfigError(
            f"the ignore list {path} holds {described(parsed.content)}; expected a list of entries, each"
            " with id or fingerprint, and reason",
        )
    entries, problems = [], []
    for number, content in enumerate(parsed.content):
        place = parsed.places.get((number,), str(path))
        try:
            entry = IgnoreEntry.model_validate(content)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                where = parsed.places.get((number, *details["loc"]), place)
                key = "".join(f"{each}: " for each in details["loc"])
                problems.append(f"{where}: {key}{explain(details, IgnoreEntry)}")
            continue
        entry._location = place
        entries.append(entry)
    if problems:
        raise problems_found(f"the ignore list {path}", problems)
    return tuple(entries)


def with_states(
    named: pd.DataFrame, entries: Sequence[IgnoreEntry], today: datetime.date
) -> tuple[pd.DataFrame, list[str]]:
    """The named samples with those that an entry names marked as ignored, and messages: entries that expired,
    and entries without effect.
    """
    warnings: list[str] = []
    state, because = (named[name].to_numpy(object).copy() for name in ("state", "ignored_because"))
    ids = named["id"].map(str) if any(entry.id is not None for entry in entries) else None
    for entry in entries:
        # Fingerprints differ between rules; the ids of numbers are written as numbers or as text.
        hit = named["fingerprint"] == entry.fingerprint
        if ids is not None and entry.id is not None:
            hit = ids == str(entry.id)
        if entry.rule is not None:
            hit &= named["rule"] == entry.rule
        rows = hit.to_numpy(bool)
        if entry.expires is not None and entry.expires < today:
            again = f"{int(rows.sum())} of its findings count again"
            counts = again if rows.any() else "nothing that it names is found any more"
            warnings.append(f"{entry.words} expired on {entry.expires}: {counts}")
        elif not rows.any():
            warnings.append(f"{entry.words} names nothing that was found; it can go")
        else:
            state[rows], because[rows] = IGNORED, entry.reason
    # A column of objects: otherwise pandas makes it a column of texts, and each None a NaN.
    reasons = pd.Series(because, index=named.index, dtype=object)
    return named.assign(state=state, ignored_because=reasons), warnings
