"""The code that a config names: found, imported and called. What fails in it is told as its own mistake."""

from __future__ import annotations

import hashlib
import importlib
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
    not_the_users += [str(Path(__file__).parent), "<frozen"]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(tuple(not_the_users)):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None
