"""From the YAML file and the command line to a config, and every mistake in our words: all at once, with
file, line and a suggestion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from psgrad.config.analysis import GateConfig
from psgrad.config.config import Config
from psgrad.config.values import ConfigSection, described, meaning, sections_in
from psgrad.errors import ConfigError
from psgrad.wording import did_you_mean, nearest
from psgrad.yaml12 import KeyPath, parse

_MAX_BYTES = 1 << 20


class Reading(NamedTuple):
    """A config without problems, or None and its problems."""

    config: Config | None
    problems: list[str]


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The validated config of a YAML file.

    `overrides` are `dotted.path=value` strings, the value in YAML, applied to the file's content and
    validated like it. Raises ConfigError with every problem found, each with its file and line (or its
    `--set`).
    """
    return _whole(path, read_config(path, overrides))


def config_from(content: Mapping[str, Any], overrides: Sequence[str] = (), base: Path = Path()) -> Config:
    """The validated config of plain values, as the YAML file would have them; paths in it are relative to
    `base`.

    Raises ConfigError with every problem found.
    """
    return _whole(None, _read(_Document("the config", _plain(content)), overrides, base))


def read_config(path: Path, overrides: Sequence[str] = ()) -> Reading:
    """A config, or its problems; see `load_config`. Raises ConfigError for a file that holds no config at
    all.
    """
    return _read(_read_document(path), overrides, path.parent)


def load_gate(content: Mapping[str, Any], overrides: Sequence[str] = ()) -> GateConfig:
    """The gate of a finished run, of which `content` is what its config said, changed by overrides such as
    `gate.max_outliers=3`.

    Raises ConfigError with every problem found; nothing but the gate can be changed when a run is over.
    """
    document = _Document("the run's config", {"gate": dict(content)})
    problems: list[str] = []
    for text in overrides:
        if text.strip().startswith("gate."):
            problems += document.override(text)
        else:
            problems.append(
                f"--set {text}: the run is over: only its gate can be changed, such as --set"
                " gate.max_outliers=3"
            )
    try:
        gate = GateConfig.model_validate(document.content["gate"])
    except ValidationError as error:
        problems += [
            document.problem({**details, "loc": ("gate", *details["loc"])})
            for details in error.errors(include_url=False)
        ]
    if problems:
        raise problems_found("the gate", problems)
    return gate


def _whole(path: Path | None, reading: Reading) -> Config:
    if reading.config is None:
        raise problems_found("the config" if path is None else f"the config {path}", reading.problems)
    return reading.config


def problems_found(what: str, problems: Sequence[str]) -> ConfigError:
    """The error for what has these problems, one on a line."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError("\n  ".join([f"{what} has {count}:", *problems]))


def _read(document: _Document, overrides: Sequence[str], base: Path) -> Reading:
    _name_in_full(document.content)
    problems = [problem for text in overrides for problem in document.override(text)]
    try:
        config = Config.model_validate(document.content, context={"base": base})
    except ValidationError as error:
        problems += [document.problem(details) for details in error.errors(include_url=False)]
        return Reading(None, problems)
    return Reading(None if problems else config, problems)


def _plain(value: Any) -> Any:
    """A value as YAML would have it: paths as text, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _name_in_full(content: dict[Any, Any]) -> None:
    """A bare name becomes a group with a name, so that `--set loss.weight=...` has a place to go."""
    influence = content.get("influence")
    for group, keys in ((content, ("loss",)), (influence, ("method", "measurement"))):
        for key in keys:
            if isinstance(group, dict) and isinstance(group.get(key), str):
                group[key] = {"name": group[key]}


def _read_document(path: Path) -> _Document:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(
                f"the config file {path} has more than {_MAX_BYTES:,} bytes; expected a YAML file that a"
                " person wrote",
                hint="the path of a dataset or a checkpoint in the config's place",
            )
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no config file {path}",
            hint=f"check the path; it is relative to {Path.cwd()}",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the config file {path} can't be read: {error}; expected a YAML file in UTF-8"
        ) from error
    value = parse(text, str(path))
    if not isinstance(value.content, dict):
        got = "is empty" if value.content is None else f"holds {described(value.content)}"
        raise ConfigError(f"the config {path} {got}; expected the keys {', '.join(Config.model_fields)}")
    return _Document(str(path), value.content, value.places)


