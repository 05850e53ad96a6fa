"""The code that a config names: found, imported and called, with its own mistakes told as its own.

Whether the code that a config names is there, by its letters: nothing is imported, nothing runs. No torch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from psgrad.config import nearest
from psgrad.errors import ConfigError, PsgradError

_FILE_MODULE = "psgrad_file_"


def resolve(spec: str, base: Path, *, raises: type[PsgradError] = ConfigError) -> Callable[..., Any]:
    """The callable that `module:callable` or `file.py:callable` names; files are relative to `base`.

    Importing runs the module's code. Raises ConfigError where something is not there or not callable, and
    `raises` where the module itself fails.
    """
    return _attribute(imported(spec, base, raises=raises), *spec.rpartition(":")[::2])


def imported(spec: str, base: Path, *, raises: type[PsgradError] = ConfigError) -> ModuleType:
    """The module or file of a spec, imported. Raises as `resolve` does."""
    location = module_of(spec)
    with _noting(spec, base):
        return (
            _file_module(base / location, raises)
            if location.endswith(".py")
            else _named_module(location, base, raises)
        )


def imported_while_running(spec: str, base: Path) -> frozenset[str]:
    """The names of all modules that this process imported first while the code of a spec was imported, or
    called by `call_factory`.

    Code that asks for a module by a name that it computes is seen by nothing else. Files that a config names
    are left out: the process may have imported the same file before it was edited.
    """
    return frozenset(_imported.get((spec, base.resolve()), ()))


_imported: dict[tuple[str, Path], set[str]] = {}


@contextmanager
def _noting(spec: str, base: Path) -> Iterator[None]:
    before = set(sys.modules)
    try:
        yield
    finally:
        new = {name for name in sys.modules.keys() - before if not name.startswith(_FILE_MODULE)}
        _imported.setdefault((spec, base.resolve()), set()).update(new)


def module_of(spec: str) -> str:
    """The module or file that a spec imports, as written in the config."""
    return spec.rpartition(":")[0]


def without_digest(module: str) -> str:
    """The name of a module; of a file's that a config names, without the hash of its place and content."""
    return module.removeprefix(_FILE_MODULE).rpartition("_")[0] if module.startswith(_FILE_MODULE) else module


def call_factory(spec: str, base: Path, kwargs: Mapping[str, Any], *, raises: type[PsgradError]) -> Any:
    """What the callable named by `spec` returns for `kwargs`; `raises` is the error for a factory
    that fails.
    """
    factory = resolve(spec, base, raises=raises)
    _check_arguments(factory, spec, kwargs)
    try:
        with _noting(spec, base):
            return factory(**kwargs)
    except PsgradError:
        raise
    except (Exception, SystemExit) as error:
        raise raises(
            f"the factory {spec} raised {describe_failure(error)}", next_step="run it by itself to see why"
        ) from error


def describe_failure(error: BaseException) -> str:
    """An exception out of the user's code: its type, its first line, and the user's line that it came
    from.
    """
    first_line = next(iter(str(error).splitlines()), "")
    place = _users_line(error)
    return f"{type(error).__name__}{f': {first_line}' if first_line else ''}{f' ({place})' if place else ''}"


def _file_module(path: Path, raises: type[PsgradError]) -> ModuleType:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path}", next_step="check the path; it is relative to the config file's folder"
        ) from None
    except OSError as error:
        raise ConfigError(f"the file {path} can't be read: {error.strerror}") from error
    # The content is part of the name: two specs share one import of a file, and an edited file is imported
    # anew.
    digest = hashlib.sha256(str(path.resolve()).encode() + content).hexdigest()[:12]
    name = f"{_FILE_MODULE}{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # before it runs, as for any import: dataclasses look their own module up
    try:
        exec(
            compile(content, str(path), "exec"), module.__dict__
        )  # and not through a loader, which would write __pycache__ beside it
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failure(str(path), error, raises) from error
    return module


