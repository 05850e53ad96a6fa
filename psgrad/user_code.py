"""The code that a config names: found, imported and called. Its failures are reported as its own."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

from psgrad.config import Config, did_you_mean
from psgrad.config.values import require_regular
from psgrad.errors import ConfigError, PsgradError, one_line

_FILE_MODULE = "psgrad_file_"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def resolve(spec: str, base: Path, *, raises: type[PsgradError] = ConfigError) -> Callable[..., Any]:
    """The callable that `module:callable` or `file.py:callable` names; files are relative to `base`.

    Importing runs the module's code. Raises ConfigError where something is not there or not callable, and
    `raises` where the module itself fails.
    """
    return _attribute(imported(spec, base, raises=raises), *spec.rpartition(":")[::2])


def imported(spec: str, base: Path, *, raises: type[PsgradError] = ConfigError) -> ModuleType:
    """The module or file of a spec, imported. Raises as `resolve` does."""
    location = module_of(spec)
    if location == LIVE:
        module = _live.get()
        if module is None:
            raise ConfigError(
                "the config names objects that were given to psgrad in Python",
                hint=(
                    "it is that of a run of live objects, which are gone; call the function of psgrad"
                    " again with the objects"
                ),
            )
        return module
    with importing_beside(base):
        if location.endswith(".py"):
            return _file_module(base / location, base, raises)
        return _named_module(location, base, raises)


LIVE = "psgrad_live"
"""The module of specs that stand for objects of this process: see `live_objects`."""
_live: ContextVar[ModuleType | None] = ContextVar("_live", default=None)


@contextmanager
def live_objects(objects: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While the block runs, the spec `psgrad_live:NAME` names a callable of this process."""
    module = ModuleType(LIVE)
    vars(module).update(objects)
    before = _live.set(module)
    try:
        yield
    finally:
        _live.reset(before)


_folders: set[Path] = set()  # of the open blocks of `importing_beside`


@contextmanager
def importing_beside(base: Path) -> Iterator[None]:
    """While the block runs, modules in a config's folder can be imported; what is installed comes first.

    Afterwards sys.path and sys.modules are as before: another config may have modules of the same names. No
    __pycache__ is written. A block inside of another one for the same folder changes nothing.
    """
    folder = base.resolve()
    if folder in _folders:
        yield
        return
    before, writes_bytecode = set(sys.modules), sys.dont_write_bytecode
    sys.path.append(str(folder))
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    _folders.add(folder)
    try:
        yield
    finally:
        _folders.remove(folder)
        for name in sys.modules.keys() - before:
            if name.startswith(_FILE_MODULE) or _lies_in(folder, sys.modules[name]):
                del sys.modules[name]
        sys.dont_write_bytecode = writes_bytecode
        if str(folder) in sys.path:  # code of the user's may have changed it
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(str(folder))]


def with_code_beside(
    workflow: Callable[Concatenate[Config, _P], _R],
) -> Callable[Concatenate[Config, _P], _R]:
    """`workflow`, run while modules in the config's folder can be imported."""

    @wraps(workflow)
    def run(config: Config, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with importing_beside(config.base):
            return workflow(config, *args, **kwargs)

    return run  # type: ignore[return-value] # a config may be given by position alone


def _lies_in(folder: Path, module: ModuleType) -> bool:
    """Whether a module's file, or its folder where it is a package without one, is the user's in a folder."""
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if place is None or {"site-packages", "dist-packages"} & set(Path(place).parts):
        return False
    return Path(place).resolve().is_relative_to(folder)


def module_of(spec: str) -> str:
    """The module or file that a spec imports, as written in the config."""
    return spec.rpartition(":")[0]


def without_digest(module: str) -> str:
    """The name of a module; of a file's that a config names, without the hash of its place and content."""
    return module.removeprefix(_FILE_MODULE).rpartition("_")[0] if module.startswith(_FILE_MODULE) else module


def call_factory(spec: str, base: Path, kwargs: Mapping[str, Any], *, raises: type[PsgradError]) -> Any:
    """What the callable named by `spec` returns for `kwargs`; `raises` is the error where it fails."""
    factory = resolve(spec, base, raises=raises)
    _check_arguments(factory, spec, kwargs)
    try:
        with importing_beside(base):
            return factory(**kwargs)
    except PsgradError:
        raise
    except (Exception, SystemExit) as error:
        raise raises(
            f"the factory {spec} raised {describe_failure(error)}", hint="run it by itself to see why"
        ) from error


def describe_failure(error: BaseException) -> str:
    """An exception out of the user's code: its type, its first line, and the user's line it came from."""
    first_line = next(iter(str(error).splitlines()), "")
    place = _users_line(error)
    return f"{type(error).__name__}{f': {first_line}' if first_line else ''}{f' ({place})' if place else ''}"


def _file_module(path: Path, base: Path, raises: type[PsgradError]) -> ModuleType:
    require_regular(path, "code")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path}",
            hint="check the path; it is relative to the config file's folder",
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
        # Not through a loader, which would write __pycache__ beside it.
        exec(compile(content, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failure(str(path), error, base, raises) from error
    return module


def _named_module(name: str, base: Path, raises: type[PsgradError]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise _import_failure(name, error, base, raises) from error
        raise ConfigError(
            f"there is no module {missing!r} to import {name!r} from",
            hint=(
                "install its package in this environment, put its folder on PYTHONPATH, or name the file:"
                " path/to/file.py:<callable>"
            ),
        ) from error
    except (Exception, SystemExit) as error:
        raise _import_failure(name, error, base, raises) from error


def _import_failure(name: str, error: BaseException, base: Path, raises: type[PsgradError]) -> PsgradError:
    step = "import it in a Python shell to see why"
    wanted = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    found = sys.modules.get(wanted)
    own = base / f"{wanted}.py"
    if found is not None and own.is_file() and not _lies_in(base.resolve(), found):
        where = getattr(found, "__file__", None) or "Python itself"
        step = f"rename {own}: {wanted} is also the name of an installed module, which comes first ({where})"
    return raises(f"importing {name} raised {describe_failure(error)}", hint=step)


def _attribute(module: ModuleType, location: str, name: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [known for known in dir(found) if not known.startswith("_")]
            raise ConfigError(
                f"{location} has no {name!r}",
                hint=did_you_mean(part, public, before=""),
            )
        found = getattr(found, part)
        if inspect.ismodule(found):
            raise ConfigError(
                f"{part!r} in {location}:{name} is the module {found.__name__}, not a callable",
                hint=f"name the module itself: {found.__name__}:<callable>",
            )
    if not callable(found):
        raise ConfigError(
            f"{location}:{name} is of type {type(found).__name__}; expected a function or a class"
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
            one_line(
                f"the kwargs of {spec} don't fit it: {error}",
                "expected " + (f"its arguments are {', '.join(names)}" if names else "it takes no arguments"),
            )
        ) from None


def _users_line(error: BaseException) -> str | None:
    """The innermost line of the traceback that belongs neither to an installed package nor to psgrad."""
    not_the_users = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    not_the_users += [str(Path(__file__).parent), "<frozen"]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(tuple(not_the_users)):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None