@dataclass
class _Document:
    """A config before validation: plain values, and the place (`file:line`, or `--set ...`) of each."""

    name: str
    content: dict[Any, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def override(self, text: str) -> Iterator[str]:
        """Applies one `a.b=value`; yields what is wrong with it."""
        place = f"--set {text}"
        dotted, equals, value_text = text.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            yield (
                f"{place}: expected a dotted path, an equals sign and a value, such as --set engine.verify=0"
            )
            return
        try:
            value = parse(value_text, "value").content
        except ConfigError as error:
            yield f"{place}: {error.message}"
            return
        group = self.content
        for depth, key in enumerate(keys[:-1], start=1):
            if group.get(key) is None:  # left out, or said to be nothing
                group[key] = {}
            group = group[key]
            self.places.setdefault(tuple(keys[:depth]), place)
            if not isinstance(group, dict):
                yield f"{place}: {'.'.join(keys[:depth])} is {described(group)}, which has no keys below it"
                return
        group[keys[-1]] = value
        self.places[tuple(keys)] = place

    def problem(self, details: ErrorDetails) -> str:
        """The message for one of pydantic's errors."""
        path = details["loc"]
        where = ".".join(str(part) for part in path)
        return f"{self._location(path)}: {where + ': ' if where else ''}{explain(details)}"

    def _location(self, path: KeyPath) -> str:
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.name)


def explain(details: ErrorDetails, root: type[ConfigSection] = Config) -> str:
    """What is wrong with a value of a section, by one of pydantic's errors, in our words."""
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(root, details["loc"])
    if kind == "missing":
        return _missing_key(root, details["loc"])
    if kind == "value_error":
        return str(context["error"])
    got = described(details["input"])
    if kind == "literal_error":
        allowed = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        meant = did_you_mean(str(details["input"]), allowed)
        return f"got {got}, expected one of {', '.join(allowed)}{meant}"
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else details["msg"]
    return f"got {got}, expected {expected}"


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "invalid_key": "a string as the key",
    "dict_type": "a group of keys and values",
    "model_type": "a group of keys and values",
    "path_type": "a path",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length} of them",
}


def _unknown_key(root: type[ConfigSection], path: KeyPath) -> str:
    section = _section_at(root, path[:-1])
    if section is None:
        return "unknown key"
    key, known = str(path[-1]), list(section.model_fields)
    if key in section.not_taken:
        return f"not a key here: {section.not_taken[key]}; known here: {', '.join(known)}"
    meant = nearest(key, known)
    if meant is None:
        # The right key in the wrong group is the second most common slip.
        meant = next(
            (f"{where}.{key}" for where, other in _all_sections(root) if key in other.model_fields), None
        )
    return f"unknown key; {f'did you mean {meant}? ' if meant else ''}known here: {', '.join(known)}"


def _missing_key(root: type[ConfigSection], path: KeyPath) -> str:
    section = _section_at(root, path[:-1])
    if section is None:
        return "missing; it is required"
    words = meaning(section.model_fields[str(path[-1])])
    return f"missing; it is required: {words[:1].lower()}{words[1:].rstrip('.')}"


def _section_at(root: type[ConfigSection], path: KeyPath) -> type[ConfigSection] | None:
    """The group of keys at a path; None below a key whose value may be of several kinds."""
    section: type[ConfigSection] | None = root
    for part in path:
        if section is not None and not isinstance(part, int):  # a place in a list of groups
            section = _sections(section).get(str(part))
    return section


def _sections(section: type[ConfigSection]) -> dict[str, type[ConfigSection]]:
    """The groups of keys inside one, those that may be absent included, and those of lists and unions."""
    fields = section.model_fields.items()
    return {name: kind for name, info in fields for kind in sections_in(info.annotation)}


def _all_sections(section: type[ConfigSection], above: str = "") -> Iterator[tuple[str, type[ConfigSection]]]:
    """Every group of keys with its dotted name; those at the top come before those inside others."""
    inside = [(f"{above}{name}", kind) for name, kind in _sections(section).items()]
    yield from inside
    for name, kind in inside:
        yield from _all_sections(kind, f"{name}.")
