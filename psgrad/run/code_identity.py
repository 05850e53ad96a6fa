"""Which code runs, as hashes: the file of a callable, all files of the user's own that it imports, and the
versions of installed packages.

Imports are read off the source, as some run only when a function is called, and others were run before by
somebody else; modules that the code was seen to import under a computed name, while it was imported or
called, are added.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from psgrad.run.input_files import sha256_of
from psgrad.user_code import imported, imported_while_running, importing_beside, resolve


@dataclass(frozen=True)
class CodeIdentity:
    """files: name -> SHA-256, in the order in which they were met, the callable's own first. packages: name
    -> version.

    A file has the name of its module; one that a config names as a file has its file name. So the same code
    in another folder is the same.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


def code_identity(spec: str, base: Path, sources: Iterable[str] = ()) -> CodeIdentity:
    """The identity of the code that a spec names, relative to `base`, to be asked for when it was called.

    `sources` are further modules of Python that belong to it: those of the classes that it made. Raises
    ConfigError as `resolve` does.
    """
    walk = _ImportWalk()
    with importing_beside(base):
        module, function = imported(spec, base), inspect.unwrap(resolve(spec, base))
        walk.visit(str(getattr(function, "__module__", None) or module.__name__), whole=True)
        for name in (module.__name__, *sources, *sorted(imported_while_running(spec, base))):
            walk.visit(name)
    return CodeIdentity(walk.files, dict(sorted(walk.packages.items())))


class _ImportWalk:
    """Modules, those that they import, and so on, as far as files are the user's own."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.packages: dict[str, str] = {}
        self._met: set[str] = set()

    def visit(self, name: str, whole: bool = False) -> None:
        """Add a module and what it imports; with `whole` also the file of an installed one."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            package = name.partition(".")[0]
            if name in self._met or package == "psgrad":
                continue
            self._met.add(name)
            file = _file_of(name)
            own = file is not None and not is_installed(file)
            if file is None or (package in sys.stdlib_module_names and not own):
                continue
            if not own and (version := _version(package)) is not None:
                self.packages[package] = version
            else:
                own = True  # what has no version is known by its files
            if (own or whole) and file.is_file():
                label = file.name if name == "__main__" or name.startswith("psgrad_file_") else name
                self.files[label] = sha256_of(file)
            if own and file.suffix == ".py":
                waiting += reversed(list(_imports_of(file, name)))
            whole = False


def _file_of(name: str) -> Path | None:
    """The file of a module, which is not imported; None for a folder, a part of Python, an absent module."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        return Path(file).resolve() if file else None
    parts = name.split(".")
    try:
        found = importlib.util.find_spec(parts[0])
        for end in range(2, len(parts) + 1):
            if found is None or found.submodule_search_locations is None:
                return None
            found = PathFinder.find_spec(".".join(parts[:end]), list(found.submodule_search_locations))
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(found.origin).resolve() if found is not None and found.origin and found.has_location else None


def _imports_of(file: Path, name: str) -> Iterator[str]:
    """The names that a file may import, packages before what is in them; some are no modules."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError):
        return
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield from _prefixes(each.name)
        elif isinstance(node, ast.ImportFrom):
            source = ".".join([*_above(package, node.level), *([node.module] if node.module else [])])
            yield from _prefixes(source)
            yield from (f"{source}.{each.name}" for each in node.names if source)
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                level = len(first.value) - len(first.value.lstrip("."))
                yield from _prefixes(".".join([*_above(package, level), first.value.lstrip(".")]))


def _above(package: str, level: int) -> list[str]:
    """The parts of the package that an import with `level` leading dots begins at; none for level 0."""
    parts = package.split(".")
    return parts[: len(parts) - level + 1] if level else []


def _called(function: ast.expr) -> str | None:
    """The last name of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".") if name else []
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


@cache
def _installed_roots() -> tuple[Path, ...]:
    found = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({Path(each).resolve() for each in found})


@cache
def is_installed(file: Path) -> bool:
    """Whether a file is of an installed package, or of Python itself."""
    return bool({"site-packages", "dist-packages"} & set(file.parts)) or any(
        file.is_relative_to(root) for root in _installed_roots()
    )


@cache
def _version(package: str) -> str | None:
    """The version of an installed package, or None; most are distributed under their own names, and asking
    for all names takes long.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        names = sorted(metadata.packages_distributions().get(package, ()))
        return ", ".join(f"{name} {metadata.version(name)}" for name in names) or None
