"""Checks the code that a config names by its text alone: nothing is imported and nothing runs. No torch."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psgrad.config import did_you_mean
from psgrad.config.values import require_regular
from psgrad.errors import ConfigError, ModelError, PsgradError
from psgrad.user_code import importing_beside


def spec_problems(
    spec: str, base: Path, kwargs: Mapping[str, Any] | None, raises: type[PsgradError]
) -> Iterator[PsgradError]:
    """The problem with `file.py:callable` or `module:callable`, in the words of importing it.

    Of a file: that it is there, is Python, has the name at its top, and takes `kwargs` (None: whatever it is
    given). Of an installed module only that its package is there. `raises` is the error for code that can't
    be imported.
    """
    location, _, name = spec.rpartition(":")
    if not location.endswith(".py"):
        yield from _package_problems(location, base)
        return
    path = base / location
    try:
        require_regular(path, "code")
        tree = ast.parse(path.read_bytes(), str(path))
    except ConfigError as error:
        yield error
        return
    except FileNotFoundError:
        yield ConfigError(
            f"there is no file {path}", next_step="check the path; it is relative to the config file's folder"
        )
        return
    except OSError as error:
        yield ConfigError(f"the file {path} can't be read: {error.strerror}")
        return
    except (SyntaxError, ValueError) as error:
        place = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        yield raises(
            f"importing {path} would raise {type(error).__name__}: {error.args[0]} ({path}{place})",
            next_step="correct the file",
        )
        return
    known, certain = _names_in(tree.body)
    first = name.split(".")[0]
    if first not in known and certain:
        public = [each for each in known if not each.startswith("_")]
        yield ConfigError(f"{location} has no {first!r}", next_step=did_you_mean(first, public, before=""))
    elif name in known and kwargs is not None:
        yield from _argument_problems(known[name], spec, kwargs)


@dataclass(frozen=True)
class TopCallable:
    """A function or class at the top of a file. required: arguments without a default; bases: as written."""

    name: str
    required: tuple[str, ...]
    bases: tuple[str, ...]


def callables_in(path: Path) -> list[TopCallable]:
    """The public functions and classes of a file. Raises ModelError for a file that is not Python."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise ModelError(f"{path} is no Python: {error}", next_step="correct the file") from error
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            signature = _signature(node)
            parameters = () if signature is None else signature.parameters.values()
            required = tuple(
                each.name
                for each in parameters
                if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            )
            bases = tuple(map(ast.unparse, node.bases)) if isinstance(node, ast.ClassDef) else ()
            found.append(TopCallable(node.name, required, bases))
    return found


def _package_problems(module: str, base: Path) -> Iterator[PsgradError]:
    package = module.split(".")[0]
    try:
        with importing_beside(base):
            there = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return
    if not there:
        yield ConfigError(
            f"there is no module {package!r} to import {module!r} from",
            next_step=(
                "install its package in this environment, put its folder on PYTHONPATH,"
                " or name a file: path/to/file.py:<callable>"
            ),
        )


def _names_in(body: list[ast.stmt]) -> tuple[dict[str, ast.stmt], bool]:
    """(name -> the statement that defines it, whether these are all names that there can be)."""
    found: dict[str, ast.stmt] = {}
    certain = True
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
            certain &= node.name != "__getattr__"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).split(".")[0]: node for each in node.names}
            certain &= all(each.name != "*" for each in node.names)
        else:
            names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
            found |= {each.id: node for each in names if isinstance(each.ctx, ast.Store)}
            bodies = [getattr(node, inside, []) for inside in ("body", "orelse", "finalbody")]
            bodies += [handler.body for handler in getattr(node, "handlers", [])]
            for inner, sure in map(_names_in, bodies):
                found, certain = {**inner, **found}, certain and sure
            calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
            certain &= not any(ast.unparse(each.func) in _WRITES_NAMES for each in calls)
    return found, certain


_WRITES_NAMES = ("globals", "exec", "setattr", "vars")


def _argument_problems(node: ast.stmt, spec: str, kwargs: Mapping[str, Any]) -> Iterator[PsgradError]:
    signature = _signature(node)
    if signature is None:
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        names = list(signature.parameters)
        yield ConfigError(
            f"the kwargs of {spec} don't fit it: {error}",
            expected=f"its arguments are {', '.join(names)}" if names else "it takes no arguments",
        )


def _signature(node: ast.stmt) -> inspect.Signature | None:
    """The signature of a plain function or of a class with an __init__; None where a decorator or a base
    class may change it.
    """
    skip = 0
    if isinstance(node, ast.ClassDef) and not node.decorator_list and not node.keywords:
        methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
        node = next((each for each in methods if each.name == "__init__"), node)
        skip = 1
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return None
    arguments, kinds = node.args, inspect.Parameter
    plain: list[tuple[str, Any]] = [(each.arg, kinds.POSITIONAL_ONLY) for each in arguments.posonlyargs]
    plain += [(each.arg, kinds.POSITIONAL_OR_KEYWORD) for each in arguments.args]
    without = len(plain) - len(arguments.defaults)
    found = [
        kinds(name, kind, default=kinds.empty if place < without else None)
        for place, (name, kind) in enumerate(plain)
    ][skip:]
    if arguments.vararg:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kinds(each.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if arguments.kwarg:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)
