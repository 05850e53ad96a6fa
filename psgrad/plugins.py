"""Finds and configures plugins: measures, influence methods, detectors and losses.

A plugin is a dataclass; its fields are its options. Its name in a config is that of one of psgrad's own or
that of an entry point of another package (psgrad/config/plugin_names.py), or `module:Class` or
`file.py:Class`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from psgrad.config import did_you_mean, is_callable_spec
from psgrad.config.plugin_names import OWN, Group, installed_plugins, plugin_names
from psgrad.config.reading import explain
from psgrad.errors import ConfigError, InfluenceError, LossError, MeasureError, PsgradError
from psgrad.user_code import describe_failure, resolve


@dataclass(frozen=True)
class PluginKind:
    """A kind of plugin.

    Attributes:
        word: as in messages.
        base: `module:Class` that each of them derives from.
        key: where the config names it.
        failed: the error for one that fails as it is made.
    """

    word: str
    group: Group
    base: str
    key: str
    failed: type[PsgradError]


MEASURES = PluginKind(
    "measure", "measures", "psgrad.engine.measures.measure:Measure", "analyze.measures", MeasureError
)
METHODS = PluginKind(
    "method", "methods", "psgrad.engine.influence.method:Method", "influence.method", InfluenceError
)
DETECTORS = PluginKind(
    "detector", "detectors", "psgrad.quality.detector:Detector", "analyze.outliers.detectors", ConfigError
)
LOSSES = PluginKind("loss", "losses", "psgrad.data.loss:Loss", "loss", LossError)
KINDS = (MEASURES, METHODS, DETECTORS, LOSSES)


def configured(kind: PluginKind, name: str, options: Mapping[str, Any], base: Path) -> Any:
    """The plugin that a config names, with its options; files are relative to `base`.

    Raises ConfigError for a name or an option that is not known and for values that are not allowed, and the
    kind's own error where a plugin from outside of psgrad fails.
    """
    found = find(kind, name, base)
    known = options_of(found)
    problems = [_unknown_option(kind, name, option, known) for option in options if option not in known]
    if not problems:
        try:
            if not known:
                return found()
            return TypeAdapter(found).validate_json(json.dumps(dict(options)), strict=True)
        except ValidationError as error:
            problems = [
                f"{kind.key}: {'.'.join(map(str, (name, *each['loc'])))}: {explain(each)}"
                for each in error.errors(include_url=False)
            ]
        except Exception as error:
            if isinstance(error, PsgradError) or name in OWN[kind.group]:
                raise
            raise kind.failed(
                f"the {kind.word} {name} raised {describe_failure(error)} as it was made",
                hint=f"a mistake in the {kind.word}, or options that it does not take",
            ) from error
    raise ConfigError("\n  ".join([f"the {kind.word} {name} does not take these options:", *problems]))


def find(kind: PluginKind, name: str, base: Path) -> type[Any]:
    """The class of the plugin that a config names. Raises ConfigError where none can be used."""
    own = OWN[kind.group].get(name)
    if own is not None:
        return located(own)
    location = installed_plugins(kind.group).get(name, name)
    if is_callable_spec(location):
        return _checked(kind, name, resolve(location, base))
    known = plugin_names(kind.group)
    raise ConfigError(
        f"{kind.key}: there is no {kind.word} {name!r}{did_you_mean(name, known)}; expected"
        f" {'one' if kind is METHODS else 'some'} of {', '.join(known)}; or module:Class",
    )


def own_classes(kind: PluginKind) -> dict[str, type[Any]]:
    """name -> class, of all of psgrad's own plugins of a kind, by name; imports all their files."""
    return {name: located(location) for name, location in sorted(OWN[kind.group].items())}


def options_of(plugin: type[Any]) -> list[str]:
    """The names of a plugin's options."""
    fields = dataclasses.fields(plugin) if dataclasses.is_dataclass(plugin) else ()
    return [each.name for each in fields if each.init]


def located(location: str) -> type[Any]:
    """The class of `module:Class`."""
    module, _, name = location.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found


def _checked(kind: PluginKind, name: str, found: Any) -> type[Any]:
    """A class from outside of psgrad, if it can be used as this kind of plugin."""
    base = kind.base.replace(":", ".")
    undefined = sorted(getattr(found, "__abstractmethods__", ()))
    if not inspect.isclass(found) or not issubclass(found, located(kind.base)):
        raise ConfigError(
            f"{kind.key}: {name} is no {kind.word}; expected a class that derives from {base}, a dataclass"
            " of its options",
            hint="docs/guides/extending.md shows one",
        )
    if undefined:
        raise ConfigError(
            f"{kind.key}: {name} does not define {', '.join(undefined)}; expected a {kind.word} that can"
            f" be made: {base} says what each has to do",
        )
    return found


def _unknown_option(kind: PluginKind, name: str, option: str, known: list[str]) -> str:
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    meant = did_you_mean(option, known, before="", after=" ")
    return f"{kind.key}: {option}: unknown option of {name}; {meant}{takes}"
