"""The method of a config: found by its name, its options checked against what it takes."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from psgrad.config import MethodConfig, is_callable_spec, nearest
from psgrad.config.reading import explain
from psgrad.engine.influence.method import Method
from psgrad.engine.influence.methods import known_methods
from psgrad.errors import ConfigError, InfluenceError, PsgradError
from psgrad.inputs.imports import describe_failure, resolve


def method_from(config: MethodConfig, base: Path) -> Method:
    """The method that a config names, with its options. Raises ConfigError for a name or options that are not known, or can't be."""
    kind = _kind(config.name, base)
    known: list[str] = [each.name for each in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    problems = [_unknown(option, known, config.name) for option in config.options if option not in known]
    if not problems:
        try:
            method: Method = TypeAdapter(kind).validate_json(json.dumps(config.options), strict=True)
            return method
        except ValidationError as error:
            details = error.errors(include_url=False)
            problems = [f"influence.method.{'.'.join(map(str, each['loc']))}: {explain(each)}" for each in details]
    raise ConfigError("\n  ".join([f"the method {config.name} does not take these options:", *problems]))


@contextmanager
def told_as_own(name: str) -> Iterator[None]:
    """What fails under a method of the user's own is told as its mistake: InfluenceError. Of psgrad's methods all passes."""
    try:
        yield
    except PsgradError:
        raise
    except Exception as error:
        if not is_callable_spec(name):
            raise
        raise InfluenceError(
            f"scoring by the method {name} raised {describe_failure(error)}",
            expected="scores [rows, queries] for all training examples, block by block in order, as psgrad.engine.influence.method says",
            cause="a mistake in the method",
            next_step="--debug shows the line",
        ) from error


def _kind(name: str, base: Path) -> type[Method]:
    methods = known_methods()
    if name in methods:
        return methods[name]
    if is_callable_spec(name):
        kind: Any = resolve(name, base)
        if not inspect.isclass(kind) or not issubclass(kind, Method):
            raise ConfigError(
                f"influence.method: {name} is no method",
                expected="a class that derives from psgrad.engine.influence.method.Method, a dataclass of its options",
                next_step="docs/guides/influence.md shows one",
            )
        if inspect.isabstract(kind):
            raise ConfigError(
                f"influence.method: {name} does not define {', '.join(sorted(kind.__abstractmethods__))}",
                expected="a method that can be made: psgrad.engine.influence.method.Method says what each has to do",
            )
        return kind
    close = nearest(name, list(methods))
    raise ConfigError(
        f"influence.method: there is no method {name!r}" + (f"; did you mean {close}?" if close else ""),
        expected=f"one of {', '.join(methods)}; or module:Class",
    )


def _unknown(option: str, known: list[str], name: str) -> str:
    close = nearest(option, known)
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    return f"influence.method.{option}: unknown option; {f'did you mean {close}? ' if close else ''}{name}: {takes}"