def _named_module(name: str, base: Path, raises: type[PsgradError]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise _import_failure(name, error, raises) from error
        file = Path(*name.split(".")).with_suffix(".py")
        if (base / file).is_file():
            hint = f"there is {file} beside the config: write {file}:<callable>"
        else:
            hint = (
                "install its package in this environment, put its folder on PYTHONPATH, or name the file:"
                " path/to/file.py:<callable>"
            )
        raise ConfigError(
            f"there is no module {missing!r} to import {name!r} from", next_step=hint
        ) from error
    except (Exception, SystemExit) as error:
        raise _import_failure(name, error, raises) from error


def _import_failure(name: str, error: BaseException, raises: type[PsgradError]) -> PsgradError:
    return raises(
        f"importing {name} raised {describe_failure(error)}",
        next_step="import it in a Python shell to see why",
    )


def _attribute(module: ModuleType, location: str, name: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            close = nearest(part, [known for known in dir(found) if not known.startswith("_")])
            raise ConfigError(
                f"{location} has no {name!r}", next_step=f"did you mean {close}?" if close else None
            )
        found = getattr(found, part)
        if inspect.ismodule(found):
            raise ConfigError(
                f"{part!r} in {location}:{name} is the module {found.__name__}, not a callable",
                next_step=f"name the module itself: {found.__name__}:<callable>",
            )
    if not callable(found):
        raise ConfigError(
            f"{location}:{name} is of type {type(found).__name__}", expected="a function or a class"
        )
    return found  # type: ignore[no-any-return]


def _check_arguments(factory: Callable[..., Any], spec: str, kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some classes written in C have none
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        names = [parameter.name for parameter in signature.parameters.values()]
        raise ConfigError(
            f"the kwargs of {spec} don't fit it: {error}",
            expected=f"its arguments are {', '.join(names)}" if names else "it takes no arguments",
        ) from None


def _users_line(error: BaseException) -> str | None:
    """The innermost line of the traceback that belongs neither to an installed package nor to psgrad."""
    not_the_users = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    not_the_users += [str(Path(__file__).parents[1]), "<frozen"]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(tuple(not_the_users)):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None


def spec_problems(
    spec: str, base: Path, kwargs: Mapping[str, Any] | None, raises: type[PsgradError]
) -> Iterator[PsgradError]:
    """What is wrong with `file.py:callable` or `module:callable`, as importing it would tell it.

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
        tree = ast.parse(path.read_bytes(), str(path))
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
            next_step="mend the file",
        )
        return
    known, certain = _names_in(tree.body)
    first = name.split(".")[0]
    if first not in known and certain:
        close = nearest(first, [each for each in known if not each.startswith("_")])
        yield ConfigError(
            f"{location} has no {first!r}", next_step=f"did you mean {close}?" if close else None
        )
    elif name in known and kwargs is not None:
        yield from _argument_problems(known[name], spec, kwargs)


def _package_problems(module: str, base: Path) -> Iterator[PsgradError]:
    package = module.split(".")[0]
    try:
        there = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return
    if not there:
        file = Path(*module.split(".")).with_suffix(".py")
        beside = (
            f"there is {file} beside the config: write {file}:<callable>" if (base / file).is_file() else None
        )
        hint = (
            beside
            or "install its package in this environment, put its folder on PYTHONPATH,"
            " or name a file: path/to/file.py:<callable>"
        )
        yield ConfigError(f"there is no module {package!r} to import {module!r} from", next_step=hint)


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
            stored = (
                each
                for each in ast.walk(node)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            )
            found |= {each.id: node for each in stored}
            for inside in ("body", "orelse", "finalbody"):
                names, sure = _names_in(getattr(node, inside, []))
                found, certain = {**names, **found}, certain and sure
            for handler in getattr(node, "handlers", []):
                names, sure = _names_in(handler.body)
                found, certain = {**names, **found}, certain and sure
            certain &= not any(
                isinstance(each, ast.Call) and ast.unparse(each.func) in _WRITES_NAMES
                for each in ast.walk(node)
            )
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
    """Of a plain function, or a class with an __init__ of its own; None for what a decorator or a base class
    may change.
    """
    skip = 0
    if isinstance(node, ast.ClassDef) and not node.decorator_list and not node.keywords:
        node = next(
            (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"),
            node,
        )
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
